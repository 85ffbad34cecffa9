"""What files were like when something was made of them: size, time and SHA-256."""

import functools
import os
import time
from collections.abc import Mapping
from typing import Any

from etils import epath

from dprjax.base import files

# A file that changed this shortly before it was read may change again within its mtime's second.
_RACY_S = 2


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
  """What tells a file from another one, or from itself after a change, without reading it."""
  if files.is_remote(path):
    stat = path.stat()
    return stat.length, int(stat.mtime)
  found = os.stat(path)
  return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _sha256(path: epath.Path) -> str:
  """Of a file, which several stores and records are made of: a process reads it once."""
  if files.is_remote(path) or os.stat(path).st_mtime > time.time() - _RACY_S:
    return files.sha256_file(path)  # it may be written again at the same time
  return _known_sha256(str(path), *identity(path))


@functools.lru_cache(maxsize=256)
def _known_sha256(path: str, *_: int) -> str:
  return files.sha256_file(path)


def changes(stamps: Mapping[str, Any], sources: Mapping[str, epath.Path]) -> list[str]:
  """The roles of files that are not as they were stamped.

  The SHA-256 decides where a file was copied or touched.
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
