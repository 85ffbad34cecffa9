"""The documents that a query finds, best first."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from dprjax.base import ranking


class Ranking(NamedTuple):
  """The documents of one query, in the order of `dprjax.base.ranking`.

  Attributes:
    ids: unique.
    scores: falling as float32.
  """

  ids: list[str]
  scores: Float64[np.ndarray, ' n']

  def top(self, k: int) -> 'Ranking':
    """The k best."""
    return Ranking(self.ids[:k], self.scores[:k])

  def without(self, id_: str) -> 'Ranking':
    """The ranking without a document, if it has that."""
    kept = [row for row, one in enumerate(self.ids) if one != id_]
    return Ranking([self.ids[row] for row in kept], self.scores[kept])


def ranked(ids: list[str], scores: Float64[np.ndarray, ' n']) -> Ranking:
  """Sorts documents by score; ``ids`` are unique."""
  order = ranking.order(np.zeros(len(ids), np.int64), scores, ranking.places(ids))
  return Ranking([ids[row] for row in order.tolist()], scores[order])
