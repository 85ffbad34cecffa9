"""Hashes of the queries that a model was trained on or chosen by.

A model file keeps 8 bytes of each, so that an evaluation on the same queries can warn.
"""

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np
from etils import epath
from jaxtyping import UInt64

from dprjax.base import arrays
from dprjax.base.files import PathLike
from dprjax.base.hashes import sameness

ROLES = {'train': 'was trained on', 'dev': 'was chosen by'}
FILE = 'queries.npz'  # in a workdir, and beside an encoder

Seen = Mapping[str, UInt64[np.ndarray, ' n']]
"""By role, ascending hashes."""


def hashes(texts: Iterable[str]) -> UInt64[np.ndarray, ' n']:
  """The first 8 bytes of the SHA-256 of the `sameness` of each text."""
  return np.unique(np.array([_hash(text) for text in texts], np.uint64))


def _hash(text: str) -> int:
  return int.from_bytes(hashlib.sha256(sameness(text)).digest()[:8], 'big')


def ids(texts: Iterable[tuple[str, str]], known: Seen) -> dict[str, list[str]]:
  """By role, the ids of these (id, text) whose text is known; roles without ids are left out."""
  if not known:
    return {}
  values = {role: set(hashes.tolist()) for role, hashes in known.items()}
  known_ids: dict[str, list[str]] = {role: [] for role in known}
  for id_, text in texts:
    digest = _hash(text)
    for role, some in values.items():
      if digest in some:
        known_ids[role].append(id_)
  return {role: some for role, some in known_ids.items() if some}


def join(*several: Seen) -> dict[str, UInt64[np.ndarray, ' n']]:
  """All that any of these models has seen."""
  by_role = {role: [one[role] for one in several if role in one] for role in ROLES}
  return {role: np.unique(np.concatenate(parts)) for role, parts in by_role.items() if parts}


def write(path: PathLike, known: Seen) -> None:
  """Writes a file of hashes, whole or not at all."""
  arrays.write_arrays(path, dict(known))


def read(path: epath.Path) -> dict[str, UInt64[np.ndarray, ' n']]:
  """Reads a file of `write`; empty if it is missing."""
  if not path.exists():
    return {}
  return arrays.read_arrays(path, 'hashes of queries')
