"""Folders that say what they hold: a JSON file beside the others, with their checksums."""

import hashlib
import json
import re
from collections.abc import Collection
from typing import Any

from etils import epath

from dprjax.base.errors import InputError
from dprjax.base.files import PathLike, below, is_special, regular_file, sha256_file, write_json
from dprjax.base.reading import read_json_object

_LEFT = re.compile(r'\..*\.[0-9a-f]{8}\.tmp')  # by a killed command
_OWN_SUM = 'sha256_of_this'  # key of a sidecar


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
    str(path.relative_to(folder)): sha256_file(path) for path in sorted(below(folder), key=str)
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
  for path in below(folder):
    name = str(path.relative_to(folder))
    if name not in known and not path.name.startswith('.'):
      raise InputError(f'{folder} also holds {name}, which is not of dprjax; move it elsewhere')
