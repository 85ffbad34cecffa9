"""Reads text and JSON once, with errors that name file and line.

Text is UTF-8; a byte-order mark is dropped. Lines end with a newline, perhaps after a carriage
return, or all with a carriage return. They have no null byte and at most 64 million characters.
"""

import bz2
import contextlib
import functools
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeVar

import msgspec
from etils import epath

from dprjax.base.errors import InputError
from dprjax.base.files import PathLike, existing

_CHUNK = 1 << 20  # characters of a JSON array read at a time
MAX_ENTRY = 1 << 26  # a longer line or entry means a broken file

T = TypeVar('T')


@contextlib.contextmanager
def open_bytes(
  path: PathLike, what: str = 'file'
) -> Iterator[tuple[IO[bytes], Callable[[], float]]]:
  """Opens a file, decompressed by its suffix; yields it and a function of the fraction read."""
  file = existing(path, what)
  with file.open('rb') as raw, decoding(str(file)):
    size = 0
    if raw.seekable():  # no pipe
      size = raw.seek(0, io.SEEK_END)
      raw.seek(0)
    decompress = _DECOMPRESSORS.get(file.suffix)
    yield (decompress(raw) if decompress else raw), lambda: raw.tell() / size if size else 0.0


@contextlib.contextmanager
def open_text(path: PathLike, what: str = 'file') -> Iterator[IO[str]]:
  with open_bytes(path, what) as (file, _), decoded(file) as text:
    yield text


def decoded(file: IO[bytes]) -> io.TextIOWrapper:
  """UTF-8 text without a byte-order mark; only newlines end a line."""
  return io.TextIOWrapper(file, encoding='utf-8-sig', newline='\n')


def _zstd(file: IO[bytes]) -> IO[bytes]:
  import pyarrow as pa

  return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(file, mode='r'), 'zstd'))


_DECOMPRESSORS: dict[str, Callable[[Any], Any]] = {
  '.gz': lambda file: gzip.GzipFile(fileobj=file),
  '.xz': lzma.LZMAFile,
  '.bz2': bz2.BZ2File,
  '.zst': _zstd,
}
COMPRESSED = tuple(_DECOMPRESSORS)


def plain_name(path: PathLike) -> str:
  """The file name without the suffix of a compressed file."""
  file = epath.Path(path)
  return file.stem if file.suffix in COMPRESSED else file.name


def read_lines(
  path: PathLike, what: str = 'file', blank: bool = False
) -> Iterator[tuple[int, str]]:
  """Yields (line number from 1, line without its newline); ``blank`` keeps blank lines."""
  with open_text(path, what) as lines:
    yield from number_lines(lines, str(path), blank=blank)


def number_lines(
  file: IO[str], name: str, start: str = '', blank: bool = False
) -> Iterator[tuple[int, str]]:
  """`read_lines` of an open file called ``name``; ``start`` was read from it before."""
  number = 0
  with decoding(name, lambda: f', line {number + 1} or after it'):
    begun = io.StringIO(start + file.readline(MAX_ENTRY)) if start else io.StringIO()
    for lines in (begun, file):
      for text in iter(functools.partial(lines.readline, MAX_ENTRY), ''):
        # A whole file without a newline: carriage returns end its lines.
        alone = not number and not text.endswith('\n')
        for line in text.removesuffix('\r').split('\r') if alone else (text,):
          number += 1
          line = sound_line(line, name, number)
          if blank or line.strip():
            yield number, line


def sound_line(line: str, name: str, number: int) -> str:
  if len(line) >= MAX_ENTRY or '\0' in line:
    raise InputError(
      f'{name}, line {number}: a null byte, or more than {MAX_ENTRY:,} characters; is this a text '
      'file?'
    )
  return line.rstrip('\r\n')


@contextlib.contextmanager
def decoding(name: str, place: Callable[[], str] = str) -> Iterator[None]:
  """Turns errors of decoding and decompression into InputError; bad UTF-8 is at ``place()``."""
  try:
    yield
  except (UnicodeDecodeError, lzma.LZMAError, zlib.error, EOFError, OSError) as error:
    # Errors of bzip2, gzip and zstd have no number.
    if isinstance(error, OSError) and error.errno is not None:
      raise
    where = place() if isinstance(error, UnicodeDecodeError) else ''
    raise InputError(f'{name}{where}: not UTF-8, or badly compressed ({error})') from error


def read_jsonl(path: PathLike, what: str, of: type[T]) -> Iterator[tuple[int, T]]:
  """Yields (line number from 1, value) for a JSON value of type ``of`` on each line."""
  name = str(path)  # that of an epath takes longer than a row
  for number, line in read_lines(path, what):
    yield number, parse(line, f'{name}, line {number}', of)


def read_records(path: PathLike, what: str, of: type[T]) -> Iterator[tuple[int, str, T]]:
  """Yields (number, 'PATH, line NUMBER', value) for a jsonl file or a JSON array.

  Arrays are read entry by entry: DPR training files exceed most memories.
  """
  name = str(path)
  with open_text(path, what) as file:
    with decoding(name, lambda: ', line 1 or after it'):
      start = file.read(64)
    if start.lstrip().startswith('['):
      for number, text in _split_array(file, start.lstrip()[1:], name):
        where = f'{name}, entry {number}'
        yield number, where, parse(text, where, of)
    else:
      for number, line in number_lines(file, name, start):
        where = f'{name}, line {number}'
        yield number, where, parse(line, where, of)


def _split_array(file: IO[str], buffer: str, name: str) -> Iterator[tuple[int, str]]:
  """Entries of a JSON array; ``buffer`` is what follows its bracket."""
  number = 0
  while True:
    buffer = buffer.lstrip()
    if buffer.startswith(']'):
      rest = buffer[1:] + file.read(_CHUNK)
      if rest.strip():
        raise InputError(f'{name}: {rest.strip()!r:.40} after the end of the list')
      return
    if number:
      buffer = buffer.removeprefix(',').lstrip()
    try:
      end = _SCANNER.raw_decode(buffer)[1]
    except (json.JSONDecodeError, RecursionError) as error:
      more = file.read(max(_CHUNK, len(buffer))) if len(buffer) < MAX_ENTRY else ''
      if not more:
        raise InputError(f'{name}, entry {number + 1}: not JSON, or cut off ({error})') from error
      buffer = ',' * (number > 0) + buffer + more
      continue
    number += 1
    yield number, buffer[:end]
    buffer = buffer[end:]


# Finds the end of a value, which `parse` then reads.
_SCANNER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str)
_decoder = functools.cache(msgspec.json.Decoder)


def parse(text: str, where: str, of: type[T]) -> T:
  """A JSON value of a type that msgspec knows, such as a ``msgspec.Struct``."""
  decoder: msgspec.json.Decoder[T] = _decoder(of)  # type: ignore[arg-type]
  try:
    return decoder.decode(text)
  except (msgspec.MsgspecError, RecursionError) as error:
    fault = '' if isinstance(error, msgspec.ValidationError) else 'not JSON: '
    raise InputError(f'{where}: {fault}{error}') from error


def convert(value: Any, where: str, of: type[T]) -> T:
  """`parse` of an already decoded value."""
  try:
    return msgspec.convert(value, of)
  except msgspec.ValidationError as error:
    raise InputError(f'{where}: {error}') from error


def read(path: PathLike, what: str, of: type[T]) -> T:
  with open_text(path, what) as file:
    return parse(file.read(), f'{what} {path}', of)


def read_json_object(path: PathLike, what: str = 'file') -> dict[str, Any]:
  return read(path, what, dict[str, Any])
