"""Repositories of the Hugging Face hub: fetched at a revision, and filled.

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
    """Whether the revision is a commit, which cannot change."""
    return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

  def __str__(self) -> str:
    return self.name if self.revision is None else f'{self.name}@{self.revision}'


class Upload(NamedTuple):
  name: str
  bytes: int
  sha256: str


def parse(text: PathLike) -> Reference | None:
  """Parses ``USER/NAME`` or ``USER/NAME@REVISION``; None for other text."""
  found = _NAME.fullmatch(os.fspath(text))
  return Reference(found[1], found[2]) if found else None


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
      f'({_reason(error)})'
    ) from error


def commit_of(folder: PathLike) -> str | None:
  """The commit of a folder in the hub cache."""
  path = epath.Path(folder)
  return path.name if path.parent.name == 'snapshots' and _COMMIT.fullmatch(path.name) else None


def locate(path: PathLike, name: str, what: str) -> epath.Path:
  """The file that a path means: itself, or ``name`` in a folder or repository.

  The mark of a folder of dprjax verifies the file. Other paths are returned as they are.

  Args:
    path: of a file or a folder, or USER/NAME, perhaps with @REVISION.
  """
  files.check_scheme(path)
  found = epath.Path(path)
  if found.is_dir():
    return _inside(found, name, what)
  reference = parse(path)
  if (
    reference is None
    or not _OWNED.fullmatch(reference.name)
    or found.suffix == epath.Path(name).suffix
    or found.exists()
  ):
    return found
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


def check_owned(name: str, flag: str) -> str:
  """The name if it is USER/NAME; else raises InputError."""
  if not _OWNED.fullmatch(name):
    raise InputError(f'{flag}={name:.80}: expected USER/NAME, a repository of the Hugging Face hub')
  return name


def uploads(folder: PathLike) -> list[Upload]:
  """The files below a folder, as they go into a repository."""
  root = epath.Path(folder)
  return [
    Upload(str(path.relative_to(root)), path.stat().length, files.sha256_file(path))
    for path in sorted(files.below(root), key=str)
  ]


def push(folder: PathLike, name: str, message: str, *, private: bool = True) -> str:
  """Puts the files of a folder into a repository in one commit; other files there stay.

  Args:
    name: USER/NAME; made if it is missing.
    private: refuse a repository that others can see.

  Returns:
    The commit hash.
  """
  import huggingface_hub

  root = epath.Path(folder)
  try:
    api = huggingface_hub.HfApi()
    api.create_repo(name, private=private, exist_ok=True)
    if private and not api.repo_info(name).private:
      raise InputError(f'--push={name} is public; choose another, or say --private=false')
    operations = [
      huggingface_hub.CommitOperationAdd(upload.name, os.fspath(root / upload.name))
      for upload in uploads(root)
    ]
    return str(api.create_commit(name, operations, commit_message=message).oid)
  except (InputError, MemoryError):
    raise
  except Exception as error:  # client, network or file system
    raise InputError(
      f'--push={name}: the Hugging Face hub refused ({_reason(error)}); try `hf auth login` '
      'or set HF_TOKEN'
    ) from error


def _reason(error: Exception) -> str:
  return ' '.join(str(error).split()) or type(error).__name__
