"""Queries and passages, one a row.

| file | queries | passages |
|---|---|---|
| a table with names (`dprjax.text.records`) | columns by name | columns by name |
| other (MS MARCO) | id text | id text; id title text; or id url title body |

`dprjax.text.inputs` says which files a folder or a pattern gives. `USUAL` has the default names
of columns. Without a column of ids, the id is the number of the row, from 0. Errors name the file
and the first line of a row.
"""

import hashlib
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from dprjax.base import files, given
from dprjax.base.errors import InputError
from dprjax.text import inputs, records
from dprjax.text.fields import ManyIds, check_id, labels


class Text(NamedTuple):
  """A query, or a passage as encoded: title, space, text."""

  id: str
  text: str


Query = Text
Passage = Text


class PassageRecord(NamedTuple):
  id: str
  title: str
  text: str

  @property
  def joined(self) -> str:
    return f'{self.title} {self.text}'.strip()


class Entry(NamedTuple):
  """A row of an input.

  Attributes:
    record: its passage; a query has no title.
    number, where: its line or row, and its place for messages.
    values: all values by the names of their columns.
    roles: the names of the columns with id, title and text; a missing column has no entry.
  """

  record: PassageRecord
  number: int
  where: str
  values: Mapping[str, Any]
  roles: Mapping[str, str]

  @property
  def categories(self) -> tuple[str, ...]:
    return labels(self.values.get('categories'), f'{self.where}: categories')


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
    'text': (
      *('text', 'passage', 'contents', 'content', 'body', 'document', 'answer', 'positive'),
      'abstract',  # arXiv
    ),
  },
}
"""The usual names of columns by side and role, in lower case; the first that exists counts."""

_ANY = {role: {name for names in USUAL.values() for name in names[role]} for role in ('id', 'text')}
# Columns of tables without a header.
_MSMARCO = ('id', 'url', 'title', 'text')
_POSITIONS: dict[str, list[tuple[str, ...]]] = {
  'query': [('id', 'text')],
  'passage': [('id', 'text'), ('id', 'title', 'text'), _MSMARCO],
}


def read_entries(
  path: files.PathLike, side: str, columns: Mapping[str, str] | None = None, before: int = 0
) -> Iterator[Entry]:
  """Yields the rows of a file; `Texts` also checks that ids are unique.

  Args:
    before: the number of the first row, the id where there is no column of ids.
  """

  is_csv = records.ending_of(path) == 'csv'

  def is_header(cells: list[str]) -> bool:
    names = {*cells}
    is_id = len(cells) == 1 or names & _ANY['id']
    return is_csv or bool(columns or (names & _ANY['text'] and is_id))

  unnamed = records.Unnamed(is_header, _POSITIONS[side])
  roles_of: dict[tuple[str, ...], dict[str, str]] = {}  # rows of JSON may differ in their names
  for count, row in enumerate(records.read(path, f'{side} file', unnamed), before):
    names = tuple(row.values)
    if names not in roles_of:
      clear = () if {'_id', 'text'} <= {*names} else ('text',)
      needed = ['text', *({'id'} & next(iter(roles_of.values()), {}).keys())]
      roles_of[names] = records.find_roles(
        names, USUAL[side], columns or {}, row.where, clear, needed
      )
    roles = roles_of[names]
    id_ = str(count)
    if 'id' in roles:
      id_ = records.id_of(row.values[roles['id']], row.where, roles['id'])
    if len(id_) > 1 and id_[0] == id_[-1] == '"':
      raise InputError(
        f'{row.where}: the id {id_:.40} is in quotes; a file quoted as CSV needs a header, "id" '
        '"text" or "id" "text" "title", in quotes and between tabs'
      )
    if names == _MSMARCO and '://' not in row.values['url']:
      raise InputError(
        f'{row.where}: 4 columns between tabs, id url title body, but {row.values["url"]!r:.40} is '
        'not a url; replace tabs within a text by spaces'
      )
    title = (
      records.text_of(row.values[roles['title']], row.where, 'title') if 'title' in roles else ''
    )
    text = records.text_of(row.values[roles['text']], row.where, roles['text'])
    record = PassageRecord(check_id(id_, row.where), title, text)
    yield Entry(record, row.number, row.where, row.values, roles)


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
    columns: the names of columns by role, id, title and text.
  """

  def __init__(
    self,
    path: files.PathLike,
    side: str,
    wanted: Container[str] | None = None,
    columns: Mapping[str, str] | None = None,
  ):
    self.path, self.side = path, side
    self._wanted, self._columns = wanted, columns
    self._inputs = inputs.find(path, side)
    self._unique = False  # whether a full pass has compared all ids

  def __iter__(self) -> Iterator[Text]:
    for record, *_ in self.entries():
      yield Text(record.id, record.joined if self.side == 'passage' else record.text.strip())

  def sha256(self) -> str:
    """SHA-256 of the file if the input is a single regular file, else of `digest`."""
    [first, *more] = self._inputs
    if more or files.is_hub_name(first):
      return digest(self)
    return files.sha256_file(files.regular_file(first, f'{self.side} file'))

  def entries(self) -> Iterator[Entry]:
    """The wanted texts with their titles and all other values."""
    ids, count = ManyIds(self.side), 0
    for one in self._inputs:
      ids.begin(one, records.unit_of(one))
      for entry in read_entries(one, self.side, self._columns, count):
        count += 1
        if self._wanted is None or entry.record.id in self._wanted:
          if not self._unique:
            ids.add(entry.record.id, entry.number)
          yield entry
    ids.finish()
    self._unique = True
    if not count:
      raise InputError(f'{self.path}: it has no {self.side}')


def columns_of(side: str, columns: Mapping[str, str]) -> dict[str, str]:
  """Names of columns for `Texts` of one side, selected from the names for both.

  ``query`` and ``query_id`` name columns of the queries, ``id``, ``title`` and ``text`` of the
  corpus.
  """
  roles = {
    'query': {'query_id': 'id', 'query': 'text'},
    'passage': {role: role for role in USUAL['passage']},
  }
  known = [role for of_side in roles.values() for role in of_side]
  if unknown := [role for role in columns if role not in known]:
    raise InputError(f'--column: {unknown[0]!r:.40} is not one of {", ".join(known)}')
  return {roles[side][role]: name for role, name in columns.items() if role in roles[side]}


def read_texts(
  path: files.PathLike,
  side: str,
  wanted: Container[str] | None = None,
  columns: Mapping[str, str] | None = None,
) -> Iterator[Text]:
  """The texts of `Texts`, once."""
  return iter(Texts(path, side, wanted, columns))


def read_several(
  paths: Iterable[files.PathLike], side: str, wanted: Container[str] | None = None
) -> dict[str, str]:
  """The texts of several files by id. Raises InputError for an id in two of them."""
  texts: dict[str, str] = {}
  for path in paths:
    added = {text.id: text.text for text in read_texts(path, side, wanted)}
    if repeated := next((id_ for id_ in added if id_ in texts), None):
      raise InputError(f'{path}: {side} id {repeated!r} is also in another file')
    texts |= added
  return texts
