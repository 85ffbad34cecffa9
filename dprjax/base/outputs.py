"""Claims outputs before anything is written, so that no command overwrites other data.

A claimed output is not an input. A claimed folder is empty or made by the same command. No other
command writes it at the same time. Leftovers of killed commands are removed.

The lock is ``.NAME.lock`` beside the output, or ``.lock`` in a folder that grows over several runs.
The lock ends with its process and with any stage that outlives this process. Between hosts it
depends on the locks of the file system. Without those (``gs://``, some network file systems)
nothing is locked.
"""

import contextlib
import errno
import functools
import itertools
import os
import pathlib
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from etils import epath

from dprjax.base import files
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike

try:
  import fcntl
except ImportError:  # Windows
  fcntl = None  # type: ignore[assignment]

Inputs = Mapping[str, PathLike | Iterable[PathLike] | None]
"""The inputs of a command, by flag. Names without a local file, such as a hub id, are ignored."""

LOCK = '.lock'
_held: set[int] = set()  # descriptors of the locks of this process
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EROFS)


@contextlib.contextmanager
def claim(
  out: PathLike | None,
  inputs: Inputs,
  *,
  flag: str = '--out',
  endings: Iterable[str] = ('', '.json'),
  folders: Collection[str] = (),
  also: Mapping[str, PathLike | None] = types.MappingProxyType({}),
  lock: bool = True,
) -> Iterator[None]:
  """Claims the file ``out`` and the files whose names continue its name.

  Args:
    out: a file, which is replaced at the end; or a pipe or a device. None claims nothing.
    endings: of the names of all files and folders that the command writes.
    also: other outputs, by flag; none may overwrite another.
    lock: False in all but one of several processes.
  """
  endings = tuple(endings)
  for name, path in ({flag: out} | dict(also)).items():
    if path is not None:
      check_name(path, name)
  _check_outputs_apart(out, flag, endings, also)
  if out is None:
    yield
    return
  if files.is_stream(out):
    check_apart(out, inputs, flag)
    yield
    return
  final = files.resolved(out)
  for ending in endings:
    check_apart(f'{final}{ending}' if ending else out, inputs, flag)
    if ending not in folders and epath.Path(f'{final}{ending}').is_dir():
      raise InputError(f'{flag}={out}: {out}{ending} is a folder; choose another name')
  with (
    hold(final.parent / f'.{final.name}{LOCK}', f'{flag}={out}')
    if lock
    else contextlib.nullcontext()
  ):
    if lock:
      files.clear(final, endings)
    yield


@contextlib.contextmanager
def claim_folder(
  out: PathLike,
  inputs: Inputs,
  *,
  what: str,
  ours: Callable[[epath.Path], bool],
  flag: str = '--out',
  grows: bool = False,
  lock: bool = True,
) -> Iterator[epath.Path]:
  """Claims the folder ``out``, which may be missing, and yields it.

  Args:
    what: the kind of folder, for messages: 'a model'.
    ours: whether a folder that is not empty is of that kind.
    grows: whether several runs fill it; otherwise it is replaced as a whole.
    lock: False in all but one of several processes.
  """
  check = functools.partial(check_folder, out, inputs, what=what, ours=ours, flag=flag)
  check()
  path, final = epath.Path(out), files.resolved(out)
  place = final / LOCK if grows else final.parent / f'.{final.name}{LOCK}'
  with hold(place, f'{flag}={out}') if lock else contextlib.nullcontext():
    check()  # another command may have filled it meanwhile
    if lock and not files.is_remote(out):
      files.clear(final)
    yield path


def check_folder(
  out: PathLike,
  inputs: Inputs,
  *,
  what: str,
  ours: Callable[[epath.Path], bool],
  flag: str = '--out',
) -> None:
  """Raises InputError if ``out`` is a file, has other contents, or overlaps an input."""
  check_name(out, flag)
  path = epath.Path(out)
  check_apart(out, inputs, flag)
  files.recover(files.resolved(out))
  if path.exists() and not (path.is_dir() and (is_vacant(path) or ours(path))):
    raise InputError(f'{flag}={out} is or contains something other than {what}; choose another')


def write_report(out: PathLike, report: Mapping[str, Any]) -> None:
  """Writes ``OUT.json`` beside an output; nothing beside a pipe or device."""
  if not files.is_stream(out):
    files.write_json(f'{files.resolved(out)}.json', report)


def is_vacant(folder: epath.Path) -> bool:
  """Whether a folder has only the lock and leftovers of killed commands."""
  return all(
    path.name == LOCK or (path.name.startswith('.') and path.name.endswith('.tmp'))
    for path in folder.iterdir()
  )


def check_name(out: PathLike, flag: str) -> None:
  """Raises InputError for an impossible name, or one below a file."""
  name = str(out)
  files.check_scheme(out)
  try:
    possible = bool(name.strip()) and epath.Path(out).name not in ('', '.', '..')
    if not files.is_remote(out):
      os.lstat(out)
  except FileNotFoundError:
    pass
  except (OSError, ValueError):  # too long, below a file, or with a null byte
    possible = False
  if not possible:
    raise InputError(f'{flag}={name!r:.80}: no file or folder can have this name')


def check_apart(out: PathLike, inputs: Inputs, flag: str = '--out') -> None:
  """Raises InputError if an output is, contains or lies in an input, by any name or link."""
  for label, paths in inputs.items():
    if paths is None or paths == '':
      continue
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
      if how := _meets(out, path):
        raise InputError(f'{flag}={out} {how} an input, {label}={path}; choose another output')


def _meets(out: PathLike, path: PathLike) -> str:
  if files.is_remote(out) != files.is_remote(path) or '\0' in str(path):
    return ''
  if files.is_remote(out):
    place, inside = pathlib.Path(str(out)), pathlib.Path(str(path))
  else:
    place, inside = (pathlib.Path(os.path.realpath(one)) for one in (out, path))
    if not os.path.lexists(path):  # a hub id, or missing
      return 'is' if place == inside else ''
  if _same(place, inside):
    return '' if files.is_special(place) else 'is'  # /dev/null may be both
  if any(_same(place, parent) for parent in inside.parents):
    return 'holds'
  if any(_same(inside, parent) for parent in place.parents):
    return 'lies in'
  return ''


def _check_outputs_apart(
  out: PathLike | None, flag: str, endings: Iterable[str], also: Mapping[str, PathLike | None]
) -> None:
  named: list[tuple[str, PathLike, PathLike]] = [
    (label, path, path) for label, path in also.items() if path is not None
  ]
  if out is not None:
    named += [
      (flag, out, f'{files.resolved(out)}{ending}' if ending else out) for ending in endings
    ]
  places = [
    (f'{label}={shown}', pathlib.Path(os.path.realpath(path)))
    for label, shown, path in named
    if not files.is_remote(path) and not files.is_stream(path)
  ]
  for (one, place), (other, beside) in itertools.combinations(places, 2):
    if one != other and (
      _same(place, beside) or place in beside.parents or beside in place.parents
    ):
      raise InputError(f'{other} and {one} would overwrite each other; choose another output')


def clear(out: PathLike) -> None:
  """Removes leftovers of killed commands, unless another command writes this output now."""
  final = files.resolved(out)
  if files.is_remote(final):
    return
  with (
    contextlib.suppress(InputError, OSError),
    hold(final.parent / f'.{final.name}{LOCK}', str(out)),
  ):
    files.clear(final)


def _same(one: pathlib.Path, other: pathlib.Path) -> bool:
  if one == other:
    return True
  try:
    return os.path.samefile(one, other)
  except OSError:
    return False


@contextlib.contextmanager
def hold(place: epath.Path, what: str) -> Iterator[None]:
  """Holds the lock file ``place``, and removes it at the end."""
  if fcntl is None or files.is_remote(place):
    yield
    return
  missing = files.missing_parents(place)
  place.parent.mkdir(parents=True, exist_ok=True)
  descriptor = -1
  try:
    descriptor = _locked(place, what)
    if descriptor >= 0:
      _held.add(descriptor)
    yield
  finally:
    if descriptor >= 0:
      _held.discard(descriptor)
      # Removed while locked: a process that opened it checks that it still exists.
      place.unlink(missing_ok=True)
      os.close(descriptor)
    for folder in missing:  # leave nothing where nothing was written
      with contextlib.suppress(OSError):
        os.rmdir(folder)


def held() -> tuple[int, ...]:
  """Descriptors of the locks of this process; a child that inherits them holds the locks, too."""
  return tuple(_held)


def _locked(place: epath.Path, what: str) -> int:
  """The open, locked file; -1 if the file system has no locks."""
  while True:
    descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      os.close(descriptor)
      raise InputError(
        f'{what}: another command is writing it now; wait, or choose another output'
      ) from None
    except OSError as error:
      os.close(descriptor)
      if error.errno in _NO_LOCKS:
        place.unlink(missing_ok=True)
        return -1
      raise
    try:
      # The previous holder may have removed it meanwhile.
      if os.path.samestat(os.fstat(descriptor), os.stat(place)):
        return descriptor
    except FileNotFoundError:
      pass
    os.close(descriptor)
