"""Retrieval data of the public formats, read into one `Dataset`.

| format        | files                                        | layout                           |
|---------------|----------------------------------------------|----------------------------------|
| beir          | corpus.jsonl                                 | `{_id, title, text}`             |
|               | queries.jsonl                                | `{_id, text}`                    |
|               | qrels/SPLIT.tsv                              | query-id corpus-id score         |
| msmarco       | collection.tsv                               | id text, id text title, or       |
|               |                                              | id url title body                |
|               | queries.SPLIT.tsv                            | id text                          |
|               | qrels.SPLIT.tsv                              | 3 columns, or TREC's 4           |
| dpr           | one json or jsonl                            | `{question, positive_ctxs,       |
|               |                                              | negative_ctxs,                   |
|               |                                              | hard_negative_ctxs}` of          |
|               |                                              | `{title, text, passage_id}`      |
| tevatron      | one jsonl                                    | `{query_id, query,               |
|               |                                              | positive_passages,               |
|               |                                              | negative_passages}` of           |
|               |                                              | `{docid, title, text}`           |
| flagembedding | one jsonl                                    | `{query, pos: [text],            |
|               |                                              | neg: [text]}`                    |
| arxiv         | one jsonl                                    | `{id, title, abstract,           |
|               |                                              | categories}`: the title is the   |
|               |                                              | query, the abstract its passage  |

Any file may be compressed (`.gz`, `.xz`). `dprjax.formats` reads the records. The rules that hold
for every format are here: ids are unique, a query needs text and a positive, a grade above 0 makes
a positive, an unknown id is counted (or refused, if strict), and a passage without text stays but
is never a positive.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

from etils import epath

from dprjax.base import files
from dprjax.base.errors import InputError
from dprjax.formats import records
from dprjax.formats.records import Negative, Passage, Query
from dprjax.formats.report import Report

_LISTED = 5  # examples of each kind of trouble that a report shows
_EMPTY_PASSAGES = 'passages without text: kept, never a positive'
_UNKNOWN_PASSAGES = 'judgements of a passage that is not in the corpus: ignored'
_UNKNOWN_NEGATIVES = 'negatives that are not in the corpus: ignored'


@dataclasses.dataclass(frozen=True)
class Source:
  """Which text to read; every field can stand in a config.

  Attributes:
    path: a folder (beir, msmarco; for the others one that holds SPLIT.jsonl or SPLIT.json) or the
      file itself.
    format: one of `dprjax.formats.records.FORMATS`, or 'auto' to look.
    split: the split whose judgements are read.
    corpus, queries, qrels: files to take instead of those found by name in the folder (beir,
      msmarco).
    negatives: mined negatives, a Tevatron jsonl whose negative_passages may carry `retriever`,
      `rank`, `score` and `pools`.
    hold_out: (fraction, seed): leave out this share of the split's queries, chosen by a hash of
      their ids.
    held_out: read just those that `hold_out` leaves out: a development set cut from the training
      queries.
    max_queries: no more than so many queries, chosen by hash too.
    strict: fail where an id is unknown, instead of counting it.
  """

  path: str
  format: str = 'auto'
  split: str = 'train'
  corpus: str | None = None
  queries: str | None = None
  qrels: str | None = None
  negatives: str | None = None
  hold_out: tuple[float, int] | None = None
  held_out: bool = False
  max_queries: int | None = None
  strict: bool = False


@dataclasses.dataclass(frozen=True)
class Dataset:
  """One split, ready to be tokenised.

  Attributes:
    queries: those with text and at least one positive, in the order of the file.
    qrels: query id -> passage id -> grade; a grade above 0 is a positive.
    negatives: query id -> its hard negatives in the order of the file; none of them is a positive.
    files: the role of each file ('corpus', 'queries', ...) and where it is.
    report: what was counted so far; a full pass over ``passages`` completes it.
  """

  source: Source
  format: str
  files: dict[str, epath.Path]
  queries: list[Query]
  qrels: dict[str, dict[str, int]]
  negatives: dict[str, list[Negative]]
  report: Report

  @property
  def passages(self) -> Iterator[Passage]:
    """A fresh stream over the corpus.

    Raises InputError for a bad record, a repeated id, and, if strict, an unknown one.
    """
    path = self.files['corpus']
    report, counted = (
      self.report,
      ('passages', _EMPTY_PASSAGES, _UNKNOWN_PASSAGES, _UNKNOWN_NEGATIVES),
    )
    report.forget(*counted)
    seen: dict[str, int] = {}
    for number, passage in records.read_corpus(self.format, path):
      if passage.id in seen:
        raise InputError(_repeated(path, number, 'passage', passage.id, seen[passage.id]))
      seen[passage.id] = number
      report.counts['passages'] += 1
      if not passage.text:
        report.count(_EMPTY_PASSAGES, passage.id)
      yield passage
    if not seen:
      raise InputError(f'{path}: no passage in it')
    for query, grades in self.qrels.items():
      for passage_id in grades:
        if passage_id not in seen:
          report.count(_UNKNOWN_PASSAGES, f'{query} {passage_id}')
    for query, negatives in self.negatives.items():
      for negative in negatives:
        if negative.id not in seen:
          report.count(_UNKNOWN_NEGATIVES, f'{query} {negative.id}')
    if self.source.strict:
      report.refuse(_UNKNOWN_PASSAGES, self.files['qrels'])
      report.refuse(_UNKNOWN_NEGATIVES, self.files.get('negatives', path))

  def total_passages(self) -> int:
    """How many passages are to be expected, counted without looking at them closely: for a progress
    bar.
    """
    if self.format in records.INLINE:
      return sum(1 for _ in records.read_corpus(self.format, self.files['corpus']))
    return sum(1 for _ in files.read_lines(self.files['corpus'], 'corpus file'))

  def positives(self, query_id: str) -> list[str]:
    """Ids of the passages whose grade is above 0, in the order of the file."""
    return [passage_id for passage_id, grade in self.qrels[query_id].items() if grade > 0]


def load_dataset(source: Source) -> Dataset:
  """Reads queries, judgements and negatives; the passages are left to be streamed from
  `Dataset.passages`.

  Raises:
    InputError: a missing, empty or malformed file; a repeated id; no query with a positive; with
      ``strict``, an unknown id.
  """
  format = detect_format(source.path) if source.format == 'auto' else source.format
  if format not in records.FORMATS:
    raise InputError(
      f'no format of data is called {format!r}; there are {", ".join(records.FORMATS)}'
    )
  if source.hold_out is not None and not 0 < source.hold_out[0] < 1:
    raise InputError(f'hold_out: a fraction between 0 and 1 is needed, not {source.hold_out[0]}')
  if source.held_out and source.hold_out is None:
    raise InputError(
      'held_out asks for the queries that hold_out leaves out, and hold_out is not set'
    )
  report = Report()
  where = locate(source)
  if format in records.INLINE:
    texts, qrels, negatives = _read_examples(format, where['corpus'])
  elif format == 'arxiv':
    texts = _unique_queries(
      where['corpus'], ((n, Query(r.id, r.title)) for n, r in records.read_arxiv(where['corpus']))
    )
    qrels, negatives = {query: {query: 1} for query in texts}, {}
  else:
    texts = _unique_queries(where['queries'], records.read_queries(format, where['queries']))
    qrels, negatives = _read_qrels(where['qrels'], texts, source.strict, report), {}
  if 'negatives' in where:
    negatives = _read_mined(where['negatives'], qrels, report)
  queries = _choose(
    [Query(query, texts[query]) for query in texts if query in qrels], qrels, source, where, report
  )
  kept = {query.id for query in queries}
  qrels = {query: grades for query, grades in qrels.items() if query in kept}
  negatives = {
    query: _without_positives(rows, qrels[query], report)
    for query, rows in negatives.items()
    if query in kept
  }
  return Dataset(source, format, where, queries, qrels, negatives, report)


def read_texts(
  path: files.PathLike, kind: str, wanted: Container[str] | None = None
) -> Iterator[Passage | Query]:
  """The texts of one file, for encoding and for BM25: BEIR's jsonl (`_id`, `title`, `text`), or a
  tsv of ids and texts.

  Args:
    path: the file; `.json` or `.jsonl` in its name make it BEIR's format, all else MS MARCO's.
    kind: 'query' or 'passage'.
    wanted: ids; the other texts are read over and their ids not kept, so that memory does not grow
      with the file. None: all.

  Raises:
    InputError: a missing, empty or malformed file, or an id (of those wanted) that comes twice.
  """
  found = files.existing(path, f'{kind} file')
  format = 'beir' if records.is_records(found) else 'msmarco'
  lines: dict[str, int] = {}
  read: Callable[[str, epath.Path], Iterator[tuple[int, Passage | Query]]] = (
    records.read_corpus if kind == 'passage' else records.read_queries
  )
  number = 0
  for number, text in read(format, found):
    if wanted is not None and text.id not in wanted:
      continue
    if text.id in lines:
      raise InputError(_repeated(found, number, kind, text.id, lines[text.id]))
    lines[text.id] = number
    yield text
  if not number:
    raise InputError(f'{found}: no {kind} in it')


def detect_format(path: files.PathLike) -> str:
  """The format of a folder or file, judged by the folder's files or the first record's keys.

  Raises InputError if none fits.
  """
  found = files.existing(path, 'data')
  if found.is_dir():
    for format, name in (('beir', 'corpus.jsonl'), ('msmarco', 'collection.tsv')):
      if any((found / f'{name}{ending}').exists() for ending in records.ENDINGS):
        return format
    candidates = sorted(child for child in found.iterdir() if records.is_records(child))
    if not candidates:
      raise InputError(
        f'{found}: neither corpus.jsonl (BEIR) nor collection.tsv (MS MARCO) nor any .json or '
        '.jsonl file in it'
      )
    found = candidates[0]
  return records.format_of_record(found)


def locate(source: Source) -> dict[str, epath.Path]:
  """The files that a source means, by role. Raises InputError naming the one that is not there."""
  path = files.existing(source.path, 'data')
  format = detect_format(path) if source.format == 'auto' else source.format
  if format in ('beir', 'msmarco'):
    names = records.file_names(format, source.split)
    found = {
      role: epath.Path(given) if (given := getattr(source, role)) else _variant(path / name, role)
      for role, name in names.items()
    }
  else:
    if path.is_dir():
      path = _variant(path / f'{source.split}.jsonl', format, f'{source.split}.json')
    # A format that keeps everything in one file has its judgements there as well.
    found = {'corpus': path, 'queries': path, 'qrels': path}
  if source.negatives:
    found['negatives'] = epath.Path(source.negatives)
  for role, file in found.items():
    files.existing(file, f'{role} file')
  return found


def _variant(path: epath.Path, what: str, *others: str) -> epath.Path:
  for name in (path.name, *others):
    for ending in records.ENDINGS:
      if (found := path.parent / f'{name}{ending}').exists():
        return found
  beside = (
    sorted(child.name for child in path.parent.iterdir())[:10] if path.parent.is_dir() else []
  )
  raise InputError(
    f'{what} file not found: {path} (or {", ".join(records.ENDINGS[1:])}); in that folder: '
    f'{", ".join(beside) or "nothing"}'
  )


def _repeated(path: epath.Path, number: int, what: str, repeated: str, first: int) -> str:
  return (
    f'{path}: {what} id {repeated!r} is on line {first} and again on line {number}; ids must '
    'be unique'
  )


def _unique_queries(path: epath.Path, queries: Iterable[tuple[int, Query]]) -> dict[str, str]:
  texts: dict[str, str] = {}
  lines: dict[str, int] = {}
  for number, query in queries:
    if query.id in texts:
      raise InputError(_repeated(path, number, 'query', query.id, lines[query.id]))
    texts[query.id], lines[query.id] = query.text, number
  return texts


def _read_examples(
  format: str, path: epath.Path
) -> tuple[dict[str, str], dict[str, dict[str, int]], dict[str, list[Negative]]]:
  examples = {}

  def queries() -> Iterator[tuple[int, Query]]:
    for number, example in records.read_examples(format, path):
      yield number, example.query
      examples[example.query.id] = (
        [passage.id for passage in example.positives],
        [negative for _, negative in example.negatives],
      )

  texts = _unique_queries(path, queries())
  qrels = {query: dict.fromkeys(positives, 1) for query, (positives, _) in examples.items()}
  return texts, qrels, {query: negatives for query, (_, negatives) in examples.items() if negatives}


def _read_qrels(
  path: epath.Path, texts: dict[str, Any], strict: bool, report: Report
) -> dict[str, dict[str, int]]:
  unknown = 'judgements of a query that is not in the queries: ignored'
  qrels: dict[str, dict[str, int]] = {}
  for number, query, passage, grade in records.read_qrels(path):
    if query not in texts:
      report.count(unknown, f'{query} {passage}')
    elif qrels.setdefault(query, {}).setdefault(passage, grade) != grade:
      raise InputError(
        f'{path}, line {number}: query {query!r} and passage {passage!r} are judged {grade} here '
        f'and {qrels[query][passage]} above'
      )
  if strict:
    report.refuse(unknown, path)
  return qrels


def _read_mined(
  path: epath.Path, qrels: dict[str, Any], report: Report
) -> dict[str, list[Negative]]:
  mined: dict[str, list[Negative]] = {}
  lines: dict[str, int] = {}
  for number, query, negatives in records.read_mined(path):
    if query in lines:
      raise InputError(_repeated(path, number, 'query', query, lines[query]))
    lines[query] = number
    if query in qrels:
      mined[query] = negatives
    else:
      report.count('queries with mined negatives that are not in this split: ignored')
  return mined


def _choose(
  queries: list[Query],
  qrels: dict[str, dict[str, int]],
  source: Source,
  where: dict[str, epath.Path],
  report: Report,
) -> list[Query]:
  """The split's usable queries, less those held out, no more than asked for; in the order of the
  file.
  """
  chosen = []
  for query in queries:
    if not query.text:
      report.count('queries without text: skipped', query.id)
    elif not any(grade > 0 for grade in qrels[query.id].values()):
      report.count('queries without a positive: skipped', query.id)
    else:
      chosen.append(query)
  if not chosen:
    raise InputError(
      f'{where["qrels"]}: no query with text and a passage graded above 0; nothing to train or to '
      'measure on'
    )
  fraction, seed = source.hold_out or (0.0, 0)
  if source.hold_out is not None:
    chosen = [query for query in chosen if (_lot(query.id, seed) < fraction) == source.held_out]
  if source.max_queries is not None and len(chosen) > source.max_queries:
    # Not the lots that hold_out drew, which would all lie on one side of the fraction.
    kept = {
      query.id
      for query in sorted(chosen, key=lambda query: _lot(query.id, seed + 1))[: source.max_queries]
    }
    chosen = [query for query in chosen if query.id in kept]
  if not chosen:
    raise InputError(
      f'hold_out={source.hold_out} and max_queries={source.max_queries} leave no query of '
      f'{len(queries):,}'
    )
  report.counts['queries'] = len(chosen)
  return chosen


def _lot(query_id: str, seed: int) -> float:
  """A number in [0, 1) that depends on the id and the seed alone."""
  return int.from_bytes(hashlib.sha256(f'{seed}:{query_id}'.encode()).digest()[:7]) / 2**56


def _without_positives(
  negatives: list[Negative], grades: dict[str, int], report: Report
) -> list[Negative]:
  kept = [negative for negative in negatives if grades.get(negative.id, 0) <= 0]
  report.counts['negatives that are positives of their query: ignored'] += len(negatives) - len(
    kept
  )
  return kept
