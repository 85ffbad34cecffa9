"""Stamps of files that are only read, which tell whether they changed since."""

import functools
import os
import time
from collections.abc import Mapping
from typing import Any

from etils import epath

from dprjax.base import files

# A file read so soon after a change may change again within the second that mtime resolves.
_RACY_S = 2


def of(sources: Mapping[str, epath.Path]) -> dict[str, Any]:
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
  found = os.stat(path)
  return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


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
