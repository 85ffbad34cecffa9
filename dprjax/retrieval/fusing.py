"""Fuses runs, query by query; `dprjax.retrieval.fusion` has the sums of one query."""

import dataclasses
import logging
import os
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from dprjax.base import files as base_files
from dprjax.base import reading
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike
from dprjax.base.progress import Progress
from dprjax.base.ranking import Ranking
from dprjax.retrieval import comparison, fusion
from dprjax.text import runs as run_files
from dprjax.text import trec
from dprjax.text.fields import report_ids
from dprjax.text.qrels import Qrels, read_qrels

logger = logging.getLogger('dprjax')

Runs = Mapping[str, Mapping[str, Ranking]]
"""Rankings by query, by name of the run."""

LEARNED = 'learned'
_LEARNT_METHOD = 'zscore'
_NONE: Mapping[str, Any] = types.MappingProxyType({})


class Learnt(NamedTuple):
  """Learnt weights, and their gain over the best single run.

  Attributes:
    scores: nDCG@10 of each query.
    gain: cross-validated.
  """

  fusion: fusion.Fusion
  scores: fusion.Learnt
  queries: int
  best: str
  gain: comparison.Interval

  def about(self) -> dict[str, Any]:
    alone = zip(self.fusion.weights, self.scores.alone.mean(axis=0).tolist(), strict=True)
    return {
      'measure': fusion.MEASURE,
      'queries': self.queries,
      'alone': dict(alone),
      'equal': float(self.scores.equal.mean()),
      'cross_validated': float(self.scores.held_out.mean()),
      'gain': {'over': self.best, **self.gain._asdict()},
    }

  @property
  def rows(self) -> list[list[str]]:
    """A table: nDCG@10 of each run, and of equal and learnt weights."""
    rows = [
      *zip(self.fusion.weights, self.scores.alone.T, strict=True),
      ('equal weights', self.scores.equal),
      ('learnt weights, cross-validated', self.scores.held_out),
    ]
    return [[name, f'{values.mean():.4f}'] for name, values in rows]

  @property
  def verdict(self) -> str:
    words = f'gain over {self.best}'
    if self.gain.mean <= 0:
      words = f'no gain over {self.best}'
    elif self.gain.low <= 0:
      words = f'no clear gain over {self.best} (it may be chance)'
    weights = ', '.join(f'{name} {weight:.2f}' for name, weight in self.fusion.weights.items())
    return (
      f'weights {weights}: {words}, {fusion.MEASURE} {self.gain.mean:+.4f}, 95 % interval '
      f'{self.gain.low:+.4f} to {self.gain.high:+.4f} over {counted(self.queries, "queries")}'
    )


def choose(
  runs: Runs,
  *,
  method: str = 'rrf',
  weights: Mapping[str, float] | PathLike | None = None,
  judged: Qrels | None = None,
  depth: int = fusion.DEPTH,
  rrf_k: int = fusion.RRF_K,
  files: Mapping[str, PathLike] = _NONE,
) -> tuple[fusion.Fusion, Learnt | None]:
  """The fusion of these runs, and what was learnt for it.

  Args:
    method: one of `fusion.METHODS`, or `LEARNED` from the judgements.
    weights: by run (default: 1); or a file of `fusion.write`, which names a method, too.
  """
  if (method == LEARNED) != (judged is not None) or (method == LEARNED and weights is not None):
    raise InputError(
      '--qrels: --method=learned needs judged queries and takes no --weights; other methods take '
      'no judgements'
    )
  learnt = None
  if judged is not None:
    learnt = learn(runs, judged, depth)
    how = learnt.fusion
  elif weights is None or isinstance(weights, Mapping):
    by_run = weights or dict.fromkeys(runs, 1.0)
    how = fusion.Fusion(weights=by_run, method=method, rrf_k=rrf_k, depth=depth)
  else:
    how = fusion.read(weights)
  if how.weights.keys() != runs.keys():
    where = '--weights' if isinstance(weights, Mapping) else f'--weights={weights}'
    raise InputError(
      f'{where}: they are for runs called {", ".join(how.weights)}, not {", ".join(runs)}; name '
      'them --run=NAME=FILE'
    )
  return dataclasses.replace(how, bm25=how.bm25 or bm25_settings(files)), learnt


def learn(runs: Runs, judged: Qrels, depth: int) -> Learnt:
  """Learns weights on the judged queries that a run has."""
  usable = {
    query_id: grades
    for query_id, grades in judged.items()
    if any(query_id in run for run in runs.values()) and max(grades.values()) > 0
  }
  if len(usable) < 2:
    raise InputError(
      f'--qrels: {counted(len(usable), "judged queries")} with relevant documents in the runs; '
      'learnt weights need 2, and some dozens for a gain'
    )
  how = fusion.Fusion(weights=dict.fromkeys(runs, 1.0), method=_LEARNT_METHOD, depth=depth)
  weights = fusion.candidates(len(runs))
  scores = np.empty((len(usable), len(weights)))
  progress = Progress('queries', len(usable), 'learning')
  for row, (query_id, grades) in enumerate(usable.items()):
    scores[row] = fusion.ndcg(*how.table(_of(runs, query_id)), grades, weights)
    progress(row + 1)
  learnt = fusion.learn(weights, scores)
  best = int(np.argmax(learnt.alone.mean(axis=0)))
  gain = comparison.difference([learnt.held_out - learnt.alone[:, best]])
  chosen = dict(zip(runs, learnt.weights.round(6).tolist(), strict=True))
  how = dataclasses.replace(how, weights=chosen)
  return Learnt(how, learnt, len(usable), list(runs)[best], gain)


def fuse(
  runs: Runs, how: fusion.Fusion, k: int, files: Mapping[str, Any] = _NONE
) -> Iterator[tuple[str, Ranking]]:
  """Yields (query, its k best documents) of the queries of all runs."""
  query_ids = list(dict.fromkeys(query_id for run in runs.values() for query_id in run))
  for name, run in runs.items():
    missing = [query_id for query_id in query_ids if query_id not in run]
    if not any(
      query_id in run for other in runs.values() if other is not run for query_id in other
    ):
      raise InputError(
        f'{files.get(name, name)}: no other run has one of its queries; give runs of the same '
        'data set'
      )
    report_ids(
      f'{name}: nothing for {len(missing):,} of {counted(len(query_ids), "queries")}',
      missing,
      'the other runs decide',
    )
  shared = False
  progress = Progress('queries', len(query_ids), 'fusing')
  for number, query_id in enumerate(query_ids, start=1):
    rankings = _of(runs, query_id)
    if not shared:
      ids = [id_ for one in rankings.values() for id_ in one.ids]
      shared = len(set(ids)) < len(ids)
    yield query_id, how.fuse(rankings, k)
    progress(number)
  if not shared:
    logger.warning(
      'the runs have no document in common; are they from the same corpus? dprjax search takes '
      'several --corpus, the parts of one'
    )


def fuse_files(
  paths: Mapping[str, str], k: int, *, qrels: PathLike | None = None, **options: Any
) -> tuple[trec.Run, dict[str, Any], fusion.Fusion, Learnt | None]:
  """Fuses the runs of files; returns the run, its report, and what `choose` gives.

  Args:
    paths: by name of the run.
    qrels: judgements, for `LEARNED`.
    options: of `choose`.
  """
  runs = {name: trec.read_run(path).rankings() for name, path in paths.items()}
  judged = None if qrels is None else read_qrels(qrels)
  how, learnt = choose(runs, judged=judged, files=paths, **options)
  started = time.perf_counter()
  fused = dict(fuse(runs, how, k, paths))
  seconds = time.perf_counter() - started
  report = {
    'index': 'fusion',
    'method': how.method,
    'weights': dict(how.weights),
    'depth': how.depth,
    **({'rrf_k': how.rrf_k} if how.method == 'rrf' else {}),
    'k': k,
    'queries': len(fused),
    'runs': {
      name: {'name': os.path.basename(path), 'sha256': base_files.sha256_file(path)}
      for name, path in paths.items()
    },
    **({} if learnt is None else {'learnt': learnt.about()}),
    'seconds': seconds,
    'queries_per_second': len(fused) / seconds,
  }
  return trec.run_from_rankings(list(fused), list(fused.values())), report, how, learnt


def names(named: Sequence[tuple[str, str]], of_tags: Mapping[str, str]) -> list[str]:
  """The name of each run: as given, else by its tag, or its path if tags are equal.

  Args:
    of_tags: names of runs of dprjax by their tags.
  """
  tags = [run_files.read_tag(path) for _, path in named]
  usual = [name or of_tags.get(tag, tag) for (name, _), tag in zip(named, tags, strict=True)]
  labels = [
    path if not name and usual.count(label) > 1 else label
    for (name, path), label in zip(named, usual, strict=True)
  ]
  for name, (_, path) in zip(labels, named, strict=True):
    if labels.count(name) > 1:
      raise InputError(f'--run={path}: two runs have the name {name}; name them --run=NAME=FILE')
  return labels


def report_of(run: PathLike) -> dict[str, Any]:
  """The report beside a run; empty if dprjax did not write one."""
  path = epath.Path(f'{base_files.resolved(run)}.json')
  try:
    report = reading.read_json_object(path, 'report') if path.exists() else {}
  except InputError:
    return {}
  return report if 'index' in report else {}


def bm25_settings(paths: Mapping[str, PathLike]) -> dict[str, Any] | None:
  """The settings of the run called bm25, from its report, if dprjax.bm25 made it."""
  report = report_of(paths[fusion.BM25]) if fusion.BM25 in paths else {}
  return report.get('settings') if report.get('index') == 'bm25s' else None


def _of(runs: Runs, query_id: str) -> dict[str, Ranking]:
  return {name: run[query_id] for name, run in runs.items() if query_id in run}
