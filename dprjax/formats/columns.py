"""Rows of a few named values, as a table or as records.

| ending | a row |
|---|---|
| .csv | values between commas; quoted where one holds a comma |
| .tsv | values between tabs, nothing quoted |
| .jsonl | an object with the names as keys |

A table may begin with a header, which then names the columns and may name others. Any file may be
compressed.
"""

import csv
from collections.abc import Iterator, Sequence
from typing import Any

from etils import epath

from dprjax.base import files, reading
from dprjax.base.errors import InputError


def read_rows(
  path: files.PathLike, names: Sequence[str], what: str
) -> Iterator[tuple[int, list[Any]]]:
  """(number of its first line, the values in the order of ``names``) of every row.

  Raises:
    InputError: the file is missing, or a row has not these values. They are text in a table and
      anything in a record.
  """
  file = files.existing(path, what)
  ending = reading.plain_name(file).rpartition('.')[2].lower()
  if ending in ('jsonl', 'json'):
    return _read_records(file, names, what)
  return _read_table(file, names, what, '\t' if ending == 'tsv' else ',')


def _read_records(
  path: epath.Path, names: Sequence[str], what: str
) -> Iterator[tuple[int, list[Any]]]:
  for number, record in reading.read_jsonl(path, what):
    absent = [name for name in names if name not in record]
    if absent:
      raise InputError(
        f'{path}, line {number}: {", ".join(absent)} missing; expected the keys {", ".join(names)}'
      )
    yield number, [record[name] for name in names]


def _read_table(
  path: epath.Path, expected: Sequence[str], what: str, delimiter: str
) -> Iterator[tuple[int, list[Any]]]:
  start = 0

  def lines() -> Iterator[str]:
    nonlocal start
    for number, line in reading.read_lines(path, what):
      start = start or number
      yield line + '\n'

  # Strict, so that a quote that is never closed is an error, not a sentence as long as the file.
  rows = csv.reader(
    lines(),
    delimiter=delimiter,
    strict=True,
    quoting=csv.QUOTE_MINIMAL if delimiter == ',' else csv.QUOTE_NONE,
  )
  places, width, first = list(range(len(expected))), len(expected), True
  try:
    for cells in rows:
      number, start = start, 0
      names = [cell.strip().lower() for cell in cells]
      if first and set(expected) <= set(names):
        places, width = [names.index(name) for name in expected], len(cells)
      elif len(cells) != width:
        others = ' and others, as in the header' if width > len(expected) else ''
        raise InputError(
          f'{path}, line {number}: {len(cells)} columns, expected {width}: '
          f'{", ".join(expected)}{others}'
        )
      else:
        yield number, [cells[place] for place in places]
      first = False
  except csv.Error as error:
    raise InputError(
      f'{path}, line {start}: {error}; put a sentence with a comma or a quote in quotes, and write '
      'each quote within them twice'
    ) from error
