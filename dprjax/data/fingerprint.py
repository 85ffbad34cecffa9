"""What is built from files once and built anew only when they change: the stores of
`dprjax.data.store` and `dprjax.data.documents`.

Such a folder holds one JSON file that names the settings and the files it was made of,
`{'settings': ..., 'files': {role: stamp}}`.
"""

import hashlib
import json
import time
from collections.abc import Callable
from typing import Any

from etils import epath

from dprjax.base import files
from dprjax.base.errors import InputError

_RACY_S = (
  2  # a file changed this close to its reading may change again within the same second of mtime
)


def build_once(
  folder: epath.Path,
  name: str,
  settings: dict[str, Any],
  where: dict[str, epath.Path],
  build: Callable[[epath.Path, dict[str, Any]], None],
  *,
  process_index: int,
  wait_s: float,
  help_build: Callable[[dict[str, Any]], None] | None = None,
) -> bool:
  """Sees to it that ``folder`` holds what is built with these settings of these files; True if that
  took building.

  Args:
    name: the JSON file that describes the folder; without it, a folder with anything in it is left
      alone.
    settings: all that decides the content beside the files' own bytes; plain JSON.
    where: the files, by role.
    build: writes the content, ``name`` with the settings and stamps included, into a folder aside
      (yet to be made), which is then renamed.
    process_index, wait_s: process 0 builds; the others wait for it, up to so many seconds.
    help_build: what the others do, given the stamps, before they wait.

  Raises:
    InputError: the folder holds something else; process 0 was not done in time; whatever ``build``
      and ``help_build`` raise.
  """
  if _is_current(folder / name, settings, where):
    return False
  if process_index != 0:
    if help_build is not None:
      help_build(_stamps(where))
    wait_for(
      lambda: _is_current(folder / name, settings, where),
      wait_s,
      f'{folder}: process 0 has not built the store',
    )
    return False
  if folder.exists() and not (folder / name).exists() and any(folder.iterdir()):
    raise InputError(f'{folder} is neither empty nor a store; name another directory for the store')
  stamps = _stamps(where)
  with files.atomic_path(folder) as aside:
    build(aside, stamps)
  return True


def wait_for(done: Callable[[], bool], wait_s: float, otherwise: str) -> None:
  """Returns when ``done()``, asked every second.

  Raises InputError that begins with ``otherwise`` after so many seconds.
  """
  deadline = time.monotonic() + wait_s
  while not done():
    if time.monotonic() > deadline:
      raise InputError(f'{otherwise} within {wait_s:g} s; see its output')
    time.sleep(1.0)


def parts_folder(
  folder: epath.Path, settings: dict[str, Any], stamps: dict[str, Any], processes: int
) -> epath.Path:
  """Where processes leave one another parts of what becomes ``folder``: beside it, under a name of
  its own for all that decides the content.
  """
  decides = [settings, {role: stamp['sha256'] for role, stamp in stamps.items()}, processes]
  digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
  return folder.parent / f'.{folder.name}.{digest[:16]}.parts'


def read_description(folder: epath.Path, name: str, format_version: int) -> dict[str, Any]:
  """The JSON of a built folder.

  Raises InputError if it is not there, or was written by another version.
  """
  if not (folder / name).exists():
    raise InputError(f'no store in {folder}: {name} is missing')
  written: dict[str, Any] = files.read_json(folder / name, 'store')
  if written['settings']['format_version'] != format_version:
    raise InputError(
      f'{folder}: a store of format {written["settings"]["format_version"]}, expected '
      f'{format_version}; build it again'
    )
  return written


def _stamps(where: dict[str, epath.Path]) -> dict[str, Any]:
  return {role: _stamp(file) for role, file in where.items()}


def _stamp(path: epath.Path) -> dict[str, Any]:
  stat = path.stat()
  return {
    'name': path.name,
    'bytes': stat.length,
    'mtime': stat.mtime,
    'read': int(time.time()),
    'sha256': files.sha256_file(path),
  }


def _is_current(
  description: epath.Path, settings: dict[str, Any], where: dict[str, epath.Path]
) -> bool:
  """Whether it names these settings and these files.

  A file that was merely copied or touched is told by its SHA-256.
  """
  if not description.exists():
    return False
  written = files.read_json(description, 'store')
  if written.get('settings') != settings or written.get('files', {}).keys() != where.keys():
    return False

  def same(file: epath.Path, stamp: dict[str, Any]) -> bool:
    stat = file.stat()
    if stat.length != stamp['bytes']:
      return False
    return (stat.mtime == stamp['mtime'] < stamp['read'] - _RACY_S) or files.sha256_file(
      file
    ) == stamp['sha256']

  return all(same(file, written['files'][role]) for role, file in where.items())
