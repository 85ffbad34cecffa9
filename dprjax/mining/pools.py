"""Pools of negatives from several runs (DPTDR section 3.3), for some queries at a time.

A candidate is a text that a run found for a query and that differs from all positives. Its origins
are the rows of all runs that found it, under any id. A random number (its lot), from the seed and
the ids of query and passage, orders the candidates of a query. The first few are a sample that does
not depend on other candidates.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64, Shaped, UInt64

from dprjax.base import outofcore, ranking

ROW = np.dtype([('query', '<i4'), ('rank', '<i4'), ('score', '<f8'), ('doc', '<u8'), ('id', '<i8')])
"""A row of a run: number of the query, rank, score, key of the document, and place of its id
(`dprjax.base.outofcore.Ids`)."""


class RankedRows(NamedTuple):
  """Rows of one run, best first, and their faults.

  Attributes:
    rows: by query and `dprjax.base.ranking`, at most ``depth`` a query; ``rank`` counts from 1.
    tied: rows with the same rank as the row before.
    contrary: rows with a lower score but a better rank than the row before.
    repeated: rows whose document occurred before for the query.
  """

  rows: Shaped[np.ndarray, ' kept']
  tied: Shaped[np.ndarray, ' tied']
  contrary: Shaped[np.ndarray, ' contrary']
  repeated: Shaped[np.ndarray, ' repeated']


class Pool(NamedTuple):
  """Candidates by query and lot, and their origins.

  Attributes:
    query: number of the query.
    doc: key of the best-ranked document with this text.
    text: code of the text.
    place: place among the candidates of the query, from 0.
    start, stop: origins in ``rows``, by rank and then run.
    rows, run: rows of the runs, and the run number of each.
    positives: rows dropped because their text is that of a positive.
    copies: rows dropped because the same run has the text at a better rank.
  """

  query: Int64[np.ndarray, ' candidates']
  doc: UInt64[np.ndarray, ' candidates']
  text: Int64[np.ndarray, ' candidates']
  place: Int64[np.ndarray, ' candidates']
  start: Int64[np.ndarray, ' candidates']
  stop: Int64[np.ndarray, ' candidates']
  rows: Shaped[np.ndarray, ' rows']
  run: Int64[np.ndarray, ' rows']
  positives: int
  copies: int


class Selection(NamedTuple):
  """Candidates of each source.

  Attributes:
    undenoised: in the sample of the whole pool.
    denoised: below the threshold, sampled or not.
    kept: in the sample of either source.
  """

  undenoised: Bool[np.ndarray, ' candidates']
  denoised: Bool[np.ndarray, ' candidates']
  kept: Bool[np.ndarray, ' candidates']


def rank_rows(
  rows: Shaped[np.ndarray, ' rows'],
  depth: int,
  ids_at: Callable[[Int64[np.ndarray, ' n']], Sequence[bytes]],
) -> RankedRows:
  """Sorts the rows of a run; ``ids_at`` gives ids, which order equal scores."""
  query, score, rank = rows['query'], rows['score'].astype(np.float32), rows['rank']
  lower = (score[1:] < score[:-1]) | ((score[1:] == score[:-1]) & (rank[1:] > rank[:-1]))
  # Most runs are already in order.
  if not ((query[1:] > query[:-1]) | (_same(query) & lower)).all():
    rows = rows[np.lexsort((rows['doc'], rank, -score, query))]
    score = rows['score'].astype(np.float32)
  later = np.flatnonzero(_same(rows['query'])) + 1
  step = rows['rank'][later] - rows['rank'][later - 1]
  place = _places(rows['query'])
  equal = _same(rows['query']) & _same(score)
  tied = np.zeros(len(rows), bool)
  tied[1:] |= equal
  tied[:-1] |= equal
  ids = np.zeros(len(rows), np.int32)
  ids[tied] = ranking.places(ids_at(rows['id'][tied]))
  kept = (rows[ranking.order(rows['query'], score, ids)] if tied.any() else rows)[place < depth]
  kept['rank'] = place[place < depth] + 1
  return RankedRows(kept, rows[later[step == 0]], rows[later[step < 0]], _repeated(rows))


def _repeated(rows: Shaped[np.ndarray, ' rows']) -> Shaped[np.ndarray, ' repeated']:
  # This sort is several times as fast as sorting rows, and repetitions are rare.
  if not _same(np.sort(rows['doc'] + rows['query'].astype(np.uint64) * outofcore.GOLDEN)).any():
    return rows[:0]
  rows = rows[np.lexsort((rows['doc'], rows['query']))]
  return rows[1:][_same(rows['query']) & _same(rows['doc'])]


def shallow(
  queries: UInt64[np.ndarray, ' rows'], scores: Float64[np.ndarray, ' rows'], depth: int
) -> Bool[np.ndarray, ' rows']:
  """Rows that can be among the ``depth`` best of their query; all, if this part is not in order."""
  scores = scores.astype(np.float32)
  if (scores[1:] > scores[:-1])[_same(queries)].any():
    return np.ones(len(queries), bool)
  places = _places(queries)
  # A row that ties with the last row inside may be inside by its id.
  edge = np.minimum(np.arange(len(queries)), np.arange(len(queries)) - places + depth - 1)
  return (places < depth) | (scores == scores[edge])


def make_pool(
  rows: Shaped[np.ndarray, ' rows'],
  run: Int64[np.ndarray, ' rows'],
  text: Int64[np.ndarray, ' rows'],
  positive_query: Int64[np.ndarray, ' positives'],
  positive_text: Int64[np.ndarray, ' positives'],
  query_keys: UInt64[np.ndarray, ' queries'],
  seed: int,
) -> Pool:
  """The union of the rows of all runs, without texts of positives, one candidate for each text.

  Args:
    rows: of every run, as from `rank_rows`.
    text: a code for the text of each row; -1 drops the row.
    positive_query, positive_text: positives of every query.
    query_keys: keys of query ids, by number.
  """
  span = max(int(text.max(initial=0)), int(positive_text.max(initial=0))) + 1
  pair = rows['query'].astype(np.int64) * span + text
  positive = (text >= 0) & np.isin(pair, positive_query.astype(np.int64) * span + positive_text)
  keep = np.flatnonzero((text >= 0) & ~positive)
  # One number orders by candidate, rank and run, and stays far below 2^63.
  rank, ranks = rows['rank'][keep], int(rows['rank'].max(initial=0)) + 1
  runs = int(run.max(initial=0)) + 1
  keep = keep[np.argsort((pair[keep] * ranks + rank) * runs + run[keep], kind='stable')]
  copies = _copies(pair[keep], run[keep], rows['doc'][keep])
  keep = keep[~copies]
  rows, run, pair = rows[keep], run[keep], pair[keep]
  start = np.flatnonzero(np.diff(pair, prepend=-1))
  stop = np.append(start[1:], len(pair))
  query, doc, text = rows['query'][start].astype(np.int64), rows['doc'][start], text[keep[start]]
  with np.errstate(over='ignore'):
    stream = outofcore.mix(np.random.default_rng(seed).integers(0, 2**63, 1, dtype=np.uint64))
    lot = outofcore.mix(outofcore.mix(query_keys[query] + stream) ^ doc)
  by_lot = np.lexsort((doc, lot, query))
  query, doc, text, start, stop = (column[by_lot] for column in (query, doc, text, start, stop))
  counts = int(positive.sum()), int(copies.sum())
  return Pool(query, doc, text, _places(query), start, stop, rows, run, *counts)


def _copies(
  pair: Int64[np.ndarray, ' n'], run: Int64[np.ndarray, ' n'], doc: UInt64[np.ndarray, ' n']
) -> Bool[np.ndarray, ' n']:
  """Rows (by candidate and rank) whose text has a better rank in the same run under another id."""
  copies = np.zeros(len(pair), bool)
  # Only candidates with several ids have copies, and these are few.
  several = np.unique(pair[1:][_same(pair) & ~_same(doc)])
  rows = np.flatnonzero(np.isin(pair, several)) if len(several) else several
  rows = rows[np.lexsort((rows, run[rows], pair[rows]))]
  copies[rows[1:]] = _same(pair[rows]) & _same(run[rows])
  return copies


def select(
  pool: Pool, probability: Float64[np.ndarray, ' candidates'], sample: int, threshold: float
) -> Selection:
  """The first ``sample`` candidates of every query, and the first ``sample`` of those whose
  probability (nan: not scored) is below ``threshold``.
  """
  denoised = probability < threshold
  undenoised = pool.place < sample
  before: np.ndarray = np.cumsum(denoised) - denoised
  first = np.arange(len(denoised)) - pool.place
  kept = undenoised | (denoised & (before - before[first] < sample))
  return Selection(undenoised, denoised, kept)


def join_scores(
  query: Int64[np.ndarray, ' candidates'],
  text: Int64[np.ndarray, ' candidates'],
  rows: Shaped[np.ndarray, ' rows'],
  texts: Int64[np.ndarray, ' rows'],
) -> Float64[np.ndarray, ' candidates']:
  """The scores of candidates in a run: the highest for their text, or nan."""
  rows, texts = rows[texts >= 0], texts[texts >= 0]
  span = max(int(texts.max(initial=0)), int(text.max(initial=0))) + 1
  pairs = rows['query'].astype(np.int64) * span + texts
  order = np.lexsort((-rows['score'], pairs))
  places = outofcore.positions(pairs[order], query * span + text)
  scores = np.full(len(places), np.nan)
  scores[places >= 0] = rows['score'][order[places[places >= 0]]]
  return scores


def _same(values: Shaped[np.ndarray, ' n']) -> Bool[np.ndarray, ' n_less_1']:
  """Whether each value, from the second on, equals the one before."""
  return values[1:] == values[:-1]


def _places(groups: Shaped[np.ndarray, ' n']) -> Int64[np.ndarray, ' n']:
  """The place of each entry in its consecutive group, from 0."""
  numbers = np.arange(len(groups))
  first = np.append(True, ~_same(groups))[: len(groups)]
  return numbers - np.maximum.accumulate(np.where(first, numbers, 0))
