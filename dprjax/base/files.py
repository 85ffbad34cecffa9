"""Files: read with errors that name file and line; written aside, then renamed.

Every path is an ``epath.Path``, so ``gs://`` works wherever a local path does.
"""

import bz2
import contextlib
import errno
import gzip
import hashlib
import io
import itertools
import json
import lzma
import os
import pathlib
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

from etils import epath

from dprjax.base.errors import InputError

PathLike = str | os.PathLike[str]

_CHUNK = 1 << 20  # characters of a JSON array read at a time
_MAX_ENTRY = 1 << 26  # an entry longer than this means a broken file
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def existing(path: PathLike, what: str) -> epath.Path:
  """The path, if something is there that is not an empty file.

  Raises:
    InputError: it is missing, or a file of zero bytes; the message begins with ``what``.
  """
  found = epath.Path(path)
  if not found.exists():
    raise InputError(f'{what} not found: {found}')
  # A pipe is not read here, since it can be read only once.
  if not (found.is_dir() or pathlib.Path(found).is_fifo()) and is_empty(found):
    raise InputError(f'{what} is empty: {found}')
  return found


def is_empty(path: epath.Path) -> bool:
  # Not stat(): epath looks up the owner's name, which a container may not have.
  with path.open('rb') as file:
    return not file.read(1)


def existing_file(path: PathLike, what: str) -> epath.Path:
  """`existing`, and not a folder."""
  found = existing(path, what)
  if found.is_dir():
    raise InputError(f'{what}: {found} is a folder; give the name of a file')
  return found


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
  """Opens UTF-8 text, decompressed by name.

  Raises:
    InputError: as `open_bytes`, or not UTF-8 (found while it is read).
  """
  found = existing_file(path, what)
  if found.suffix in COMPRESSED:
    with open_bytes(found, what) as (file, _), io.TextIOWrapper(file, encoding='utf-8') as text:
      yield text
  else:
    with found.open('r', encoding='utf-8') as text, decoding(str(found)):
      yield text


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


def read_lines(path: PathLike, what: str = 'file') -> Iterator[tuple[int, str]]:
  """Yields (line number from 1, line without its newline); blank lines are left out.

  Raises:
    InputError: as `open_text`.
  """
  with open_text(path, what) as lines:
    yield from number_lines(lines, str(path))


def number_lines(lines: Iterable[str], name: str) -> Iterator[tuple[int, str]]:
  """`read_lines` of an open file, which errors call ``name``."""
  number = 0
  with decoding(name, lambda: f', line {number + 1} or after it'):
    for number, line in enumerate(lines, start=1):
      if line.strip():
        yield number, line.rstrip('\r\n')


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
      lines = itertools.chain(io.StringIO(start + file.readline()), file)
      for number, line in number_lines(lines, str(path)):
        where = f'{path}, line {number}'
        yield number, where, parse_object(line, where)


def _read_entries(
  file: IO[str], buffer: str, name: str
) -> Iterator[tuple[int, str, dict[str, Any]]]:
  """The entries of a JSON array whose first characters, after the bracket, are ``buffer``."""
  decoder, number = json.JSONDecoder(), 0
  while True:
    buffer = buffer.lstrip()
    if buffer.startswith(',') and number:
      buffer = buffer[1:].lstrip()
    if buffer.startswith(']'):
      return
    try:
      value, end = decoder.raw_decode(buffer)
    except json.JSONDecodeError as error:
      more = file.read(max(_CHUNK, len(buffer))) if len(buffer) < _MAX_ENTRY else ''
      if not more:
        raise InputError(
          f'{name}, entry {number + 1}: not JSON, or cut off ({error.msg}); expected a list of '
          'objects'
        ) from error
      buffer += more
      continue
    number += 1
    where = f'{name}, entry {number}'
    yield number, where, _object(value, where)
    buffer = buffer[end:]


def parse_object(line: str, where: str) -> dict[str, Any]:
  """The JSON object on a line of jsonl.

  Raises:
    InputError: it is not a JSON object; the message begins with ``where``.
  """
  try:
    value = json.loads(line)
  except json.JSONDecodeError as error:
    raise InputError(
      f'{where}: not JSON ({error.msg} at column {error.colno}); expected one object a line'
    ) from error
  return _object(value, where)


def _object(value: Any, where: str) -> dict[str, Any]:
  if not isinstance(value, dict):
    raise InputError(f'{where}: expected a JSON object, found {type(value).__name__}')
  return value


def read_json(path: PathLike, what: str = 'file') -> Any:
  """A whole JSON file. Raises InputError where it is missing, empty or not JSON."""
  with open_text(path, what) as file:
    try:
      return json.load(file)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
      raise InputError(f'{what} is not JSON: {path} ({error})') from error


@contextlib.contextmanager
def atomic_path(path: PathLike) -> Iterator[epath.Path]:
  """A temporary path for a file or folder, which becomes ``path`` on success.

  On an error what was written is removed, and an existing ``path`` stays as it was.

  Raises:
    InputError: no space is left, or a quota is used up.
  """
  final = epath.Path(path)
  final.parent.mkdir(parents=True, exist_ok=True)
  aside = final.parent / f'.{final.name}.{uuid.uuid4().hex[:8]}.tmp'
  try:
    with no_room(final):
      yield aside
      if final.is_dir():
        final.rmtree()
      aside.replace(final)
  finally:
    if aside.is_dir():
      aside.rmtree()
    elif aside.exists():
      aside.unlink()


def output_file(path: PathLike) -> epath.Path:
  """The path, if a file may be written there; to be asked before hours of work.

  Raises:
    InputError: it is a folder.
  """
  final = epath.Path(path)
  if final.is_dir():
    raise InputError(f'{final} is a folder; give the name of a file')
  return final


@contextlib.contextmanager
def atomic_write(path: PathLike, mode: str = 'w') -> Iterator[IO[Any]]:
  """An open file whose content appears at ``path`` whole or not at all.

  Raises:
    InputError: as ``atomic_path`` and ``output_file``.
  """
  output_file(path)
  encoding = None if 'b' in mode else 'utf-8'
  with atomic_path(path) as aside, aside.open(mode, encoding=encoding) as file:
    yield file


@contextlib.contextmanager
def no_room(path: PathLike) -> Iterator[None]:
  """Turns "no space left" inside the block into an InputError that names ``path``."""
  try:
    yield
  except OSError as error:
    if error.errno not in _NO_ROOM:
      raise
    raise InputError(
      f'cannot write {path}: {error.strerror}; free some space and run the same command again'
    ) from error


def read_sidecar(folder: PathLike, name: str, what: str, fingerprint: str) -> dict[str, Any] | None:
  """The JSON that describes a folder; None if there is none, or of another fingerprint.

  Raises:
    InputError: the folder holds something else than ``what``, so it must not be replaced.
  """
  root = epath.Path(folder)
  if not root.exists():
    return None
  if not (root / name).exists():
    if root.is_dir() and not any(root.iterdir()):
      return None
    raise InputError(f'{root} holds something else than a {what}; choose another folder')
  sidecar = read_json(root / name, what)
  return sidecar if sidecar.get('fingerprint') == fingerprint else None


def write_json(path: PathLike, value: Any) -> None:
  """Writes indented JSON atomically, keys in the order given."""
  with atomic_write(path) as file:
    json.dump(value, file, indent=2, ensure_ascii=False)
    file.write('\n')


def sha256_file(path: PathLike) -> str:
  """SHA-256 of a file's bytes, in hexadecimal."""
  digest = hashlib.sha256()
  with epath.Path(path).open('rb') as file:
    while block := file.read(1 << 20):
      digest.update(block)
  return digest.hexdigest()
