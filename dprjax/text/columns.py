"""Rows of a table as text. Every row has as many columns as the first."""

import csv
import re
from collections.abc import Iterable, Iterator

from dprjax.base import reading
from dprjax.base.counts import counted
from dprjax.base.errors import InputError

UNNAMED = 'Unnamed: {}'

# A limit of the whole process; some passages are longer than the default of 131,072 characters.
csv.field_size_limit(reading.MAX_ENTRY)


def split_rows(
  lines: Iterable[tuple[int, str]], name: str, delimiter: str | None = '\t', *, quoted: bool
) -> Iterator[tuple[int, list[str]]]:
  """(number of its first line, values) of every row; blank lines between rows are left out.

  Lines are read lazily: no line after the end of the present row has been read.

  Args:
    lines: numbers and lines without their newlines, blank lines too.
    delimiter: None: white space.
    quoted: whether values may be in quotes, as the Python csv module writes them.
  """
  width = first = 0
  raw = ((number, line.split(delimiter)) for number, line in lines if line.strip())
  for number, cells in _quoted_rows(lines, name, delimiter or ' ') if quoted else raw:
    if not first:
      first, width = number, len(cells)
    if len(cells) != width:
      raise InputError(
        f'{name}, line {number}: {counted(len(cells), "columns")} between '
        f'{delimiter or "spaces"!r}; expected {width}, as in line {first}'
      )
    yield number, cells


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
          'put all its values in quotes'
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


def header_of(cells: Iterable[str]) -> list[str]:
  """The names of columns; those without a name have the one that pandas gives them."""
  return [cell.strip() or UNNAMED.format(place) for place, cell in enumerate(cells)]


def delimiter_of(header: str) -> str:
  """A tab if there is one outside of quotes, else what occurs most often."""
  bare = re.sub('"[^"]*"', '', header)
  return '\t' if '\t' in bare else max(',;|', key=bare.count)


def names_of(line: str, delimiter: str = '\t') -> list[str]:
  """The names in a header, in lower case and without quotes."""
  names = header_of(name.strip().strip('"') for name in line.split(delimiter))
  return [name.lower() for name in names]
