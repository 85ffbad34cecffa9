"""Pools of negatives from several runs (DPTDR section 3.3): arrays in, arrays out, for some queries
at a time.

A candidate is a text that some run found for a query, and that is not the text of one of its
positives. The rows of all runs that found it, under whatever id, are its origins. A lot, drawn from
the seed, the query's id and the passage's, orders the candidates of a query: a sample is the first
few of them, whatever else is in the pool, and needs no memory of what was drawn.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64, Shaped, UInt64

from dprjax.base import outofcore

ROW = np.dtype([('query', '<i4'), ('rank', '<i4'), ('score', '<f8'), ('doc', '<u8')])
"""A row of a run: the query's number, the file's rank and score, the document's key."""


class Ranking(NamedTuple):
  """Rows of one run, best first, and what is wrong with them.

  Attributes:
    rows: by query, falling score, rank in the file, key; no more than so many a query. ``rank`` is
      the place, from 1.
    doubtful: rows that share their rank with another of their query.
    contrary: rows whose score is below another's of their query, and their rank above it.
    repeated: rows whose document their query has already.
  """

  rows: Shaped[np.ndarray, 'kept']
  doubtful: Shaped[np.ndarray, 'doubtful']
  contrary: Shaped[np.ndarray, 'contrary']
  repeated: Shaped[np.ndarray, 'repeated']


class Pool(NamedTuple):
  """Candidates, by query and then by lot, and their origins.

  Attributes:
    query, doc: the query's number; the key of the document that stands for the text, the one that
      is ranked best.
    text: the text's code.
    place: among the candidates of the query, from 0.
    start, stop: origins ``start`` to ``stop`` are the candidate's, the best rank first, then in the
      order of the runs.
    origins: ``(run, rank, score)`` arrays.
    positives, copies: rows that were left out because they are of a positive's text; and for being
      the same text and run again.
  """

  query: Int64[np.ndarray, 'candidates']
  doc: UInt64[np.ndarray, 'candidates']
  text: Int64[np.ndarray, 'candidates']
  place: Int64[np.ndarray, 'candidates']
  start: Int64[np.ndarray, 'candidates']
  stop: Int64[np.ndarray, 'candidates']
  origins: tuple[Int32[np.ndarray, 'rows'], Int32[np.ndarray, 'rows'], Float64[np.ndarray, 'rows']]
  positives: int
  copies: int


class Selection(NamedTuple):
  """Which candidates are kept.

  Attributes:
    undenoised: in the sample of the whole pool.
    denoised: below the threshold; kept or not.
    kept: in the sample of either pool.
  """

  undenoised: Bool[np.ndarray, 'candidates']
  denoised: Bool[np.ndarray, 'candidates']
  kept: Bool[np.ndarray, 'candidates']


def rank_rows(rows: Shaped[np.ndarray, 'rows'], depth: int) -> Ranking:
  """Puts a run's rows (`ROW`) in order.

  The score decides, as in trec_eval, and the file's rank among equal scores.
  """
  query, score, rank = rows['query'], rows['score'], rows['rank']
  on = query[1:] == query[:-1]
  ordered = (query[1:] > query[:-1]) | (
    on & ((score[1:] < score[:-1]) | ((score[1:] == score[:-1]) & (rank[1:] > rank[:-1])))
  )
  if not ordered.all():
    rows = rows[np.lexsort((rows['doc'], rank, -score, query))]
    on = rows['query'][1:] == rows['query'][:-1]
  later = np.flatnonzero(on) + 1
  step = rows['rank'][later] - rows['rank'][later - 1]
  place = _places(rows['query'])
  kept = rows[place < depth]
  kept['rank'] = place[place < depth] + 1
  return Ranking(kept, rows[later[step == 0]], rows[later[step < 0]], _repeated(rows))


def _repeated(rows: Shaped[np.ndarray, 'rows']) -> Shaped[np.ndarray, 'repeated']:
  pairs = np.sort(rows['doc'] + rows['query'].astype(np.uint64) * outofcore.GOLDEN)
  if not (
    pairs[1:] == pairs[:-1]
  ).any():  # nearly always, and several times as fast as to sort the rows
    return rows[:0]
  ordered = rows[np.lexsort((rows['doc'], rows['query']))]
  return ordered[1:][
    (ordered['query'][1:] == ordered['query'][:-1]) & (ordered['doc'][1:] == ordered['doc'][:-1])
  ]


def shallow(
  queries: UInt64[np.ndarray, 'rows'], scores: Float64[np.ndarray, 'rows'], depth: int
) -> Bool[np.ndarray, 'rows']:
  """Which rows of a piece of a run can be among the ``depth`` best of their query: all, where the
  piece is not in order.
  """
  on = queries[1:] == queries[:-1]
  if (scores[1:][on] > scores[:-1][on]).any():
    return np.ones(len(queries), bool)
  places = _places(queries)
  # A tie with the last one inside may be inside by its rank.
  edge = np.minimum(np.arange(len(queries)), np.arange(len(queries)) - places + depth - 1)
  return (places < depth) | (scores == scores[edge])


def make_pool(
  runs: list[Shaped[np.ndarray, 'rows']],
  texts: list[Int64[np.ndarray, 'rows']],
  positive_query: Int64[np.ndarray, 'positives'],
  positive_text: Int64[np.ndarray, 'positives'],
  query_keys: UInt64[np.ndarray, 'queries'],
  seed: int,
) -> Pool:
  """Union of the runs' rows, less the positives' texts, one candidate a text.

  Args:
    runs: rows of every run, as `rank_rows` gives them; queries are numbers below
      ``len(query_keys)``.
    texts: a code of every row's text, the same for the same text; -1 leaves the row out.
    positive_query, positive_text: what is no negative of which query.
    query_keys: of the queries' ids, for the lots.
    seed: of the lots.
  """
  columns = [
    np.concatenate([rows[name] for rows in runs]) for name in ('query', 'rank', 'score', 'doc')
  ]
  run = np.repeat(np.arange(len(runs), dtype=np.int32), [len(rows) for rows in runs])
  text = np.concatenate(texts)
  known = text >= 0
  query, rank, score, doc, run, text = (column[known] for column in (*columns, run, text))
  span = max(int(text.max(initial=0)), int(positive_text.max(initial=0))) + 1
  pair = query.astype(np.int64) * span + text
  wanted = ~np.isin(pair, positive_query.astype(np.int64) * span + positive_text)
  positives = int(np.count_nonzero(~wanted))
  query, rank, score, doc, run, text, pair = (
    column[wanted] for column in (query, rank, score, doc, run, text, pair)
  )
  # One number orders by candidate, rank and run: its parts are far below 2^63 for any number of
  # rows that fits into memory.
  ranks = int(np.max(rank, initial=0)) + 1
  order = np.argsort((pair * ranks + rank) * len(runs) + run, kind='stable')
  again = _found_again(pair[order], run[order], doc[order])
  order = order[~again]
  pair, run, rank, score = pair[order], run[order], rank[order], score[order]
  start = np.flatnonzero(np.diff(pair, prepend=-1))
  stop = np.append(start[1:], len(pair))
  query, doc, text = query[order[start]].astype(np.int64), doc[order[start]], text[order[start]]
  with np.errstate(over='ignore'):
    stream = outofcore.mix(np.random.default_rng(seed).integers(0, 2**63, 1, dtype=np.uint64))
    lot = outofcore.mix(outofcore.mix(query_keys[query] + stream) ^ doc)
  by_lot = np.lexsort((doc, lot, query))
  query, doc, text, start, stop = (column[by_lot] for column in (query, doc, text, start, stop))
  return Pool(
    query,
    doc,
    text,
    _places(query),
    start,
    stop,
    (run, rank, score),
    positives,
    int(np.count_nonzero(again)),
  )


def _found_again(
  pair: Int64[np.ndarray, 'n'], run: Int32[np.ndarray, 'n'], doc: UInt64[np.ndarray, 'n']
) -> Bool[np.ndarray, 'n']:
  """Rows, ordered by candidate and rank, of a text that the same run has found before under another
  id: there it has its better rank.
  """
  again = np.zeros(len(pair), bool)
  # Only where a candidate has several ids, which is rare.
  several = np.unique(pair[1:][(pair[1:] == pair[:-1]) & (doc[1:] != doc[:-1])])
  rows = np.flatnonzero(np.isin(pair, several)) if len(several) else several
  rows = rows[np.lexsort((rows, run[rows], pair[rows]))]
  again[rows[1:]] = (pair[rows][1:] == pair[rows][:-1]) & (run[rows][1:] == run[rows][:-1])
  return again


def select(
  pool: Pool, probability: Float64[np.ndarray, 'candidates'], sample: int, threshold: float
) -> Selection:
  """The first ``sample`` candidates of every query, and the first ``sample`` of those below the
  threshold; nan: not scored.
  """
  denoised = probability < threshold
  undenoised = pool.place < sample
  before: np.ndarray = np.cumsum(denoised) - denoised
  first = np.arange(len(denoised)) - pool.place
  return Selection(
    undenoised, denoised, undenoised | (denoised & (before - before[first] < sample))
  )


def join_scores(
  pool: Pool, rows: Shaped[np.ndarray, 'rows'], texts: Int64[np.ndarray, 'rows']
) -> Float64[np.ndarray, 'candidates']:
  """The scores that a run has for the candidates' texts, the highest where it has several; nan
  where it has none. ``texts`` as in `make_pool`.
  """
  rows, texts = rows[texts >= 0], texts[texts >= 0]
  span = max(int(texts.max(initial=0)), int(pool.text.max(initial=0))) + 1
  pairs = rows['query'].astype(np.int64) * span + texts
  order = np.lexsort((-rows['score'], pairs))
  pairs, first = np.unique(pairs[order], return_index=True)
  scores = np.full(len(pool.query), np.nan)
  wanted = pool.query * span + pool.text
  places = np.searchsorted(pairs, wanted)
  inside = np.flatnonzero(places < len(pairs))
  hit = inside[pairs[places[inside]] == wanted[inside]]
  scores[hit] = rows['score'][order[first[places[hit]]]]
  return scores


def _places(sorted_groups: Shaped[np.ndarray, 'n']) -> Int64[np.ndarray, 'n']:
  """The place of each entry among those of its group, from 0; groups lie together."""
  numbers = np.arange(len(sorted_groups))
  first = np.ones(len(sorted_groups), bool)
  first[1:] = sorted_groups[1:] != sorted_groups[:-1]
  return numbers - np.maximum.accumulate(np.where(first, numbers, 0)) if len(numbers) else numbers
