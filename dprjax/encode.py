"""Encodes texts into a folder of embeddings.

    python -m dprjax.encode --backbone=DIR --prompt=prompt.npz --kind=passage \\
        --input=corpus.jsonl --out=embeddings/corpus

Uses all local devices, and sorts texts by length to compute little padding. After an interruption
the same command continues with the next shard. On several hosts, run the same command on each:
every process encodes other shards. All hosts must see the folder, which ends up the same as from
one process.

--store=float16, int8 and binary make the folder 2, 4 and 32 times smaller, and --dimensions=128 as
much as it cuts: docs/smaller.md says what that costs.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from etils import epath

from dprjax.base import files, outputs
from dprjax.base.errors import InputError
from dprjax.formats.qrels import read_qrels
from dprjax.formats.texts import KINDS, Text, read_texts
from dprjax.retrieval import codes, manifest
from dprjax.runtime import cli, compiled

if TYPE_CHECKING:
  from dprjax.inference.encoder import Encoder

logger = logging.getLogger('dprjax')

_INPUTS = ('backbone', 'prompt', 'input', 'qrels', 'documents')
_CODED = tuple(codes.LEVELS)
_CHECKED = 1000  # texts of a corpus, for a word that the topics know


def encode(
  encoder: Encoder,
  kind: str,
  source: str,
  out: str,
  *,
  dtype: str = 'float32',
  shard_rows: int = 20_000,
  qrels: str | None = None,
  topic: str = 'infer',
  documents: str | None = None,
  calibrate: int = 1024,
) -> None:
  """Encodes a file of texts into ``out``; ``retrieval.embeddings`` describes the folder.

  Args:
    encoder: a backbone with one prompt or none.
    kind: 'query' or 'passage'.
    source: a BEIR jsonl (``_id``, ``title``, ``text``) or a tsv of ids and texts.
    out: the folder.
    dtype: of the stored vectors, one of ``manifest.DTYPES``.
    shard_rows: rows a file; an interruption loses at most one shard.
    qrels: encode only the queries that are judged in this file.
    topic: under a prompt of kind topic: 'infer', each text's own, by its words; 'oracle', that of
      the document with its id; or the number of the topic that all texts get.
    documents: a corpus, for 'oracle'.
    calibrate: texts that the ranges of codes are measured on, at most; a folder that was begun
      keeps its ranges.

  Raises:
    InputError: bad input; ``out`` holds something else, embeddings of other settings or texts, or
      inputs; or another command fills it.
  """
  inputs = {
    '--input': source,
    '--qrels': qrels,
    '--documents': documents,
    '--backbone': [backbone.path for backbone in encoder.backbones.values()],
    '--prompt': [prompt.path for prompt, _ in encoder.bank.values() if prompt is not None],
  }
  import jax

  with claim(out, inputs, lock=not jax.process_index()):
    _encode(encoder, kind, source, out, dtype, shard_rows, qrels, topic, documents, calibrate)


def claim(
  out: str, inputs: outputs.Inputs, *, lock: bool
) -> contextlib.AbstractContextManager[epath.Path]:
  """Claims a folder of embeddings, which may be an unfinished one."""
  return outputs.claim_folder(
    out, inputs, what='embeddings', ours=manifest.is_embeddings, grows=True, lock=lock
  )


def _encode(
  encoder: Encoder,
  kind: str,
  source: str,
  out: str,
  dtype: str,
  shard_rows: int,
  qrels: str | None,
  topic: str,
  documents: str | None,
  calibrate: int,
) -> None:
  texts = list(read_texts(source, kind))
  if qrels is not None:
    judged = read_qrels(qrels)
    texts = [text for text in texts if text.id in judged]
    if not texts:
      raise InputError(f'{source}: none of its queries is judged in {qrels}')
  from dprjax.inference import folders

  numbers = _topics(encoder, kind, source, texts, topic, documents)
  folders.fill_folder(
    encoder,
    kind,
    texts,
    out,
    source=source,
    dtype=dtype,
    shard_rows=shard_rows,
    topic=topic,
    numbers=numbers,
    calibrate=calibrate,
  )


def _topics(
  encoder: Encoder,
  kind: str,
  source: str,
  texts: Sequence[Text],
  topic: str,
  documents: str | None,
) -> list[int] | None:
  """Each text's topic; None for its own.

  Raises:
    InputError: there is no such topic, or the corpus has no word that the topics know.
  """
  if topic == 'infer':
    if kind == 'passage':
      for model in encoder.topics.values():
        model.check_shares([text.text for text in texts[:_CHECKED]], source)
    return None
  if topic != 'oracle':
    encoder.check_topic(int(topic))
    return [int(topic)] * len(texts)
  encoder.check_topic(0)
  if documents is None:
    raise InputError('--topic=oracle needs --documents=FILE, the corpus that has their topics')
  found = {text.id: text.text for text in read_texts(documents, 'passage', {t.id for t in texts})}
  if missing := [text.id for text in texts if text.id not in found]:
    raise InputError(
      f'--topic=oracle: {documents} has no document with the id {missing[0]!r} ({len(missing)} of '
      f'{len(texts)} are missing); give --topic=infer'
    )
  (model,) = encoder.topics.values()
  return model.assign([found[text.id] for text in texts]).tolist()


def _topic(text: str) -> str:
  """For argparse's ``type``."""
  return text if text in ('infer', 'oracle') else str(cli.up_to(1000, least=0)(text))


def main(argv: Sequence[str] | None = None) -> None:
  parser = cli.Parser('encode', __doc__ or '', processes=True)
  parser.add_argument(
    '--backbone', required=True, help='a Hugging Face directory, a hub id, or package:NAME'
  )
  parser.add_argument(
    '--prompt', help='a prompt.npz for that backbone, or USER/NAME[@COMMIT] on the hub'
  )
  parser.add_argument(
    '--topic',
    type=_topic,
    default='infer',
    metavar='infer|oracle|NUMBER',
    help="under a prompt of kind topic: each text's own topic, by its words (the default); that of "
    'the document with its id; or one for all texts',
  )
  parser.add_argument('--documents', metavar='FILE', help='with --topic=oracle: the corpus')
  parser.add_argument('--kind', required=True, choices=KINDS)
  parser.add_argument(
    '--input',
    required=True,
    metavar='FILE',
    help='jsonl with _id, title and text, or a tsv of id and text; .gz and .xz too',
  )
  parser.add_argument(
    '--qrels', metavar='FILE', help='with --kind=query: only the queries judged here'
  )
  parser.add_argument('--out', required=True, metavar='DIR', help='the folder of embeddings')
  parser.add_argument(
    '--pooling',
    metavar='NAME',
    help='cls, mean, lasttoken, ...; default: what the prompt or the backbone says',
  )
  parser.add_argument(
    '--normalize', type=cli.boolean, metavar='true|false', help='unit length; same default'
  )
  parser.add_argument('--max_length', type=cli.up_to(2**20), help='tokens of a text; same default')
  parser.add_argument(
    '--batch_size',
    type=cli.up_to(2**16),
    default=64,
    help='texts at a time over all devices, at most (default: 64)',
  )
  cli.add_dtype(parser)
  parser.add_argument(
    '--store',
    choices=manifest.DTYPES,
    default='float32',
    help='of the stored vectors; int8 and binary (1 bit) are for passages (default: float32)',
  )
  parser.add_argument(
    '--dimensions',
    type=cli.up_to(2**20),
    help='the first numbers of every vector alone, for a model that was trained for it '
    '(default: all)',
  )
  parser.add_argument(
    '--calibrate',
    type=cli.up_to(10**7),
    default=1024,
    metavar='TEXTS',
    help='with --store=int8 or binary: texts that the ranges of the codes are measured on '
    '(default: 1024)',
  )
  parser.add_argument(
    '--shard_rows',
    type=cli.up_to(2**31 - 1),
    default=20_000,
    help='vectors a file (default: 20000)',
  )
  cli.run(parser, _command, argv)


def _command(args: argparse.Namespace) -> None:
  # First, because loading the backbone takes a while.
  files.existing(args.input, 'input')
  if args.topic == 'oracle' and args.documents is None:
    raise InputError('--topic=oracle needs --documents=FILE, the corpus that has their topics')
  if args.qrels and args.kind != 'query':
    raise InputError('--qrels chooses queries: it goes with --kind=query')
  if args.store in _CODED and args.kind == 'query':
    raise InputError(
      f'--store={args.store} is for passages; queries stay float32 or float16, and their scores '
      'with the codes are exact'
    )
  inputs = {f'--{name}': getattr(args, name) for name in _INPUTS}
  with claim(args.out, inputs, lock=False):
    pass
  compiled.keep()
  with cli.loading():
    from dprjax.inference.encoder import Encoder
  encoder = Encoder.load(
    args.backbone,
    args.prompt,
    pooling=args.pooling,
    normalize=args.normalize,
    batch_size=args.batch_size,
    dtype=args.dtype,
    dimensions=args.dimensions,
    **{f'{args.kind}_max_length': args.max_length},
  )
  if args.store == 'float16' and not encoder.entry().spec.normalize:
    raise InputError(
      '--store=float16 needs vectors of unit length (--normalize=true): raw inner products can '
      'exceed its range'
    )
  _check_trained(encoder)
  encode(
    encoder,
    args.kind,
    args.input,
    args.out,
    dtype=args.store,
    shard_rows=args.shard_rows,
    qrels=args.qrels,
    topic=args.topic,
    documents=args.documents,
    calibrate=args.calibrate,
  )


def _check_trained(encoder: Encoder) -> None:
  """Says where vectors are cut to a length that the prompt was not trained for."""
  prompt = encoder.entry().prompt
  trained = [] if prompt is None else prompt.meta.get('matryoshka', [])
  whole = encoder.backbones['passage'].config.vector_size
  if encoder.dimension < whole and encoder.dimension not in (*trained, whole):
    logger.info(
      '--dimensions=%d: %s',
      encoder.dimension,
      'no prompt says that it was trained for this (config.matryoshka): measure what is lost',
    )


if __name__ == '__main__':
  main()
