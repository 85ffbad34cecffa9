"""Outputs: claimed before anything is written, so that no command harms what is there.

A command claims what it writes. Then the output is none of its inputs, a folder is empty or of the
kind that the command writes, no other command writes it at the same time, and what a killed command
left beside it is gone.

The lock is ``.NAME.lock`` beside the output, or ``.lock`` in a folder that grows over several runs.
It ends with its process, however that ends, or with the stage that it ran, if that lives longer. On
NFS and its like it holds between hosts as far as the file system's own locks do; where there are
none (``gs://``, some network file systems) nothing is locked.
"""

import contextlib
import errno
import itertools
import os
import pathlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from etils import epath

from dprjax.base import files, reading, version
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike

try:
  import fcntl
except ImportError:  # Windows
  fcntl = None  # type: ignore[assignment]

Inputs = Mapping[str, PathLike | Iterable[PathLike] | None]
"""What a command reads, by flag. Names of nothing local, such as a hub id, are passed over."""

LOCK = '.lock'
MARK = 'dprjax.json'  # says which kind of folder of ours it is in
_LONGEST_NAME = 255  # bytes
_DEEPEST = 200  # folders
_held: set[int] = set()  # descriptors of the locks that this process holds
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EROFS)


@contextlib.contextmanager
def claim(
  out: PathLike,
  inputs: Inputs,
  *,
  flag: str = '--out',
  endings: Iterable[str] = ('', '.json'),
  folders: Collection[str] = (),
  lock: bool = True,
) -> Iterator[epath.Path]:
  """Claims the file ``out`` and those whose names continue its own.

  Args:
    out: a file, which is replaced in the end; or a pipe or a device, which is written to.
    inputs: what the command reads.
    flag: that named ``out``, for messages.
    endings: of the names of all files and folders that the command writes.
    folders: which of them are folders.
    lock: False in all but one of several processes that work together.

  Yields:
    ``out``, as it was given.

  Raises:
    InputError: ``out`` is a folder or a socket, is an input or lies in one, or another command
      writes it.
  """
  check_name(out, flag)
  path = epath.Path(out)
  if path.is_dir():
    raise InputError(f'{flag}={out} is a folder; give the name of a file')
  endings = tuple(endings)
  if files.is_stream(out):
    if pathlib.Path(out).is_socket():
      raise InputError(f'{flag}={out} is a socket; give the name of a file')
    check_apart(out, inputs, flag)
    yield path
    return
  for ending in endings:
    check_apart(f'{files.resolved(out)}{ending}' if ending else out, inputs, flag)
    beside = epath.Path(f'{files.resolved(out)}{ending}')
    if ending in folders and beside.exists() and not beside.is_dir():
      raise InputError(f'{flag}={out}: {beside}, a folder that is written too, is a file')
    if ending and ending not in folders and beside.is_dir():
      raise InputError(f'{flag}={out}: {out}{ending}, which is written too, is a folder')
  final = files.resolved(out)
  with hold(final.parent / f'.{final.name}{LOCK}', f'{flag}={out}') if lock else _nothing():
    if lock:
      files.clear(final, endings)
    yield path


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
  """Claims the folder ``out``.

  Args:
    out: the folder. It may be missing.
    inputs: what the command reads.
    what: the kind of folder, for messages: 'a model'.
    ours: whether a folder that is not empty is of that kind.
    flag: that named ``out``, for messages.
    grows: whether several runs of the command fill it; otherwise it is replaced as a whole.
    lock: False in all but one of several processes that work together.

  Yields:
    ``out``, as it was given.

  Raises:
    InputError: ``out`` is a file, holds something else, is an input, holds one or lies in one; or
      another command writes it.
  """
  check_name(out, flag)
  path, final = epath.Path(out), files.resolved(out)
  if path.exists() and not path.is_dir():
    raise InputError(f'{flag}={out} is a file; name a folder')
  check_apart(out, inputs, flag)
  files.recover(final)

  def check() -> None:
    if path.is_dir() and not is_vacant(path) and not ours(path):
      raise InputError(
        f'{flag}={out} holds something else than {what}; choose another folder, nothing was changed'
      )

  check()
  if not lock or files.is_remote(out):
    yield path
    return
  made = [folder for folder in (final, *final.parents) if not folder.exists()] if grows else []
  if grows:
    final.mkdir(parents=True, exist_ok=True)
  place = final / LOCK if grows else final.parent / f'.{final.name}{LOCK}'
  try:
    with hold(place, f'{flag}={out}'):
      check()  # another command may just have filled it
      files.clear(final)
      yield path
  finally:
    for folder in made:  # where nothing was written, nothing is left
      with contextlib.suppress(OSError):
        os.rmdir(folder)


def write_report(out: PathLike, report: Mapping[str, Any]) -> None:
  """Writes ``OUT.json`` beside an output; nothing beside a pipe or a device."""
  if not files.is_stream(out):
    files.write_json(f'{files.resolved(out)}.json', report)


def is_vacant(folder: epath.Path) -> bool:
  """Whether there is nothing in a folder but the lock and what killed commands left."""
  return all(
    path.name == LOCK or (path.name.startswith('.') and path.name.endswith('.tmp'))
    for path in folder.iterdir()
  )


def write_mark(folder: PathLike, format: str, **more: Any) -> None:
  """Marks a folder as ours, of the kind ``format``: 'dprjax.training'."""
  mark = {'format': format, 'version': 1, 'dprjax_version': version.__version__, **more}
  files.write_json(epath.Path(folder) / MARK, mark)


def read_mark(folder: PathLike) -> dict[str, Any]:
  """The mark of a folder; empty where there is none, or nothing that can be read."""
  path = epath.Path(folder) / MARK
  if not path.exists() or files.is_special(path):
    return {}
  try:
    return reading.read_json_object(path, 'mark')
  except (InputError, OSError):  # somebody else's file of that name
    return {}


def check_name(out: PathLike, flag: str) -> None:
  """Raises InputError for a name that no file can have, or one below a file."""
  name = str(out)
  files.check_scheme(out)
  if not name.strip() or '\0' in name or epath.Path(out).name in ('', '.', '..'):
    raise InputError(f'{flag}={name!r}: no file or folder can have this name')
  parts = os.fsencode(name).split(b'/')
  if max(map(len, parts)) > _LONGEST_NAME or len(parts) > _DEEPEST or sum(map(len, parts)) > 4000:
    raise InputError(f'{flag}={name:.80}...: the name is too long; choose a shorter one')
  if not files.is_remote(out):
    above = next((path for path in epath.Path(out).absolute().parents if path.exists()), None)
    if above is not None and not above.is_dir():
      raise InputError(f'{flag}={out}: {above} is a file, not a folder; name another path')


def check_apart(out: PathLike, inputs: Inputs, flag: str = '--out') -> None:
  """Raises InputError where an output is, holds or lies in an input, by any name or link."""
  if files.is_remote(out):
    own = str(out).rstrip('/')
    for label, path in _each(inputs):
      other = str(path).rstrip('/')
      if own == other or own.startswith(f'{other}/') or other.startswith(f'{own}/'):
        raise _not_apart(flag, out, label, path, 'is')
    return
  place = pathlib.Path(os.path.realpath(out))
  for label, path in _each(inputs):
    if files.is_remote(path) or '\0' in str(path):
      continue
    inside = pathlib.Path(os.path.realpath(path))
    if not os.path.lexists(path):  # a hub id, or missing, which is said elsewhere
      if place == inside:
        raise _not_apart(flag, out, label, path, 'is')
      continue
    if _same(place, inside):
      if files.is_special(place):  # /dev/null and a terminal may be both
        continue
      raise _not_apart(flag, out, label, path, 'is')
    if place in inside.parents or any(_same(place, parent) for parent in inside.parents):
      raise _not_apart(flag, out, label, path, 'holds')
    if inside.is_dir() and (
      any(_same(inside, parent) for parent in place.parents) or _linked(place, inside)
    ):
      raise _not_apart(flag, out, label, path, 'lies in')


def check_outputs_apart(outputs: Mapping[str, PathLike]) -> None:
  """Raises InputError where one of a command's outputs is, holds or lies in another one."""
  places = {
    flag: pathlib.Path(os.path.realpath(out))
    for flag, out in outputs.items()
    if not files.is_remote(out) and not files.is_stream(out)
  }
  for (one, place), (other, beside) in itertools.combinations(places.items(), 2):
    if _same(place, beside) or place in beside.parents or beside in place.parents:
      raise InputError(
        f'{one}={outputs[one]} and {other}={outputs[other]} would overwrite each other; choose '
        'another output'
      )


def clear(out: PathLike) -> None:
  """Removes what killed commands left of an output, unless another command writes it now."""
  final = files.resolved(out)
  if files.is_remote(final):
    return
  with (
    contextlib.suppress(InputError, OSError),
    hold(final.parent / f'.{final.name}{LOCK}', str(out)),
  ):
    files.clear(final)


def _each(inputs: Inputs) -> Iterator[tuple[str, PathLike]]:
  for label, paths in inputs.items():
    if paths is None or paths == '':
      continue
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
      yield label, path


def _linked(place: pathlib.Path, folder: pathlib.Path) -> bool:
  """Whether a file is also, by a hard link, a file below ``folder``."""
  return (
    place.is_file()
    and place.stat().st_nlink > 1
    and any(_same(place, path) for path in folder.rglob('*') if path.is_file())
  )


def _same(one: pathlib.Path, other: pathlib.Path) -> bool:
  if one == other:
    return True
  try:
    return os.path.samefile(one, other)
  except OSError:  # one of them is not there
    return False


def _not_apart(flag: str, out: PathLike, label: str, path: PathLike, how: str) -> InputError:
  return InputError(
    f'{flag}={out} {how} an input, {label}={path}; choose another output, nothing was changed'
  )


@contextlib.contextmanager
def hold(place: epath.Path, what: str) -> Iterator[None]:
  """Holds the lock file ``place``, which is removed in the end.

  Raises:
    InputError: another process holds it; the message begins with ``what``.
  """
  if fcntl is None or files.is_remote(place):
    yield
    return
  missing = [folder for folder in (place.parent, *place.parent.parents) if not folder.exists()]
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
      # While it is still locked: whoever waits for it looks again whether it is there.
      place.unlink(missing_ok=True)
      os.close(descriptor)
    for folder in missing:  # where nothing was written, nothing is left
      with contextlib.suppress(OSError):
        os.rmdir(folder)


def held() -> tuple[int, ...]:
  """The open lock files of this process.

  A lock that a child inherits is held until the child has ended too, so that a killed process
  whose child goes on does not free what the child writes.
  """
  return tuple(_held)


def _locked(place: epath.Path, what: str) -> int:
  """The open, locked file; -1 where the file system has no locks."""
  while True:
    descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      os.close(descriptor)
      raise InputError(
        f'{what}: another command is writing it now; wait for it to end, or choose another output'
      ) from None
    except OSError as error:
      os.close(descriptor)
      if error.errno in _NO_LOCKS:
        place.unlink(missing_ok=True)
        return -1
      raise
    try:
      # Whoever held it before may have removed it since it was opened here.
      if os.path.samestat(os.fstat(descriptor), os.stat(place)):
        return descriptor
    except FileNotFoundError:
      pass
    os.close(descriptor)


@contextlib.contextmanager
def _nothing() -> Iterator[None]:
  yield
