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
from collections.abc import Sequence

from dprjax.base import cli, files, flags, outputs
from dprjax.base.errors import InputError
from dprjax.base.flags import flag
from dprjax.engines.engine import ENGINES
from dprjax.retrieval import fusing, fusion
from dprjax.text import trec

logger = logging.getLogger('dprjax')

_OF_TAGS = {
  'dprjax-bm25': fusion.BM25,
  **{f'dprjax-{name}': fusion.DENSE for name in ('exact', 'scann', *ENGINES)},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  run: tuple[tuple[str, str], ...] = flags.runs(
    'a TREC run; NAME is bm25 or dense for runs of dprjax, else the tag of the run'
  )
  out: str = flags.run_out()
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
  weights_out: str | None = flags.file(
    'file for method and weights (default with --method=learned: run.trec.fusion.json)'
  )
  qrels: str | None = flags.file('with --method=learned: judged queries')
  depth: int = flag('how many documents of each run and query count', fusion.DEPTH, most=10**6)
  k: int = flag('passages a query', 1000, most=10**6)
  rrf_k: int = flag('the constant of rrf', fusion.RRF_K, most=10**6)


def _command(args: Flags) -> None:
  stored = args.weights if args.weights and args.weights.endswith('.json') else None
  if stored:
    for name in flags.given(args, 'method', 'qrels', 'depth', 'rrf_k', 'weights_out'):
      raise InputError(f'--{name} does not go with --weights=FILE')
  inputs: outputs.Inputs = {
    '--run': [path for _, path in args.run],
    '--weights': stored,
    **flags.paths(args, 'qrels'),
  }
  weights_out, endings = args.weights_out, ['', '.json']
  if weights_out is not None:
    outputs.check_apart(weights_out, inputs, '--weights_out')
  elif args.method == fusing.LEARNED and not files.is_stream(args.out):
    endings.append('.fusion.json')
    weights_out = f'{files.resolved(args.out)}{endings[-1]}'
  with outputs.claim(args.out, inputs, endings=endings, also={'--weights_out': args.weights_out}):
    names = fusing.names(args.run, _OF_TAGS)
    run, report, how, learnt = fusing.fuse_files(
      dict(zip(names, (path for _, path in args.run), strict=True)),
      args.k,
      qrels=args.qrels,
      method=args.method,
      weights=stored or _numbers(args.weights, names),
      depth=args.depth,
      rrf_k=args.rrf_k,
    )
    if learnt is not None:
      cli.print_table(['', fusion.MEASURE], learnt.rows)
      logger.info('%s', learnt.verdict)
    trec.write_reported(args.out, run, 'dprjax-fuse', report)
    if weights_out is not None:
      about = {'learnt': report['learnt']} if learnt is not None else {}
      fusion.write(weights_out, how, **about)
      logger.info('%s: method and weights', weights_out)


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


main = cli.main(Flags, _command)

if __name__ == '__main__':
  main()
