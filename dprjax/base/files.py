"""Files: written aside and then renamed, read with the line number at hand.

Every path is an ``epath.Path``, so ``gs://`` works wherever a local path does.
"""

import bz2
import contextlib
import errno
import gzip
import hashlib
import io
import json
import lzma
import os
import uuid
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

from etils import epath

from dprjax.base.errors import InputError

PathLike = str | os.PathLike[str]

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def existing(path: PathLike, what: str) -> epath.Path:
  """The path, if there is something there that is not an empty file.

  Raises:
    InputError: it is missing, or a file of zero bytes; the message begins with ``what``.
  """
  found = epath.Path(path)
  if not found.exists():
    raise InputError(f'{what} not found: {found}')
  if not found.is_dir():
    # Not stat(): epath looks up the owner's name, which a container may not have.
    with found.open('rb') as file:
      if not file.read(1):
        raise InputError(f'{what} is empty: {found}')
  return found


def open_text(path: PathLike, what: str = 'file') -> IO[str]:
  """Opens UTF-8 text, decompressing ``.gz``, ``.xz`` and ``.bz2`` by name.

  Raises InputError if missing, empty or a folder.
  """
  found = existing(path, what)
  if found.is_dir():
    raise InputError(f'{what}: {found} is a folder; give the name of a file')
  if found.suffix in _DECOMPRESSORS:
    return _Decompressed(found.open('rb'), _DECOMPRESSORS[found.suffix])
  return found.open('r', encoding='utf-8')


@contextlib.contextmanager
def open_bytes(
  path: PathLike, what: str = 'file'
) -> Iterator[tuple[IO[bytes], Callable[[], float]]]:
  """The bytes of `open_text`'s text, and a function that tells the share of the file that was read
  so far.

  Raises:
    InputError: missing, empty, or badly compressed (when it is read).
  """
  found = existing(path, what)
  with found.open('rb') as raw, decoding(str(found)):
    raw.seek(0, io.SEEK_END)
    size = raw.tell()
    raw.seek(0)
    yield (
      (_DECOMPRESSORS[found.suffix](raw) if found.suffix in _DECOMPRESSORS else raw),
      lambda: raw.tell() / size,
    )


_DECOMPRESSORS: dict[str, Callable[[Any], Any]] = {
  '.gz': lambda file: gzip.GzipFile(fileobj=file),
  '.xz': lzma.LZMAFile,
  '.bz2': bz2.BZ2File,
}


class _Decompressed(io.TextIOWrapper):
  """UTF-8 text of a compressed file.

  Closes that file too, which gzip and its like leave open when it was opened for them.
  """

  def __init__(self, compressed: IO[bytes], decompress: Callable[[IO[bytes]], Any]):
    super().__init__(decompress(compressed), encoding='utf-8')
    self._compressed = compressed

  def close(self) -> None:
    super().close()
    self._compressed.close()


def read_lines(path: PathLike, what: str = 'file') -> Iterator[tuple[int, str]]:
  """Yields (1-based line number, line without its newline), blank lines left out.

  Raises:
    InputError: the file is missing, empty, not UTF-8, or its compression is broken.
  """
  with open_text(path, what) as lines:
    yield from number_lines(lines, str(path))


def number_lines(lines: IO[str], name: str) -> Iterator[tuple[int, str]]:
  """`read_lines` of a file that is open already; errors call it ``name``."""
  number = 0
  with decoding(name, lambda: f', line {number + 1} or after it'):
    for number, line in enumerate(lines, start=1):
      if line.strip():
        yield number, line.rstrip('\r\n')


@contextlib.contextmanager
def decoding(name: str, place: Callable[[], str] = str) -> Iterator[None]:
  """Turns what reading text that is not UTF-8 or badly compressed raises into an InputError about
  ``name``, and ``place()`` in it.
  """
  try:
    yield
  except UnicodeDecodeError as error:
    raise InputError(
      f'{name}{place()}: not UTF-8 text ({error.reason}); convert it first'
    ) from error
  except (lzma.LZMAError, zlib.error, EOFError, OSError) as error:
    # The operating system's own errors have a number; bzip2's and gzip's complaints are bare.
    if isinstance(error, OSError) and error.errno is not None:
      raise
    raise InputError(
      f'{name}: broken or cut-off compressed file ({error}); fetch it again'
    ) from error


def read_jsonl(path: PathLike, what: str = 'file') -> Iterator[tuple[int, dict[str, Any]]]:
  """Yields (1-based line number, object).

  Raises InputError naming file and line where a line is not a JSON object.
  """
  for number, line in read_lines(path, what):
    yield number, parse_record(line, f'{path}, line {number}')


def parse_record(line: str, where: str) -> dict[str, Any]:
  """A line of jsonl. Raises InputError, which begins with ``where``, unless it is a JSON object."""
  try:
    value = json.loads(line)
  except json.JSONDecodeError as error:
    raise InputError(
      f'{where}: not JSON ({error.msg} at column {error.colno}); expected one object a line'
    ) from error
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
  """A temporary path beside ``path`` (a file or a folder of the caller's making), renamed on
  success.

  On any error what was written is removed, and an existing ``path`` is as it was.

  Raises:
    InputError: no space is left (or a quota is used up) where the file was to go.
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
  """The path, if a file may be written there: worth asking before hours of work.

  Raises InputError where a folder is in its place.
  """
  final = epath.Path(path)
  if final.is_dir():
    raise InputError(f'{final} is a folder; give the name of a file')
  return final


@contextlib.contextmanager
def atomic_write(path: PathLike, mode: str = 'w') -> Iterator[IO[Any]]:
  """An open file whose content appears at ``path`` whole or not at all; see ``atomic_path`` and
  ``output_file``.
  """
  output_file(path)
  with (
    atomic_path(path) as aside,
    aside.open(mode, **({} if 'b' in mode else {'encoding': 'utf-8'})) as file,
  ):
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
  """The JSON beside something that can be made again; None where there is none yet, or one of
  another fingerprint.

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
