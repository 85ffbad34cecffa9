"""Pools of negatives from several runs (DPTDR section 3.3): arrays in, arrays out, for some queries
at a time.

A candidate is a text that a run found for a query and that no positive of the query has. Its
origins are the rows of all runs that found it, under any id. A random number (its lot), made from
the seed and the ids of query and passage, orders the candidates of a query. The first few are a
sample, whatever else is in the pool.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64, Shaped, UInt64

from dprjax.base import outofcore, ranking

ROW = np.dtype([('query', '<i4'), ('rank', '<i4'), ('score', '<f8'), ('doc', '<u8'), ('id', '<i8')])
"""A row of a run: the query's number, the file's rank and score, the document's key, and the place
of its id (`dprjax.base.outofcore.Ids`)."""


class Ranking(NamedTuple):
  """Rows of one run, best first, and what is wrong with them.

  Attributes:
    rows: ordered by query and `dprjax.base.ranking`; at most ``depth`` a query. ``rank`` is the
      place in this order, from 1.
    tied: rows that share their rank with the row before them.
    contrary: rows with a lower score and a better rank than the row before them.
    repeated: rows whose document comes before for their query.
  """

  rows: Shaped[np.ndarray, ' kept']
  tied: Shaped[np.ndarray, ' tied']
  contrary: Shaped[np.ndarray, ' contrary']
  repeated: Shaped[np.ndarray, ' repeated']


class Pool(NamedTuple):
  """Candidates, ordered by query and then by lot, and their origins.

  Attributes:
    query: the query's number.
    doc: the key of the document that is ranked best among those with this text.
    text: the text's code.
    place: the place among the query's candidates, from 0.
    start, stop: the origins in ``rows``: by rank, then in the order of the runs.
    rows, run: rows of the runs, and the number of each one's run.
    positives: how many rows were left out because they have a positive's text.
    copies: how many were left out because the same run has the text before.
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
  """Which candidates are in which pool.

  Attributes:
    undenoised: in the sample of the whole pool.
    denoised: below the threshold, whether sampled or not.
    kept: in the sample of either pool.
  """

  undenoised: Bool[np.ndarray, ' candidates']
  denoised: Bool[np.ndarray, ' candidates']
  kept: Bool[np.ndarray, ' candidates']


def rank_rows(
  rows: Shaped[np.ndarray, ' rows'],
  depth: int,
  ids_at: Callable[[Int64[np.ndarray, ' n']], Sequence[bytes]],
) -> Ranking:
  """Puts a run's rows (`ROW`) in order. ``ids_at``: the ids at some places, for equal scores."""
  query, score, rank = rows['query'], rows['score'].astype(np.float32), rows['rank']
  lower = (score[1:] < score[:-1]) | ((score[1:] == score[:-1]) & (rank[1:] > rank[:-1]))
  # Most runs are in order already.
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
  return Ranking(kept, rows[later[step == 0]], rows[later[step < 0]], _repeated(rows))


def _repeated(rows: Shaped[np.ndarray, ' rows']) -> Shaped[np.ndarray, ' repeated']:
  # Repetitions are rare, and this sort is several times as fast as that of the rows.
  if not _same(np.sort(rows['doc'] + rows['query'].astype(np.uint64) * outofcore.GOLDEN)).any():
    return rows[:0]
  rows = rows[np.lexsort((rows['doc'], rows['query']))]
  return rows[1:][_same(rows['query']) & _same(rows['doc'])]


def shallow(
  queries: UInt64[np.ndarray, ' rows'], scores: Float64[np.ndarray, ' rows'], depth: int
) -> Bool[np.ndarray, ' rows']:
  """Which rows of a part of a run can be among the ``depth`` best of their query: all, if the part
  is not in order.
  """
  scores = scores.astype(np.float32)
  if (scores[1:] > scores[:-1])[_same(queries)].any():
    return np.ones(len(queries), bool)
  places = _places(queries)
  # A row with the score of the last row inside may be inside by its id.
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
  """The union of the runs' rows without the positives' texts, one candidate a text.

  Args:
    rows: of every run, as `rank_rows` returns them.
    run: the number of each row's run.
    text: a code for each row's text, the same for the same text; -1 leaves the row out.
    positive_query, positive_text: the positives of every query.
    query_keys: the keys of the queries' ids, by number.
    seed: of the lots.
  """
  span = max(int(text.max(initial=0)), int(positive_text.max(initial=0))) + 1
  pair = rows['query'].astype(np.int64) * span + text
  positive = (text >= 0) & np.isin(pair, positive_query.astype(np.int64) * span + positive_text)
  keep = np.flatnonzero((text >= 0) & ~positive)
  # One number orders by candidate, rank and run. Its parts are far below 2^63 for any number of
  # rows that fits into memory.
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
  """Which rows, ordered by candidate and rank, have a text that the same run ranks better under
  another id.
  """
  copies = np.zeros(len(pair), bool)
  # Only candidates with several ids have copies, and they are rare.
  several = np.unique(pair[1:][_same(pair) & ~_same(doc)])
  rows = np.flatnonzero(np.isin(pair, several)) if len(several) else several
  rows = rows[np.lexsort((rows, run[rows], pair[rows]))]
  copies[rows[1:]] = _same(pair[rows]) & _same(run[rows])
  return copies


def select(
  pool: Pool, probability: Float64[np.ndarray, ' candidates'], sample: int, threshold: float
) -> Selection:
  """Selects the first ``sample`` candidates of every query, and the first ``sample`` of those with
  a probability below ``threshold`` (nan: not scored).
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
  """The candidates' scores in a run: the highest of those for a candidate's text; nan if there is
  none. ``text`` and ``texts`` have codes of the candidates' and the rows' texts, as in `make_pool`.
  """
  rows, texts = rows[texts >= 0], texts[texts >= 0]
  span = max(int(texts.max(initial=0)), int(text.max(initial=0))) + 1
  pairs = rows['query'].astype(np.int64) * span + texts
  order = np.lexsort((-rows['score'], pairs))
  places = outofcore.positions(pairs[order], query * span + text)
  scores = np.full(len(places), np.nan)
  scores[places >= 0] = rows['score'][order[places[places >= 0]]]
  return scores


def _same(values: Shaped[np.ndarray, ' n']) -> Bool[np.ndarray, ' n_less_1']:
  """Which values, from the second on, are the same as the one before."""
  return values[1:] == values[:-1]


def _places(groups: Shaped[np.ndarray, ' n']) -> Int64[np.ndarray, ' n']:
  """The place of each entry in its group, from 0. A group's entries are consecutive."""
  numbers = np.arange(len(groups))
  first = np.append(True, ~_same(groups))[: len(groups)]
  return numbers - np.maximum.accumulate(np.where(first, numbers, 0))
