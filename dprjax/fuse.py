"""Fuses runs by ranks or normalised scores, with given or learnt weights.

    python -m dprjax.fuse --run=bm25.trec --run=dense.trec --out=fused.trec
    python -m dprjax.fuse --run=bm25.trec --run=dense.trec --method=learned \\
        --qrels=qrels/train.tsv --weights_out=fusion.json --out=train.trec
    python -m dprjax.fuse --run=bm25.trec --run=dense.trec --weights=fusion.json --out=test.trec

The first command adds reciprocal ranks. The second learns weights of normalised scores for nDCG@10
on judged queries, and prints their cross-validated gain over the best single run. The third uses
them, like `search --hybrid`, `serve --hybrid` and `Retriever.load(hybrid=)`.

The lines of a query must be together in each run; the order of queries may differ between runs. One
query is in memory at a time. A document missing in a run has the value 0 there (docs/fusion.md).

--shards merges runs of disjoint parts of a corpus with comparable scores.
"""

import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dprjax.base import cli, files, flags, outputs
from dprjax.base.counts import counted, rate
from dprjax.base.errors import InputError
from dprjax.base.flags import flag
from dprjax.encoding import manifest
from dprjax.engines import ENGINES
from dprjax.retrieval import fusing, fusion
from dprjax.text import runs, trec
from dprjax.text.qrels import read_qrels
from dprjax.text.rankings import Ranking, Rankings

logger = logging.getLogger('dprjax')

LEARNED = 'learned'
_OF_TAGS = {
  'dprjax-bm25': fusion.BM25,
  **{f'dprjax-{index}': fusion.DENSE for index in ('exact', 'scann')},
  **{f'dprjax-{engine}': fusion.DENSE for engine in ENGINES},
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
    choices=(*fusion.METHODS, LEARNED),
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
  shards: bool = flags.switch('merge runs of disjoint parts of one corpus')


def main(argv: Sequence[str] | None = None) -> None:
  cli.run(Flags, fuse, argv)


def fuse(args: Flags) -> None:
  """Fuses or merges runs, and writes a run and its report."""
  learns, given = args.method == LEARNED, args.weights and args.weights.endswith('.json')
  if len(args.run) < 2:
    raise InputError(f'{counted(len(args.run), "runs")}: give --run at least twice')
  if args.shards:
    _refuse(args, ('method', 'weights', 'weights_out', 'qrels', 'rrf_k', 'depth'), '--shards')
  if given:
    _refuse(args, ('method', 'qrels', 'depth', 'rrf_k', 'weights_out'), '--weights=FILE')
  if learns and args.qrels is None:
    raise InputError('--method=learned needs --qrels, judged queries')
  if learns and args.weights:
    raise InputError('--weights does not go with --method=learned')
  if not learns:
    flags.refuse(args, ('qrels',), 'method=learned')
  inputs: outputs.Inputs = {
    '--run': [path for _, path in args.run],
    '--weights': args.weights if given else None,
    **flags.paths(args, 'qrels'),
  }
  kept, endings = args.weights_out, ['', '.json']
  if kept is not None:
    outputs.check_apart(kept, inputs, '--weights_out')
  elif learns and not files.is_stream(args.out):
    endings.append('.fusion.json')
    kept = f'{files.resolved(args.out)}{endings[-1]}'
  with (
    outputs.claim(args.out, inputs, endings=endings, also={'--weights_out': args.weights_out}),
    contextlib.ExitStack() as stack,
  ):
    names = _names(args.run)
    opened = {
      name: stack.enter_context(Rankings(path))
      for name, (_, path) in zip(names, args.run, strict=True)
    }
    about: dict[str, Any] = {}
    if args.shards:
      how = None
      _check_spaces(args)
    elif given and args.weights:
      how = _of_file(args.weights, names)
    elif learns:
      how, about = _learn(args, opened)
    else:
      how = fusion.Fusion(
        weights=dict(zip(names, _numbers(args.weights, len(names)), strict=True)),
        method=args.method,
        rrf_k=args.rrf_k,
        depth=args.depth,
        bm25=fusing.bm25_settings({name: run.path for name, run in opened.items()}),
      )
    _write(args, opened, how, about)
    if kept is not None and how is not None:
      fusion.write(kept, how, **about)
      logger.info('%s: method and weights', kept)


def _refuse(args: Flags, names: Sequence[str], other: str) -> None:
  for name in flags.given(args, *names):
    raise InputError(f'--{name} does not go with {other}')


def _names(named: Sequence[tuple[str, str]]) -> list[str]:
  """The name of each run: as given, else its tag, or its path if tags are equal."""
  tags = [runs.read_tag(path) for _, path in named]
  usual = [name or _OF_TAGS.get(tag, tag) for (name, _), tag in zip(named, tags, strict=True)]
  names = [
    path if not name and usual.count(own) > 1 else own
    for (name, path), own in zip(named, usual, strict=True)
  ]
  for name, (_, path) in zip(names, named, strict=True):
    if names.count(name) > 1:
      raise InputError(f'--run={path}: two runs have the name {name}; name them --run=NAME=FILE')
  return names


def _numbers(weights: str | None, count: int) -> list[float]:
  if weights is None:
    return [1.0] * count
  try:
    numbers = [float(word) for word in weights.split(',')]
  except ValueError:
    raise InputError(
      f'--weights={weights:.80}: expected numbers separated by commas, or a .json file'
    ) from None
  if len(numbers) != count:
    raise InputError(f'--weights={weights:.80}: {len(numbers)} numbers for {count} runs')
  return numbers


def _of_file(path: str, names: Sequence[str]) -> fusion.Fusion:
  """The fusion in a file, for these runs."""
  how = fusion.read(path)
  if how.weights.keys() != set(names):
    raise InputError(
      f'--weights={path} is for runs called {", ".join(how.weights)}, not {", ".join(names)}; '
      'name them --run=NAME=FILE'
    )
  return how


def _check_spaces(args: Flags) -> None:
  """Raises InputError if reports show that scores of shards are not comparable."""
  spaces = {
    path: {field: report.get(field) for field in manifest.SPACE}
    for _, path in args.run
    if 'backbone_sha256' in (report := fusing.report_of(path))
  }
  for (one, space), (other, another) in itertools.pairwise(spaces.items()):
    manifest.check_same_space(one, space, other, another)


def _learn(args: Flags, opened: Mapping[str, Rankings]) -> tuple[fusion.Fusion, dict[str, Any]]:
  """Learns weights on the judged queries, and shows their gain."""
  assert args.qrels is not None
  learnt = fusing.learn(opened, read_qrels(args.qrels), args.depth, args.qrels)
  scores, gain, best = learnt.scores, learnt.gain, learnt.best
  rows = [
    *zip(opened, scores.alone.T, strict=True),
    ('equal weights', scores.equal),
    ('learnt weights, cross-validated', scores.held_out),
  ]
  cli.print_table(['', fusion.MEASURE], [[name, f'{values.mean():.4f}'] for name, values in rows])
  verdict = f'gain over {best}'
  if gain.mean <= 0:
    verdict = f'no gain over {best}'
  elif gain.low <= 0:
    verdict = f'no clear gain over {best} (it may be chance)'
  logger.info(
    'weights %s: %s, %s %+.4f, 95 %% interval %+.4f to %+.4f over %s',
    ', '.join(f'{name} {weight:.2f}' for name, weight in learnt.fusion.weights.items()),
    verdict,
    fusion.MEASURE,
    gain.mean,
    gain.low,
    gain.high,
    counted(learnt.queries, 'queries'),
  )
  settings = fusing.bm25_settings({name: run.path for name, run in opened.items()})
  how = dataclasses.replace(learnt.fusion, bm25=settings)
  return how, {'learnt': learnt.about()}


def _write(
  args: Flags,
  opened: Mapping[str, Rankings],
  how: fusion.Fusion | None,
  about: Mapping[str, Any],
) -> None:
  """Writes the run and its report."""
  started, queries, rows = time.perf_counter(), 0, 0
  paths = {name: run.path for name, run in opened.items()}

  def counted_rows() -> Iterator[tuple[str, Ranking]]:
    nonlocal queries, rows
    for query_id, ranking in fusing.fuse(opened, how, args.k, paths):
      queries, rows = queries + 1, rows + len(ranking.ids)
      yield query_id, ranking

  trec.write_rankings(args.out, counted_rows(), 'dprjax-fuse')
  seconds = time.perf_counter() - started
  outputs.write_report(
    args.out,
    {
      'index': 'fusion',
      'method': 'shards' if how is None else how.method,
      **({} if how is None else {'weights': dict(how.weights), 'depth': how.depth}),
      **({'rrf_k': how.rrf_k} if how is not None and how.method == 'rrf' else {}),
      'k': args.k,
      'queries': queries,
      'runs': {
        name: {'name': run.path.name, 'sha256': files.sha256_file(run.path)}
        for name, run in opened.items()
      },
      **about,
      'seconds': seconds,
    },
  )
  logger.info(
    '%s: %s for %s, %s queries a second',
    args.out,
    counted(rows, 'passages'),
    counted(queries, 'queries'),
    rate(queries / seconds),
  )


if __name__ == '__main__':
  main()
