"""Which ids and labels can be used."""

import collections
import hashlib
import logging
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from dprjax.base import reading
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike

if TYPE_CHECKING:
  from dprjax.base import hashes

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


def check_id(given: Id, where: str) -> str:
  """The id as text, if files and runs can hold it."""
  id_ = str(given)
  if _BAD_ID.search(id_):
    raise InputError(
      f'{where}: the id {id_!r:.80} is empty, has white space around it or a control character in '
      'it'
    )
  return id_


def labels(given: Any, where: str) -> tuple[str, ...]:
  """The labels of a list, or of one text with spaces in between, each once."""
  named = reading.convert(given, where, _Labels)
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


_AT_ONCE = 1 << 16  # ids checked immediately


class ManyIds:
  """Ids of an input of any length, which must be unique.

  A repeated id is refused at once among the first ``_AT_ONCE``, and in `finish` otherwise, by
  digests of 16 bytes (`hashes.Copies`).
  """

  def __init__(self, kind: str):
    self._kind = kind
    self._files: list[tuple[str, str]] = []
    self._first: dict[str, int] = {}
    self._waiting: list[tuple[str, int]] = []
    self._copies: hashes.Copies | None = None

  def begin(self, file: PathLike, unit: str = 'line') -> None:
    """Begins a file, whose ids have places called lines or rows."""
    self._files.append((str(file), unit))

  def add(self, id_: str, number: int) -> None:
    """Adds an id on line ``number``."""
    place = len(self._files) - 1 << 40 | number
    if self._copies is not None:
      self._waiting.append((id_, place))
      if len(self._waiting) == _AT_ONCE:
        self._flush()
      return
    first = self._first.setdefault(id_, place)
    if first != place:
      raise self._twice(first, place, f' {id_!r:.80}')
    if len(self._first) == _AT_ONCE:
      # numpy and pyarrow take half a second to import, which few inputs need.
      from dprjax.base import hashes

      self._copies = hashes.Copies()
      self._waiting, self._first = list(self._first.items()), {}
      self._flush()

  def finish(self) -> None:
    """Raises InputError if an id occurred twice."""
    if self._copies is None:
      return
    self._flush()
    if len(pairs := self._copies.pairs()):
      raise self._twice(*pairs[0].tolist())

  def _flush(self) -> None:
    assert self._copies is not None
    digests = b''.join(
      hashlib.blake2b(id_.encode('utf-8', 'surrogatepass'), digest_size=16).digest()
      for id_, _ in self._waiting
    )
    self._copies.add(digests, [place for _, place in self._waiting])
    self._waiting = []

  def _twice(self, first: int, again: int, id_: str = '') -> InputError:
    (file, unit), (other, other_unit) = (self._files[place >> 40] for place in (first, again))
    mask = (1 << 40) - 1
    where = '' if other == file else f'{other}, '
    return InputError(
      f'{file}: {self._kind} id{id_} is on {unit} {first & mask} and again on '
      f'{where}{other_unit} {again & mask}; ids must be unique'
    )


def report_ids(sentence: str, ids: Sequence[str], then: str = '') -> None:
  """Logs a problem with ids, if any, and its remedy."""
  if not ids:
    return
  listed = ', '.join(f'{id_:.80}' for id_ in ids[:_LISTED])
  message = f'{sentence}: {listed}{", ..." if len(ids) > _LISTED else ""}'
  logger.info('%s', message + (f'; {then}' if then else ''))
