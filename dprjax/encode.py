"""Encodes texts into a folder of embeddings.

    python -m dprjax.encode --backbone=DIR --prompt=prompt.npz --side=passage \\
        --input=corpus.jsonl --out=embeddings/corpus

All local devices encode. After an interruption the same command continues with the next shard. On
several hosts that see the same folder, run the same command on each: every process encodes its own
shards.

In a job array, each job encodes one part into its own folder, and dprjax.search searches all
folders:

    python -m dprjax.encode ... --part=$SLURM_ARRAY_TASK_ID/8 --out=corpus-$SLURM_ARRAY_TASK_ID
    python -m dprjax.search --corpus='corpus-*' ...

--precision=float16, int8 and binary make the folder 2, 4 and 32 times smaller; --dimensions=128
shortens the vectors. docs/smaller.md lists the losses.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dprjax.base import cli, flags, machine, outputs
from dprjax.base.errors import InputError
from dprjax.base.flags import flag
from dprjax.encoding import codes, manifest
from dprjax.text import inputs as inputs_of
from dprjax.text.texts import Text, Texts
from dprjax.text.vector_spec import SIDES

if TYPE_CHECKING:
  from dprjax.encoding.text_encoder import Encoder

_CHECKED = 1000  # texts checked for words of the topics


def _topic(text: str) -> str:
  return text if text == 'infer' else str(flags.whole(0, 1000)(text))


def _part(text: str) -> str:
  number, slash, count = text.partition('/')
  parts = flags.whole(1, 10**6)(count if slash else '')
  return f'{flags.whole(0, parts - 1)(number)}/{parts}'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  backbone: str = flags.backbone()
  prompt: str | None = flag('a prompt.npz of the backbone, or USER/NAME[@COMMIT] on the hub', None)
  topic: str = flag(
    'with a topic prompt: infer the topic of each text from its words, or one topic for all texts',
    'infer',
    read=_topic,
    metavar='infer|NUMBER',
  )
  side: str = flag('of the texts', choices=SIDES)
  input: str = flags.texts_file('_id, title and text')
  column: dict[str, str] = flags.columns('id, title or text')
  qrels: str | None = flag('with --side=query: only the queries judged here', None, metavar='FILE')
  out: str = flag('the folder of embeddings', metavar='DIR')
  pooling: str | None = flag(
    'cls, mean, lasttoken, ... (default: that of the prompt or backbone)', None, metavar='NAME'
  )
  normalize: bool | None = flag('unit length; same default', None)
  max_length: int | None = flag('tokens of a text; same default', None, most=2**20)
  batch_size: int = flags.batch_size()
  dtype: str = flags.dtype()
  weight_parts: int | None = flags.weight_parts()
  precision: str = flag(
    'of stored vectors; int8 and binary (1 bit) only for passages',
    'float32',
    choices=manifest.DTYPES,
  )
  dimensions: int | None = flag(
    'keep only this many leading numbers of a vector (default: all)',
    None,
    most=2**20,
  )
  calibrate: int = flag(
    'texts for measuring the ranges of int8 and binary codes', 1024, most=10**7, metavar='TEXTS'
  )
  shard_rows: int = flag('vectors a file; an interruption loses one file', 20_000, most=2**31 - 1)
  part: str | None = flag(
    'only this part of the texts, from 0/N to N-1/N, for job arrays, each with its own --out',
    None,
    read=_part,
    metavar='I/N',
  )
  job: flags.Job = flags.job()


def main(argv: Sequence[str] | None = None) -> None:
  cli.run(Flags, _command, argv)


def _command(args: Flags) -> None:
  # Before loading the backbone, which takes long.
  inputs_of.check_again([args.input], args.side, '--input')
  if args.qrels and args.side != 'query':
    raise InputError('--qrels selects queries: it needs --side=query')
  if args.precision in codes.LEVELS and args.side == 'query':
    raise InputError(
      f'--precision={args.precision} is for passages; queries stay float32 or float16'
    )
  import jax

  inputs = flags.paths(args, 'backbone', 'prompt', 'input', 'qrels')
  with outputs.claim_folder(
    args.out,
    inputs,
    what='embeddings',
    ours=manifest.is_embeddings,
    grows=True,
    lock=not jax.process_index(),
  ):
    _encode(args)


def _encode(args: Flags) -> None:
  machine.keep_programs()
  with cli.loading():
    from dprjax.encoding import embedder, folders
    from dprjax.encoding.text_encoder import Encoder
  limit: dict[str, Any] = {f'{args.side}_max_length': args.max_length}
  encoder = Encoder.load(
    args.backbone,
    args.prompt,
    pooling=args.pooling,
    normalize=args.normalize,
    batch_size=args.batch_size,
    mesh=embedder.local_mesh(args.weight_parts) if args.weight_parts else None,
    dtype=args.dtype,
    dimensions=args.dimensions,
    **limit,
  )
  if args.precision == 'float16' and not encoder.entry().spec.normalize:
    raise InputError(
      '--precision=float16 needs --normalize=true: other values can exceed its range'
    )
  judged = None
  if args.qrels:
    from dprjax.text.qrels import read_qrels

    judged = read_qrels(args.qrels)
  texts: Iterable[Text] = Texts(args.input, args.side, judged, columns=args.column)
  if judged is not None and not any(True for _ in texts):
    raise InputError(f'{args.input}: none of its queries is judged in {args.qrels}')
  if args.part is not None:
    texts = _part_of(texts, args.part, args.input)
  folders.fill_folder(
    encoder,
    args.side,
    texts,
    args.out,
    source=args.input,
    dtype=args.precision,
    shard_rows=args.shard_rows,
    topic=_topic_of(encoder, args, texts),
    calibrate=args.calibrate,
  )


class _Slice:
  """Texts from ``start`` to ``stop``; each iteration reads them again."""

  def __init__(self, texts: Iterable[Text], start: int, stop: int):
    self._texts, self._start, self._stop = texts, start, stop

  def __iter__(self) -> Iterator[Text]:
    return itertools.islice(iter(self._texts), self._start, self._stop)


def _part_of(texts: Iterable[Text], part: str, source: str) -> _Slice:
  number, parts = map(int, part.split('/'))
  total = sum(1 for _ in texts)
  if total < parts:
    raise InputError(f'--part={part}: {source} has only {total:,} texts')
  return _Slice(texts, total * number // parts, total * (number + 1) // parts)


def _topic_of(encoder: Encoder, args: Flags, texts: Iterable[Text]) -> int | None:
  """The topic of all texts; None to infer that of each."""
  if args.topic != 'infer':
    encoder.check_topic(int(args.topic))
    return int(args.topic)
  if args.side == 'passage' and encoder.topics:
    first = [text.text for text in itertools.islice(texts, _CHECKED)]
    for model in encoder.topics.values():
      model.check_shares(first, args.input)
  return None


if __name__ == '__main__':
  main()
