"""The k largest scores of each query, chosen with numpy while blocks of scores arrive.

A score that does not exceed the k-th best so far cannot be among the best, and after some thousand
rows few do: a comparison of all scores, and a sort of those few, take the place of a selection
among all.
"""

import numpy as np
from jaxtyping import Float, Int

_FIRST = 1024  # columns that are sorted before there is a k-th best
_MANY = 8  # times k: so many candidates of a query are looked at in smaller pieces


class Best:
  """The best k rows so far."""

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

  def ranked(self) -> tuple[Float[np.ndarray, 'queries k'], Int[np.ndarray, 'queries k']]:
    """Scores and rows, best first; equal scores by row, ascending.

    Where fewer than k rows have come, the rest has row -1 and score -inf.
    """
    # Those that stand for nothing come before rows that have a score of -inf in truth: there are
    # none, since no such score is better than nothing.
    order = np.argsort(-self._scores, axis=1, kind='stable')
    return np.take_along_axis(self._scores, order, 1), np.take_along_axis(self._rows, order, 1)

  def _add(self, similar: np.ndarray, offset: int) -> None:
    queries, width = similar.shape
    better = similar > self._least
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
    place = shape[1] - self._k
    self._least = np.partition(scores, place, axis=1)[:, place : place + 1]
    kept = scores >= self._least
    # Of those that tie with the last, as many as there is room for: the first ones.
    for crowded in np.flatnonzero(np.count_nonzero(kept, axis=1) > self._k):
      last = np.flatnonzero(scores[crowded] == self._least[crowded])
      excess = np.count_nonzero(kept[crowded]) - self._k
      kept[crowded, last[-excess:]] = False
    self._scores = scores[kept].reshape(queries, self._k)
    self._rows = rows[kept].reshape(queries, self._k)
