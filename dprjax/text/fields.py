"""Which ids and labels can be used."""

import collections
import hashlib
import logging
import re
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from dprjax.base import hashes, reading
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike

# Control characters and the line separators of Python splitlines and editors; byte-order marks,
# which joined files leave inside; and halves of surrogate pairs, from command lines with bytes that
# are not UTF-8.
_BAD_ID = re.compile(r'^\s|\s$|[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff]|^$')

_LISTED = 5  # ids in a message

logger = logging.getLogger('dprjax')


Id = str | int
"""An id in JSON."""

_Label = Annotated[str, msgspec.Meta(pattern=r'\A\S([\s\S]*\S)?\Z')]
_Labels: Any = str | Annotated[list[_Label], msgspec.Meta(max_length=1000)] | None


def check_id(value: Id, where: str) -> str:
  """The id as text, if files and runs can hold it."""
  id_ = str(value)
  if _BAD_ID.search(id_):
    raise InputError(
      f'{where}: the id {id_!r:.80} is empty, has white space around it or a control character in '
      'it'
    )
  return id_


def labels(value: Any, where: str) -> tuple[str, ...]:
  """The labels of a list, or of one text with spaces in between, each once."""
  named = reading.convert(value, where, _Labels)
  return tuple(dict.fromkeys(named.split() if isinstance(named, str) else named or ()))


def read_ids(path: PathLike, what: str = 'ids') -> list[str]:
  """A file of ids, one a line; blank lines are left out."""
  ids = UniqueIds(path, 'the')
  for number, line in reading.read_lines(path, what):
    ids.add(check_id(line, f'{path}, line {number}'), number)
  return list(ids.lines)


def check_unique(ids: Sequence[str], where: str) -> None:
  """Raises InputError, which begins with ``where``, for a repeated id."""
  if len(set(ids)) < len(ids):
    twice = collections.Counter(ids).most_common(1)[0][0]
    raise InputError(f'{where}: the id {twice!r:.80} occurs twice; ids must be unique')


class UniqueIds:
  """Ids of one file, which must be unique.

  Attributes:
    lines: id -> the number of its line.
  """

  def __init__(self, path: PathLike, kind: str):
    self._path, self._kind = path, kind
    self.lines: dict[str, int] = {}

  def add(self, id_: str, line: int) -> None:
    """Raises InputError if the id was added before."""
    first = self.lines.setdefault(id_, line)
    if first != line:
      raise InputError(
        f'{self._path}: {self._kind} id {id_!r} is on line {first} and again on line {line}; ids '
        'must be unique'
      )


class ManyIds:
  """Ids of an input of any length, which must be unique.

  `finish` compares them, by digests of 16 bytes (`hashes.Copies`).
  """

  _AT_ONCE = 1 << 16

  def __init__(self, kind: str):
    self._kind = kind
    self._files: list[tuple[str, str]] = []
    self._waiting: list[tuple[str, int]] = []
    self._copies = hashes.Copies()

  def begin(self, file: PathLike, unit: str = 'line') -> None:
    """Begins a file, whose ids have places called lines or rows."""
    self._files.append((str(file), unit))

  def add(self, id_: str, number: int) -> None:
    self._waiting.append((id_, len(self._files) - 1 << 40 | number))
    if len(self._waiting) == self._AT_ONCE:
      self._flush()

  def finish(self) -> None:
    """Raises InputError if an id occurred twice."""
    self._flush()
    if not len(pairs := self._copies.pairs()):
      return
    places = pairs[0].tolist()
    (file, unit), (other_file, other_unit) = (self._files[place >> 40] for place in places)
    first, again = (place & (1 << 40) - 1 for place in places)
    where = '' if other_file == file else f'{other_file}, '
    raise InputError(
      f'{file}: {self._kind} id is on {unit} {first} and again on {where}{other_unit} {again}; ids '
      'must be unique'
    )

  def _flush(self) -> None:
    digests = b''.join(
      hashlib.blake2b(id_.encode('utf-8', 'surrogatepass'), digest_size=16).digest()
      for id_, _ in self._waiting
    )
    self._copies.add(digests, [place for _, place in self._waiting])
    self._waiting = []


def report_ids(sentence: str, ids: Sequence[str], then: str = '') -> None:
  """Logs a problem with ids, if any, and its remedy."""
  if not ids:
    return
  listed = ', '.join(f'{id_:.80}' for id_ in ids[:_LISTED])
  message = f'{sentence}: {listed}{", ..." if len(ids) > _LISTED else ""}'
  logger.info('%s', message + (f'; {then}' if then else ''))
