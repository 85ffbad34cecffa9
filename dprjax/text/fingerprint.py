"""Folders that are built from files once, and again only when these inputs change.

    DIR/NAME.json      {'settings': ..., 'files': {role: stamp}, 'report': counts, 'sha256': ...}
    DIR/lengths.npz    arrays read into memory when the folder is opened

`dprjax.text.token_cache` is such a folder.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from etils import epath

from dprjax.base import arrays, files, outputs, provenance
from dprjax.base.counts import ReadReport
from dprjax.base.errors import InputError

_WAIT_S = 24 * 3600.0  # for process 0
_log = logging.getLogger(__name__)


class Built(NamedTuple):
  """The results of a build that are written beside its tables.

  Attributes:
    lengths: the arrays of lengths.npz.
    report: its counts go into the JSON file, and all of it into the log.
    description: other entries of the JSON file.
  """

  lengths: Mapping[str, Any]
  report: ReadReport
  description: Mapping[str, Any]


def build_once(
  folder: epath.Path,
  name: str,
  settings: dict[str, Any],
  sources: Mapping[str, epath.Path],
  build: Callable[[epath.Path], Built],
  process_index: int,
) -> bool:
  """Builds ``folder`` unless it was built with these settings and files; returns whether it built.

  The folder is built aside and renamed, by process 0, which also compares checksums of an existing
  folder; others wait for it.

  Args:
    name: of the JSON file that describes the folder, without ending; a folder that has other files
      but not this one is an error.
    settings: JSON that, with the files, decides the content.
  """
  settings = json.loads(json.dumps(settings))  # as read back later: tuples become lists
  changed = _changed(folder, name, settings, sources)
  if process_index:
    deadline = time.monotonic() + _WAIT_S
    while changed and _changed(folder, name, settings, sources):
      if time.monotonic() > deadline:
        raise InputError(f'{folder}: process 0 has not built it in {_WAIT_S:g} s; see its output')
      time.sleep(1.0)
    return False
  if (written := provenance.read(folder, f'{name}.json')) is not None:
    provenance.check(folder, f'{name}.json', written, contents=not changed)
    if not changed:
      return False
    _log.info('%s: %s differs in %s; building it again', name, folder, ', '.join(changed))
  elif folder.exists() and any(folder.iterdir()):
    raise InputError(f'{folder} is neither empty nor a token cache; name another directory')
  with outputs.hold(folder.parent / f'.{folder.name}{outputs.LOCK}', f'the token cache {folder}'):
    files.clear(folder)
    stamped = provenance.stamp(sources)
    with files.atomic_path(folder) as aside:
      built = build(aside)
      arrays.write_arrays(aside / 'lengths.npz', built.lengths)
      about = {'settings': settings, **built.description, 'files': stamped}
      provenance.write(aside, f'{name}.json', **about, report=dict(built.report.counts))
  _log.info('%s: built %s\n%s', name, folder, built.report)
  return True


def open_built(folder: epath.Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
  """The JSON and the arrays of a built folder, whose files `build_once` has checked."""
  written = provenance.read(folder, f'{name}.json')
  assert written is not None
  remedy = f'remove {folder} to build it again'
  return written, arrays.read_arrays(folder / 'lengths.npz', 'token cache', remedy=remedy)


def _changed(
  folder: epath.Path, name: str, settings: dict[str, Any], sources: Mapping[str, epath.Path]
) -> list[str]:
  """Names of settings and files that differ from the description; empty if it is current.

  Raises InputError if the description is damaged.
  """
  written = provenance.read(folder, f'{name}.json')
  if written is None:
    return [f'{name}.json']
  old = written['settings']
  changed = [key for key in old | settings if old.get(key, old) != settings.get(key, settings)]
  return changed or provenance.changes(written['files'], sources)
