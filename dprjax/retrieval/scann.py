"""Approximate inner-product search with ScaNN, tuned to a measured recall.

Below ``BRUTE_FORCE_BELOW`` vectors ScaNN compares a query with all of them. Above, it distributes
the vectors over about sqrt(n) leaves, scores them by quantised products (anisotropic loss: Guo et
al., ICML 2020), and scores the best again exactly. ScaNN runs on Linux with Python below 3.14; call
``available`` first.
"""

import dataclasses
import importlib.util
import math
import os
from typing import Annotated

import msgspec
import numpy as np
from etils import epath
from jaxtyping import Float, Int

from dprjax.base import provenance
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike, atomic_path
from dprjax.base.reading import convert
from dprjax.retrieval import best
from dprjax.retrieval.best import TopK, check_finite

BRUTE_FORCE_BELOW = 20_000

_FORMAT = 'dprjax.scann'
_SIDECAR = 'dprjax_index.json'
# The ScaNN documentation recommends these for vectors of about unit length.
_DIMENSIONS_PER_BLOCK, _ANISOTROPIC_THRESHOLD = 2, 0.2
_TRAINING_SAMPLE = 250_000


@dataclasses.dataclass(frozen=True)
class ScannSettings:
  """The effort of a search.

  Attributes:
    leaves_to_search: of the tree; 0 without a tree.
    reorder: candidates to score again exactly; 0 if all scores are exact.
  """

  leaves_to_search: int
  reorder: int


def available() -> bool:
  return importlib.util.find_spec('scann') is not None


class ScannIndex:
  """A ScaNN searcher over ``count`` vectors in ``leaves`` leaves (0: brute force)."""

  def __init__(self, searcher, count: int, leaves: int):
    self.searcher = searcher
    self.count = count
    self.leaves = leaves

  @property
  def kind(self) -> str:
    return 'tree_ah' if self.leaves else 'brute_force'

  def settings(self, k: int) -> ScannSettings:
    """Initial settings: a tenth of the leaves, and enough for 2 k vectors."""
    if not self.leaves:
      return ScannSettings(0, 0)
    return ScannSettings(
      min(self.leaves, max(self.leaves // 10, math.ceil(2 * k * self.leaves / self.count))),
      min(self.count, max(4 * k, 100)),
    )

  def search(
    self,
    queries: Float[np.ndarray, 'queries H'],
    k: int,
    settings: ScannSettings,
    ids_at: best.Ids = best.numbers,
  ) -> TopK:
    """The best ``min(k, n)`` rows found by ScaNN, on all cores; -1 where the leaves have fewer.

    ``ids_at`` gives ids, which order equal exact scores.
    """
    check_finite(queries, 'query', 0)
    most = self.count if not self.leaves else max(k, settings.reorder)
    return best.whole_ties(
      lambda some, wanted: self._search(queries[some], wanted, settings),
      len(queries),
      min(k, self.count),
      min(most, self.count),
      ids_at,
    )

  def _search(
    self, queries: Float[np.ndarray, 'queries H'], k: int, settings: ScannSettings
  ) -> TopK:
    amount = (
      {'leaves_to_search': settings.leaves_to_search, 'pre_reorder_num_neighbors': settings.reorder}
      if self.leaves
      else {}
    )
    rows, scores = self.searcher.search_batched_parallel(
      np.ascontiguousarray(queries, np.float32), k, **amount
    )
    missing = np.isnan(scores)
    rows = np.where(missing, -1, rows.astype(np.int64)).astype(np.int32)
    scores = np.where(missing, -np.inf, scores).astype(np.float32)
    order = np.argsort(-scores, axis=1)
    return TopK(np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1))

  def tune(
    self,
    queries: Float[np.ndarray, 'queries H'],
    truth: Int[np.ndarray, 'queries k'],
    target: float,
    ids_at: best.Ids = best.numbers,
  ) -> tuple[ScannSettings, float]:
    """Doubles the effort until recall@k reaches the target or a search covers the whole index.

    Returns:
      The settings and their recall.
    """
    k = truth.shape[1]
    settings = self.settings(k)
    while True:
      reached = recall(self.search(queries, k, settings, ids_at).rows, truth)
      # Both stay 0 without a tree.
      wider = ScannSettings(
        min(self.leaves, 2 * settings.leaves_to_search), min(self.count, 2 * settings.reorder)
      )
      if reached >= target or wider == settings:
        return settings, reached
      settings = wider


def recall(rows: Int[np.ndarray, 'queries k'], truth: Int[np.ndarray, 'queries k']) -> float:
  """The mean fraction of exact best rows found."""
  return float(
    np.mean([np.isin(exact, row).mean() for row, exact in zip(rows, truth, strict=True)])
  )


def build(vectors: Float[np.ndarray, 'n H'], k: int) -> ScannIndex:
  """Builds an index in memory, for searches of about k rows."""
  from scann import scann_ops_pybind  # not available on every system

  check_finite(vectors, 'document', 0)
  count = len(vectors)
  leaves = 0 if count < BRUTE_FORCE_BELOW else round(math.sqrt(count))
  index = ScannIndex(None, count, leaves)
  k = min(k, count)
  builder = scann_ops_pybind.builder(np.ascontiguousarray(vectors, np.float32), k, 'dot_product')
  if not leaves:
    builder = builder.score_brute_force()
  else:
    settings, sample = index.settings(k), min(count, _TRAINING_SAMPLE)
    builder = (
      builder.tree(leaves, settings.leaves_to_search, training_sample_size=sample)
      .score_ah(
        _DIMENSIONS_PER_BLOCK,
        anisotropic_quantization_threshold=_ANISOTROPIC_THRESHOLD,
        training_sample_size=sample,
      )
      .reorder(settings.reorder)
    )
  index.searcher = builder.build()
  return index


def save(index: ScannIndex, folder: PathLike, fingerprint: str) -> None:
  """Writes the index and the fingerprint of its vectors, whole or not at all."""
  with atomic_path(folder) as aside:
    aside.mkdir()
    # Relative paths, so that the folder can be renamed.
    try:
      index.searcher.serialize(os.fspath(aside), relative_path=True)
    except RuntimeError as error:
      raise InputError(f'ScaNN cannot write {folder} ({error}); free some space') from error
    counts = {'count': index.count, 'leaves': index.leaves}
    provenance.write(aside, _SIDECAR, format=_FORMAT, fingerprint=fingerprint, **counts)


def is_index(folder: epath.Path) -> bool:
  return provenance.read_mark(folder, _SIDECAR).get('format') == _FORMAT


class _Counts(msgspec.Struct):
  count: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]  # rows are int32
  leaves: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


def load(folder: PathLike, fingerprint: str) -> ScannIndex | None:
  """Opens an index; None if it is missing or has other vectors (and may be replaced)."""
  root = epath.Path(folder)
  # Checksums first, since some damaged files make ScaNN end the process.
  sidecar = provenance.kept(root, _SIDECAR, fingerprint)
  if sidecar is None:
    return None
  counts = convert(sidecar, f'ScaNN index {root / _SIDECAR}', _Counts)
  from scann import scann_ops_pybind

  searcher = scann_ops_pybind.load_searcher(os.fspath(root))
  return ScannIndex(searcher, counts.count, counts.leaves)
