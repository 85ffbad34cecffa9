"""Rows of a few named values, as a table or as records.

| ending | a row |
|---|---|
| .csv | values between commas (or semicolons, tabs, pipes), which may be quoted |
| .tsv | values between tabs; quotes count as in .csv only if the header is quoted |
| .jsonl | an object with the names as keys |

A table may begin with a header that names these columns and others. Every row has as many columns
as the first. Any file may be compressed.
"""

import csv
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from etils import epath

from dprjax.base import files, reading
from dprjax.base.errors import InputError

UNNAMED = 'Unnamed: {}'

# A limit of the whole process; some passages are longer than the default of 131,072 characters.
csv.field_size_limit(reading.MAX_ENTRY)


def split_rows(
  lines: Iterable[tuple[int, str]], name: str, delimiter: str = '\t', *, quoted: bool
) -> Iterator[tuple[int, list[str]]]:
  """(number of its first line, values) of every row; blank lines between rows are left out.

  Lines are read lazily: no line after the end of the present row has been read.

  Args:
    lines: numbers and lines without their newlines, blank lines too.
    name: of the file, for messages.
    delimiter: between values.
    quoted: whether values may be in quotes, as the Python csv module writes them.

  Raises:
    InputError: with the number of the first line of the row: quotes that the csv module does not
      write, or a number of columns that differs from the first row.
  """
  width = first = 0
  for number, cells in _quoted_rows(lines, name, delimiter) if quoted else _raw(lines, delimiter):
    if not first:
      first, width = number, len(cells)
    if len(cells) != width:
      raise InputError(
        f'{name}, line {number}: {_counted(cells, delimiter)}; expected {width}, as in line {first}'
      )
    yield number, cells


def _counted(cells: Sequence[str], delimiter: str) -> str:
  between = {'\t': 'tabs', ',': 'commas'}.get(delimiter, repr(delimiter))
  return f'{len(cells)} column{"s" * (len(cells) != 1)} between {between}'


def _raw(lines: Iterable[tuple[int, str]], delimiter: str) -> Iterator[tuple[int, list[str]]]:
  return ((number, line.split(delimiter)) for number, line in lines if line.strip())


def _quoted_rows(
  lines: Iterable[tuple[int, str]], name: str, delimiter: str
) -> Iterator[tuple[int, list[str]]]:
  taken: list[tuple[int, str]] = []

  def take() -> Iterator[str]:
    for number, line in lines:
      taken.append((number, line))
      # The csv module accepts a carriage return only in quotes. No line has a null byte.
      yield line.replace('\r', '\0') + '\n'

  try:
    # Strict: an unclosed quote is an error; otherwise the value would reach to the end of the file.
    for cells in csv.reader(take(), delimiter=delimiter, strict=True):
      number = taken[0][0]
      if len(taken) > 1 and all(_is_row(line, delimiter, len(cells)) for _, line in taken):
        raise csv.Error(
          f'one quoted value spans {len(taken)} lines that look like rows; if they are one row, '
          'put all '
          'its values in quotes'
        )
      taken.clear()
      if ''.join(cells).strip():
        yield number, [cell.replace('\0', '\r') for cell in cells]
  except csv.Error as error:
    raise InputError(
      f'{name}, line {taken[0][0]}: {error}; put a value with a quote, a newline or the delimiter '
      'in quotes, and write each quote within them twice'
    ) from error


def _is_row(line: str, delimiter: str, width: int) -> bool:
  """Whether a line inside a quoted value looks like a row with an unquoted id."""
  cells = line.split(delimiter)
  return len(cells) == width > 1 and cells[0].split() == [cells[0]] and cells[0][0] != '"'


def read_rows(
  path: files.PathLike, names: Sequence[str], what: str
) -> Iterator[tuple[int, list[Any]]]:
  """(number of its first line, the values in the order of ``names``) of every row.

  Raises:
    InputError: the file is missing, or a row lacks one of these values. Values are text in a table,
      and of any type in a record.
  """
  file = files.existing(path, what)
  ending = reading.plain_name(file).rpartition('.')[2].lower()
  if ending in ('jsonl', 'json'):
    return _read_records(file, names, what)
  return _read_table(file, names, what, '\t' if ending == 'tsv' else ',')


def _read_records(
  path: epath.Path, names: Sequence[str], what: str
) -> Iterator[tuple[int, list[Any]]]:
  for number, record in reading.read_jsonl(path, what, dict[str, Any]):
    absent = [name for name in names if name not in record]
    if absent:
      raise InputError(
        f'{path}, line {number}: {", ".join(absent)} missing; expected the keys {", ".join(names)}'
      )
    yield number, [record[name] for name in names]


def _read_table(
  path: epath.Path, expected: Sequence[str], what: str, delimiter: str
) -> Iterator[tuple[int, list[Any]]]:
  quoted = delimiter == ','
  lines = reading.read_lines(path, what, blank=True)
  for number, line in lines:
    if line.strip():
      found = delimiter_of(line)
      if set(expected) <= set(names_of(line, found)):
        delimiter, quoted = found, quoted or '"' in line
      lines = itertools.chain([(number, line)], lines)
      break
  places, header = list(range(len(expected))), False
  for place, (number, cells) in enumerate(split_rows(lines, str(path), delimiter, quoted=quoted)):
    names = [cell.strip().lower() for cell in cells]
    if not place and set(expected) <= set(names):
      places, header = [names.index(name) for name in expected], True
    elif not header and len(cells) != len(expected):
      raise InputError(
        f'{path}, line {number}: {_counted(cells, delimiter)}; expected {len(expected)}: '
        f'{", ".join(expected)}'
      )
    else:
      yield number, [cells[place] for place in places]


def header_of(cells: Iterable[str]) -> list[str]:
  """The names of columns; those without a name have the one that pandas gives them."""
  return [cell.strip() or UNNAMED.format(place) for place, cell in enumerate(cells)]


def delimiter_of(header: str) -> str:
  """A tab if there is one outside of quotes, else what occurs most often."""
  bare = re.sub('"[^"]*"', '', header)
  return '\t' if '\t' in bare else max(',;|', key=bare.count)


def names_of(line: str, delimiter: str = '\t') -> list[str]:
  """The names in a header, in lower case and without quotes."""
  return [name.strip().strip('"').strip().lower() for name in line.split(delimiter)]
