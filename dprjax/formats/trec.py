"""Runs and relevance judgements, in the files that ``trec_eval`` and ``ir_measures`` read.

A ranking is ordered as trec_eval orders it: by score, and documents of equal score by id,
descending.
"""

import array
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from dprjax.base.errors import InputError
from dprjax.base.files import PathLike, atomic_write, read_lines

Qrels = dict[str, dict[str, int]]
"""Query id -> document id -> relevance (0: judged, not relevant)."""

_QRELS_HEADER = {'score', 'relevance', 'rel', 'label'}


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
  """What was retrieved for every query, best first: 12 bytes a row and each id once.

  Attributes:
    query_ids: in the order in which they first came.
    doc_ids: the distinct documents, ascending.
    offsets: query i's rows are ``offsets[i]`` to ``offsets[i + 1]``.
    docs: places in ``doc_ids``.
    scores: falling within a query.
  """

  query_ids: list[str]
  doc_ids: list[str]
  offsets: Int[np.ndarray, 'queries_and_1']
  docs: Int[np.ndarray, 'rows']
  scores: Float[np.ndarray, 'rows']

  def __len__(self) -> int:
    """How many queries."""
    return len(self.query_ids)

  def __iter__(self) -> Iterator[tuple[str, list[tuple[str, float]]]]:
    """Yields (query id, [(document id, score), ...]), best first."""
    for number, query_id in enumerate(self.query_ids):
      rows = slice(self.offsets[number], self.offsets[number + 1])
      yield (
        query_id,
        [
          (self.doc_ids[doc], score)
          for doc, score in zip(self.docs[rows].tolist(), self.scores[rows].tolist(), strict=True)
        ],
      )

  def query_of_row(self) -> Int[np.ndarray, 'rows']:
    """Each row's place in ``query_ids``."""
    return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.offsets))

  def same_id(self) -> Bool[np.ndarray, 'rows']:
    """True for a document that has its query's own id."""
    place = {id_: number for number, id_ in enumerate(self.doc_ids)}
    own = np.array([place.get(id_, -1) for id_ in self.query_ids], dtype=np.int64)
    return self.docs == own[self.query_of_row()]

  def keep(self, rows: Bool[np.ndarray, 'rows']) -> 'Run':
    """The run without the rows that are False; every query stays, be it without documents."""
    counts = np.bincount(self.query_of_row()[rows], minlength=len(self))
    return dataclasses.replace(
      self, offsets=_offsets(counts), docs=self.docs[rows], scores=self.scores[rows]
    )

  def top(self, k: int) -> 'Run':
    """The k best of every query."""
    return self.keep(np.arange(len(self.docs)) - self.offsets[self.query_of_row()] < k)

  def rescored(self, scores: Float[np.ndarray, 'rows']) -> 'Run':
    """The same documents by other scores, each query's ordered anew."""
    return _ordered(self.query_ids, self.query_of_row(), self.doc_ids, self.docs, scores)


def run_from_rows(
  query_ids: Sequence[str],
  doc_ids: Sequence[str],
  rows: Int[np.ndarray, 'queries k'],
  scores: Float[np.ndarray, 'queries k'],
) -> Run:
  """A run from a retriever's answer.

  Args:
    query_ids: one for every row of ``rows``.
    doc_ids: the corpus, one id a document.
    rows: places in ``doc_ids``; negative where there was nothing more to retrieve.
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
  docs = [
    place.setdefault(doc_id, len(place)) for documents in rankings.values() for doc_id in documents
  ]
  queries = np.repeat(np.arange(len(rankings)), [len(documents) for documents in rankings.values()])
  scores = [score for documents in rankings.values() for score in documents.values()]
  return _ordered(
    list(rankings),
    queries,
    list(place),
    np.array(docs, dtype=np.int64),
    np.array(scores, dtype=np.float64),
  )


def _ordered(
  query_ids: list[str],
  queries: np.ndarray,
  doc_ids: list[str],
  docs: np.ndarray,
  scores: np.ndarray,
) -> Run:
  """Sorts the documents by id, and the rows by query, falling score, falling document id."""
  by_id = sorted(range(len(doc_ids)), key=doc_ids.__getitem__)
  place = np.empty(len(doc_ids), dtype=np.int32)
  place[by_id] = np.arange(len(doc_ids), dtype=np.int32)
  docs, scores = place[docs], scores.astype(np.float64)
  order = np.lexsort((-docs, -scores, queries))
  counts = np.bincount(queries, minlength=len(query_ids))
  return Run(
    query_ids, [doc_ids[number] for number in by_id], _offsets(counts), docs[order], scores[order]
  )


def _offsets(counts: np.ndarray) -> np.ndarray:
  return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def read_run(path: PathLike) -> Run:
  """Reads a TREC run (``qid Q0 docid rank score tag``). The rank column is not used: as in
  trec_eval, the score decides.

  Raises:
    InputError: naming the line: not six columns, a score that is no finite number, a document that
      comes twice for a query, or scores that rise within a query (ranked by rank alone, or by a
      distance: trec_eval would turn it over).
  """
  query_place: dict[str, int] = {}
  doc_place: dict[str, int] = {}
  queries, docs, lines, scores = (
    array.array('q'),
    array.array('q'),
    array.array('q'),
    array.array('d'),
  )
  last: dict[int, float] = {}
  for number, line in read_lines(path, 'run'):
    columns = line.split()
    score = row_score(columns, path, number)
    query_id, _, doc_id, *_ = columns
    query = query_place.setdefault(query_id, len(query_place))
    if score > last.get(query, math.inf):
      raise InputError(
        f"{path}, line {number}: not sorted: query {query_id}'s score rises from {last[query]} to "
        f'{score}; '
        'sort each query by falling score'
      )
    last[query] = score
    queries.append(query)
    docs.append(doc_place.setdefault(doc_id, len(doc_place)))
    lines.append(number)
    scores.append(score)
  pairs = np.asarray(queries, dtype=np.int64) * max(len(doc_place), 1) + np.asarray(
    docs, dtype=np.int64
  )
  order = np.argsort(pairs, kind='stable')
  repeated = order[1:][pairs[order[1:]] == pairs[order[:-1]]]
  if repeated.size:
    row = repeated.min()
    query_id, doc_id = list(query_place)[queries[row]], list(doc_place)[docs[row]]
    raise InputError(
      f'{path}, line {lines[row]}: document {doc_id} comes twice for query {query_id}'
    )
  return _ordered(
    list(query_place), np.asarray(queries), list(doc_place), np.asarray(docs), np.asarray(scores)
  )


def row_score(columns: Sequence[str], path: PathLike, number: int) -> float:
  """The score in the columns of a run's line.

  Raises InputError, naming the line, for other than six columns or no finite score.
  """
  if len(columns) != 6:
    raise InputError(
      f'{path}, line {number}: {len(columns)} columns, expected 6: query Q0 document rank score tag'
    )
  try:
    score = float(columns[4])
  except ValueError:
    score = math.nan
  if not math.isfinite(score):
    raise InputError(f'{path}, line {number}: the score {columns[4]!r} is not a finite number')
  return score


def write_run(path: PathLike, run: Run, tag: str) -> None:
  """Writes a TREC run, ranks from 1.

  Raises InputError for an empty run and for ids with white space, before anything is written.
  """
  if not len(run.docs):
    raise InputError(f'nothing was retrieved for any of {len(run)} queries: {path} is not written')
  for id_ in (*run.query_ids, *run.doc_ids, tag):
    if not id_ or any(character.isspace() for character in id_):
      raise InputError(
        f'the id {id_!r} cannot be written to a TREC run: it is empty or has white space in it'
      )
  with atomic_write(path) as file:
    for query_id, ranking in run:
      file.writelines(
        f'{query_id} Q0 {doc_id} {rank} {score!r} {tag}\n'
        for rank, (doc_id, score) in enumerate(ranking, start=1)
      )


def read_qrels(path: PathLike) -> Qrels:
  """Reads judgements: BEIR's tsv with its header, TREC's and MS MARCO's four columns, or three
  without a header.

  Raises:
    InputError: naming the line: another number of columns, a relevance that is no whole number, or
      a document judged twice for a query with different relevance.
  """
  qrels: Qrels = {}
  width = 0
  for number, line in read_lines(path, 'qrels'):
    columns = line.split('\t') if '\t' in line else line.split()
    columns = [column.strip() for column in columns]
    if not width:
      width = len(columns)
      if width in (3, 4) and columns[-1].lower() in _QRELS_HEADER:
        continue
    if width not in (3, 4) or len(columns) != width:
      known = '3 (query, document, relevance) or 4 (query, 0, document, relevance)'
      raise InputError(
        f'{path}, line {number}: {len(columns)} columns, expected '
        f'{width if width in (3, 4) else known}'
      )
    query_id, doc_id, text = columns[0], columns[-2], columns[-1]
    try:
      relevance = int(text)
    except ValueError:
      raise InputError(
        f'{path}, line {number}: the relevance {text!r} is not a whole number'
      ) from None
    if qrels.setdefault(query_id, {}).setdefault(doc_id, relevance) != relevance:
      raise InputError(
        f'{path}, line {number}: document {doc_id} is judged {relevance} for query {query_id}, and '
        f'{qrels[query_id][doc_id]} before'
      )
  if not qrels:
    raise InputError(f'{path}: a header and no judgements')
  return qrels
