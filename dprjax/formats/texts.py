"""Queries and passages, one a row.

| file | queries | passages |
|---|---|---|
| .json, .jsonl (BEIR) | `{_id, text}` | `{_id, text, title, categories}`; two are optional |
| other (MS MARCO) | id text | id text; id title text; or id url title body |

Columns are separated by tabs, and every row has as many as the first. Three are those of the titled
corpus that RocketQA and coCondenser use for MS MARCO. A header such as `id title text` is known.

Columns are quoted, as Python's csv module writes them, under two headers: `id text title`, which is
that of DPR's psgs_w100.tsv, and one that is in quotes itself. A quoted text may hold newlines. In
other files a quote is a character like others. Any file may be compressed. Errors name the file and
the first line of a row.
"""

import itertools
from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple

import msgspec

from dprjax.base import files, reading
from dprjax.base.errors import InputError
from dprjax.formats import columns
from dprjax.formats.fields import Id, Labels, UniqueIds, check_id, labels

SIDES = ('query', 'passage')


class Text(NamedTuple):
  """A query, or a passage as it is encoded: its title, a space, its text."""

  id: str
  text: str


Query = Text
Passage = Text


class PassageRecord(NamedTuple):
  """A passage as its file has it."""

  id: str
  title: str
  text: str

  @property
  def joined(self) -> str:
    """The text as it is encoded."""
    return f'{self.title} {self.text}'.strip()


class _BeirQuery(msgspec.Struct, kw_only=True):
  id: Id = msgspec.field(name='_id')
  text: str


class _Beir(_BeirQuery, kw_only=True):
  title: str | None = None


class _BeirLabels(msgspec.Struct):
  id: Id = msgspec.field(name='_id')
  categories: Labels = None


Row = str | list[str]
"""A line of JSON, or columns."""


class FileLayout(NamedTuple):
  """How the rows of a corpus, or of queries, are written.

  Attributes:
    names: of the columns, in their order; empty for JSON lines.
    quoted: whether columns are quoted as in CSV.
    header: whether the first row is a header.
  """

  names: tuple[str, ...] = ()
  quoted: bool = False
  header: bool = False

  def rows(self, lines: Iterable[tuple[int, str]], name: str) -> Iterator[tuple[int, Row]]:
    """(number of its first line, row) of every row; see `columns.split_rows`."""
    if self.names:
      return columns.split_rows(lines, name, quoted=self.quoted)
    return ((number, line) for number, line in lines if line.strip())

  def entry(self, row: Row, where: str) -> PassageRecord:
    """A row as a passage. Raises InputError, which begins with ``where``."""
    if isinstance(row, str):
      beir = reading.parse(row, where, _Beir)
      return PassageRecord(check_id(beir.id, where), beir.title or '', beir.text)
    cells = self._cells(row, where)
    return PassageRecord(cells['id'], cells.get('title', ''), cells['text'])

  def query(self, row: Row, where: str) -> Query:
    """A row as a query. Raises InputError, which begins with ``where``."""
    if isinstance(row, str):
      beir = reading.parse(row, where, _BeirQuery)
      return Query(check_id(beir.id, where), beir.text.strip())
    if len(row) != 2:
      raise InputError(f'{where}: {len(row)} columns between tabs; expected 2, id and text')
    cells = self._cells(row, where)
    return Query(cells['id'], cells['text'].strip())

  def _cells(self, row: list[str], where: str) -> dict[str, str]:
    cells = dict(zip(self.names, row, strict=True))
    if not self.quoted and len(cells['id']) > 1 and cells['id'][0] == cells['id'][-1] == '"':
      raise InputError(
        f'{where}: the id {cells["id"]:.40} is in quotes; a file that is quoted as in CSV needs a '
        'header, "id" "text" or "id" "text" "title", in quotes and between tabs'
      )
    if cells.get('url') and '://' not in cells['url']:
      raise InputError(
        f'{where}: 4 columns between tabs, id url title body, but {cells["url"]!r:.40} is no url; '
        'replace tabs within a text by spaces'
      )
    check_id(cells['id'], where)
    return cells


_NAMES = {
  2: ('id', 'text'),
  3: ('id', 'title', 'text'),
  4: ('id', 'url', 'title', 'text'),
}
_QUOTED = (('id', 'text'), ('id', 'text', 'title'))  # DPR's header
_ALIASES = dict.fromkeys(('_id', 'docid', 'pid', 'qid'), 'id') | dict.fromkeys(
  ('passage', 'query', 'body'), 'text'
)


def is_json(path: files.PathLike) -> bool:
  return reading.plain_name(path).endswith(('.json', '.jsonl'))


def format_of(path: files.PathLike) -> str:
  """'beir' for jsonl and 'msmarco' for columns, by the file's name."""
  return 'beir' if is_json(path) else 'msmarco'


def open_rows(
  lines: Iterator[tuple[int, str]], format: str, name: str
) -> tuple[FileLayout, Iterator[tuple[int, Row]]]:
  """How a file is written, by its first line, and its rows without the header.

  Args:
    lines: numbers and lines, blank ones too; they are taken as they are needed.
    format: 'beir' or 'msmarco'.
    name: of the file, for messages.

  Raises:
    InputError: two to four columns are expected; while rows are read, as `columns.split_rows`.
  """
  for number, line in lines:
    if line.strip():
      layout = FileLayout() if format == 'beir' else _layout(line, f'{name}, line {number}')
      rows = layout.rows(itertools.chain([(number, line)], lines), name)
      if layout.header:
        next(rows)
      return layout, rows
  return FileLayout(), iter(())


def _layout(first_line: str, where: str) -> FileLayout:
  header = columns.names_of(first_line)
  names = tuple(_ALIASES.get(name, name) for name in header)
  if sorted(names) in (sorted(known) for known in _NAMES.values()):
    return FileLayout(names, '"' in first_line or tuple(header) in _QUOTED, header=True)
  if len(names) not in _NAMES:
    raise InputError(
      f'{where}: {len(names)} column{"s" * (len(names) > 1)} between tabs; expected id text, id '
      'title text, or id url title body'
    )
  return FileLayout(_NAMES[len(names)])


def read_corpus(path: files.PathLike, format: str = '') -> Iterator[tuple[int, PassageRecord]]:
  """Yields (line number, entry) of a corpus, whose format is `format_of` its path by default."""
  for number, entry, _ in read_entries(path, format):
    yield number, entry


def read_entries(
  path: files.PathLike, format: str = ''
) -> Iterator[tuple[int, PassageRecord, bool]]:
  """`read_corpus`, and whether columns are quoted as in CSV."""
  lines = reading.read_lines(path, 'corpus file', blank=True)
  layout, rows = open_rows(lines, format or format_of(path), str(path))
  for number, row in rows:
    yield number, layout.entry(row, f'{path}, line {number}'), layout.quoted


def read_queries(path: files.PathLike, format: str = '') -> Iterator[tuple[int, Query]]:
  """Yields (line number, query) of a file, whose format is `format_of` its path by default."""
  lines = reading.read_lines(path, 'queries file', blank=True)
  layout, rows = open_rows(lines, format or format_of(path), str(path))
  for number, row in rows:
    yield number, layout.query(row, f'{path}, line {number}')


def read_texts(
  path: files.PathLike, side: str, wanted: Container[str] | None = None, format: str = ''
) -> Iterator[Text]:
  """The queries or passages of one file.

  Args:
    path: the file.
    side: 'query' or 'passage'.
    wanted: ids; other texts are skipped and their ids not kept, so that memory does not grow with
      the file. None: all.
    format: 'beir' or 'msmarco'; `format_of` the path by default.

  Raises:
    InputError: a missing, empty or malformed file, or an id (of those wanted) that comes twice.
  """
  found = files.existing(path, f'{side} file')
  ids = UniqueIds(found, side)
  texts: Iterator[tuple[int, Text]] = (
    read_queries(found, format)
    if side == 'query'
    else ((number, Passage(entry.id, entry.joined)) for number, entry in read_corpus(found, format))
  )
  number = 0
  for number, text in texts:
    if wanted is None or text.id in wanted:
      ids.add(text.id, number)
      yield text
  if not number:
    raise InputError(f'{found}: no {side} in it')


def read_categories(path: files.PathLike) -> Iterator[tuple[int, str, tuple[str, ...]]]:
  """Yields (line number, id, categories) of a BEIR corpus.jsonl."""
  for number, record in reading.read_jsonl(path, 'corpus file', _BeirLabels):
    where = f'{path}, line {number}'
    yield number, check_id(record.id, where), labels(record.categories, where)
