"""Moves vectors of judged passages towards the queries that they answer.

NUDGE (Zeighami et al., 2024, arXiv 2409.02343): a closed form gives the vector, within a distance
of the old one, that has the largest inner product with its training queries (section 3).
"""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Float64, Int

# Candidate distances, in lengths of a vector.
BOUNDS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.4)

Judged = Sequence[Mapping[int, int]]
"""The grades of relevant passages by row, for each query."""


def move(
  vectors: Float[np.ndarray, 'M D'],
  towards: Float[np.ndarray, 'M D'],
  bound: float,
  unit: bool,
) -> Float[np.ndarray, 'M D']:
  """The vectors within ``bound`` with the largest inner product with ``towards``.

  Args:
    vectors: the old vectors, of unit length if ``unit``.
    towards: sums of training queries; a row of zeros moves nothing.
    bound: the maximum distance from the old vector.
    unit: new vectors have unit length (NUDGE-N); else any length (NUDGE-M).
  """
  goal = _unit(towards.astype(np.float64))
  old = vectors.astype(np.float64)
  if not unit:
    return (old + bound * goal).astype(np.float32)
  # On the sphere a distance is an angle: |x - v|^2 = 2 - 2 x v.
  least = 1 - min(bound, 2) ** 2 / 2
  along = (goal * old).sum(axis=1, keepdims=True)
  aside = _unit(goal - along * old)
  turned = least * old + np.sqrt(1 - least**2) * aside
  new = np.where(along >= least, goal, turned)
  return np.where(aside.any(axis=1, keepdims=True), new, old).astype(np.float32)


def _unit(x: Float64[np.ndarray, 'n D']) -> Float64[np.ndarray, 'n D']:
  length = np.linalg.norm(x, axis=1, keepdims=True)
  return np.divide(x, length, out=np.zeros_like(x), where=length > 1e-6)


def towards(
  queries: Float[np.ndarray, 'Q D'], judged: Judged
) -> tuple[Int[np.ndarray, ' M'], Float[np.ndarray, 'M D']]:
  """The rows of relevant passages, ascending, and for each the sum of its queries."""
  rows = np.array(sorted({row for own in judged for row in own}), np.int64)
  sums = np.zeros((len(rows), queries.shape[1]))
  for query, own in zip(queries, judged, strict=True):
    sums[np.searchsorted(rows, [*own])] += query
  return rows, sums
