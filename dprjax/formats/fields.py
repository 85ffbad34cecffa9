"""Fields of records, and ids: the one place that decides which of them can be used."""

import math
import re
from typing import Any, NamedTuple

from dprjax.base.errors import InputError
from dprjax.base.files import PathLike
from dprjax.base.reading import read_lines

# Control characters, and the separators of lines that Python's splitlines and editors know; a
# byte-order mark within a file comes from files that were joined, half of a surrogate pair from
# bytes of a command line that are no UTF-8.
_BAD_ID = re.compile(r'^\s|\s$|[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff]|^$')

_MOST_LABELS = 1000


Id = str | int
"""An id as JSON has it."""

Labels = str | list[str] | None
"""Labels as JSON has them: a list, or one text with spaces in between."""


def check_id(given: Id, where: str) -> str:
  """The id as text, if files and runs can hold it.

  Raises:
    InputError: it is empty, or has white space around it or a control character in it.
  """
  id_ = str(given)
  if _BAD_ID.search(id_):
    raise InputError(
      f'{where}: the id {id_!r:.80} is empty, has white space around it or a control character in '
      'it'
    )
  return id_


def labels(given: Labels, where: str) -> tuple[str, ...]:
  """The labels, each once. Raises InputError for one that is empty or for more than 1,000."""
  names = given.split() if isinstance(given, str) else given or ()
  if len(names) > _MOST_LABELS or not all(name.strip() == name != '' for name in names):
    raise InputError(
      f'{where}: expected at most {_MOST_LABELS:,} labels, none empty or with spaces around it'
    )
  return tuple(dict.fromkeys(names))


class Record(NamedTuple):
  """A JSON object and where it is from: 'FILE, line 7'.

  Every method raises InputError, naming that place and the key, for a value of another type.
  """

  values: dict[str, Any]
  where: str

  def id(self, key: str) -> str:
    """The id under ``key``, text or a whole number."""
    value = self.values.get(key)
    if not isinstance(value, str | int) or isinstance(value, bool) or value == '':
      raise self._wrong(key, 'text or a number')
    return check_id(str(value), self.where)

  def first_id(self, *keys: str) -> str | None:
    """The id under the first of these keys that is there."""
    return next((self.id(key) for key in keys if self.values.get(key) is not None), None)

  def text(self, key: str, default: str | None = None) -> str:
    """The text under ``key``, or the default, if any."""
    value = self.values.get(key)
    if value is None and default is not None:
      return default
    if not isinstance(value, str):
      raise self._wrong(key, 'text')
    return value

  def optional_text(self, key: str) -> str | None:
    """The text under ``key``, which must be there but may be null."""
    if key not in self.values or self.values[key] is not None:
      return self.text(key)
    return None

  def choice(self, key: str, *values: str) -> str:
    """One of these texts."""
    value = self.values.get(key)
    if not isinstance(value, str) or value not in values:
      raise self._wrong(key, ' or '.join(map(repr, values)))
    return value

  def boolean(self, key: str) -> bool:
    """True or false."""
    value = self.values.get(key)
    if not isinstance(value, bool):
      raise self._wrong(key, 'true or false')
    return value

  def whole(self, key: str, least: int, most: int) -> int:
    """A whole number within these bounds."""
    value = self.values.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
      raise self._wrong(key, f'a whole number from {least} to {most}')
    return value

  def record(self, key: str) -> 'Record':
    """The object under ``key``."""
    value = self.values.get(key)
    if not isinstance(value, dict):
      raise self._wrong(key, 'an object')
    return Record(value, f'{self.where}, {key!r}')

  def texts(self, key: str, expected: str = 'a list of texts', optional: bool = False) -> list[str]:
    """The list of texts under ``key``; empty if it is ``optional`` and absent."""
    return self._list(key, str, expected, optional)

  def records(self, key: str, expected: str, optional: bool = False) -> list['Record']:
    """The list of objects under ``key``; empty if it is ``optional`` and absent."""
    return [Record(value, self.where) for value in self._list(key, dict, expected, optional)]

  def number(self, key: str, default: float | None = None) -> float:
    """The finite number under ``key``, or the default, if any."""
    value = self.values.get(key)
    if value is None and default is not None:
      return default
    if not is_number(value):
      raise self._wrong(key, 'a finite number')
    return float(value)  # type: ignore[arg-type]

  def numbers(self, key: str, count: int) -> list[float]:
    """The list of ``count`` finite numbers under ``key``."""
    values = self.values.get(key)
    if not isinstance(values, list) or len(values) != count or not all(map(is_number, values)):
      raise self._wrong(key, f'a list of {count} finite numbers')
    return [float(value) for value in values]

  def _list(self, key: str, kind: type, expected: str, optional: bool) -> list[Any]:
    values = self.values.get(key, [] if optional else None)
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
      raise self._wrong(key, expected)
    return values

  def _wrong(self, key: str, expected: str) -> InputError:
    value = self.values.get(key)
    found = 'missing' if value is None else f'{value!r:.40}'
    return InputError(f'{self.where}: {key!r} is {found}; expected {expected}')


def read_ids(path: PathLike, what: str = 'ids') -> list[str]:
  """A file of ids, one a line; blank lines are left out.

  Raises:
    InputError: no ids; an id that cannot be used (`check_id`) or comes twice.
  """
  ids = UniqueIds(path, 'the')
  for number, line in read_lines(path, what):
    ids.add(check_id(line, f'{path}, line {number}'), number)
  if not ids.lines:
    raise InputError(f'{what}: {path} holds no ids')
  return list(ids.lines)


def is_number(value: Any) -> bool:
  """Whether a value of JSON is a finite number."""
  try:
    return type(value) in (int, float) and math.isfinite(value)
  except OverflowError:  # an integer of hundreds of digits
    return False


class UniqueIds:
  """Ids of one file, each of which may come once.

  Attributes:
    lines: id -> the number of its line.
  """

  def __init__(self, path: PathLike, kind: str):
    self._path, self._kind = path, kind
    self.lines: dict[str, int] = {}

  def add(self, id_: str, line: int) -> None:
    """Raises InputError if the id is there already."""
    first = self.lines.setdefault(id_, line)
    if first != line:
      raise InputError(
        f'{self._path}: {self._kind} id {id_!r} is on line {first} and again on line {line}; ids '
        'must be unique'
      )
