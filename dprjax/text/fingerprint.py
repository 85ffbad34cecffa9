"""Folders that are built from files once, and again only when these inputs change.

    DIR/NAME.json      {'settings': ..., 'files': {role: stamp}, 'report': counts, 'sha256': ...}
    DIR/lengths.npz    arrays read into memory when the folder is opened
    .DIR.*.parts/I/    the part of process I, until process 0 has joined all parts

The caches of `dprjax.text.token_cache` and `dprjax.text.segments` are such folders.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from etils import epath

from dprjax.base import arrays, files, outputs, provenance
from dprjax.base.errors import InputError
from dprjax.text.read_report import ReadReport

_REMEDY = 'remove {} to build it again'
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
  build: Callable[[epath.Path, list[epath.Path]], Built],
  *,
  process_index: int,
  process_count: int = 1,
  wait_s: float,
  build_part: Callable[[epath.Path], None] | None = None,
) -> bool:
  """Builds ``folder`` unless it was built with these settings and files; returns whether it built.

  The folder is built aside and renamed. After an interrupt, the next job with the same files,
  settings and processes uses finished parts. Process 0 compares checksums of an existing folder.

  Args:
    name: of the JSON file that describes the folder, without ending; a folder that has other files
      but not this one is an error.
    settings: JSON that, with the files, decides the content.
    sources: the files, by role.
    build: makes the given folder from the folders of the parts, which appear as processes finish.
    process_index, process_count, wait_s: process 0 builds; others wait up to ``wait_s`` seconds.
    build_part: makes the part of a process other than 0.
  """
  settings = json.loads(json.dumps(settings))  # as read back later: tuples become lists
  changed = _changed(folder, name, settings, sources)
  if process_index and changed:
    if build_part is not None:
      parts = _parts_folder(folder, settings, provenance.stamp(sources), process_count)
      if not (parts / str(process_index)).exists():
        with files.atomic_path(parts / str(process_index)) as aside:
          build_part(aside)
    wait_for(
      lambda: not _changed(folder, name, settings, sources),
      wait_s,
      f'{folder}: process 0 has not built the token cache',
    )
  if not changed and not process_index:
    written = provenance.read(folder, f'{name}.json')
    assert written is not None
    provenance.check(folder, f'{name}.json', written)
  if process_index or not changed:
    return False
  if (written := provenance.read(folder, f'{name}.json')) is not None:
    provenance.check(folder, f'{name}.json', written, contents=False)
    _log.info('%s: %s differs in %s; building it again', name, folder, ', '.join(changed))
  elif folder.exists() and any(folder.iterdir()):
    raise InputError(f'{folder} is neither empty nor a token cache; name another directory')
  with outputs.hold(folder.parent / f'.{folder.name}{outputs.LOCK}', f'the token cache {folder}'):
    files.clear(folder)
    report = _build(folder, name, settings, sources, build, process_count)
  _log.info('%s: built %s\n%s', name, folder, report)
  return True


def _build(
  folder: epath.Path,
  name: str,
  settings: dict[str, Any],
  sources: Mapping[str, epath.Path],
  build: Callable[[epath.Path, list[epath.Path]], Built],
  process_count: int,
) -> ReadReport:
  stamped = provenance.stamp(sources)
  parts = _parts_folder(folder, settings, stamped, process_count)
  with files.atomic_path(folder) as aside:
    built = build(aside, [parts / str(process) for process in range(1, process_count)])
    arrays.write_arrays(aside / 'lengths.npz', built.lengths)
    about = {'settings': settings, **built.description, 'files': stamped}
    provenance.write(aside, f'{name}.json', **about, report=dict(built.report.counts))
  # Including leftovers of interrupted jobs with other files or settings.
  for old in folder.parent.glob(f'.{files.glob_escaped(folder.name)}.*.parts'):
    old.rmtree()
  return built.report


def open_built(folder: epath.Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
  """The JSON and the arrays of a built folder, whose files `build_once` has checked."""
  written = provenance.read(folder, f'{name}.json')
  assert written is not None
  lengths = arrays.read_arrays(folder / 'lengths.npz', 'token cache', remedy=_REMEDY.format(folder))
  return written, lengths


def wait_for(done: Callable[[], bool], wait_s: float, problem: str) -> None:
  """Waits for ``done()``; InputError beginning with ``problem`` after ``wait_s`` seconds."""
  deadline = time.monotonic() + wait_s
  while not done():
    if time.monotonic() > deadline:
      raise InputError(f'{problem} within {wait_s:g} s; see its output')
    time.sleep(1.0)


def _parts_folder(
  folder: epath.Path, settings: dict[str, Any], stamped: dict[str, Any], processes: int
) -> epath.Path:
  """The folder of parts beside ``folder``; its name is a hash of all that decides the content."""
  sums = {role: stamp['sha256'] for role, stamp in stamped.items()}
  digest = provenance.digest([processes, settings, sums])
  return folder.parent / f'.{folder.name}.{digest[:16]}.parts'


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
