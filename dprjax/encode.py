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

import dataclasses
from typing import Any

from dprjax.base import cli, flags, machine, outputs
from dprjax.base.errors import InputError
from dprjax.base.flags import flag
from dprjax.encoding import codes, manifest
from dprjax.text import inputs
from dprjax.text.vector_spec import SIDES


def _topic(text: str) -> int | None:
  return None if text == 'infer' else flags.whole(0, 1000)(text)


def _part(text: str) -> tuple[int, int]:
  number, slash, count = text.partition('/')
  parts = flags.whole(1, 10**6)(count if slash else '')
  return flags.whole(0, parts - 1)(number), parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  backbone: str = flags.backbone()
  prompt: str | None = flag('a prompt.npz of the backbone, or USER/NAME[@COMMIT] on the hub', None)
  topic: int | None = flag(
    'with a topic prompt: infer the topic of each text from its words (default), or one topic for '
    'all texts',
    None,
    read=_topic,
    metavar='infer|NUMBER',
  )
  side: str = flag('of the texts', choices=SIDES)
  input: str = flags.texts_file('_id, title and text')
  column: dict[str, str] = flags.columns('id, title or text')
  qrels: str | None = flags.file('with --side=query: only the queries judged here')
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
  part: tuple[int, int] | None = flag(
    'only this part of the texts, from 0/N to N-1/N, for job arrays, each with its own --out',
    None,
    read=_part,
    metavar='I/N',
  )
  job: flags.Job = flags.job()


def _command(args: Flags) -> None:
  # Before loading the backbone, which takes long.
  inputs.check_again([args.input], args.side, '--input')
  if args.qrels and args.side != 'query':
    raise InputError('--qrels selects queries: it needs --side=query')
  if args.precision in codes.LEVELS and args.side == 'query':
    raise InputError(
      f'--precision={args.precision} is for passages; queries stay float32 or float16'
    )
  import jax

  with outputs.claim_folder(
    args.out,
    flags.paths(args, 'backbone', 'prompt', 'input', 'qrels'),
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
  folders.encode_file(
    encoder,
    args.side,
    args.input,
    args.out,
    columns=args.column,
    qrels=args.qrels,
    part=args.part or (0, 1),
    topic=args.topic,
    dtype=args.precision,
    shard_rows=args.shard_rows,
    calibrate=args.calibrate,
  )


main = cli.main(Flags, _command)

if __name__ == '__main__':
  main()
