"""The order of every ranking: falling score, then falling id, as in trec_eval and pytrec_eval.

Like these, scores compare as float32 and ids as UTF-8 bytes: d9 comes before d10.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float64, Int


def places(ids: Sequence[str] | Sequence[bytes]) -> Int[np.ndarray, ' n']:
  """The rank of each id, ascending, from 0."""
  by_id = sorted(range(len(ids)), key=ids.__getitem__)  # of str: by code point, as UTF-8 bytes
  ranks = np.empty(len(ids), np.int32)
  ranks[by_id] = np.arange(len(ids), dtype=np.int32)
  return ranks


def order(
  queries: Int[np.ndarray, ' rows'],
  scores: Float[np.ndarray, ' rows'],
  ids: Int[np.ndarray, ' rows'],
) -> Int[np.ndarray, ' rows']:
  """Sorts rows by query, best first; ``ids`` are their `places`."""
  with np.errstate(over='ignore'):
    return np.lexsort((-ids, -scores.astype(np.float32), queries))


class Ranking(NamedTuple):
  """The documents of one query, in this order.

  Attributes:
    ids: unique.
    scores: falling as float32.
  """

  ids: list[str]
  scores: Float64[np.ndarray, ' n']

  def top(self, k: int) -> 'Ranking':
    return Ranking(self.ids[:k], self.scores[:k])

  def without(self, id_: str) -> 'Ranking':
    rows = [row for row, one in enumerate(self.ids) if one != id_]
    return Ranking([self.ids[row] for row in rows], self.scores[rows])


def ranked(ids: list[str], scores: Float64[np.ndarray, ' n']) -> Ranking:
  """Sorts documents by score; ``ids`` are unique."""
  by_score = order(np.zeros(len(ids), np.int64), scores, places(ids))
  return Ranking([ids[row] for row in by_score.tolist()], scores[by_score])


def dcg(gains: Sequence[float]) -> float:
  """Discounted cumulative gain of documents in their order, with log2(rank + 1)."""
  total = 0.0  # sum() rounds differently from Python 3.12 on
  for rank, gain in enumerate(gains, start=1):
    if gain > 0:
      total += gain / math.log2(rank + 1)
  return total
