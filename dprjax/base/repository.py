"""Repositories of the Hugging Face hub, fetched at a revision.

The client's own settings apply: HF_TOKEN or `hf auth login`, HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE.
"""

import logging
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from etils import epath

from dprjax.base import files, provenance
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike

logger = logging.getLogger('dprjax')

_NAME = re.compile(r'(\w[\w.-]*(?:/\w[\w.-]*)?)(?:@([\w.-]+))?')
_OWNED = re.compile(r'\w[\w.-]{0,95}/\w[\w.-]{0,95}')
_COMMIT = re.compile(r'[0-9a-f]{40}')


class Reference(NamedTuple):
  """A repository USER/NAME at a commit, tag or branch; None is the newest."""

  name: str
  revision: str | None = None

  @property
  def pinned(self) -> bool:
    return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

  def __str__(self) -> str:
    return self.name if self.revision is None else f'{self.name}@{self.revision}'


def parse(text: PathLike) -> Reference | None:
  """Parses ``USER/NAME`` or ``USER/NAME@REVISION``; None for other text."""
  match = _NAME.fullmatch(os.fspath(text))
  return Reference(match[1], match[2]) if match else None


def fetch(
  reference: Reference, patterns: Sequence[str], what: str, cached: bool = False
) -> epath.Path:
  """Fetches a repository from the cache or the hub; returns its folder.

  Args:
    cached: use only the cache, which may lack files.
  """
  import huggingface_hub  # slow to import

  try:
    return epath.Path(
      huggingface_hub.snapshot_download(
        reference.name,
        revision=reference.revision,
        allow_patterns=list(patterns),
        local_files_only=cached,
      )
    )
  except MemoryError:
    raise
  except Exception as error:  # client, network or file system
    raise InputError(
      f'{what} not found: {reference} is no directory, and the Hugging Face hub failed '
      f'({" ".join(str(error).split()) or type(error).__name__})'
    ) from error


def commit_of(folder: PathLike) -> str | None:
  path = epath.Path(folder)
  return path.name if path.parent.name == 'snapshots' and _COMMIT.fullmatch(path.name) else None


def locate(path: PathLike, name: str, what: str) -> epath.Path:
  """The file that a path means: itself, or ``name`` in a folder or repository.

  The mark of a folder of dprjax verifies the file. Other paths are returned as they are.
  """
  files.check_scheme(path)
  place = epath.Path(path)
  if place.is_dir():
    return _inside(place, name, what)
  reference = parse(path)
  if (
    reference is None
    or not _OWNED.fullmatch(reference.name)
    or place.suffix == epath.Path(name).suffix
    or place.exists()
  ):
    return place
  folder = fetch(reference, [name, provenance.MARK], what)
  if not reference.pinned and (commit := commit_of(folder)):
    logger.info(
      '%s %s is commit %s; to stay with it: %s@%s',
      what,
      reference,
      commit[:12],
      reference.name,
      commit,
    )
  return _inside(folder, name, what)


def _inside(folder: epath.Path, name: str, what: str) -> epath.Path:
  file = folder / name
  digests = provenance.read_mark(folder).get('files')
  if (
    isinstance(digests, dict)
    and name in digests
    and files.sha256_file(files.regular_file(file, what)) != digests[name]
  ):
    raise InputError(
      f'{what}: {file} differs from its SHA-256 in {provenance.MARK}; fetch it again'
    )
  return file
