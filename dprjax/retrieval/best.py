"""The best rows of a corpus for each query: lists of them, and how numpy chooses them."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from dprjax.base.errors import InputError

_FIRST = 1024  # columns that are sorted before there is a k-th best
_MANY = 8  # times k: so many candidates of a query are looked at in smaller pieces


class TopK(NamedTuple):
  """The best k rows of the corpus for each query, best first; equal scores by row, ascending.

  Where an index finds fewer than k, the rest has row -1 and score -inf.
  """

  scores: Float[np.ndarray, 'queries k']
  rows: Int[np.ndarray, 'queries k']


def best_of(found: TopK, count: int) -> TopK:
  """The best k rows of each query, of which there are ``count`` vectors: all first ones, then all
  second ones, and so on. A row counts once, with its best score.
  """
  if count == 1:
    return found
  queries, k = len(found.rows) // count, found.rows.shape[1]

  def side_by_side(array: np.ndarray) -> np.ndarray:
    return array.reshape(count, queries, k).swapaxes(0, 1).reshape(queries, count * k)

  def ranked(scores: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.lexsort((rows, -scores), axis=1)
    return np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)

  scores, rows = ranked(side_by_side(found.scores), side_by_side(found.rows))
  by_row = np.argsort(rows, axis=1, kind='stable')  # of equal rows the best stays first
  sorted_rows = np.take_along_axis(rows, by_row, 1)
  again = np.zeros(rows.shape, bool)
  np.put_along_axis(again, by_row[:, 1:], sorted_rows[:, 1:] == sorted_rows[:, :-1], 1)
  scores, rows = np.where(again, -np.inf, scores), np.where(again, -1, rows)
  scores, rows = ranked(scores.astype(found.scores.dtype), rows.astype(found.rows.dtype))
  return TopK(scores[:, :k], rows[:, :k])


def rescore(
  queries: Float[np.ndarray, 'queries H'],
  rows: Int[np.ndarray, 'queries n'],
  take: Callable[[Int[np.ndarray, 'm']], Float[np.ndarray, 'm H']],
  block_bytes: int = 1 << 26,
) -> Float[np.ndarray, 'queries n']:
  """The inner products of queries with some rows each; -inf where a row is -1.

  Args:
    queries: float32.
    rows: of each query.
    take: gives the vectors of ascending rows, as ``embeddings.Embeddings.take``.
    block_bytes: of vectors in memory at a time, about.
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


def order(found: TopK, k: int) -> TopK:
  """The k best of rows in any order: by falling score, then row."""
  places = np.lexsort((found.rows, -found.scores), axis=1)[:, :k]
  return TopK(*(np.take_along_axis(array, places, axis=1) for array in found))


class Best:
  """The best k rows so far, while blocks of scores arrive.

  A score that does not exceed the k-th best so far cannot be among the best, and after some
  thousand rows few do: a comparison of all scores, and a choice among those few, take the place of
  a choice among all.
  """

  def __init__(self, queries: int, k: int):
    """Begins with nothing."""
    self._k, self._seen = k, 0
    # In the order of rows; k of each query, and -inf where fewer have come.
    self._scores = np.full((queries, k), -np.inf, np.float32)
    self._rows = np.full((queries, k), -1, np.int32)
    self._least = self._scores[:, :1]  # the k-th best of each query

  def add(self, similar: Float[np.ndarray, 'queries n'], offset: int) -> None:
    """Takes the scores of the rows from ``offset`` on, which come after all earlier ones.

    No score is NaN.
    """
    start = 0
    while start < similar.shape[1]:
      # As many again as were seen: about k of them are better than the k-th best of those.
      stop = min(start + max(self._seen, _FIRST, 4 * self._k), similar.shape[1])
      self._add(similar[:, start:stop], offset + start)
      start = stop

  def ranked(self) -> TopK:
    """The list; where fewer than k rows have come, the rest has row -1 and score -inf."""
    order = np.argsort(-self._scores, axis=1, kind='stable')  # of equal scores the first row
    return TopK(*(np.take_along_axis(one, order, axis=1) for one in (self._scores, self._rows)))

  def _add(self, similar: np.ndarray, offset: int) -> None:
    queries, width = similar.shape
    if self._seen or width <= self._k:
      better = similar > self._least
    else:  # all are better than none: of these, those that may stay
      better = similar >= _kth(similar, self._k)
    places = np.flatnonzero(better)
    if len(places) > _MANY * self._k * queries and width > max(_FIRST, 4 * self._k):
      # Scores that rise with the rows: the first half raises the k-th best for the second.
      self._add(similar[:, : width // 2], offset)
      self._add(similar[:, width // 2 :], offset + width // 2)
      return
    self._seen += width
    if not len(places):
      return
    # Of every query its own number of candidates, behind its list.
    query, column = places // width, places % width
    counts = np.bincount(query, minlength=queries)
    within = self._k + np.arange(len(places)) - np.repeat(np.cumsum(counts) - counts, counts)
    shape = queries, self._k + int(counts.max())
    scores, rows = np.full(shape, -np.inf, np.float32), np.full(shape, -1, np.int32)
    scores[:, : self._k], rows[:, : self._k] = self._scores, self._rows
    scores[query, within] = similar[query, column]
    rows[query, within] = column + offset
    self._least = _kth(scores, self._k)
    kept = scores >= self._least
    # Of those that tie with the last, as many as there is room for: the first ones.
    for crowded in np.flatnonzero(np.count_nonzero(kept, axis=1) > self._k):
      last = np.flatnonzero(scores[crowded] == self._least[crowded])
      excess = np.count_nonzero(kept[crowded]) - self._k
      kept[crowded, last[-excess:]] = False
    self._scores = scores[kept].reshape(queries, self._k)
    self._rows = rows[kept].reshape(queries, self._k)


def _kth(scores: np.ndarray, k: int) -> np.ndarray:
  """The k-th best score of each row, ``[rows, 1]``."""
  place = scores.shape[1] - k
  return np.partition(scores, place, axis=1)[:, place : place + 1]


def check_finite(vectors: Float[np.ndarray, 'rows H'], what: str, offset: int) -> None:
  """Raises InputError for NaN or infinity; NaN would come first in every ranking.

  ``offset`` is the first row's number.
  """
  bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
  if bad.size:
    raise InputError(
      f'the vector of {what} {offset + bad[0]} (counted from 0) is not finite: encode again'
    )
