"""Files: kinds of paths, and writing aside and renaming.

Every path is an ``epath.Path``, so ``gs://`` works wherever a local path does.
"""

import contextlib
import errno
import glob
import hashlib
import io
import json
import os
import pathlib
import re
import stat
import sys
import uuid
from collections.abc import Iterable, Iterator
from typing import IO, Any

from etils import epath

from dprjax.base.errors import InputError

PathLike = str | os.PathLike[str]
HUB = 'hf:'  # begins the name of a data set of the hub

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DESCRIPTOR = re.compile(r'/dev/(std(?:in|out|err))|/(?:dev|proc/self)/fd/([0-9]{1,9})')


def existing(path: PathLike, what: str) -> epath.Path:
  """The path of an existing folder, special file, or file that is not empty."""
  check_scheme(path)
  place = epath.Path(path)
  there = is_name(path) and place.exists()
  # Reading a pipe would take its content.
  if not there or not (place.is_dir() or is_special(place) or not is_empty(place)):
    raise InputError(f'{what} {"is empty" if there else "not found"}: {place}')
  return place


def user_cache() -> pathlib.Path:
  """The dprjax folder in the user's cache directory; it may be missing.

  Raises:
    RuntimeError: there is no home directory, and ``XDG_CACHE_HOME`` is not set.
  """
  home = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(home) / 'dprjax'


def is_name(path: PathLike) -> bool:
  return '\0' not in str(path) and all(len(part) < 256 for part in os.fsencode(path).split(b'/'))


def check_scheme(path: PathLike) -> None:
  """Raises InputError for an address that is neither local nor in an object store."""
  scheme = re.match(r'([a-zA-Z][a-zA-Z0-9+.-]*)://', str(path))
  if scheme and scheme[1] not in ('gs', 's3', 'az', 'hf'):
    raise InputError(
      f'{path}: {scheme[0]} is not supported; use a local path, gs://, s3:// or az://'
    )


def is_remote(path: PathLike) -> bool:
  return '://' in str(path)


def is_hub_name(path: PathLike) -> bool:
  """Whether a source is a data set of the hub (``hf://`` is a path of fsspec)."""
  return str(path).startswith(HUB) and not is_remote(path)


def is_special(path: PathLike) -> bool:
  """Whether a pipe, a device or a socket is there."""
  if is_remote(path) or not is_name(path):
    return False
  try:
    mode = pathlib.Path(path).stat().st_mode
  except OSError:
    return False
  return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def is_stream(path: PathLike) -> bool:
  """Whether a write there cannot be undone: `is_special`, or an open file such as /dev/stdout."""
  return is_special(path) or _descriptor(path) is not None


def _descriptor(path: PathLike) -> int | None:
  name = _DESCRIPTOR.fullmatch(str(path))
  if name is None:
    return None
  return ('stdin', 'stdout', 'stderr').index(name[1]) if name[1] else int(name[2])


def is_empty(path: epath.Path) -> bool:
  # The epath stat() looks up the owner by name, which fails in some containers.
  with path.open('rb') as file:
    return not file.read(1)


def regular_file(path: PathLike, what: str) -> epath.Path:
  """`existing` file that can be read more than once: no folder, pipe, device or socket."""
  file = existing(path, what)
  if file.is_dir() or is_special(file):
    raise InputError(f'{what}: {file} is a folder, a pipe or a device; expected a file')
  return file


def refuse_special(folder: epath.Path) -> None:
  """Raises InputError for a pipe, device or socket in a folder from an untrusted source."""
  for path in folder.iterdir() if not is_remote(folder) and folder.is_dir() else ():
    if is_special(path):
      raise InputError(f'{path} is a pipe, a device or a socket; expected a file')


@contextlib.contextmanager
def atomic_path(path: PathLike) -> Iterator[epath.Path]:
  """A temporary path for a file or folder, which becomes ``path`` on success.

  On an error it is removed, and an existing ``path`` stays. A link stays and its target is
  replaced. An old folder is moved aside first; `recover` puts it back after a kill.
  """
  final = resolved(path)
  if final.parent.exists():
    recover(final)
  with _aside(path, final) as aside:
    yield aside


@contextlib.contextmanager
def _aside(path: PathLike, final: epath.Path) -> Iterator[epath.Path]:
  """`atomic_path` without `recover`, which lists the whole folder and which files do not need."""
  parents = missing_parents(final)
  final.parent.mkdir(parents=True, exist_ok=True)
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
    for folder in parents:  # made for nothing
      with contextlib.suppress(OSError):
        os.rmdir(folder)


def missing_parents(path: epath.Path) -> list[epath.Path]:
  """The folders to make for a local file, innermost first."""
  return [] if is_remote(path) else [folder for folder in path.parents if not folder.exists()]


def resolved(path: PathLike) -> epath.Path:
  """The path behind links; absolute, if it is local."""
  if is_remote(path):
    check_scheme(path)
    return epath.Path(path)
  return epath.Path(os.path.realpath(path))


def remove(path: epath.Path) -> None:
  if path.is_dir():
    path.rmtree()
  elif path.exists():
    path.unlink()


def discard(folder: epath.Path) -> None:
  """Removes a folder of dprjax; if killed meanwhile, the next command removes the rest."""
  if folder.exists():
    aside = folder if is_remote(folder) else folder.rename(_beside(folder, 'tmp'))
    aside.rmtree()


def recover(final: epath.Path) -> None:
  """Restores the folder that a killed command had renamed, or removes it if it was replaced."""
  for old in sorted(final.parent.glob(f'.{glob.escape(final.name)}.*.old')):
    if final.exists():
      old.rmtree()
    else:
      old.rename(final)


def clear(final: epath.Path, endings: Iterable[str] = ('.json',)) -> None:
  """Removes leftovers of killed commands: of ``final``, and of files whose names continue it.

  Only for the holder of its lock.
  """
  more = '|'.join(map(re.escape, endings))
  name = re.compile(rf'\.{re.escape(final.name)}({more}|)\.[0-9a-f]{{8}}\.tmp')
  for path in final.parent.iterdir() if final.parent.exists() else ():
    if name.fullmatch(path.name):
      remove(path)


def _beside(final: epath.Path, ending: str) -> epath.Path:
  return final.parent / f'.{final.name}.{uuid.uuid4().hex[:8]}.{ending}'


def _replace_folder(new: epath.Path, final: epath.Path) -> None:
  if is_remote(final):  # object stores have no folders to rename
    final.rmtree()
    new.replace(final)
  else:
    old = _beside(final, 'old')
    final.rename(old)
    new.rename(final)
    old.rmtree()


@contextlib.contextmanager
def atomic_write(path: PathLike, mode: str = 'w') -> Iterator[IO[Any]]:
  """An open file whose content appears at ``path`` whole or not at all.

  Pipes and devices, such as /dev/stdout, get it in one piece.
  """
  if epath.Path(path).is_dir():
    raise InputError(f'{path} is a folder; give the name of a file')
  encoding = None if 'b' in mode else 'utf-8'
  if is_stream(path):
    # The reader of a pipe must not get half of a result that then fails.
    buffer: IO[Any] = io.BytesIO() if encoding is None else io.StringIO()
    yield buffer
    for stream in (sys.stdout, sys.stderr):
      stream.flush()
    # An open file is written from its present position.
    descriptor = _descriptor(path)
    place = path if descriptor is None else os.dup(descriptor)
    with no_room(path), open(place, mode, encoding=encoding) as device:
      device.write(buffer.getvalue())  # type: ignore[attr-defined]
    return
  with _aside(path, resolved(path)) as aside, aside.open(mode, encoding=encoding) as file:
    yield file


@contextlib.contextmanager
def no_room(path: PathLike) -> Iterator[None]:
  """Turns "no space left" inside the block into an InputError that names ``path``."""
  try:
    yield
  except OSError as error:
    # The error of numpy has no errno.
    if error.errno not in _NO_ROOM and 'requested and' not in str(error):
      raise
    reason = error.strerror or f'no space left? ({error})'
    raise InputError(f'cannot write {path}: {reason}; free some space and try again') from error


def is_pattern(path: PathLike) -> bool:
  """Whether a path is a pattern such as ``corpus-*.jsonl``, and no file has this literal name."""
  return bool(re.search(r'[*?[]', str(path))) and is_name(path) and not epath.Path(path).exists()


def matching(pattern: PathLike) -> list[epath.Path]:
  check_scheme(pattern)
  parts = epath.Path(pattern).parts
  first = next(number for number, part in enumerate(parts) if re.search(r'[*?[]', part))
  folder = epath.Path(*parts[:first])
  return sorted(folder.glob('/'.join(parts[first:])), key=str) if folder.exists() else []


def below(folder: epath.Path) -> Iterator[epath.Path]:
  """All files below a folder. (epath lacks rglob for gs://.)"""
  for path in folder.iterdir():
    if path.is_dir():
      yield from below(path)
    else:
      yield path


def write_json(path: PathLike, value: Any) -> None:
  """Writes indented JSON atomically, keys in the order given. Raises ValueError for NaN."""
  text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
  with atomic_write(path, 'wb') as file:
    # A path in it may have bytes that are not UTF-8.
    file.write(text.encode('utf-8', 'replace') + b'\n')


def sha256_file(path: PathLike) -> str:
  digest = hashlib.sha256()
  with epath.Path(path).open('rb') as file:
    while block := file.read(1 << 20):
      digest.update(block)
  return digest.hexdigest()
