"""Fusion of rankings: weighted sums of reciprocal ranks or of normalised scores.

| method | value of a document in a run | constant scores |
|---|---|---|
| rrf | 1 / (rrf_k + rank), ranks from 1 (Cormack et al. 2009) | by rank |
| zscore | standard deviations above the lowest score | 1 |

Scores are taken as float32 and normalised query by query, over the first ``depth`` documents of a
run. A document missing in a run has the value 0 there; for zscore this is the value of the last
document in the run. `dprjax.base.ranking` orders equal sums.

rrf equals that of pyserini, which orders ties by rising id.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
from jaxtyping import Float64, Int

from dprjax.base import files, reading
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike
from dprjax.base.ranking import Ranking, dcg, ranked

METHODS = ('rrf', 'zscore')
DEPTH, RRF_K = 1000, 60
BM25, DENSE = 'bm25', 'dense'
"""Names of the two runs of a hybrid search."""

CUTOFF = 10  # weights are learnt for nDCG at this rank
MEASURE = f'nDCG@{CUTOFF}'
_FORMAT = 'dprjax.fusion'
_MOST = 1000  # weights to choose from
_FINEST = 20  # steps of a weight from 0 to 1
_PRIOR = 0.1  # see `learn`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fusion:
  """A way to fuse several rankings.

  Attributes:
    weights: by name of the run: finite, none below 0, at least one above. A run of weight 0 is left
      out.
    depth: how many documents of each run count.
    bm25: settings of the BM25 index, if one of the runs came from dprjax.bm25.
  """

  method: str = 'rrf'
  weights: Mapping[str, float]
  rrf_k: Annotated[int, msgspec.Meta(ge=1)] = RRF_K
  depth: Annotated[int, msgspec.Meta(ge=1)] = DEPTH
  bm25: Mapping[str, Any] | None = None

  def __post_init__(self) -> None:
    weights = self.weights.values()
    whole = all(0 <= weight < math.inf for weight in weights) and any(weights)
    if not whole or self.method not in METHODS:
      shown = ', '.join(f'{weight:g}' for weight in weights)
      raise InputError(
        f'method {self.method:.40}, weights {shown:.80}: expected one of {", ".join(METHODS)}, and '
        'numbers from 0 on, one above 0'
      )

  def table(
    self, rankings: Mapping[str, Ranking]
  ) -> tuple[list[str], Float64[np.ndarray, 'documents runs']]:
    """All documents, ascending by id, and their values in each run, in the order of weights.

    A missing run has no documents.
    """
    cut = [rankings[name].top(self.depth) if name in rankings else None for name in self.weights]
    ids = sorted({id_ for one in cut if one is not None for id_ in one.ids})
    place = {id_: row for row, id_ in enumerate(ids)}
    values = np.zeros((len(ids), len(cut)))
    for column, one in enumerate(cut):
      if one is not None and one.ids:
        rows = [place[id_] for id_ in one.ids]
        values[rows, column] = normalized(one.scores, self.method, self.rrf_k)
    return ids, values

  def fuse(self, rankings: Mapping[str, Ranking], k: int | None = None) -> Ranking:
    """The k best documents (default: all) by the weighted sum of their values.

    Args:
      rankings: of one query, by name of the run; empty rankings may be missing.
    """
    used = {name: one for name, one in rankings.items() if self.weights[name] > 0}
    ids, values = self.table(used)
    # Sorted, so that sums do not depend on the order of runs.
    parts = np.sort(values * np.array(list(self.weights.values())), axis=1)
    fused = ranked(ids, parts.sum(axis=1))
    return fused if k is None else fused.top(k)


def normalized(
  scores: Float64[np.ndarray, ' n'], method: str, rrf_k: int = RRF_K
) -> Float64[np.ndarray, ' n']:
  """The values of scores in a run, best first; there must be at least one."""
  if method == 'rrf':
    return 1 / (rrf_k + np.arange(1, len(scores) + 1, dtype=np.float64))
  scores = scores.astype(np.float32).astype(np.float64)
  lowest, highest = scores.min(), scores.max()
  if lowest == highest:
    return np.ones(len(scores))
  return (scores - lowest) / scores.std()


# Learning weights.


def candidates(runs: int) -> Float64[np.ndarray, 'candidates runs']:
  """Weights from 0 to 1 with the sum 1, in equal steps: at most 1,000, and equal weights.

  They include each run without the others.
  """
  steps = next(
    steps for steps in range(_FINEST, 0, -1) if math.comb(steps + runs - 1, runs - 1) <= _MOST
  )
  # Bars between stars.
  bars = itertools.combinations(range(steps + runs - 1), runs - 1)
  edges = np.array([(-1, *bar, steps + runs - 1) for bar in bars])
  grid = (np.diff(edges, axis=1) - 1) / steps
  return np.unique(np.concatenate([grid, np.full((1, runs), 1 / runs)]), axis=0)


def ndcg(
  ids: Sequence[str],
  values: Float64[np.ndarray, 'documents runs'],
  grades: Mapping[str, int],
  weights: Float64[np.ndarray, 'candidates runs'],
) -> Float64[np.ndarray, ' candidates']:
  """nDCG@10 of a query under each candidate, as in ``measures.measure``.

  Args:
    ids, values: `Fusion.table`.
  """
  gains = sorted((grade for grade in grades.values() if grade > 0), reverse=True)[:CUTOFF]
  totals = np.zeros(len(weights))
  if not gains or not ids:
    return totals
  scores = (values @ weights.T).astype(np.float32)
  for row, id_ in enumerate(ids):
    if (grade := grades.get(id_, 0)) > 0:
      # Among equal scores the larger id comes first.
      before = (scores > scores[row]).sum(axis=0) + (scores[row + 1 :] == scores[row]).sum(axis=0)
      totals += np.where(before < CUTOFF, grade / np.log2(before + 2), 0)
  return totals / dcg(gains)


class Learnt(NamedTuple):
  """Weights, and nDCG@10 of each query in cross-validation.

  Attributes:
    held_out: of each query under the weights learnt from the other queries.
    alone: of each query for each run without fusion.
    equal: of each query under equal weights.
  """

  weights: Float64[np.ndarray, ' runs']
  held_out: Float64[np.ndarray, ' queries']
  alone: Float64[np.ndarray, 'queries runs']
  equal: Float64[np.ndarray, ' queries']


def learn(
  weights: Float64[np.ndarray, 'candidates runs'],
  scores: Float64[np.ndarray, 'queries candidates'],
) -> Learnt:
  """Learns weights from scores of `candidates`, with leave-one-out cross-validation over queries.

  The weights are a weighted mean of the candidates, rounded to a candidate. A candidate counts with
  exp(-z^2 / 2), where z is its mean difference from the best candidate in standard errors. A prior
  adds .1 to the squared differences of all queries, so that few queries give nearly equal weights.
  The best candidate itself would depend on single queries.

  Args:
    scores: of at least two queries.
  """

  def chosen(
    sums: Float64[np.ndarray, 'n candidates'], squares: Float64[np.ndarray, 'n candidates'], of: int
  ) -> Int[np.ndarray, ' n']:
    """Chooses candidates by sums and sums of squares of differences from the best."""
    likely = np.exp(-(sums**2) / (squares - sums**2 / of + _PRIOR) / 2)
    mean = likely @ weights / likely.sum(axis=1, keepdims=True)
    # |w - mean|^2 without the part shared by all candidates.
    return np.argmin((weights**2).sum(axis=1) - 2 * mean @ weights.T, axis=1)

  queries, runs = len(scores), weights.shape[1]
  total = scores.sum(axis=0)
  behind = scores[:, [np.argmax(total)]] - scores
  final = chosen(behind.sum(axis=0)[None], (behind**2).sum(axis=0)[None], queries)
  held_out = np.empty(queries)
  best = np.argmax(total - scores, axis=1)  # leaving out the query
  for one in np.unique(best):
    rows, behind = np.flatnonzero(best == one), scores[:, [one]] - scores
    sums = behind.sum(axis=0) - behind[rows]
    squares = (behind**2).sum(axis=0) - behind[rows] ** 2
    held_out[rows] = scores[rows, chosen(sums, squares, queries - 1)]
  alone = [int(np.argmax(weights[:, run])) for run in range(runs)]
  equal = int(np.argmin(((weights - 1 / runs) ** 2).sum(axis=1)))
  return Learnt(weights[final[0]], held_out, scores[:, alone], scores[:, equal])


class _Bm25(msgspec.Struct):
  k1: float
  b: float
  language: str


class _Header(msgspec.Struct):
  format: Literal['dprjax.fusion']
  method: str
  bm25: _Bm25 | None = None


def write(path: PathLike, fusion: Fusion, **about: Any) -> None:
  """Writes a small JSON file for `read`; ``about`` is information for people."""
  values = {name: value for name, value in dataclasses.asdict(fusion).items() if value is not None}
  files.write_json(path, {'format': _FORMAT, **values, **about})


def read(path: PathLike) -> Fusion:
  values = reading.read_json_object(path, 'fusion')
  reading.convert(values, f'fusion {path}', _Header)
  return reading.convert(values, f'fusion {path}', Fusion)


class Hybrid(NamedTuple):
  """Hybrid search: a dense ranking fused with a BM25 ranking of the same passages.

  Attributes:
    fusion: of the runs `BM25` and `DENSE`.
    search: finds the best k passages for each query text by BM25.
  """

  fusion: Fusion
  search: Callable[[Sequence[str], int], list[Ranking]]

  def rank(
    self, queries: Sequence[str], dense: Sequence[Ranking], k: int, drop: Sequence[str] = ()
  ) -> list[Ranking]:
    """The k best passages of each query.

    Args:
      dense: rankings with their first ``fusion.depth`` passages, or all.
      drop: for each query, the id of a passage to leave out of the BM25 ranking.
    """
    lexical = self.search(queries, self.fusion.depth + bool(drop))
    if drop:
      lexical = [one.without(id_) for one, id_ in zip(lexical, drop, strict=True)]
    return [
      self.fusion.fuse({BM25: one, DENSE: other}, k)
      for one, other in zip(lexical, dense, strict=True)
    ]


def read_hybrid(path: PathLike) -> Fusion:
  """`read` of weights for a hybrid search."""
  fusion = read(path)
  if fusion.weights.keys() != {BM25, DENSE}:
    raise InputError(
      f'{path} fuses runs called {", ".join(fusion.weights)}; a hybrid search needs weights of '
      f'{BM25} and {DENSE}: dprjax.fuse --run={BM25}=FILE --run={DENSE}=FILE --weights_out=FILE'
    )
  return fusion


def open_hybrid(fusion: Fusion, folder: PathLike, ids: Collection[str]) -> Hybrid:
  """A hybrid search with an index of dprjax.bm25 over these passages."""
  from dprjax.retrieval import bm25_index  # other fusions do without

  index = bm25_index.open_index(folder)
  if len(index.ids) != len(ids) or set(index.ids) != set(ids):
    raise InputError(
      f'{folder} is a BM25 index of {len(index.ids):,} passages, which differ from the '
      f'{len(ids):,} embeddings: make it from the same corpus'
    )
  if fusion.bm25 is not None and fusion.bm25 != index.settings:
    raise InputError(
      f'the weights are of BM25 with {fusion.bm25}, the index {folder} has {index.settings}: make '
      'it with the same'
    )
  return Hybrid(fusion, index.rankings)


def build_hybrid(fusion: Fusion, ids: Sequence[str], texts: Sequence[str]) -> Hybrid:
  from dprjax.retrieval import bm25_index

  return Hybrid(fusion, bm25_index.build(ids, texts, **(fusion.bm25 or {})).rankings)
