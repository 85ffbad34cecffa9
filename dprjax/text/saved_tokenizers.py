"""Caches tokenizers read by transformers in the user cache directory.

transformers takes seconds to import and to read a tokenizer, at every start of a command. The
result depends on the files and the version of transformers, so the key is a hash of both. If a
cache file is damaged or cannot be written, only these seconds are lost.
"""

import hashlib
import json
import pathlib
from importlib import metadata
from typing import Any

from etils import epath

from dprjax.base import files
from dprjax.base.errors import InputError
from dprjax.base.reading import read_json_object

_FORMAT = 'dprjax.tokenizer.4'
_PACKAGES = ('transformers', 'tokenizers', 'sentencepiece')
_MOST = 64  # tokenizers kept, the newest
# Files that a tokenizer may be read from; not weights.
_ENDINGS = ('.json', '.txt', '.model', '.bpe', '.vocab', '.jinja')


def key_of(folder: epath.Path) -> str:
  """A hash of everything that the tokenizer of a folder depends on."""
  digest = hashlib.sha256(_FORMAT.encode())
  for package in _PACKAGES:
    digest.update(f'{package} {metadata.version(package)}\n'.encode())
  for path in sorted(folder.iterdir(), key=lambda path: path.name):
    if path.name.endswith(_ENDINGS) and path.is_file():
      digest.update(f'{path.name} {files.sha256_file(path)}\n'.encode())
  return digest.hexdigest()


def read(key: str) -> dict[str, Any] | None:
  """The fields given to `write`; None if the file is missing or damaged."""
  path = _path(key)
  if path is None or not path.is_file():
    return None
  try:
    kept = read_json_object(path, 'kept tokenizer')
  except (InputError, OSError):
    return None
  fields = kept.get('fields')
  return fields if isinstance(fields, dict) and kept.get('sha256') == _sum(fields) else None


def write(key: str, fields: dict[str, Any]) -> None:
  """Writes JSON values, if the cache directory can be written."""
  path = _path(key)
  if path is None:
    return
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, {'sha256': _sum(fields), 'fields': fields})
    by_age = sorted(
      path.parent.glob('*.json'), key=lambda kept: kept.stat().st_mtime_ns, reverse=True
    )
    for old in by_age[_MOST:]:
      old.unlink(missing_ok=True)
  except (InputError, OSError):
    return


def _path(key: str) -> pathlib.Path | None:
  try:
    return files.user_cache() / 'tokenizers' / f'{key}.json'
  except RuntimeError:  # no home directory
    return None


def _sum(fields: dict[str, Any]) -> str:
  return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
