"""Moves vectors of judged passages towards the queries that they answer.

NUDGE (Zeighami et al., 2024, arXiv 2409.02343): a closed form gives the vector, within a distance
of the old one, that has the largest inner product with its training queries (section 3).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float64, Int

from dprjax.base.ranking import dcg

CUTOFF = 10
FOLDS = 5
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


class Scores(NamedTuple):
  """nDCG@10 of each query, where its own judgements moved no vectors.

  Attributes:
    by_bound: under each bound.
    known: whether a passage of the query is also relevant to another training query.
  """

  by_bound: Float64[np.ndarray, 'Q bounds']
  known: Bool[np.ndarray, ' Q']

  def best(self) -> int:
    """The index of the bound with the best mean; the smallest of equals."""
    return int(np.argmax(self.by_bound.mean(axis=0)))

  def held_out(self) -> Float64[np.ndarray, ' Q']:
    """Each query under the bound chosen by the other queries."""
    chosen = np.argmax(self.by_bound.sum(axis=0) - self.by_bound, axis=1)
    return np.take_along_axis(self.by_bound, chosen[:, None], axis=1)[:, 0]


def cross_validate(
  queries: Float[np.ndarray, 'Q D'],
  blocks: Iterator[Float[np.ndarray, 'rows D']],
  vectors: Float[np.ndarray, 'M D'],
  judged: Judged,
  folds: Int[np.ndarray, ' Q'],
  bounds: Sequence[float],
  unit: bool,
) -> Scores:
  """Scores the queries of each fold with passages moved only by queries of the other folds.

  Args:
    queries: all training queries.
    blocks: the corpus.
    vectors: of the relevant passages, in the order of `towards`.
    judged: grades of each query, not empty.
    folds: the fold of each query.
    bounds, unit: as for `move`.
  """
  rows, _ = towards(queries, judged)
  parts = []
  for fold in np.unique(folds):
    others = [number for number in range(len(queries)) if folds[number] != fold]
    moved, sums = towards(queries[others], [judged[number] for number in others])
    parts.append((np.flatnonzero(folds == fold), moved, sums))
  shape = len(queries), CUTOFF
  top, top_rows = np.full(shape, -np.inf), np.full(shape, -1, np.int64)
  start = 0
  for block in blocks:  # the best passages that do not move
    scores = queries @ block.T
    numbers = np.arange(start, start + len(block))
    for own, moved, _ in parts:
      still = np.concatenate([top[own], scores[own]], axis=1)
      inside = moved[(moved >= start) & (moved < start + len(block))] - start
      still[:, CUTOFF + inside] = -np.inf
      places = np.argpartition(-still, CUTOFF - 1, axis=1)[:, :CUTOFF]
      whole = np.broadcast_to(numbers, (len(own), len(numbers)))
      whole = np.concatenate([top_rows[own], whole], axis=1)
      top[own] = np.take_along_axis(still, places, axis=1)
      top_rows[own] = np.take_along_axis(whole, places, axis=1)
    start += len(block)
  found = np.zeros((len(queries), len(bounds)))
  known = np.zeros(len(queries), bool)
  for own, moved, sums in parts:
    old = vectors[np.searchsorted(rows, moved)]
    for column, bound in enumerate(bounds):
      scores = queries[own] @ move(old, sums, bound, unit).T
      for place, number in enumerate(own.tolist()):
        both = np.concatenate([top[number], scores[place]])
        ids = np.concatenate([top_rows[number], moved])
        found[number, column] = _ndcg(both, ids, judged[number])
    for number in own.tolist():
      known[number] = np.isin([*judged[number]], moved).any()
  return Scores(found, known)


def _ndcg(
  scores: Float[np.ndarray, ' n'], rows: Int[np.ndarray, ' n'], grades: Mapping[int, int]
) -> float:
  """nDCG@10 of a query; among equal scores, relevant passages come last."""
  total = 0.0
  for row, grade in grades.items():
    own = scores[rows == row]
    before = (scores >= own[0]).sum() - 1 if len(own) else CUTOFF
    total += grade / np.log2(before + 2) if before < CUTOFF else 0.0
  return float(total / dcg(sorted(grades.values(), reverse=True)[:CUTOFF]))
