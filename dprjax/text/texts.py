"""Queries and passages, one a row.

| file | queries | passages |
|---|---|---|
| .json, .jsonl (BEIR) | `{_id, text}` | `{_id, text, title, categories}`; last two optional |
| .csv, .parquet, hf:NAME, other .jsonl and .tsv | columns by name | columns by name |
| .md, .html, .pdf, .txt without tabs | | documents, cut by `dprjax.text.documents` |
| other (MS MARCO) | id text | id text; id title text; or id url title body |

`dprjax.text.inputs` says which files a folder or a pattern gives. `USUAL` has the default names
of columns. Without a column of ids, the id is the number of the row, from 0.

Columns are separated by tabs, and every row has as many as the first. The titled MS MARCO corpus of
RocketQA and coCondenser has three columns. Headers such as `id title text` are recognized. Two
headers mean that columns are quoted as the Python csv module writes them: `id text title`, as in
the psgs_w100.tsv of DPR, and a header in quotes. A quoted text may contain newlines. In other files
quotes are ordinary characters. Any file may be compressed. Errors name the file and the first line
of a row.
"""

import contextlib
import hashlib
import itertools
import tempfile
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import IO, Any, NamedTuple

import msgspec
from etils import epath

from dprjax.base import files, given, reading
from dprjax.base.errors import InputError
from dprjax.text import columns, hub_data, inputs, records
from dprjax.text.fields import Id, Labels, ManyIds, check_id, labels


class Text(NamedTuple):
  """A query, or a passage as encoded: title, space, text."""

  id: str
  text: str


Query = Text
Passage = Text


class PassageRecord(NamedTuple):
  """A passage as in its file."""

  id: str
  title: str
  text: str

  @property
  def joined(self) -> str:
    """The text to encode."""
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
    """A row as a passage."""
    if isinstance(row, str):
      beir = reading.parse(row, where, _Beir)
      return PassageRecord(check_id(beir.id, where), beir.title or '', beir.text)
    cells = self._cells(row, where)
    return PassageRecord(cells['id'], cells.get('title', ''), cells['text'])

  def query(self, row: Row, where: str) -> Query:
    """A row as a query."""
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
        f'{where}: the id {cells["id"]:.40} is in quotes; a file quoted as CSV needs a '
        'header, "id" "text" or "id" "text" "title", in quotes and between tabs'
      )
    if cells.get('url') and '://' not in cells['url']:
      raise InputError(
        f'{where}: 4 columns between tabs, id url title body, but {cells["url"]!r:.40} is not a '
        'url; replace tabs within a text by spaces'
      )
    check_id(cells['id'], where)
    return cells


_NAMES = {
  2: ('id', 'text'),
  3: ('id', 'title', 'text'),
  4: ('id', 'url', 'title', 'text'),
}
_QUOTED = (('id', 'text'), ('id', 'text', 'title'))  # The DPR header
_ALIASES = dict.fromkeys(('_id', 'docid', 'pid', 'qid'), 'id') | dict.fromkeys(
  ('passage', 'query', 'body'), 'text'
)


def is_json(path: files.PathLike) -> bool:
  return reading.plain_name(path).endswith(('.json', '.jsonl'))


def format_of(path: files.PathLike) -> str:
  """'beir' for jsonl and 'msmarco' for columns, by the file name."""
  return 'beir' if is_json(path) else 'msmarco'


def open_rows(
  lines: Iterator[tuple[int, str]], format: str, name: str
) -> tuple[FileLayout, Iterator[tuple[int, Row]]]:
  """The layout of a file, by its first line, and its rows without the header, read lazily."""
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
  """Yields (line number, entry) of a corpus; ``format`` is by default `format_of` the path."""
  for number, entry, _ in read_entries(path, format):
    yield number, entry


def read_entries(
  path: files.PathLike, format: str = ''
) -> Iterator[tuple[int, PassageRecord, bool]]:
  """Like `read_corpus`, and whether columns are quoted as in CSV."""
  lines = reading.read_lines(path, 'corpus file', blank=True)
  layout, rows = open_rows(lines, format or format_of(path), str(path))
  for number, row in rows:
    yield number, layout.entry(row, f'{path}, line {number}'), layout.quoted


_INDEX = (records.INDEX.lower(), given.INDEX)
USUAL: dict[str, dict[str, tuple[str, ...]]] = {
  'query': {
    'id': ('_id', 'id', 'query_id', 'query-id', 'qid', *_INDEX),
    'text': ('text', 'query', 'question', 'query_text', 'anchor'),
  },
  'passage': {
    'id': (
      *('_id', 'id', 'docid', 'doc_id', 'passage_id', 'pid', 'docno', 'corpus_id', 'corpus-id'),
      *_INDEX,
    ),
    'title': ('title',),
    'text': ('text', 'passage', 'contents', 'content', 'body', 'document', 'answer', 'positive'),
  },
}
"""The usual names of columns by side and role, in lower case; the first that exists counts."""


def digest(texts: Iterable[Text]) -> str:
  """SHA-256 of ids and texts."""
  sha256 = hashlib.sha256()
  for text in texts:
    sha256.update(pack(text))
  return sha256.hexdigest()


def pack(text: Text) -> bytes:
  """Bytes unique to this id and text."""
  id_, content = text.id.encode(), text.text.encode()
  return b''.join((len(id_).to_bytes(8, 'big'), id_, len(content).to_bytes(8, 'big'), content))


class Texts:
  """The queries or passages of an input; each iteration reads them again.

  Args:
    path: a file, a pipe, a pattern, a folder or ``hf:NAME``, see `dprjax.text.inputs`.
    side: 'query' or 'passage'.
    wanted: ids of the texts to read, without checking other ids; None: all.
    format: 'beir' or 'msmarco'; by the path by default.
    columns: the names of columns by role, id, title and text.
  """

  def __init__(
    self,
    path: files.PathLike,
    side: str,
    wanted: Container[str] | None = None,
    format: str = '',
    columns: Mapping[str, str] | None = None,
  ):
    self.path, self.side = path, side
    self._wanted, self._format, self._columns = wanted, format, columns or {}
    self._inputs = inputs.find(path, side)
    self._kept: IO[bytes] | None = None
    self._unique = False  # whether a full pass has compared all ids

  def __iter__(self) -> Iterator[Text]:
    return self._read() if self._kept is None else _unpack(self._kept)

  def sha256(self) -> str:
    """SHA-256 of the file if the input is a single regular file, else of `digest`."""
    [first, *more] = self._inputs
    if more or first.document or hub_data.is_named(first.path):
      return digest(self)
    return files.sha256_file(files.regular_file(first.path, f'{self.side} file'))

  @contextlib.contextmanager
  def kept(self) -> Iterator['Texts']:
    """Itself; within the block, the texts of a pipe are kept in a temporary file."""
    if not any(files.is_special(one.path) for one in self._inputs):
      yield self
      return
    with tempfile.TemporaryFile() as kept:
      for text in self._read():
        packed = msgspec.msgpack.encode(text)
        kept.write(len(packed).to_bytes(4, 'big') + packed)
      self._kept = kept
      yield self

  def _read(self) -> Iterator[Text]:
    ids, count, empty = ManyIds(self.side), 0, 0
    for one in self._inputs:
      by_rows = hub_data.is_named(one.path) or records.ending_of(one.path) == 'parquet'
      ids.begin(one.path, 'row' if by_rows else 'line')
      before = count
      for number, text in self._read_one(one, count):
        count += 1
        if self._wanted is None or text.id in self._wanted:
          if not self._unique:
            ids.add(text.id, number)
          yield text
      empty += one.document and count == before
    ids.finish()
    self._unique = True
    if not count:
      raise InputError(f'{self.path}: it has no {self.side}')

  def _read_one(self, one: inputs.Input, before: int) -> Iterator[tuple[int, Text]]:
    if one.document:
      from dprjax.text import documents  # imports slow modules

      for number, found in enumerate(documents.read_passages(one.path, one.name)):
        record = PassageRecord(check_id(found.id, str(one.path)), found.title, found.text)
        yield number, self._passage(record, {})
    elif _has_rows(one) or self._columns:
      yield from self._read_rows(one, records.read(one.path, f'{self.side} file'), before)
    elif self._format != 'msmarco' and is_json(one.path):
      yield from self._read_json(one, before)
    else:
      yield from self._read_lines(one, before)

  def _read_lines(self, one: inputs.Input, before: int) -> Iterator[tuple[int, Text]]:
    """Columns between tabs, by position or by header."""
    lines = reading.read_lines(one.path, f'{self.side} file', blank=True)
    for number, line in lines:
      if not line.strip():
        continue
      again = itertools.chain([(number, line)], lines)
      names = columns.header_of(name.strip().strip('"') for name in line.split('\t'))
      if self._named(names, str(one.path)) and not _is_layout(names):
        rows = records.table_rows(again, str(one.path), '\t')
        yield from self._read_rows(one, rows, before)
        return
      name = str(one.path)
      layout, rows_ = open_rows(again, 'msmarco', name)
      for number, row in rows_:
        where = f'{name}, line {number}'
        if self.side == 'query':
          yield number, layout.query(row, where)
        else:
          source = dict(zip(layout.names, row, strict=True))
          yield number, self._passage(layout.entry(row, where), source, ('id', 'title', 'text'))
      return

  def _read_json(self, one: inputs.Input, before: int) -> Iterator[tuple[int, Text]]:
    """BEIR records, or others with known names, by the keys of the first."""
    found = reading.record_texts(one.path, f'{self.side} file')
    first = next(found, None)
    if first is None:
      return
    found = itertools.chain([first], found)
    keys = list(reading.parse_object(first[2], first[1]))
    if not {'_id', 'text'} <= set(keys) and self._named(keys, str(one.path)):
      rows = (
        records.Row(number, where, reading.parse_object(line, where))
        for number, where, line in found
      )
      yield from self._read_rows(one, rows, before)
      return
    layout = FileLayout()
    for number, where, line in found:
      if self.side == 'query':
        yield number, layout.query(line, where)
      else:
        yield number, self._passage(layout.entry(line, where), line)

  def _passage(
    self,
    record: PassageRecord,
    source: Mapping[str, Any] | str,
    used: Container[str] = ('_id', 'title', 'text'),
  ) -> Text:
    """A passage from its record, which contains the names ``used`` of the row ``source``."""
    del source, used
    return Text(record.id, record.joined)

  def _named(self, names: list[str], where: str) -> bool:
    """Whether these names have a text, and an id unless the text is the only column."""
    roles = records.find_roles(names, USUAL[self.side], self._columns, where)
    return 'text' in roles and ('id' in roles or len(names) == 1)

  def _read_rows(
    self, one: inputs.Input, rows: Iterator[records.Row], before: int
  ) -> Iterator[tuple[int, Text]]:
    """Rows of named values; an id that is missing is the number of the row, from ``before``."""
    roles: dict[str, str] = {}
    for count, row in enumerate(rows, before):
      if not roles:
        names, usual = list(row.values), USUAL[self.side]
        clear = needed = ('text',)
        roles = records.find_roles(names, usual, self._columns, str(one.path), clear, needed)
      values = {role: row.values.get(name) for role, name in roles.items()}
      id_ = str(count)
      if 'id' in roles:
        id_ = check_id(records.id_of(values['id'], row.where, roles['id']), row.where)
      text = records.text_of(values['text'], row.where, roles['text'])
      if self.side == 'query':
        yield row.number, Query(id_, text.strip())
      else:
        title = records.text_of(values.get('title'), row.where, 'title')
        record = PassageRecord(id_, title, text)
        yield row.number, self._passage(record, row.values, roles.values())


def _has_rows(one: inputs.Input) -> bool:
  return hub_data.is_named(one.path) or records.ending_of(one.path) in ('csv', 'parquet')


def _is_layout(names: list[str]) -> bool:
  """Whether column names are a header of MS MARCO or DPR files."""
  found = sorted(_ALIASES.get(name.lower(), name.lower()) for name in names)
  return found in (sorted(known) for known in _NAMES.values())


def _unpack(file: IO[bytes]) -> Iterator[Text]:
  file.seek(0)
  while size := file.read(4):
    yield Text(*msgspec.msgpack.decode(file.read(int.from_bytes(size, 'big'))))


def corpus_lines(path: files.PathLike) -> epath.Path | None:
  """The file of a corpus whose rows `FileLayout` reads; None for other inputs."""
  found = inputs.find(path, 'passage')
  [first, *more] = found
  if more or first.document or _has_rows(first) or records.ending_of(first.path) == 'json':
    return None
  if not is_json(first.path) or files.is_special(first.path):
    return first.path
  for number, line in reading.read_lines(first.path, 'passage file'):
    keys = reading.parse_object(line, f'{first.path}, line {number}').keys()
    roles = records.find_roles(list(keys), USUAL['passage'], {}, str(first.path))
    return None if not {'_id', 'text'} <= keys and 'text' in roles else first.path
  return first.path


def columns_of(side: str, given: Mapping[str, str]) -> dict[str, str]:
  """Names of columns for `Texts` of one side, selected from the names for both.

  ``query`` and ``query_id`` name columns of the queries, ``id``, ``title`` and ``text`` of the
  corpus.
  """
  roles = {
    'query': {'query_id': 'id', 'query': 'text'},
    'passage': {role: role for role in USUAL['passage']},
  }
  known = [role for own in roles.values() for role in own]
  if unknown := [role for role in given if role not in known]:
    raise InputError(f'--column: {unknown[0]!r:.40} is not one of {", ".join(known)}')
  return {roles[side][role]: name for role, name in given.items() if role in roles[side]}


def read_texts(
  path: files.PathLike,
  side: str,
  wanted: Container[str] | None = None,
  format: str = '',
  columns: Mapping[str, str] | None = None,
) -> Iterator[Text]:
  """The texts of `Texts`, once."""
  return iter(Texts(path, side, wanted, format, columns))


def read_categories(path: files.PathLike) -> Iterator[tuple[int, str, tuple[str, ...]]]:
  """Yields (line number, id, categories) of a BEIR corpus.jsonl."""
  for number, record in reading.read_jsonl(path, 'corpus file', _BeirLabels):
    where = f'{path}, line {number}'
    yield number, check_id(record.id, where), labels(record.categories, where)
