"""Reads retrieval data of public formats into a `Dataset`.

| format | files | records |
|---|---|---|
| beir | corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv | see `text.texts`, `text.qrels` |
| msmarco | collection.tsv or psgs_w100.tsv, queries.SPLIT.tsv, qrels.SPLIT.tsv | likewise |
| dpr, tevatron, flagembedding, arxiv, table | SPLIT.jsonl | see `text.examples` |
| ids | corpus.jsonl, SPLIT.jsonl | likewise |

In place of .jsonl a file may be .json, .csv, .tsv or .parquet (`text.records`). A folder may
also have one BEIR folder for each split, SPLIT/corpus.jsonl and so on, as from ``dprjax.papers``.
Any file may be compressed. In every format ids are unique, a query needs text and a positive,
grades above 0 are positives, unknown ids are counted, and a passage without text stays but is
never a positive.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from etils import epath

from dprjax.base import files, hashes, reading
from dprjax.base.counts import ReadReport
from dprjax.base.errors import InputError
from dprjax.text import examples, inputs, records, texts
from dprjax.text.examples import Negative
from dprjax.text.fields import UniqueIds
from dprjax.text.qrels import Qrels, judge, read_qrels
from dprjax.text.texts import Passage, Query

FORMATS = ('beir', 'msmarco', *examples.FORMATS)
WITH_CATEGORIES = ('beir', 'arxiv')

_COLLECTIONS = ('collection.tsv', 'psgs_w100.tsv')
_OWN = {  # files of a BEIR folder, by side
  side: tuple(name for name in names if name not in _COLLECTIONS)
  for side, names in inputs.OWN.items()
}
ROLES = tuple(dict.fromkeys((*texts.USUAL['passage'], *examples.USUAL)))
"""Roles of columns: in a BEIR folder id, title and text belong to the corpus."""


_EMPTY_PASSAGES = 'passages without text: kept, never a positive'
_UNKNOWN_PASSAGES = 'judgements of a passage that is not in the corpus: ignored'
_UNKNOWN_QUERIES = 'judgements of a query that is not in the queries: ignored'
_UNKNOWN_NEGATIVES = 'negatives that are not in the corpus: ignored'
_POSITIVES = 'negatives that are positives of their query: ignored'

Negatives = dict[str, list[Negative]]


@dataclasses.dataclass(frozen=True)
class Source:
  """Selects the text to read.

  Attributes:
    path: a folder (with SPLIT.jsonl or SPLIT.json, except for beir and msmarco), or the file
      itself.
    format: one of `FORMATS`, or 'auto' to detect it.
    split: the split whose judgements are read.
    corpus, queries, qrels: files that replace those of the folder (beir, msmarco).
    negatives: mined negatives: a Tevatron jsonl whose negative_passages may have `retriever`,
      `rank`, `score` and `sources`.
    hold_out: (fraction, seed): leave out this fraction of queries, by a hash of their ids.
    held_out: read only the queries left out by `hold_out` or `fold`.
    max_queries: the most queries, also chosen by a hash, before ``fold``.
    fold: (number from 0, count, seed): leave out one of ``count`` equal parts of the queries.
    categories: read categories of passages (beir, arxiv); a passage without any is never a
      positive.
    columns: names of columns, as ``ROLE=COLUMN,ROLE=COLUMN`` (`records.parse_columns`).
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
  categories: bool = False
  fold: tuple[int, int, int] | None = None
  columns: str = ''


@dataclasses.dataclass(frozen=True)
class Dataset:
  """One split, ready to be tokenised.

  Attributes:
    files: role of a file ('corpus', 'queries', ...) -> its path.
    queries: those with text and a positive, in file order.
    qrels: query id -> passage id -> grade; grades above 0 are positives.
    negatives: query id -> its hard negatives in file order, without positives.
    report: counts so far; a full pass over ``passages`` completes it.
  """

  source: Source
  format: str
  files: dict[str, epath.Path]
  queries: list[Query]
  qrels: Qrels
  negatives: Negatives
  report: ReadReport

  @property
  def passages(self) -> Iterator[Passage]:
    report = self.report
    report.forget('passages', _EMPTY_PASSAGES, _UNKNOWN_PASSAGES, _UNKNOWN_NEGATIVES)
    missing = {passage_id for grades in self.qrels.values() for passage_id in grades}
    missing.update(negative.id for rows in self.negatives.values() for negative in rows)
    for passage in _read_passages(_how(self.source, self.format), self.files['corpus']):
      missing.discard(passage.id)
      report.count('passages')
      if not passage.text:
        report.count(_EMPTY_PASSAGES, passage.id)
      yield passage
    for query, grades in self.qrels.items():
      for passage_id in grades:
        if passage_id in missing:
          report.count(_UNKNOWN_PASSAGES, f'{query} {passage_id}')
    for query, negatives in self.negatives.items():
      for negative in negatives:
        if negative.id in missing:
          report.count(_UNKNOWN_NEGATIVES, f'{query} {negative.id}')

  def read_categories(self) -> dict[str, tuple[str, ...]]:
    """The categories of every passage, by id; InputError for a format without categories."""
    if self.format not in WITH_CATEGORIES:
      raise InputError(
        f'{self.files["corpus"]}: {self.format} has no categories; Topic-DPR needs beir or arxiv'
      )
    entries = texts.read_entries(self.files['corpus'], 'passage')
    return {entry.record.id: entry.categories for entry in entries}

  def total_passages(self) -> int:
    how = _how(self.source, self.format)
    return sum(1 for _ in _read_passages(how, self.files['corpus']))

  def positives(self, query_id: str) -> list[str]:
    """Ids of passages graded above 0, in the order of the file."""
    return [passage_id for passage_id, grade in self.qrels[query_id].items() if grade > 0]


def load_dataset(source: Source) -> Dataset:
  """Reads queries, judgements and negatives; `Dataset.passages` streams the passages."""
  format = _format_of(source)
  paths, how = locate(source), _how(source, format)
  queries, qrels, negatives, report = _read_queries(how, paths['queries'], paths['qrels'])
  if 'negatives' in paths:
    negatives = {}
    for query, mined in _read_mined(paths['negatives']).items():
      if query in qrels:
        negatives[query] = mined
      else:
        report.count('queries with mined negatives that are not in this split: ignored')
  judged = [query for query in queries.values() if query.id in qrels]
  chosen = _choose(judged, qrels, source, paths, report)
  return Dataset(
    source,
    format,
    paths,
    chosen,
    {query.id: qrels[query.id] for query in chosen},
    {
      query.id: _without_positives(negatives[query.id], qrels[query.id], report)
      for query in chosen
      if query.id in negatives
    },
    report,
  )


def detect_format(path: files.PathLike, columns: str = '') -> str:
  """The format of a folder or file, by file names or the keys of the first record."""
  place, named = files.existing(path, 'data'), _columns(columns)
  if not place.is_dir():
    return examples.detect_format(files.regular_file(place, 'data'), named)  # read again later
  has_corpus = inputs.variant(place, *_OWN['passage'])
  candidates = sorted(child for child in place.iterdir() if _is_table(child))
  others = [one for one in candidates if not has_corpus or not _is_own(one)]
  if has_corpus and not (place / 'qrels').exists() and not inputs.variant(place, *_OWN['query']):
    for one in others:
      has = records.names_of(one, 'data file')
      roles = {role: name for role, name in named.items() if name in has}
      if {'query', 'positive_id'} <= records.find_roles(has, examples.USUAL, roles, '').keys():
        return 'ids'
  known = (
    ('beir', _OWN['passage']),
    ('msmarco', _COLLECTIONS),
    ('beir', _OWN['query']),
  )
  for format, names in known:
    if inputs.variant(place, *names):
      return format
  if not candidates:
    raise InputError(
      f'{place}: expected corpus.jsonl (BEIR), collection.tsv (MS MARCO) or a file of '
      f'{", ".join(f".{ending}" for ending in records.ENDINGS)}'
    )
  return examples.detect_format(files.regular_file(candidates[0], 'data'), named)


_ROLES = ('corpus', 'queries', 'qrels')


def locate(source: Source, roles: Sequence[str] = _ROLES) -> dict[str, epath.Path]:
  """The files of a source, by role; raises InputError if one of ``roles`` is missing."""
  path = _folder_of(source)
  format, split = _format_of(source), source.split

  def any_of(name: str) -> tuple[str, ...]:
    return tuple(f'{name}.{ending}' for ending in records.ENDINGS)

  if format in ('beir', 'msmarco', 'ids'):
    names = {
      'corpus': _COLLECTIONS if format == 'msmarco' else _OWN['passage'],
      'queries': {
        'beir': _OWN['query'],
        'msmarco': (f'queries.{split}.tsv',),
      }.get(format, any_of(split)),
      'qrels': {
        'beir': (f'qrels/{split}.tsv',),
        'msmarco': (f'qrels.{split}.tsv',),
      }.get(format, any_of(split)),
    }
    paths = {
      role: epath.Path(named) if (named := getattr(source, role)) else find_file(path, role, *some)
      for role, some in names.items()
      if role in roles
    }
  else:
    if path.is_dir():
      path = find_file(path, format, *any_of(split))
    # These formats keep everything in one file.
    paths = dict.fromkeys(roles, path)
  if source.negatives:
    paths['negatives'] = epath.Path(source.negatives)
  for role, file in paths.items():
    files.regular_file(file, f'{role} file')  # each is read more than once
  return paths


def _is_table(path: epath.Path) -> bool:
  return records.ending_of(path) in records.ENDINGS and not path.name.startswith('.')


def _is_own(path: epath.Path) -> bool:
  """Whether a file is the corpus or the queries of its folder."""
  return reading.plain_name(path).lower() in (*_OWN['passage'], *_OWN['query'])


def _columns(text: str) -> dict[str, str]:
  return records.parse_columns(text, 'config.data.columns')


def _format_of(source: Source) -> str:
  if source.format != 'auto':
    return source.format
  return detect_format(_folder_of(source), source.columns)


def _folder_of(source: Source) -> epath.Path:
  """The path of a source, or the folder of its split below it."""
  path = files.existing(source.path, 'data')
  below = path / source.split
  corpus = _OWN['passage']
  split = source.format in ('auto', 'beir') and path.is_dir() and not inputs.variant(path, *corpus)
  return below if split and below.is_dir() and inputs.variant(below, *corpus) else path


def find_file(folder: epath.Path, role: str, *names: str) -> epath.Path:
  """The first of these files that exists, plain or compressed."""
  if file := inputs.variant(folder, *names):
    return file
  path = folder / names[0]
  where = next(place for place in path.parents if place.is_dir())
  beside = sorted(child.name + '/' * child.is_dir() for child in where.iterdir())
  raise InputError(
    f'{role} file not found: {path} (or {", ".join(reading.COMPRESSED)}); {where} has '
    f'{", ".join(beside[:10]) or "no files"}{", ..." if len(beside) > 10 else ""}'
  )


class _How(NamedTuple):
  """How files are read: their format, and names of columns by role."""

  format: str
  columns: tuple[tuple[str, str], ...] = ()

  def of(self, *roles: str) -> dict[str, str]:
    return {role: name for role, name in self.columns if role in roles}


def _how(source: Source, format: str) -> _How:
  return _How(format, tuple(sorted(_columns(source.columns).items())))


class _Queries(NamedTuple):
  queries: dict[str, Query]
  qrels: Qrels
  negatives: Negatives
  report: ReadReport


def _read_queries(how: _How, queries: epath.Path, judgements: epath.Path) -> _Queries:
  if how.format in examples.FORMATS:
    return _Queries(*_read_examples(how, queries), ReadReport())
  named = {'text': 'query', 'id': 'query_id'}
  columns = {role: how.of(name)[name] for role, name in named.items() if how.of(name)}
  read = texts.read_texts(queries, 'query', columns=columns)
  by_id = {query.id: query for query in read}
  report = ReadReport()
  return _Queries(by_id, _known(read_qrels(judgements), by_id, report), {}, report)


def _read_passages(how: _How, path: epath.Path) -> Iterator[Passage]:
  if how.format in examples.FORMATS and how.format != 'ids':
    passages = examples.read_passages(how.format, path, dict(how.columns))
    return (passage for _, passage in passages)
  columns = how.of(*texts.USUAL['passage'])
  return texts.read_texts(path, 'passage', columns=columns)


def _read_examples(how: _How, path: epath.Path) -> tuple[dict[str, Query], Qrels, Negatives]:
  ids = UniqueIds(path, 'query')
  queries: dict[str, Query] = {}
  qrels: Qrels = {}
  negatives: Negatives = {}
  columns = dict(how.columns)
  if how.format == 'ids':
    columns = {role: name for role, name in columns.items() if role not in texts.USUAL['passage']}
  for number, example in examples.read_examples(how.format, path, columns):
    query = example.query
    if how.format not in examples.TABLES:
      ids.add(query.id, number)
    elif queries.setdefault(query.id, query).text != query.text:
      raise InputError(
        f'{path}: the query {query.id!r:.80} has a different text at {number}; ids must be unique'
      )
    queries[query.id] = query
    grades = example.grades or (1,) * len(example.positives)
    qrels.setdefault(query.id, {})
    for passage, grade in zip(example.positives, grades, strict=True):
      judge(qrels, query.id, passage.id, grade, f'{path}: at {number}')
    if example.negatives:
      of_query = negatives.setdefault(query.id, [])
      known = {negative.id for negative in of_query} if how.format in examples.TABLES else set()
      of_query += [negative for _, negative in example.negatives if negative.id not in known]
  return queries, qrels, negatives


def _known(qrels: Qrels, queries: dict[str, Query], report: ReadReport) -> Qrels:
  """The judgements of these queries; counts the others."""
  for query, grades in qrels.items():
    if query not in queries:
      for passage in grades:
        report.count(_UNKNOWN_QUERIES, f'{query} {passage}')
  return {query: grades for query, grades in qrels.items() if query in queries}


def _read_mined(path: epath.Path) -> Negatives:
  mined: Negatives = {}
  ids = UniqueIds(path, 'query')
  for number, query, negatives in examples.read_mined(path):
    ids.add(query, number)
    mined[query] = negatives
  return mined


def _choose(
  queries: list[Query],
  qrels: Qrels,
  source: Source,
  paths: dict[str, epath.Path],
  report: ReadReport,
) -> list[Query]:
  """The usable queries of the split after `hold_out` and `max_queries`, in file order."""
  chosen = []
  for query in queries:
    if not query.text:
      report.count('queries without text: skipped', query.id)
    elif not any(grade > 0 for grade in qrels[query.id].values()):
      report.count('queries without a positive: skipped', query.id)
    else:
      chosen.append(query)
  usable = len(chosen)
  fraction, seed = source.hold_out or (0.0, 0)
  if source.hold_out is not None:
    chosen = [query for query in chosen if held_out(query.id, fraction, seed) == source.held_out]
  if source.max_queries is not None and len(chosen) > source.max_queries:
    drawn = sorted(chosen, key=lambda query: hashes.draw(query.id, seed, 'max_queries'))
    sample = {query.id for query in drawn[: source.max_queries]}
    chosen = [query for query in chosen if query.id in sample]
  if source.fold is not None:
    number, count, seed = source.fold
    dealt = sorted(chosen, key=lambda query: hashes.draw(query.id, seed, 'fold'))
    part = {query.id for query in dealt[number::count]}
    chosen = [query for query in chosen if (query.id in part) == source.held_out]
  if not chosen:
    raise InputError(
      f'{paths["qrels"]}: no query is left: {usable:,} of {len(queries):,} have text and a passage '
      f'graded above 0; hold_out={source.hold_out}, max_queries={source.max_queries}, '
      f'fold={source.fold}'
    )
  report.counts['queries'] = len(chosen)
  return chosen


def held_out(name: str, fraction: float, seed: int) -> bool:
  """Whether a query or a pair is held out."""
  return hashes.fraction(name, seed, 'hold_out') < fraction


def _without_positives(
  negatives: list[Negative], grades: dict[str, int], report: ReadReport
) -> list[Negative]:
  kept = [negative for negative in negatives if grades.get(negative.id, 0) <= 0]
  report.counts[_POSITIVES] += len(negatives) - len(kept)
  return kept
