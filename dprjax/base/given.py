"""Texts from Python programs: lists, and columns of pandas, pyarrow, polars and numpy."""

import numbers
import re
from collections.abc import Iterable, Mapping
from typing import Any

from dprjax.base.errors import InputError

_SURROGATE = re.compile('[\ud800-\udfff]')  # half of a pair, which no tokenizer takes

INDEX = '__index_level_0__'  # as Arrow calls the index of pandas


def texts(data: Any, what: str = 'texts') -> list[str]:
  return [check_text(value, number, what) for number, value in enumerate(values(data, what))]


def values(data: Any, what: str) -> list[Any]:
  """The values of an iterable or a column, as Python's own types where possible."""
  columns = table(data)
  others = isinstance(data, str | bytes | Mapping | set | frozenset)
  axes = getattr(data, 'ndim', 1)
  if columns is not None or others or not isinstance(data, Iterable) or axes != 1:
    kind = (
      type(data).__name__ if columns is None else f'a table of {", ".join(columns) or "no columns"}'
    )
    raise InputError(f'{what}: expected a list of strings or one column, not {kind}')
  for convert in ('to_pylist', 'to_list', 'tolist'):  # pyarrow; pandas, polars; numpy
    if hasattr(data, convert):
      return list(getattr(data, convert)())
  return list(data)


def table(data: Any) -> dict[str, Any] | None:
  """The columns of a table of pandas, pyarrow, polars or datasets; else None.

  Named levels of a pandas index are columns, and an `index_of` is the column `INDEX`.
  """
  names = getattr(data, 'column_names', None)  # pyarrow and datasets
  if names is None:
    names = getattr(data, 'columns', None)  # pandas and polars
  if names is None or isinstance(data, Mapping):
    return None
  index: Any = getattr(data, 'index', None)
  levels = [name for name in getattr(index, 'names', ()) if name is not None]
  columns = {str(name): index.get_level_values(name) for name in levels}
  if (labels := index_of(data)) is not None:
    columns[INDEX] = labels
  return columns | {str(name): data[name] for name in names}


def index_of(data: Any) -> list[Any] | None:
  """The index of a pandas table or column, unless it counts the rows or has several levels."""
  index: Any = getattr(data, 'index', None)
  if getattr(index, 'nlevels', 0) != 1:
    return None
  values = index.tolist()
  return None if values == list(range(len(values))) else values


def identifier(value: Any, what: str) -> str:
  """An id (text or a whole number) as text."""
  if isinstance(value, bool) or not isinstance(value, str | numbers.Integral):
    raise InputError(f'{what} is {value!r:.40}; expected text or a whole number')
  return str(value)


def check_text(value: Any, number: int, what: str = 'texts') -> str:
  """The text, which a tokenizer takes."""
  if not isinstance(value, str) or _SURROGATE.search(value):
    more = "; leave it out, or give ''" if is_missing(value) else ''
    raise InputError(f'{what}: number {number} is {value!a:.40}; expected a string{more}')
  return value


def is_missing(value: Any) -> bool:
  """Whether it is None, NaN, NaT or the NA of pandas."""
  if value is None or type(value).__name__ == 'NAType':
    return True
  try:
    return bool(value != value)
  except (TypeError, ValueError):  # an array, say
    return False
