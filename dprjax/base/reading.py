"""Text and JSON: read once, with errors that name file and line.

Text is UTF-8; a byte-order mark at its beginning is left out. A line ends with a newline, before
which there may be a carriage return. It has no null byte and at most 64 million characters.
"""

import bz2
import contextlib
import functools
import gzip
import io
import json
import lzma
import math
import re
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

from etils import epath

from dprjax.base.errors import InputError
from dprjax.base.files import PathLike, existing_file

_CHUNK = 1 << 20  # characters of a JSON array read at a time
MAX_ENTRY = 1 << 26  # a line or an entry longer than this means a broken file
_MAX_JSON = 1 << 28  # characters of a whole JSON file
_DEEPEST = 64  # levels of lists and objects in JSON


@contextlib.contextmanager
def open_bytes(
  path: PathLike, what: str = 'file'
) -> Iterator[tuple[IO[bytes], Callable[[], float]]]:
  """Opens a file, decompressed by name (`COMPRESSED`).

  Yields the file, and a function that returns the fraction of it that was read so far.

  Raises:
    InputError: it is missing, empty, a folder, or badly compressed (found while it is read).
  """
  found = existing_file(path, what)
  with found.open('rb') as raw, decoding(str(found)):
    size = 0
    if raw.seekable():  # a pipe is not
      size = raw.seek(0, io.SEEK_END)
      raw.seek(0)
    decompress = _DECOMPRESSORS.get(found.suffix)
    yield (decompress(raw) if decompress else raw), lambda: raw.tell() / size if size else 0.0


@contextlib.contextmanager
def open_text(path: PathLike, what: str = 'file') -> Iterator[IO[str]]:
  """Opens UTF-8 text, decompressed by name, without a byte-order mark.

  Raises:
    InputError: as `open_bytes`, or not UTF-8 (found while it is read).
  """
  with open_bytes(path, what) as (file, _), decoded(file) as text:
    yield text


def decoded(file: IO[bytes]) -> io.TextIOWrapper:
  """The file as UTF-8 text without a byte-order mark. A newline alone ends a line."""
  return io.TextIOWrapper(file, encoding='utf-8-sig', newline='\n')


_DECOMPRESSORS: dict[str, Callable[[Any], Any]] = {
  '.gz': lambda file: gzip.GzipFile(fileobj=file),
  '.xz': lzma.LZMAFile,
  '.bz2': bz2.BZ2File,
}
COMPRESSED = tuple(_DECOMPRESSORS)


def plain_name(path: PathLike) -> str:
  """The file's name without the ending of a compressed file."""
  found = epath.Path(path)
  return found.stem if found.suffix in COMPRESSED else found.name


def read_lines(
  path: PathLike, what: str = 'file', blank: bool = False
) -> Iterator[tuple[int, str]]:
  """Yields (line number from 1, line without its newline); ``blank``: also blank lines.

  Raises:
    InputError: as `open_text` and `sound_line`.
  """
  with open_text(path, what) as lines:
    yield from number_lines(lines, str(path), blank=blank)


def number_lines(
  file: IO[str], name: str, start: str = '', blank: bool = False
) -> Iterator[tuple[int, str]]:
  """`read_lines` of an open file, which errors call ``name``; ``start`` was read from it before."""
  number = 0
  with decoding(name, lambda: f', line {number + 1} or after it'):
    begun = io.StringIO(start + file.readline(MAX_ENTRY)) if start else io.StringIO()
    for lines in (begun, file):
      for line in iter(functools.partial(lines.readline, MAX_ENTRY), ''):
        number += 1
        line = sound_line(line, name, number)
        if blank or line.strip():
          yield number, line


def byte_lines(file: IO[bytes]) -> Iterator[bytes]:
  """The lines of an open file with their newlines; one that is too long for text comes in parts."""
  return iter(functools.partial(file.readline, MAX_ENTRY), b'')


def sound_line(line: str, name: str, number: int) -> str:
  """The line without its newline.

  Raises:
    InputError: it has a null byte, or is as long as no line is.
  """
  if len(line) >= MAX_ENTRY:
    raise InputError(
      f'{name}, line {number}: longer than {MAX_ENTRY:,} characters; is this a text file?'
    )
  if '\0' in line:
    raise InputError(f'{name}, line {number}: a null byte in the text; the file is damaged')
  return line.rstrip('\r\n')


@contextlib.contextmanager
def decoding(name: str, place: Callable[[], str] = str) -> Iterator[None]:
  """Turns errors of decoding and decompression into InputError.

  The message begins with ``name`` and, for text that is not UTF-8, ``place()``.
  """
  try:
    yield
  except UnicodeDecodeError as error:
    raise InputError(
      f'{name}{place()}: not UTF-8 text ({error.reason}); convert it first'
    ) from error
  except (lzma.LZMAError, zlib.error, EOFError, OSError) as error:
    # Errors of the operating system have a number; those of bzip2 and gzip have none.
    if isinstance(error, OSError) and error.errno is not None:
      raise
    raise InputError(
      f'{name}: broken or cut-off compressed file ({error}); fetch it again'
    ) from error


def read_jsonl(path: PathLike, what: str = 'file') -> Iterator[tuple[int, dict[str, Any]]]:
  """Yields (line number from 1, object) of a file with a JSON object on each line.

  Raises:
    InputError: as `open_text`; a line is not a JSON object.
  """
  for number, line in read_lines(path, what):
    yield number, parse_object(line, f'{path}, line {number}')


def read_records(path: PathLike, what: str = 'file') -> Iterator[tuple[int, str, dict[str, Any]]]:
  """Yields (number, 'PATH, line NUMBER', object) of a jsonl file or the entries of a JSON array.

  An array is read entry by entry: DPR's training files are larger than most memories.
  """
  with open_text(path, what) as file:
    start = file.read(64)
    if start.lstrip().startswith('['):
      yield from _read_entries(file, start.lstrip()[1:], str(path))
    else:
      for number, line in number_lines(file, str(path), start):
        where = f'{path}, line {number}'
        yield number, where, parse_object(line, where)


def _read_entries(
  file: IO[str], buffer: str, name: str
) -> Iterator[tuple[int, str, dict[str, Any]]]:
  """The entries of a JSON array whose first characters, after the bracket, are ``buffer``."""
  number = 0
  while True:
    buffer = buffer.lstrip()
    if buffer.startswith(']'):
      rest = buffer[1:] + file.read(_CHUNK)
      if rest.strip():
        raise InputError(f'{name}: {rest.strip()!r:.40} after the end of the list')
      return
    if number and buffer:
      if not buffer.startswith(','):
        raise InputError(f'{name}: no comma after entry {number}; expected a list of objects')
      buffer = buffer[1:].lstrip()
    where = f'{name}, entry {number + 1}'
    try:
      value, end = _DECODER.raw_decode(buffer)
    except json.JSONDecodeError as error:
      more = file.read(max(_CHUNK, len(buffer))) if len(buffer) < MAX_ENTRY else ''
      if not more:
        raise InputError(
          f'{where}: not JSON, or cut off ({error.msg}); expected a list of objects'
        ) from error
      buffer = ',' * (number > 0) + buffer + more
      continue
    except (RecursionError, ValueError):
      again = functools.partial(_DECODER.raw_decode, buffer)
      _parsed(again, buffer, where, 'a list of objects')
      raise
    number += 1
    value = _parsed(functools.partial(_same, value), buffer[:end], where, 'a list of objects')
    yield number, where, _object(value, where)
    buffer = buffer[end:]


def parse_object(line: str, where: str) -> dict[str, Any]:
  """The JSON object on a line of jsonl.

  Raises:
    InputError: as `parse_json`, or it is no object; the message begins with ``where``.
  """
  return _object(parse_json(line, where, 'one object a line'), where)


def parse_json(text: str, where: str, expected: str = 'a JSON document') -> Any:
  """A JSON value, of which other programs can make the same.

  Raises:
    InputError: not JSON; NaN or infinite; nested deeper than 64; an integer of thousands of digits;
      half of a surrogate pair. The message begins with ``where``.
  """
  return _parsed(lambda: _DECODER.decode(text), text, where, expected)


def _same(value: Any) -> Any:
  return value


def _no_constant(name: str) -> Any:
  raise InputError(f'{name} is not JSON')


def _finite(text: str) -> float:
  if math.isinf(number := float(text)):
    raise InputError(f'the number {text:.40} is too large')
  return number


_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)


def _parsed(parse: Callable[[], Any], text: str, where: str, expected: str) -> Any:
  try:
    value = parse()
    if text.count('[') + text.count('{') > _DEEPEST and _depth(value) > _DEEPEST:
      raise RecursionError
  except json.JSONDecodeError as error:
    at = f'line {error.lineno}, ' if error.lineno > 1 else ''
    what = error.msg.removesuffix(' at')
    raise InputError(
      f'{where}: not JSON ({what} at {at}column {error.colno}); expected {expected}'
    ) from error
  except RecursionError:
    raise InputError(f'{where}: JSON nested deeper than {_DEEPEST}; expected {expected}') from None
  except ValueError as error:  # an integer that is too long, or a constant
    reason = str(error).partition(';')[0]
    raise InputError(f'{where}: {reason}; expected {expected}') from error
  if _SURROGATE.search(text):
    try:
      json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
      raise InputError(
        f'{where}: half of a surrogate pair ({error.object[error.start]!a}) in a text; write '
        'the whole character, or leave it out'
      ) from error
  return value


_SURROGATE = re.compile(r'\\u[dD][89a-fA-F]')


def _depth(value: Any) -> int:
  """How deep lists and objects are nested, up to one more than is allowed."""
  depth, level = 0, [value]
  while depth <= _DEEPEST and (
    level := [child for child in level if isinstance(child, list | dict) and child]
  ):
    depth += 1
    level = [
      child
      for parent in level
      for child in (parent.values() if isinstance(parent, dict) else parent)
    ]
  return depth


def _object(value: Any, where: str) -> dict[str, Any]:
  if not isinstance(value, dict):
    raise InputError(f'{where}: expected a JSON object, found {type(value).__name__}')
  return value


def read_json(path: PathLike, what: str = 'file') -> Any:
  """A whole JSON file. Raises InputError where it is missing or empty, and as `parse_json` does."""
  with open_text(path, what) as file:
    text = file.read(_MAX_JSON)
  if len(text) == _MAX_JSON:
    raise InputError(f'{what} {path}: longer than {_MAX_JSON:,} characters; is this a JSON file?')
  return parse_json(text, f'{what} {path}')


def read_json_object(path: PathLike, what: str = 'file') -> dict[str, Any]:
  """`read_json`, and an object; else InputError."""
  return _object(read_json(path, what), f'{what} {path}')
