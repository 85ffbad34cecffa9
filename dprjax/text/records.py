"""Rows of named values, from every kind of file.

| source | a row |
|---|---|
| .jsonl, .json | an object; .json may be one list of them |
| .csv, .tsv | values under the names of the header, whose delimiter is that of the table |
| .parquet | values under the names of the columns |
| hf:NAME[:SPLIT] | of the ``datasets`` library, see `dprjax.text.hub_data` |

A caller may take tables without a header, too (`Unnamed`). Values of .csv may be in quotes, as the
Python csv module writes them. Those of .tsv may be if the header has a quote, or is that of the
psgs_w100.tsv of DPR, `id text title`, or `id text`; elsewhere quotes are ordinary characters. A
quoted value may contain newlines. Every row has as many values as the first.

The index of pandas is the column `INDEX` in each. All but .parquet may be compressed. One row, or a
batch of them, is in memory at a time.
"""

import csv
import itertools
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dprjax.base import files, reading
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.base.given import identifier

if TYPE_CHECKING:
  import pyarrow.parquet as pq

T = TypeVar('T')

ENDINGS = ('jsonl', 'json', 'csv', 'tsv', 'parquet')
UNNAMED = 'Unnamed: {}'
INDEX = UNNAMED.format(0)

_QUOTED = (['id', 'text'], ['id', 'text', 'title'])
_BATCH = 1024  # rows of a parquet file at a time
_TEXT: Any = str | None
# A limit of the whole process; some passages are longer than the default of 131,072 characters.
csv.field_size_limit(reading.MAX_ENTRY)


class Row(NamedTuple):
  """A row, the number of its first line (or its index from 1), and its place for messages."""

  number: int
  where: str
  values: dict[str, Any]


class Unnamed(NamedTuple):
  """Tables that may do without a header.

  Attributes:
    is_header: whether the cells of the first line, in lower case, are names.
    positions: the names of the columns if they are not, one tuple for each possible number.
  """

  is_header: Callable[[list[str]], bool]
  positions: Sequence[Sequence[str]]


def ending_of(path: files.PathLike) -> str:
  """The ending of a file name in lower case, without the ending of a compression."""
  return reading.plain_name(path).rpartition('.')[2].lower()


def is_json(path: files.PathLike) -> bool:
  return not files.is_hub_name(path) and ending_of(path) in ('jsonl', 'json')


def unit_of(path: files.PathLike) -> str:
  """What the number of a `Row` counts."""
  return 'row' if files.is_hub_name(path) or ending_of(path) == 'parquet' else 'line'


def read(path: files.PathLike, what: str, unnamed: Unnamed | None = None) -> Iterator[Row]:
  """Yields the rows of a source, ``what`` in messages.

  A file with an ending that is not in `ENDINGS` is a table of tabs if that may be ``unnamed``, and
  JSON otherwise.
  """
  if files.is_hub_name(path):
    from dprjax.text import hub_data

    for number, values in enumerate(hub_data.rows(str(path)), 1):
      yield Row(number, f'{path}, row {number}', values)
    return
  match ending_of(path):
    case 'parquet':
      yield from _read_parquet(path, what)
    case ending if ending in ('csv', 'tsv') or (unnamed and not is_json(path)):
      yield from _read_table(path, what, unnamed)
    case _:
      for number, where, values in reading.read_records(path, what, dict[str, Any]):
        yield Row(number, where, values)


def read_as(path: files.PathLike, what: str, of: type[T]) -> Iterator[tuple[int, str, T]]:
  """`reading.read_records` of any kind of source."""
  if is_json(path):
    yield from reading.read_records(path, what, of)
    return
  for row in read(path, what):
    yield row.number, row.where, reading.convert(row.values, row.where, of)


def read_columns(
  path: files.PathLike, names: Sequence[str], what: str
) -> Iterator[tuple[int, list[Any]]]:
  """(number of its first line, the values in the order of ``names``) of every row.

  A table may do without a header: then it has these columns only.
  """
  unnamed = Unnamed(set(names).issubset, [names])
  exact, usual = dict(zip(names, names, strict=True)), {name: (name,) for name in names}
  for row in read(path, what, None if is_json(path) else unnamed):
    roles = exact
    if not row.values.keys() >= exact.keys():
      roles = find_roles([*row.values], usual, {}, row.where, needed=names)
    yield row.number, [row.values[roles[name]] for name in names]


def names_of(path: files.PathLike, what: str) -> list[str]:
  """The names of the values of the first row."""
  if files.is_hub_name(path):
    from dprjax.text import hub_data

    return hub_data.names(str(path))
  for row in read(path, what):
    return list(row.values)
  return []


def parse_columns(text: str, where: str) -> dict[str, str]:
  """``ROLE=COLUMN,ROLE=COLUMN`` as a mapping."""
  columns = {}
  for part in filter(None, text.split(',')):
    role, equals, name = part.partition('=')
    if not (role.strip() and equals and name.strip()):
      raise InputError(f'{where}: expected ROLE=COLUMN,ROLE=COLUMN, not {text!r:.80}')
    columns[role.strip()] = name.strip()
  return columns


def find_roles(
  names: Sequence[str],
  usual: Mapping[str, Sequence[str]],
  chosen: Mapping[str, str],
  where: str,
  clear: Container[str] = (),
  needed: Sequence[str] = (),
) -> dict[str, str]:
  """The column of every role that has one.

  Args:
    usual: by role, names in lower case; the first that exists counts.
    chosen: by role, the name chosen by the user.
    clear: roles for which only one usual name may exist.
    needed: roles that must have a column.
  """
  for role, name in chosen.items():
    if role not in usual or name not in names:
      raise InputError(
        f'{where}: {role:.40}={name:.80}: roles are {", ".join(usual)}, and columns '
        f'{", ".join(names):.300}'
      )
  known = {name.strip().lower(): name for name in reversed(names)}
  taken = set(chosen.values())
  roles = dict(chosen)
  for role, candidates in usual.items():
    if role not in roles:
      here = [known[name] for name in candidates if name in known and known[name] not in taken]
      if role in clear and len(here) > 1:
        raise InputError(
          f'{where}: {" and ".join(here)} could be the {role}; choose one, as {role}={here[0]}, '
          'with --column, config.data.columns or fit(columns={...}), or rename the others'
        )
      for one in here[:1]:
        roles[role] = one
        taken.add(one)
  if absent := [role for role in needed if role not in roles]:
    raise InputError(
      f'{where}: no column of {" and ".join(absent)}; there are {", ".join(names):.300}; rename '
      f'one, or name it with --column or config.data.columns, as {absent[0]}=NAME'
    )
  return roles


def text_of(value: Any, where: str, name: str) -> str:
  """A value as text; a missing one is empty."""
  return reading.convert(value, f'{where}: {name}', _TEXT) or ''


def id_of(value: Any, where: str, name: str) -> str:
  """A value as an unchecked id."""
  if isinstance(value, float) and value.is_integer():  # a column of numbers with a gap
    value = int(value)
  return identifier(value, f'{where}: {name}')


def _read_table(path: files.PathLike, what: str, unnamed: Unnamed | None) -> Iterator[Row]:
  lines, place = reading.read_lines(path, what, blank=True), str(path)
  first = next(((number, line) for number, line in lines if line.strip()), None)
  if first is None:
    return
  tabs, delimiter = ending_of(path) != 'csv', _delimiter_of(first[1])
  header = _names_of(first[1], delimiter)
  if len(header) == 1 or (unnamed and not unnamed.is_header(header)):
    delimiter = '\t' if tabs else ','
    header = _names_of(first[1], delimiter)
  names: Sequence[str] = ()
  positions: Sequence[Sequence[str]] | None = None
  if unnamed is not None and not unnamed.is_header(header):
    positions = unnamed.positions
  quoted = not tabs or (positions is None and ('"' in first[1] or header in _QUOTED))
  rows = split_rows(itertools.chain([first], lines), place, delimiter, quoted=quoted)
  for number, cells in rows:
    where = f'{place}, line {number}'
    if not names:
      names = _header_of(cells)
      if positions is not None:
        names = next((one for one in positions if len(one) == len(cells)), ())
      if not names or len(set(names)) < len(names):
        expected = [*map(' '.join, positions or ()), 'a header with distinct names']
        raise InputError(
          f'{where}: {len(cells)} columns between {"tabs" if tabs else "commas"}, '
          f'{", ".join(cells):.80}; expected {", or ".join(expected)}'
        )
      if positions is None:
        continue
    yield Row(number, where, dict(zip(names, cells, strict=True)))


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


def _header_of(cells: Iterable[str]) -> list[str]:
  """The names of columns; those without a name have the one that pandas gives them."""
  return [cell.strip() or UNNAMED.format(place) for place, cell in enumerate(cells)]


def _delimiter_of(header: str) -> str:
  """A tab if there is one outside of quotes, else what occurs most often."""
  bare = re.sub('"[^"]*"', '', header)
  return '\t' if '\t' in bare else max(',;|', key=bare.count)


def _names_of(line: str, delimiter: str = '\t') -> list[str]:
  """The names in a header, in lower case and without quotes."""
  names = _header_of(name.strip().strip('"') for name in line.split(delimiter))
  return [name.lower() for name in names]


def _read_parquet(path: files.PathLike, what: str) -> Iterator[Row]:
  import pyarrow as pa
  import pyarrow.parquet as pq

  place = files.regular_file(path, what)
  try:
    with place.open('rb') as raw, pq.ParquetFile(raw) as file:
      number, name = 0, str(path)
      index = _index_of(file)
      for batch in file.iter_batches(_BATCH):
        for values in batch.to_pylist():
          if index is not None:
            values[INDEX] = values[index] if isinstance(index, str) else index[number]
          number += 1
          yield Row(number, f'{name}, row {number}', values)
  except (pa.ArrowException, OSError) as error:
    if isinstance(error, OSError) and error.errno is not None:
      raise
    why = ' '.join(str(error).split())
    raise InputError(f'{path}: not a complete Parquet file ({why:.200}); fetch it again') from error


def _index_of(file: 'pq.ParquetFile') -> range | str | None:
  """The index of a pandas table, or its column; None if it counts the rows from 0."""
  schema = file.schema_arrow
  index = (schema.pandas_metadata or {}).get('index_columns', ())
  one = index[0] if len(index) == 1 else None
  if isinstance(one, dict):
    rows = range(one['start'], one['stop'], one['step'])
    # The description stays when others take rows out of the table.
    return rows if len(rows) == file.metadata.num_rows and rows != range(len(rows)) else None
  return one if one in schema.names else None
