"""Fuses runs by ranks or normalised scores, with given or learnt weights.

    python -m dprjax.fuse --run=bm25.trec --run=dense.trec --out=fused.trec
    python -m dprjax.fuse --run=bm25.trec --run=dense.trec --method=learned \\
        --qrels=qrels/train.tsv --weights_out=fusion.json --out=train.trec
    python -m dprjax.fuse --run=bm25.trec --run=dense.trec --weights=fusion.json --out=test.trec

The first command adds reciprocal ranks. The second learns weights of normalised scores for nDCG@10
on judged queries, and prints their cross-validated gain over the best single run. The third uses
them, like `Retriever.load(hybrid=)`. A document missing in a run has the value 0 there
(docs/fusion.md).
"""

import dataclasses
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dprjax.base import cli, files, flags, outputs
from dprjax.base.errors import InputError
from dprjax.base.flags import flag
from dprjax.engines.engine import ENGINES
from dprjax.retrieval import fusing, fusion
from dprjax.text import trec
from dprjax.text.qrels import read_qrels

logger = logging.getLogger('dprjax')

_OF_TAGS = {
  'dprjax-bm25': fusion.BM25,
  **{f'dprjax-{name}': fusion.DENSE for name in ('exact', 'scann', *ENGINES)},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  run: tuple[tuple[str, str], ...] = flag(
    'a TREC run; NAME is bm25 or dense for runs of dprjax, else the tag of the run',
    read=flags.maybe_named,
    metavar='[NAME=]run.trec',
  )
  out: str = flag('the run; its report goes to run.trec.json', metavar='run.trec')
  method: str = flag(
    'rrf adds reciprocal ranks, the others add scores normalised for each query; learned is '
    'zscore with weights learnt on --qrels',
    'rrf',
    choices=(*fusion.METHODS, fusing.LEARNED),
  )
  weights: str | None = flag(
    'of each run in order (default: 1); or a file from --weights_out, in place of --method',
    None,
    metavar='N,N,...|FILE',
  )
  weights_out: str | None = flag(
    'file for method and weights (default with --method=learned: run.trec.fusion.json)',
    None,
    metavar='FILE',
  )
  qrels: str | None = flag('with --method=learned: judged queries', None, metavar='FILE')
  depth: int = flag('how many documents of each run and query count', fusion.DEPTH, most=10**6)
  k: int = flag('passages a query', 1000, most=10**6)
  rrf_k: int = flag('the constant of rrf', fusion.RRF_K, most=10**6)


def main(argv: Sequence[str] | None = None) -> None:
  cli.run(Flags, fuse, argv)


def fuse(args: Flags) -> None:
  """Fuses runs, and writes a run and its report."""
  stored = args.weights if args.weights and args.weights.endswith('.json') else None
  if stored:
    for name in flags.given(args, 'method', 'qrels', 'depth', 'rrf_k', 'weights_out'):
      raise InputError(f'--{name} does not go with --weights=FILE')
  inputs: outputs.Inputs = {
    '--run': [path for _, path in args.run],
    '--weights': stored,
    **flags.paths(args, 'qrels'),
  }
  kept, endings = args.weights_out, ['', '.json']
  if kept is not None:
    outputs.check_apart(kept, inputs, '--weights_out')
  elif args.method == fusing.LEARNED and not files.is_stream(args.out):
    endings.append('.fusion.json')
    kept = f'{files.resolved(args.out)}{endings[-1]}'
  with outputs.claim(args.out, inputs, endings=endings, also={'--weights_out': args.weights_out}):
    paths = dict(zip(fusing.names(args.run, _OF_TAGS), (path for _, path in args.run), strict=True))
    read = {name: trec.read_run(path).rankings() for name, path in paths.items()}
    how, learnt = fusing.choose(
      read,
      method=args.method,
      weights=stored or _numbers(args.weights, list(paths)),
      judged=None if args.qrels is None else read_qrels(args.qrels),
      depth=args.depth,
      rrf_k=args.rrf_k,
      files=paths,
    )
    about = {}
    if learnt is not None:
      cli.print_table(['', fusion.MEASURE], learnt.rows)
      logger.info('%s', learnt.verdict)
      about = {'learnt': learnt.about()}
    _write(args, read, how, paths, about)
    if kept is not None:
      fusion.write(kept, how, **about)
      logger.info('%s: method and weights', kept)


def _numbers(weights: str | None, names: Sequence[str]) -> dict[str, float] | None:
  if weights is None:
    return None
  try:
    return dict(zip(names, map(float, weights.split(',')), strict=True))
  except ValueError:
    raise InputError(
      f'--weights={weights:.80}: expected a number for each of {len(names)} runs, separated by '
      'commas, or a .json file'
    ) from None


def _write(
  args: Flags,
  read: fusing.Runs,
  how: fusion.Fusion,
  paths: Mapping[str, str],
  about: Mapping[str, Any],
) -> None:
  """Writes the run and its report."""
  started = time.perf_counter()
  fused = dict(fusing.fuse(read, how, args.k, paths))
  seconds = time.perf_counter() - started
  report = {
    'index': 'fusion',
    'method': how.method,
    'weights': dict(how.weights),
    'depth': how.depth,
    **({'rrf_k': how.rrf_k} if how.method == 'rrf' else {}),
    'k': args.k,
    'queries': len(fused),
    'runs': {
      name: {'name': os.path.basename(path), 'sha256': files.sha256_file(path)}
      for name, path in paths.items()
    },
    **about,
    'seconds': seconds,
    'queries_per_second': len(fused) / seconds,
  }
  run = trec.run_from_rankings(list(fused), list(fused.values()))
  trec.write_reported(args.out, run, 'dprjax-fuse', report)


if __name__ == '__main__':
  main()
