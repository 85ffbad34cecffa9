"""Ids and labels: which of them can be used."""

import re

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
