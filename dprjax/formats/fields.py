"""Fields of records, and ids: the one place that decides which of them can be used."""

import re
from typing import Any

from dprjax.base.errors import InputError
from dprjax.base.files import PathLike

_BAD_ID = re.compile(r'^\s|\s$|[\x00-\x1f\x7f]|^$')


def check_id(identifier: str, where: str) -> str:
  """The id, if files and runs can hold it.

  Raises:
    InputError: it is empty, or has white space around it or a control character in it.
  """
  if _BAD_ID.search(identifier):
    raise InputError(
      f'{where}: the id {identifier!r:.80} is empty, has white space around it or a control '
      'character in it'
    )
  return identifier


def identifier(record: dict[str, Any], key: str, where: str) -> str:
  """The id under ``key``, text or a whole number."""
  value = record.get(key)
  if not isinstance(value, str | int) or isinstance(value, bool) or value == '':
    raise _wrong(value, key, where, 'text or a number')
  return check_id(str(value), where)


def first_identifier(record: dict[str, Any], keys: tuple[str, ...], where: str) -> str | None:
  """The id under the first of these keys that has one; None if no key has."""
  return next((identifier(record, key, where) for key in keys if record.get(key) is not None), None)


def text(record: dict[str, Any], key: str, where: str, default: str | None = None) -> str:
  """The text under ``key``; ``default``, unless that is None, where there is none."""
  value = record.get(key)
  if value is None and default is not None:
    return default
  if not isinstance(value, str):
    raise _wrong(value, key, where, 'text')
  return value


def entries(
  record: dict[str, Any],
  key: str,
  where: str,
  kind: type,
  expected: str,
  optional: bool = False,
) -> list[Any]:
  """The list of ``kind`` under ``key``; empty where it is ``optional`` and absent."""
  value = record.get(key, [] if optional else None)
  if not isinstance(value, list) or not all(isinstance(entry, kind) for entry in value):
    raise _wrong(value, key, where, expected)
  return value


def _wrong(value: Any, key: str, where: str, expected: str) -> InputError:
  found = 'missing' if value is None else f'{value!r:.40}'
  return InputError(f'{where}: {key!r} is {found}; expected {expected}')


class UniqueIds:
  """Ids of one file, each of which may come once.

  Attributes:
    lines: id -> the number of its line.
  """

  def __init__(self, path: PathLike, kind: str):
    self._path, self._kind = path, kind
    self.lines: dict[str, int] = {}

  def add(self, identifier: str, line: int) -> None:
    """Raises InputError if the id is there already."""
    first = self.lines.setdefault(identifier, line)
    if first != line:
      raise InputError(
        f'{self._path}: {self._kind} id {identifier!r} is on line {first} and again on line '
        f'{line}; ids must be unique'
      )
