"""Tokenizers that transformers has read once, kept in the user cache directory.

transformers takes seconds to import and to read a tokenizer, each time a command starts. What it
made of the files of a folder is the same until they, or it, change: the key is a hash of all of
that. A file that is damaged or cannot be written costs these seconds and nothing else.
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

_FORMAT = 'dprjax.tokenizer.3'
_PACKAGES = ('transformers', 'tokenizers', 'sentencepiece')
_MOST = 64  # are kept, the newest ones
# Of what a tokenizer may be read from; weights are not.
_ENDINGS = ('.json', '.txt', '.model', '.bpe', '.vocab', '.jinja')


def key_of(folder: epath.Path) -> str:
  """Hashes all that the tokenizer of a folder is made from."""
  digest = hashlib.sha256(_FORMAT.encode())
  for package in _PACKAGES:
    digest.update(f'{package} {metadata.version(package)}\n'.encode())
  for path in sorted(folder.iterdir(), key=lambda path: path.name):
    if path.name.endswith(_ENDINGS) and path.is_file():
      digest.update(f'{path.name} {files.sha256_file(path)}\n'.encode())
  return digest.hexdigest()


def read(key: str) -> dict[str, Any] | None:
  """What `write` was given; None where there is no such file, or it is damaged."""
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
  """Keeps JSON values, if the cache directory can be written."""
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
  except RuntimeError:  # nobody's home
    return None


def _sum(fields: dict[str, Any]) -> str:
  return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
