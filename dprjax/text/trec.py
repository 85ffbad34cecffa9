"""Runs in memory, in the order of `dprjax.base.ranking`, and their TREC files."""

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float, Int

from dprjax.base import outputs, ranking
from dprjax.base.counts import counted, rate
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike, atomic_write
from dprjax.base.ranking import Ranking

logger = logging.getLogger('dprjax')


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
  """Ranked documents of every query, best first; 12 bytes a row, and each id stored once.

  Attributes:
    query_ids: in the order of their first rows.
    doc_ids: the distinct documents, ascending.
    offsets: query i has the rows ``offsets[i]`` to ``offsets[i + 1]``.
    docs: index into ``doc_ids`` of each row.
    scores: of each row, falling within a query as float32.
  """

  query_ids: list[str]
  doc_ids: list[str]
  offsets: Int[np.ndarray, ' queries_and_1']
  docs: Int[np.ndarray, ' rows']
  scores: Float[np.ndarray, ' rows']

  def __len__(self) -> int:
    return len(self.query_ids)

  def __iter__(self) -> Iterator[tuple[str, list[tuple[str, float]]]]:
    """Yields (query id, [(document id, score), ...]), best first."""
    for query_id, start, stop in zip(
      self.query_ids, self.offsets[:-1].tolist(), self.offsets[1:].tolist(), strict=True
    ):
      docs = [self.doc_ids[doc] for doc in self.docs[start:stop].tolist()]
      yield query_id, list(zip(docs, self.scores[start:stop].tolist(), strict=True))

  def rankings(self) -> dict[str, Ranking]:
    each = map(slice, self.offsets[:-1], self.offsets[1:])
    return {
      query_id: Ranking([self.doc_ids[doc] for doc in self.docs[rows].tolist()], self.scores[rows])
      for query_id, rows in zip(self.query_ids, each, strict=True)
    }

  def query_of_row(self) -> Int[np.ndarray, ' rows']:
    """The index into ``query_ids`` of each row."""
    return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.offsets))

  def same_id(self) -> Bool[np.ndarray, ' rows']:
    """True where a document has the id of its query."""
    queries = set(self.query_ids)
    place = {id_: number for number, id_ in enumerate(self.doc_ids) if id_ in queries}
    same = np.array([place.get(id_, -1) for id_ in self.query_ids], dtype=np.int64)
    return self.docs == same[self.query_of_row()]

  def keep(self, rows: Bool[np.ndarray, ' rows']) -> 'Run':
    """Only the rows that are True; queries stay, even without documents."""
    counts = np.bincount(self.query_of_row()[rows], minlength=len(self))
    return dataclasses.replace(
      self, offsets=_offsets(counts), docs=self.docs[rows], scores=self.scores[rows]
    )

  def top(self, k: int) -> 'Run':
    return self.keep(np.arange(len(self.docs)) - self.offsets[self.query_of_row()] < k)

  def rescored(self, scores: Float[np.ndarray, ' rows']) -> 'Run':
    """The same documents ranked by other scores."""
    return _ordered(self.query_ids, self.query_of_row(), self.doc_ids, self.docs, scores)


def run_from_rows(
  query_ids: Sequence[str],
  doc_ids: Sequence[str],
  rows: Int[np.ndarray, 'queries k'],
  scores: Float[np.ndarray, 'queries k'],
) -> Run:
  """A run from the results of a retriever.

  Args:
    rows: indices into ``doc_ids``; negative where fewer than k were retrieved.
    scores: larger is better.
  """
  used = rows >= 0
  queries = np.nonzero(used)[0]
  documents, docs = np.unique(rows[used], return_inverse=True)
  return _ordered(
    list(query_ids), queries, [doc_ids[row] for row in documents.tolist()], docs, scores[used]
  )


def run_from_dict(rankings: Mapping[str, Mapping[str, float]]) -> Run:
  """A run from query id -> document id -> score."""
  place: dict[str, int] = {}
  docs: list[int] = []
  scores: list[float] = []
  for ranked in rankings.values():
    docs += [place.setdefault(doc_id, len(place)) for doc_id in ranked]
    scores += ranked.values()
  queries = np.repeat(np.arange(len(rankings)), [len(ranked) for ranked in rankings.values()])
  return _ordered(
    list(rankings), queries, list(place), np.array(docs, np.int64), np.array(scores, np.float64)
  )


def run_from_rankings(query_ids: Sequence[str], rankings: Sequence[Ranking]) -> Run:
  return run_from_dict(
    {
      query_id: dict(zip(one.ids, one.scores.tolist(), strict=True))
      for query_id, one in zip(query_ids, rankings, strict=True)
    }
  )


def _ordered(
  query_ids: list[str],
  queries: np.ndarray,
  doc_ids: list[str],
  docs: np.ndarray,
  scores: np.ndarray,
) -> Run:
  """Sorts the documents by id, and the rows by query and `dprjax.base.ranking`."""
  place = ranking.places(doc_ids)
  docs, scores = place[docs], scores.astype(np.float64)
  order = ranking.order(queries, scores, docs)
  counts = np.bincount(queries, minlength=len(query_ids))
  by_id = [doc_ids[number] for number in np.argsort(place).tolist()]
  return Run(query_ids, by_id, _offsets(counts), docs[order], scores[order])


def _offsets(counts: np.ndarray) -> np.ndarray:
  return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def read_run(path: PathLike) -> Run:
  """Reads a TREC run (``qid Q0 docid rank score tag``).

  As in trec_eval, scores decide and ranks are ignored.
  """
  from dprjax.text import runs  # commands that write runs do without its parser

  query_place: dict[str, int] = {}
  doc_place: dict[str, int] = {}
  parts = []
  for block in runs.read_blocks(path, ranks=False):
    queries, docs = _places(block.query_ids, query_place), _places(block.doc_ids, doc_place)
    parts.append((queries, docs, block.scores, block.lines))
  queries, docs, scores, lines = (np.concatenate(column) for column in zip(*parts, strict=True))
  return _checked(path, list(query_place), queries, list(doc_place), docs, scores, lines)


def _checked(
  path: PathLike,
  query_ids: list[str],
  queries: Int[np.ndarray, ' rows'],
  doc_ids: list[str],
  docs: Int[np.ndarray, ' rows'],
  scores: Float[np.ndarray, ' rows'],
  lines: Int[np.ndarray, ' rows'],
) -> Run:
  """Rows in the order of their lines, checked and sorted."""
  order = np.argsort(queries, kind='stable')
  before, after = order[:-1], order[1:]
  rises = (queries[after] == queries[before]) & (
    scores[after].astype(np.float32) > scores[before].astype(np.float32)
  )
  if rises.any():
    first = np.argmin(np.where(rises, after, len(queries)))
    last, row = before[first], after[first]
    raise InputError(
      f'{path}, line {lines[row]}: not sorted: the score of query {query_ids[queries[row]]} '
      f'rises from {scores[last]} to {scores[row]}; sort each query by falling score'
    )
  pairs = queries * len(doc_ids) + docs
  order = np.argsort(pairs, kind='stable')
  repeated = order[1:][pairs[order[1:]] == pairs[order[:-1]]]
  if repeated.size:
    row = repeated.min()
    raise InputError(
      f'{path}, line {lines[row]}: document {doc_ids[docs[row]]} comes twice for query '
      f'{query_ids[queries[row]]}'
    )
  return _ordered(query_ids, queries, doc_ids, docs, scores)


def _places(ids: pa.StringArray, places: dict[str, int]) -> Int[np.ndarray, ' rows']:
  """The index of each id in ``places``, to which new ids are added."""
  encoded = ids.dictionary_encode()
  new = [places.setdefault(id_, len(places)) for id_ in encoded.dictionary.to_pylist()]
  return np.array(new, np.int64)[encoded.indices.to_numpy()]


def write_run(path: PathLike, run: Run, tag: str) -> None:
  """Writes a TREC run, ranks from 1; nothing of a run with bad ids."""
  for id_ in (*run.query_ids, *run.doc_ids, tag):
    if id_.split() != [id_]:
      raise InputError(f'the id {id_!r} is empty or has white space, so a TREC run cannot hold it')
  with atomic_write(path) as file:
    for query_id, ranked in run:
      file.writelines(
        f'{query_id} Q0 {doc_id} {rank} {score!r} {tag}\n'
        for rank, (doc_id, score) in enumerate(ranked, start=1)
      )


def write_reported(out: str, run: Run, tag: str, report: Mapping[str, Any], how: str = '') -> None:
  """Writes a run and the report of a command beside it, and logs its size and speed.

  The report has ``queries_per_second``.
  """
  write_run(out, run, tag)
  outputs.write_report(out, report)
  logger.info(
    '%s: %s for %s%s, %s queries a second',
    out,
    counted(len(run.docs), 'passages'),
    counted(len(run), 'queries'),
    how and f' ({how})',
    rate(report['queries_per_second']),
  )
