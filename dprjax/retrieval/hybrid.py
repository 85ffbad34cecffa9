"""Hybrid search: a dense ranking fused with a BM25 ranking of the same passages."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from dprjax.base.errors import InputError
from dprjax.base.files import PathLike
from dprjax.base.ranking import Ranking
from dprjax.retrieval import bm25_index, fusion


class Hybrid(NamedTuple):
  """A fusion of the runs `fusion.BM25` and `fusion.DENSE`.

  Attributes:
    search: finds the best k passages for each query text by BM25.
  """

  fusion: fusion.Fusion
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
      self.fusion.fuse({fusion.BM25: one, fusion.DENSE: other}, k)
      for one, other in zip(lexical, dense, strict=True)
    ]


def read(path: PathLike) -> fusion.Fusion:
  """The fusion of a file of weights."""
  found = fusion.read(path)
  if found.weights.keys() != {fusion.BM25, fusion.DENSE}:
    raise InputError(
      f'{path} fuses runs called {", ".join(found.weights)}; a hybrid search needs weights of '
      f'{fusion.BM25} and {fusion.DENSE}: dprjax.fuse --run={fusion.BM25}=FILE '
      f'--run={fusion.DENSE}=FILE --weights_out=FILE'
    )
  return found


def load(found: fusion.Fusion, folder: PathLike, ids: Collection[str]) -> Hybrid:
  """A hybrid search with an index of dprjax.bm25."""
  index = bm25_index.open_index(folder)
  if len(index.ids) != len(ids) or set(index.ids) != set(ids):
    raise InputError(
      f'{folder} is a BM25 index of {len(index.ids):,} passages, which differ from the '
      f'{len(ids):,} embeddings: make it from the same corpus'
    )
  check_settings(found, index.settings, f'the index {folder}')
  return Hybrid(found, index.rankings)


def check_settings(found: fusion.Fusion, settings: Mapping[str, Any], where: str) -> None:
  """Raises InputError if weights were learnt with BM25 settings that differ from ``where``."""
  if found.bm25 is not None and found.bm25 != settings:
    raise InputError(
      f'the weights are of BM25 with {_shown(found.bm25)}, {where} has {_shown(settings)}: make it '
      'with the same'
    )


def build(found: fusion.Fusion, ids: Sequence[str], texts: Sequence[str]) -> Hybrid:
  """A hybrid search of these passages."""
  return Hybrid(found, bm25_index.build(ids, texts, **(found.bm25 or {})).rankings)


def _shown(settings: Mapping[str, Any]) -> str:
  return ', '.join(f'{name}={value}' for name, value in settings.items())
