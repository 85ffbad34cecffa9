"""Selects the best rows of a corpus for each query, with numpy.

Ids order equal scores (`dprjax.base.ranking`). Only ids of tied rows are looked up, since all ids
may exceed memory.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from dprjax.base import ranking
from dprjax.base.ranking import Ranking
from dprjax.encoding import codes

Ids = Callable[[Int[np.ndarray, ' n']], Sequence[str]]
"""Looks up ids of ascending rows, like ``embeddings.Embeddings.ids_at``."""

_FIRST = 1024  # columns to sort before there is a k-th best
_MANY = 8  # times k candidates a query; more are split into smaller pieces
_TIED = 1 << 22  # tied rows in memory, about
_FOUND = 1 << 24  # results of a repeated search at a time


class TopK(NamedTuple):
  """The best k rows for each query, best first; equal scores by falling id.

  Unused places have row -1 and score -inf.
  """

  scores: Float[np.ndarray, 'queries k']
  rows: Int[np.ndarray, 'queries k']


def rankings(top: TopK, ids: Sequence[str]) -> list[Ranking]:
  """The results of each query without unused places; ``ids`` are by row."""
  some = []
  for scores, rows in zip(top.scores, top.rows, strict=True):
    used = rows >= 0
    used_ids = [ids[row] for row in rows[used].tolist()]
    some.append(Ranking(used_ids, scores[used].astype(np.float64)))
  return some


def ids_of(ids: Sequence[str]) -> Ids:
  return lambda rows: [ids[row] for row in rows.tolist()]


def numbers(rows: Int[np.ndarray, ' n']) -> list[str]:
  return [str(row) for row in rows.tolist()]


def order(top: TopK, k: int, ids_at: Ids) -> TopK:
  """The k best of unordered rows."""
  scores, rows = top
  if (scores[:, 1:] > scores[:, :-1]).any():
    by_score = np.argsort(-scores, axis=1)
    scores, rows = (np.take_along_axis(array, by_score, 1) for array in (scores, rows))
  # Ties after the k-th score do not matter.
  same = (scores[:, 1:] == scores[:, :-1]) & (rows[:, 1:] >= 0)
  same &= scores[:, 1:] >= scores[:, min(k, scores.shape[1]) - 1, None]
  crowded = np.flatnonzero(same.any(axis=1))
  if len(crowded):
    tied = np.zeros((len(crowded), rows.shape[1]), bool)
    tied[:, 1:] |= same[crowded]
    tied[:, :-1] |= same[crowded]
    some, values = rows[crowded], scores[crowded]
    wanted, inverse = np.unique(some[tied], return_inverse=True)
    place = np.zeros(some.shape, np.int32)
    place[tied] = ranking.places(ids_at(wanted))[inverse]
    by_id = np.lexsort((-place, -values), axis=1)[:, :k]
    scores, rows = scores[:, :k].copy(), rows[:, :k].copy()
    scores[crowded] = np.take_along_axis(values, by_id, 1)
    rows[crowded] = np.take_along_axis(some, by_id, 1)
  return TopK(scores[:, :k], rows[:, :k])


def best_of(top: TopK, count: int, k: int, ids_at: Ids) -> TopK:
  """The k best rows of queries with ``count`` vectors each; a row counts once, with its best score.

  ``top`` has the first vectors of all queries, then all second vectors, and so on.
  """
  if count == 1:
    return order(top, k, ids_at)
  queries, width = len(top.rows) // count, top.rows.shape[1]

  def side_by_side(array: np.ndarray) -> np.ndarray:
    return array.reshape(count, queries, width).swapaxes(0, 1).reshape(queries, count * width)

  scores, rows = side_by_side(top.scores), side_by_side(top.rows)
  by_row = np.lexsort((-scores, rows), axis=1)  # among equal rows, best first
  scores, rows = (np.take_along_axis(array, by_row, 1) for array in (scores, rows))
  again = np.zeros(rows.shape, bool)
  again[:, 1:] = rows[:, 1:] == rows[:, :-1]
  scores = np.where(again, np.float32(-np.inf), scores)
  rows = np.where(again, np.int32(-1), rows)
  return order(TopK(scores, rows), k, ids_at)


def whole_ties(
  search: Callable[[Int[np.ndarray, ' some'], int], TopK],
  queries: int,
  k: int,
  most: int,
  ids_at: Ids,
) -> TopK:
  """The k best rows of an index that may cut within ties.

  ``search(queries, n)`` finds the n best rows. If the n-th ties with the k-th, the search is
  repeated with a larger n, up to ``most``.
  """
  k = min(k, most)
  scores, rows = np.full((queries, k), -np.inf, np.float32), np.full((queries, k), -1, np.int32)
  pending, width = np.arange(queries), min(k + 1, most)
  while len(pending):
    open_ = []
    size = max(1, _FOUND // width)
    for some in np.split(pending, range(size, len(pending), size)):
      top = search(some, width)
      scores[some], rows[some] = order(top, k, ids_at)
      goes_on = (top.rows[:, -1] >= 0) & (top.scores[:, -1] == top.scores[:, k - 1])
      open_.append(some[goes_on])
    pending = np.concatenate(open_)
    if width == most:
      break
    width = min(4 * width, most)
  return TopK(scores, rows)


def rescore(
  queries: Float[np.ndarray, 'queries H'],
  rows: Int[np.ndarray, 'queries n'],
  take: Callable[[Int[np.ndarray, ' m']], Float[np.ndarray, 'm H']],
  block_bytes: int = 1 << 26,
) -> Float[np.ndarray, 'queries n']:
  """Inner products of queries with their rows; -inf where a row is -1.

  Args:
    take: reads vectors of ascending rows, like ``embeddings.Embeddings.take``.
  """
  scores = np.full(rows.shape, -np.inf, np.float32)
  size = max(1, block_bytes // (4 * max(rows.shape[1] * queries.shape[1], 1)))
  for start in range(0, len(queries), size):
    part = slice(start, start + size)
    wanted, places = np.unique(np.maximum(rows[part], 0), return_inverse=True)
    vectors = take(wanted)[places.reshape(rows[part].shape)]
    products = np.matmul(vectors, queries[part].astype(np.float32)[:, :, None])[:, :, 0]
    scores[part] = np.where(rows[part] >= 0, products, -np.inf)
  return scores


class Best:
  """Keeps the best k rows as blocks of scores arrive.

  After some thousand rows few scores reach the k-th best: comparing all and sorting these is faster
  than selecting among all. Rows that tie with the k-th best but do not fit into the list are kept
  beside it until the k-th best rises or ids decide.
  """

  def __init__(self, queries: int, k: int, ids_at: Ids = numbers):
    self._k, self._seen, self._ids_at = k, 0, ids_at
    # -inf with fewer than k rows.
    self._scores = np.full((queries, k), -np.inf, np.float32)
    self._rows = np.full((queries, k), -1, np.int32)
    self._least = self._scores[:, :1]  # the k-th best of each query
    self._tied_query, self._tied_row = np.empty(0, np.int64), np.empty(0, np.int32)

  def add(self, similar: Float[np.ndarray, 'queries n'], offset: int) -> None:
    """Adds scores without NaN, of the rows from ``offset`` on; rows come in order."""
    start = 0
    while start < similar.shape[1]:
      # As many as seen before: about k of them beat the k-th best so far.
      stop = min(start + max(self._seen, _FIRST, 4 * self._k), similar.shape[1])
      self._add(similar[:, start:stop], offset + start)
      start = stop

  def ranked(self) -> TopK:
    """The list; unused places have row -1 and score -inf."""
    self._settle()
    return order(TopK(self._scores, self._rows), self._k, self._ids_at)

  def _add(self, similar: np.ndarray, offset: int) -> None:
    queries, width = similar.shape
    if self._seen or width <= self._k:
      good = similar >= self._least
    else:  # the list is empty: select among these
      good = similar >= _kth(similar, self._k)
    places = np.flatnonzero(good)
    if len(places) > _MANY * self._k * queries and width > max(_FIRST, 4 * self._k):
      # Scores rise with the rows: the first half raises the k-th best for the second half.
      self._add(similar[:, : width // 2], offset)
      self._add(similar[:, width // 2 :], offset + width // 2)
      return
    self._seen += width
    if not len(places):
      return
    # Candidates of each query, after its list.
    query, column = places // width, places % width
    counts = np.bincount(query, minlength=queries)
    within = self._k + np.arange(len(places)) - np.repeat(np.cumsum(counts) - counts, counts)
    shape = queries, self._k + int(counts.max())
    scores, rows = np.full(shape, -np.inf, np.float32), np.full(shape, -1, np.int32)
    scores[:, : self._k], rows[:, : self._k] = self._scores, self._rows
    scores[query, within] = similar[query, column]
    rows[query, within] = column + offset
    before, self._least = self._least, _kth(scores, self._k)
    kept = scores >= self._least
    stays = (self._least == before)[self._tied_query, 0]
    tied_query, tied_row = [self._tied_query[stays]], [self._tied_row[stays]]
    # Rows that tie with the last stay while there is room.
    for crowded in np.flatnonzero(np.count_nonzero(kept, axis=1) > self._k):
      last = np.flatnonzero(scores[crowded] == self._least[crowded])
      out = last[self._k - np.count_nonzero(kept[crowded]) :]
      kept[crowded, out] = False
      if self._least[crowded] > -np.inf:
        tied_query.append(np.full(len(out), crowded))
        tied_row.append(rows[crowded, out])
    self._scores = scores[kept].reshape(queries, self._k)
    self._rows = rows[kept].reshape(queries, self._k)
    self._tied_query, self._tied_row = np.concatenate(tied_query), np.concatenate(tied_row)
    if len(self._tied_row) > _TIED:
      self._settle()

  def _settle(self) -> None:
    """Fills the places of the last score in each list with the best ids of that score."""
    if not len(self._tied_row):
      return
    last = np.zeros(self._scores.shape, bool)
    crowded = np.unique(self._tied_query)
    last[crowded] = self._scores[crowded] == self._least[crowded]
    query = np.concatenate([np.nonzero(last)[0], self._tied_query])
    rows = np.concatenate([self._rows[last], self._tied_row])
    wanted, inverse = np.unique(rows, return_inverse=True)
    by_id = np.lexsort((-ranking.places(self._ids_at(wanted))[inverse], query))
    query, rows = query[by_id], rows[by_id]
    within = np.arange(len(query)) - np.searchsorted(query, query)
    self._rows[last] = rows[within < np.count_nonzero(last, axis=1)[query]]
    self._tied_query, self._tied_row = self._tied_query[:0], self._tied_row[:0]


def _kth(scores: np.ndarray, k: int) -> np.ndarray:
  """The k-th best score of each row, ``[rows, 1]``."""
  place = scores.shape[1] - k
  return np.partition(scores, place, axis=1)[:, place : place + 1]


def check_finite(vectors: Float[np.ndarray, 'rows H'], what: str, offset: int) -> None:
  """Raises InputError for NaN or infinity. ``offset`` is the number of the first row, from 0."""
  codes.check_finite(vectors, lambda row: f'the vector of {what} {offset + row}')
