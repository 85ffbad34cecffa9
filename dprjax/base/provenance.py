"""Records of the inputs of an output, which decide whether it is intact and can be reused.

A kept folder has a JSON file (`write`) with its inputs and the SHA-256 of every file and of the
record itself; `kept` compares it with the present inputs. A mark names the kind of a folder that
dprjax made. `base.stamps` has the files that are only read.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from etils import epath

from dprjax.base import files, reading, version
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike

MARK = 'dprjax.json'
_OWN_SUM = 'own_sha256'


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
  own = record.pop(_OWN_SUM, None)
  if own != digest(record) or not isinstance(record.get('sha256'), dict):
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
  """SHA-256 of every file below a folder, by path in it."""
  return {
    str(path.relative_to(folder)): files.sha256_file(path)
    for path in sorted(files.below(folder), key=str)
  }


def digest(value: Any) -> str:
  """SHA-256 of a JSON value."""
  return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _again(folder: epath.Path) -> str:
  return f'remove {folder} to make it again'
