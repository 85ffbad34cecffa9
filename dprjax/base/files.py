"""Files: read once, with errors that name file and line; written aside, then renamed.

Every path is an ``epath.Path``, so ``gs://`` works wherever a local path does. Text is UTF-8; a
byte-order mark at its beginning is left out. A line ends with a newline, before which there may be
a carriage return. It has no null byte and at most 64 million characters.
"""

import bz2
import contextlib
import ctypes
import errno
import functools
import gzip
import hashlib
import io
import json
import lzma
import math
import os
import pathlib
import re
import stat
import sys
import uuid
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import IO, Any

from etils import epath

from dprjax.base.errors import InputError

PathLike = str | os.PathLike[str]

_CHUNK = 1 << 20  # characters of a JSON array read at a time
_MAX_ENTRY = 1 << 26  # a line or an entry longer than this means a broken file
_MAX_JSON = 1 << 28  # characters of a whole JSON file
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DEEPEST = 64  # levels of lists and objects in JSON
_DESCRIPTOR = re.compile(r'/dev/(std(?:in|out|err))|/(?:dev|proc/self)/fd/([0-9]{1,9})')
_LEFT = re.compile(r'\..*\.[0-9a-f]{8}\.tmp')  # by a killed command
_OWN_SUM = 'sha256_of_this'  # key of a sidecar
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of renameat2(2)


def existing(path: PathLike, what: str) -> epath.Path:
  """The path, if something is there that is not an empty file.

  Raises:
    InputError: it is missing, or a file of zero bytes; the message begins with ``what``.
  """
  check_scheme(path)
  found = epath.Path(path)
  if not is_name(path) or not found.exists():
    raise InputError(f'{what} not found: {found}')
  # A pipe or a device is not read here, since what is read from it is gone.
  if not found.is_dir() and not is_special(found) and is_empty(found):
    raise InputError(f'{what} is empty: {found}')
  return found


def is_name(path: PathLike) -> bool:
  """Whether a file can have this name."""
  return '\0' not in str(path) and all(len(part) < 256 for part in os.fsencode(path).split(b'/'))


def check_scheme(path: PathLike) -> None:
  """Raises InputError for an address that is none of an object store."""
  scheme = re.match(r'([a-zA-Z][a-zA-Z0-9+.-]*)://', str(path))
  if scheme and scheme[1] not in ('gs', 's3', 'az', 'hf'):
    raise InputError(
      f'{path}: {scheme[0]} is neither read nor written; fetch the file, or name gs://, s3:// or '
      'az://'
    )


def is_remote(path: PathLike) -> bool:
  return '://' in str(path)


def is_special(path: PathLike) -> bool:
  """Whether a pipe, a device or a socket is there: neither a file nor a folder."""
  if is_remote(path) or not is_name(path):
    return False
  try:
    mode = pathlib.Path(path).stat().st_mode
  except OSError:
    return False
  return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def is_stream(path: PathLike) -> bool:
  """Whether what is written there goes on at once: `is_special`, or a name of an open file, such as
  /dev/stdout.
  """
  return is_special(path) or _descriptor(path) is not None


def _descriptor(path: PathLike) -> int | None:
  """The number of the open file that a path of this system names."""
  name = _DESCRIPTOR.fullmatch(str(path))
  if name is None:
    return None
  return ('stdin', 'stdout', 'stderr').index(name[1]) if name[1] else int(name[2])


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


def regular_file(path: PathLike, what: str) -> epath.Path:
  """`existing_file`, and not a pipe: for what is read more than once.

  Raises:
    InputError: as `existing_file`, or a pipe, a device or a socket.
  """
  found = existing_file(path, what)
  if is_special(found):
    raise InputError(
      f'{what}: {found} is a pipe or a device, which can be read only once; write it to a file '
      'first'
    )
  return found


def refuse_special(folder: epath.Path) -> None:
  """Raises InputError for a pipe, a device or a socket among the files of a folder.

  For folders whose files are read by name, and which may come from a stranger.
  """
  for path in folder.iterdir() if not is_remote(folder) and folder.is_dir() else ():
    if is_special(path):
      raise InputError(f'{path} is a pipe, a device or a socket; expected a file')


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


def read_lines(path: PathLike, what: str = 'file') -> Iterator[tuple[int, str]]:
  """Yields (line number from 1, line without its newline); blank lines are left out.

  Raises:
    InputError: as `open_text` and `sound_line`.
  """
  with open_text(path, what) as lines:
    yield from number_lines(lines, str(path))


def number_lines(file: IO[str], name: str, start: str = '') -> Iterator[tuple[int, str]]:
  """`read_lines` of an open file, which errors call ``name``; ``start`` was read from it before."""
  number = 0
  with decoding(name, lambda: f', line {number + 1} or after it'):
    begun = io.StringIO(start + file.readline(_MAX_ENTRY)) if start else io.StringIO()
    for lines in (begun, file):
      for line in iter(functools.partial(lines.readline, _MAX_ENTRY), ''):
        number += 1
        line = sound_line(line, name, number)
        if line.strip():
          yield number, line


def byte_lines(file: IO[bytes]) -> Iterator[bytes]:
  """The lines of an open file with their newlines; one that is too long for text comes in parts."""
  return iter(functools.partial(file.readline, _MAX_ENTRY), b'')


def sound_line(line: str, name: str, number: int) -> str:
  """The line without its newline.

  Raises:
    InputError: it has a null byte, or is as long as no line is.
  """
  if len(line) >= _MAX_ENTRY:
    raise InputError(
      f'{name}, line {number}: longer than {_MAX_ENTRY:,} characters; is this a text file?'
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
      more = file.read(max(_CHUNK, len(buffer))) if len(buffer) < _MAX_ENTRY else ''
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
    raise InputError(
      f'{where}: not JSON ({error.msg} at {at}column {error.colno}); expected {expected}'
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
        f'{where}: half of a surrogate pair ({error.object[error.start]!a}) in a text; write the '
        'file as UTF-8'
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


@contextlib.contextmanager
def atomic_path(path: PathLike) -> Iterator[epath.Path]:
  """A temporary path for a file or folder, which becomes ``path`` on success.

  On an error what was written is removed, and an existing ``path`` stays as it was. A link is
  followed: what it points to is replaced. At no moment is there neither the old folder nor the new.

  Raises:
    InputError: no space is left, or a quota is used up.
  """
  final = resolved(path)
  made = missing_parents(final)
  final.parent.mkdir(parents=True, exist_ok=True)
  recover(final)
  aside = _beside(final, 'tmp')
  try:
    with no_room(path):
      yield aside
      if final.is_dir():
        _replace_folder(aside, final)
      else:
        aside.replace(final)
  finally:
    remove(aside)
    for folder in made:  # where nothing was written, nothing is left
      with contextlib.suppress(OSError):
        os.rmdir(folder)


def missing_parents(path: epath.Path) -> list[epath.Path]:
  """The folders that writing a local file makes, the innermost first."""
  return [] if is_remote(path) else [folder for folder in path.parents if not folder.exists()]


def resolved(path: PathLike) -> epath.Path:
  """The path that links lead to; absolute, if it is local.

  Raises:
    InputError: the links lead in a circle.
  """
  if is_remote(path):
    check_scheme(path)
    return epath.Path(path)
  final = os.path.realpath(path)
  if os.path.islink(final):
    raise InputError(f'{path} is a link that leads in a circle; choose another name')
  return epath.Path(final)


def remove(path: epath.Path) -> None:
  """Removes a file or a whole folder, if there is one."""
  if path.is_dir():
    path.rmtree()
  elif path.exists():
    path.unlink()


def discard(folder: epath.Path) -> None:
  """Removes a folder of ours at once: what a kill leaves of it is cleared by the next command."""
  if folder.exists():
    aside = folder if is_remote(folder) else folder.rename(_beside(folder, 'tmp'))
    aside.rmtree()


def recover(final: epath.Path) -> None:
  """Puts back the folder that a killed command had renamed, or removes it where it is replaced.

  Only a file system that cannot exchange two folders in one step needs it.
  """
  for old in sorted(final.parent.glob(f'.{glob_escaped(final.name)}.*.old')):
    if final.exists():
      old.rmtree()
    else:
      old.rename(final)


def clear(final: epath.Path, endings: Iterable[str] = ('.json',)) -> None:
  """Removes what killed commands left of a file or folder that they were writing, and of those
  whose names continue its own.

  To be called by whoever holds the lock of ``final`` (`dprjax.base.outputs`).
  """
  more = '|'.join(map(re.escape, endings))
  name = re.compile(rf'\.{re.escape(final.name)}({more}|)\.[0-9a-f]{{8}}\.tmp')
  for path in final.parent.iterdir() if final.parent.exists() else ():
    if name.fullmatch(path.name):
      remove(path)


def glob_escaped(name: str) -> str:
  return re.sub(r'([*?[])', r'[\1]', name)


def _beside(final: epath.Path, ending: str) -> epath.Path:
  return final.parent / f'.{final.name}.{uuid.uuid4().hex[:8]}.{ending}'


def _replace_folder(new: epath.Path, final: epath.Path) -> None:
  if is_remote(final):  # an object store has no folders to rename
    final.rmtree()
    new.replace(final)
  elif _exchange(new, final):
    new.rmtree()
  else:
    old = _beside(final, 'old')
    final.rename(old)
    new.rename(final)
    old.rmtree()


def _exchange(one: epath.Path, other: epath.Path) -> bool:
  """Exchanges two local folders in one step; False where the system or file system cannot."""
  rename = _renameat2()
  return rename is not None and not rename(
    _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE
  )


@functools.cache
def _renameat2() -> Any:
  try:
    return ctypes.CDLL(None).renameat2
  except (AttributeError, OSError, TypeError):  # not Linux, or an old C library
    return None


@contextlib.contextmanager
def atomic_write(path: PathLike, mode: str = 'w') -> Iterator[IO[Any]]:
  """An open file whose content appears at ``path`` whole or not at all.

  A pipe or a device, such as /dev/stdout, is written to directly.

  Raises:
    InputError: as ``atomic_path``; ``path`` is a folder.
  """
  if epath.Path(path).is_dir():
    raise InputError(f'{path} is a folder; give the name of a file')
  encoding = None if 'b' in mode else 'utf-8'
  if is_stream(path):
    # In one piece: whoever reads a pipe does not get half of a result that then fails.
    buffer: IO[Any] = io.BytesIO() if encoding is None else io.StringIO()
    yield buffer
    for stream in (sys.stdout, sys.stderr):
      stream.flush()
    # An open file is written to where it is, not from its beginning.
    descriptor = _descriptor(path)
    place = path if descriptor is None else os.dup(descriptor)
    with no_room(path), open(place, mode, encoding=encoding) as device:
      device.write(buffer.getvalue())  # type: ignore[attr-defined]
    return
  with atomic_path(path) as aside, aside.open(mode, encoding=encoding) as file:
    yield file


@contextlib.contextmanager
def no_room(path: PathLike) -> Iterator[None]:
  """Turns "no space left" inside the block into an InputError that names ``path``."""
  try:
    yield
  except OSError as error:
    # numpy gives no number, but says how many items it could not write.
    if error.errno not in _NO_ROOM and 'requested and' not in str(error):
      raise
    reason = error.strerror or f'no space left? ({error})'
    raise InputError(
      f'cannot write {path}: {reason}; free some space and run the same command again'
    ) from error


def read_sidecar(
  folder: PathLike, name: str, format: str, what: str, fingerprint: str, complete: bool = False
) -> dict[str, Any] | None:
  """The JSON that describes a folder (`write_sidecar`); None if there is none, or of another
  fingerprint.

  Raises:
    InputError: the folder holds something else than ``what``, so it must not be replaced; a file of
      it was changed or is missing; or, where it is ``complete``, another file was added.
  """
  root = epath.Path(folder)
  if not root.exists():
    return None
  other = InputError(f'{root} holds something else than a {what}; choose another folder')
  if not root.is_dir():
    raise other
  if not (root / name).exists():
    if all(path.name == '.lock' or _LEFT.fullmatch(path.name) for path in root.iterdir()):
      return None
    raise other
  sidecar = read_json_object(regular_file(root / name, what), what)
  if sidecar.get('format') != format:
    raise other
  if complete and isinstance(sidecar.get('sha256'), dict):
    _check_ours_alone(root, {name, *sidecar['sha256']})
  if sidecar.get('fingerprint') != fingerprint:
    return None
  remedy = f'remove {root}, and it is made again'
  check_sums(root, sidecar.get('sha256'), remedy)
  if sidecar.get(_OWN_SUM) != _own_sum(sidecar):
    raise InputError(f'{root / name} was changed or is damaged (its SHA-256 differs); {remedy}')
  return sidecar


def write_sidecar(folder: PathLike, name: str, format: str, fingerprint: str, **more: Any) -> None:
  """Describes a folder whose other files are complete: its format and their sums."""
  root = epath.Path(folder)
  sidecar = {'format': format, 'fingerprint': fingerprint, 'sha256': sums(root), **more}
  write_json(root / name, sidecar | {_OWN_SUM: _own_sum(sidecar)})


def _own_sum(sidecar: dict[str, Any]) -> str:
  """The SHA-256 of what a sidecar says, beside its own."""
  rest = {key: value for key, value in sidecar.items() if key != _OWN_SUM}
  return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def sums(folder: epath.Path) -> dict[str, str]:
  """The SHA-256 of every file below a folder, by its path in there."""
  return {
    str(path.relative_to(folder)): sha256_file(path) for path in sorted(_below(folder), key=str)
  }


def check_sums(folder: epath.Path, expected: Any, remedy: str) -> None:
  """Raises InputError, which ends in ``remedy``, for files that are missing or changed."""
  if not isinstance(expected, dict):
    raise InputError(f'{folder}: there are no checksums of its files; {remedy}')
  for name, digest in expected.items():
    # The names are from a file, which may lie: nothing outside the folder is read, and no pipe.
    if name.startswith('/') or '..' in name.split('/') or '\0' in name:
      raise InputError(f'{folder}: {name!r:.80} is not the name of a file in it; {remedy}')
    file = folder / name
    if not file.exists():
      raise InputError(f'{file} is missing; {remedy}')
    if file.is_dir() or is_special(file) or sha256_file(file) != digest:
      raise InputError(f'{file} was changed or is damaged (its SHA-256 differs); {remedy}')


def _check_ours_alone(folder: epath.Path, known: Collection[str]) -> None:
  """Raises InputError for a file that somebody else put into a folder of ours."""
  for path in _below(folder):
    name = str(path.relative_to(folder))
    if name not in known and not path.name.startswith('.'):
      raise InputError(f'{folder} also holds {name}, which is not of dprjax; move it elsewhere')


def _below(folder: epath.Path) -> Iterator[epath.Path]:
  """All files below a folder. (epath has no rglob for gs://.)"""
  for path in folder.iterdir():
    if path.is_dir():
      yield from _below(path)
    else:
      yield path


def write_json(path: PathLike, value: Any) -> None:
  """Writes indented JSON atomically, keys in the order given. Raises ValueError for NaN."""
  text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
  with atomic_write(path, 'wb') as file:
    # A path in it may have bytes that are no UTF-8.
    file.write(text.encode('utf-8', 'replace') + b'\n')


def sha256_file(path: PathLike) -> str:
  """SHA-256 of a file's bytes, in hexadecimal."""
  digest = hashlib.sha256()
  with epath.Path(path).open('rb') as file:
    while block := file.read(1 << 20):
      digest.update(block)
  return digest.hexdigest()
