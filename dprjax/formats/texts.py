"""Queries and passages, one a line.

| file | queries | passages |
|---|---|---|
| .json, .jsonl (BEIR) | `{_id, text}` | `{_id, text, title, categories}`; two are optional |
| other (MS MARCO) | id text | id text; id title text; or id url title body |

Columns are separated by tabs. Three are those of the titled corpus that RocketQA and coCondenser
use for MS MARCO. DPR's psgs_w100.tsv has another order and is recognized by its header,
`id text title`; its columns are quoted as in CSV. A header `id title text` is known too. Any file
may be compressed. Errors name file and line.
"""

import csv
from collections.abc import Callable, Container, Iterator
from typing import NamedTuple

from dprjax.base import files, reading
from dprjax.base.errors import InputError
from dprjax.formats.fields import Record, UniqueIds, check_id

KINDS = ('query', 'passage')


class Text(NamedTuple):
  """A query, or a passage as it is encoded: its title, a space, its text."""

  id: str
  text: str


Query = Text
Passage = Text


class Entry(NamedTuple):
  """A passage as its file has it."""

  id: str
  title: str
  text: str

  @property
  def joined(self) -> str:
    """The text as it is encoded."""
    return f'{self.title} {self.text}'.strip()


Parse = Callable[[str, str], Entry]
"""(line, where for messages) -> the entry."""


def is_json(path: files.PathLike) -> bool:
  return reading.plain_name(path).endswith(('.json', '.jsonl'))


def format_of(path: files.PathLike) -> str:
  """'beir' for jsonl and 'msmarco' for columns, by the file's name."""
  return 'beir' if is_json(path) else 'msmarco'


def corpus_parser(format: str, first_line: str) -> tuple[Parse, bool]:
  """What parses the lines of a corpus, and whether its first line is a header."""
  if format == 'beir':
    return _parse_record, False
  columns = first_line.split('\t')
  if columns[:2] == ['id', 'text']:
    return parse_quoted, True
  return _parse_columns, columns == ['id', 'title', 'text']


def read_corpus(path: files.PathLike, format: str = '') -> Iterator[tuple[int, Entry]]:
  """Yields (line number, entry) of a corpus, whose format is `format_of` its path by default."""
  for number, entry, _ in read_entries(path, format):
    yield number, entry


def read_entries(path: files.PathLike, format: str = '') -> Iterator[tuple[int, Entry, bool]]:
  """`read_corpus`, and whether the corpus is DPR's, with the quotes of CSV."""
  parse: Parse | None = None
  for number, line in reading.read_lines(path, 'corpus file'):
    if parse is None:
      parse, header = corpus_parser(format or format_of(path), line)
      if header:
        continue
    yield number, parse(line, f'{path}, line {number}'), parse is parse_quoted


def read_queries(path: files.PathLike, format: str = '') -> Iterator[tuple[int, Query]]:
  """Yields (line number, query) of a file, whose format is `format_of` its path by default."""
  columns = (format or format_of(path)) != 'beir'
  for number, line in reading.read_lines(path, 'queries file'):
    where = f'{path}, line {number}'
    if columns:
      parts = line.split('\t')
      if len(parts) != 2:
        raise InputError(f'{where}: {len(parts)} columns between tabs; expected 2, id and text')
      yield number, Query(check_id(parts[0], where), parts[1].strip())
    else:
      record = Record(reading.parse_object(line, where), where)
      yield number, Query(record.id('_id'), record.text('text').strip())


def read_texts(
  path: files.PathLike, kind: str, wanted: Container[str] | None = None, format: str = ''
) -> Iterator[Text]:
  """The queries or passages of one file.

  Args:
    path: the file.
    kind: 'query' or 'passage'.
    wanted: ids; other texts are skipped and their ids not kept, so that memory does not grow with
      the file. None: all.
    format: 'beir' or 'msmarco'; `format_of` the path by default.

  Raises:
    InputError: a missing, empty or malformed file, or an id (of those wanted) that comes twice.
  """
  found = files.existing(path, f'{kind} file')
  ids = UniqueIds(found, kind)
  texts: Iterator[tuple[int, Text]] = (
    read_queries(found, format)
    if kind == 'query'
    else ((number, Passage(entry.id, entry.joined)) for number, entry in read_corpus(found, format))
  )
  number = 0
  for number, text in texts:
    if wanted is None or text.id in wanted:
      ids.add(text.id, number)
      yield text
  if not number:
    raise InputError(f'{found}: no {kind} in it')


def read_categories(path: files.PathLike) -> Iterator[tuple[int, str, tuple[str, ...]]]:
  """Yields (line number, id, categories) of a BEIR corpus.jsonl."""
  for number, values in reading.read_jsonl(path, 'corpus file'):
    record = Record(values, f'{path}, line {number}')
    yield number, record.id('_id'), record.labels('categories')


def _parse_record(line: str, where: str) -> Entry:
  record = Record(reading.parse_object(line, where), where)
  title, text = record.text('title', ''), record.text('text')
  return Entry(record.id('_id'), title, text)


def parse_quoted(line: str, where: str) -> Entry:
  """An entry of DPR's psgs_w100.tsv."""
  try:
    columns = next(csv.reader([line], delimiter='\t'))
  except csv.Error as error:
    raise InputError(f'{where}: {error}') from error
  if len(columns) not in (2, 3):
    raise InputError(f'{where}: {len(columns)} columns between tabs; expected id text title')
  return Entry(check_id(columns[0], where), columns[2] if len(columns) == 3 else '', columns[1])


def _parse_columns(line: str, where: str) -> Entry:
  match line.split('\t'):
    case [id_, text]:
      title = ''
    case [id_, title, text] | [id_, _, title, text]:
      pass
    case columns:
      raise InputError(
        f'{where}: {len(columns)} columns between tabs; expected id text, id title text, or id url '
        'title body'
      )
  return Entry(check_id(id_, where), title, text)
