"""Records of the inputs of an output, which decide whether it is intact and can be reused.

A kept folder has a JSON file (`write`) with its inputs and the SHA-256 of every file and of the
record itself; `kept` compares it with the present inputs. A mark names the kind of a folder that
dprjax made. A stamp tells whether a file that is only read has changed since.
"""

import functools
import hashlib
import json
import os
import time
from collections.abc import Mapping
from typing import Any

from etils import epath

from dprjax.base import files, reading, version
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike

MARK = 'dprjax.json'
_OWN_SUM = 'own_sha256'
# A file read so soon after a change may change again within the second that mtime resolves.
_RACY_S = 2


def write_mark(folder: PathLike, format: str, **more: Any) -> None:
  """Marks a folder as made by dprjax, of the kind ``format``, such as 'dprjax.training'."""
  mark = {'format': format, 'version': 1, 'dprjax_version': version.__version__, **more}
  files.write_json(epath.Path(folder) / MARK, mark)


def read_mark(folder: PathLike, name: str = MARK) -> dict[str, Any]:
  """The mark or record of a folder; empty if there is none that can be read."""
  path = epath.Path(folder) / name
  if not path.exists() or files.is_special(path):
    return {}
  try:
    return reading.read_json_object(path, 'mark')
  except (InputError, OSError):  # a file of this name from another program
    return {}


def write(folder: epath.Path, name: str, **about: Any) -> None:
  """Writes the record ``name`` of a folder of complete files."""
  record = about | {'sha256': sums(folder)}
  files.write_json(folder / name, record | {_OWN_SUM: digest(record)})


def read(folder: epath.Path, name: str) -> dict[str, Any] | None:
  path = folder / name
  if not path.exists():
    return None
  record = reading.read_json_object(files.regular_file(path, 'record'), 'record')
  checksum = record.pop(_OWN_SUM, None)
  if checksum != digest(record) or not isinstance(record.get('sha256'), dict):
    raise InputError(f'{path} was changed or damaged (SHA-256); {_again(folder)}')
  return record


def kept(folder: epath.Path, name: str, fingerprint: str) -> dict[str, Any] | None:
  """The record of a folder whose files are intact; None if it must be made again."""
  record = read(folder, name)
  if record is None:
    return None
  belongs = record.get('fingerprint') == fingerprint
  check(folder, name, record, contents=belongs)
  return record if belongs else None


def check(folder: epath.Path, name: str, record: Mapping[str, Any], contents: bool = True) -> None:
  """Raises InputError if the files of a folder differ from its record.

  Without ``contents``, only for files that dprjax did not write.
  """
  missing = dict(record['sha256'])
  # The record may be forged: read only files of the folder.
  for path in files.below(folder):
    inside = str(path.relative_to(folder))
    if inside == name or path.name.startswith('.'):
      continue
    if inside not in missing:
      raise InputError(f'{folder} also holds {inside}, which is not from dprjax; move it away')
    if not contents or (not files.is_special(path) and files.sha256_file(path) == missing[inside]):
      del missing[inside]
  if contents and missing:
    raise InputError(
      f'{folder / min(missing)} is missing, or was changed or damaged (SHA-256); {_again(folder)}'
    )


def sums(folder: epath.Path) -> dict[str, str]:
  """SHA-256 of every file, by its path in the folder."""
  return {
    str(path.relative_to(folder)): files.sha256_file(path)
    for path in sorted(files.below(folder), key=str)
  }


def digest(value: Any) -> str:
  """SHA-256 of a JSON value."""
  return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _again(folder: epath.Path) -> str:
  return f'remove {folder} to make it again'


def stamp(sources: Mapping[str, epath.Path]) -> dict[str, Any]:
  """Name, size, time and SHA-256 of every file, by role."""
  stamps = {}
  for role, path in sources.items():
    stat = path.stat()
    stamps[role] = {
      'name': path.name,
      'bytes': stat.length,
      'mtime': stat.mtime,
      'read': int(time.time()),
      'sha256': _sha256(path),
    }
  return stamps


def identity(path: epath.Path) -> tuple[int, ...]:
  """Changes with the content of a file, without reading it."""
  if files.is_remote(path):
    stat = path.stat()
    return stat.length, int(stat.mtime)
  stats = os.stat(path)
  return stats.st_ino, stats.st_size, stats.st_mtime_ns, stats.st_ctime_ns


def _sha256(path: epath.Path) -> str:
  """SHA-256 of a file, read once in a process."""
  if files.is_remote(path) or os.stat(path).st_mtime > time.time() - _RACY_S:
    return files.sha256_file(path)  # it may change within the same second
  return _known_sha256(str(path), *identity(path))


@functools.lru_cache(maxsize=256)
def _known_sha256(path: str, *_: int) -> str:
  return files.sha256_file(path)


def changes(stamps: Mapping[str, Any], sources: Mapping[str, epath.Path]) -> list[str]:
  """The roles of files that changed since they were stamped.

  If only times differ, the SHA-256 decides.
  """

  def same(file: epath.Path, stamped: Any) -> bool:
    if not isinstance(stamped, dict) or not file.exists():
      return False
    stat = file.stat()
    if stat.length != stamped.get('bytes'):
      return False
    read = stamped.get('read')
    if stat.mtime == stamped.get('mtime') and isinstance(read, int) and stat.mtime < read - _RACY_S:
      return True
    return _sha256(file) == stamped.get('sha256')

  return [
    role
    for role in dict(stamps) | dict(sources)
    if role not in stamps or role not in sources or not same(sources[role], stamps[role])
  ]
