"""Reads a TREC run from disk, one query at a time, with about 200 bytes a query in memory."""

import contextlib
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import IO, NamedTuple, Self

import numpy as np
from jaxtyping import Float64

from dprjax.base import files, ranking
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike
from dprjax.base.reading import open_bytes
from dprjax.text import runs


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


class _Extent(NamedTuple):
  """Where the lines of a query begin."""

  offset: int
  line: int


class Rankings(Mapping[str, Ranking]):
  """An open run: a mapping of query ids, in file order, to rankings."""

  def __init__(self, path: PathLike):
    """Finds the lines of each query, which must be together."""
    self.path = files.regular_file(path, 'run')
    self._extents: dict[str, _Extent] = {}
    last: str | None = None
    for block in runs.read_blocks(path, ranks=False):
      codes = block.query_ids.dictionary_encode().indices.to_numpy()
      for row in np.flatnonzero(np.diff(codes, prepend=-1)).tolist():
        query, line = block.query_ids[row].as_py(), int(block.lines[row])
        if query == last:  # goes on from the block before
          continue
        if query in self._extents:
          raise InputError(
            f'{path}, line {line}: query {query} already has lines further up; put the lines of '
            'each query together: sort -s -k1,1 RUN'
          )
        self._extents[query], last = _Extent(int(block.offsets[row]), line), query
    begins = [extent.offset for extent in self._extents.values()]
    self._sizes = dict(zip(self._extents, [*np.diff(begins).tolist(), -1], strict=True))
    self._stack = contextlib.ExitStack()
    self._file: IO[bytes] = self._stack.enter_context(open_bytes(path, 'run'))[0]

  def __enter__(self) -> Self:
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    self._stack.close()

  def __len__(self) -> int:
    return len(self._extents)

  def __iter__(self) -> Iterator[str]:
    return iter(self._extents)

  def __contains__(self, query_id: object) -> bool:
    return query_id in self._extents

  def __getitem__(self, query_id: str) -> Ranking:
    """The ranking of a query by its scores; ranks are ignored, as in trec_eval."""
    extent = self._extents[query_id]
    self._file.seek(extent.offset)
    block = runs.parse(self.path, self._file.read(self._sizes[query_id]), extent.line)
    ids = block.doc_ids.to_pylist()
    with np.errstate(over='ignore'):
      rises = np.flatnonzero(np.diff(block.scores.astype(np.float32)) > 0)
    if rises.size:
      row = int(rises[0]) + 1
      raise InputError(
        f'{self.path}, line {block.lines[row]}: not sorted: the score of query {query_id} rises '
        f'from {block.scores[row - 1]} to {block.scores[row]}; sort each query by falling score'
      )
    if len(set(ids)) < len(ids):
      row = next(row for row, id_ in enumerate(ids) if id_ in ids[:row])
      raise InputError(
        f'{self.path}, line {block.lines[row]}: document {ids[row]} comes twice for query '
        f'{query_id}'
      )
    return ranked(ids, block.scores)
