"""API keys: tenants, their rights and their limits.

A TOML file has a table for each tenant, with the SHA-256 of its keys:

    [search-team]
    sha256 = ["...", "..."]         # two while a key is exchanged
    scopes = ["read", "write"]      # or metrics, admin; default: read
    prompts = ["qa", "chat-*"]      # default: all; so indexes
    concurrent = 16                 # requests at a time; default: no limit
    weight = 2                      # its share of a busy server beside others; default: 1

A key is drawn at random (``secrets.token_urlsafe(32)``), so a plain SHA-256 hides it: salts and
slow hashes protect passwords, which can be guessed. The file is read again when it changes.
"""

import fnmatch
import hashlib
import logging
import time
from typing import Annotated, Literal

import msgspec
from etils import epath

from dprjax.base import provenance, reading
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike
from dprjax.serving.turns import Tenant

logger = logging.getLogger('dprjax')

READ, WRITE, METRICS, ADMIN = 'read', 'write', 'metrics', 'admin'
_LOOK_S = 1.0  # between looks at the file
_EMPTY = hashlib.sha256(b'').digest()

_Digest = Annotated[str, msgspec.Meta(pattern='^[0-9a-fA-F]{64}$')]
_Names = list[str] | None
_Scope = Literal['read', 'write', 'metrics', 'admin']


class Grant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
  """The rights of a key: a table of the file, and its name.

  `scopes`: admin allows everything. Metrics name all prompts and tenants, so a key that reads
  everything may read them too. `prompts`, `indexes`: patterns of names. A key that
  limits one kind sees nothing of another that it does not name.
  """

  sha256: _Digest | Annotated[list[_Digest], msgspec.Meta(min_length=1)]
  name: Annotated[str, msgspec.Meta(min_length=1)] = ''
  scopes: Annotated[tuple[_Scope, ...], msgspec.Meta(min_length=1)] = ('read',)
  prompts: _Names = None
  indexes: _Names = None
  concurrent: Annotated[int, msgspec.Meta(ge=1)] | None = None
  weight: Annotated[float, msgspec.Meta(ge=0.01, le=100)] = 1.0

  @property
  def tenant(self) -> Tenant:
    return Tenant(self.name, self.weight)

  @property
  def sees_all(self) -> bool:
    return self.prompts is None and self.indexes is None

  def may(self, scope: str) -> bool:
    if scope == METRICS and READ in self.scopes and self.sees_all:
      return True
    return scope in self.scopes or ADMIN in self.scopes

  def may_use(self, kind: str, name: str) -> bool:
    """Whether it allows a name of ``prompts`` or ``indexes``."""
    patterns = getattr(self, kind) or ()
    return self.sees_all or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


ANYONE = Grant([], scopes=('admin',))  # of a server without keys


class Keys:
  def __init__(self, path: PathLike):
    self._path = epath.Path(path)
    self._identity, self._looked = self._look(), time.monotonic()
    self._grants = _read(self._path)

  def find(self, authorization: str) -> Grant | None:
    """The rights of ``Authorization: Bearer KEY``; None for an unknown key."""
    if time.monotonic() > self._looked + _LOOK_S:
      self._refresh()
    scheme, _, key = authorization.partition(' ')
    if scheme.lower() != 'bearer':
      return None
    return self._grants.get(hashlib.sha256(key.strip().encode()).digest())

  def _look(self) -> tuple[int, ...]:
    return provenance.identity(self._path) if self._path.exists() else ()

  def _refresh(self) -> None:
    """Reads the file again if it changed. A file that cannot be used changes nothing."""
    before, self._identity, self._looked = self._identity, self._look(), time.monotonic()
    if self._identity == before:
      return
    try:
      self._grants = _read(self._path)
      logger.info('%d keys were read again from %s', len(self._grants), self._path)
    except (InputError, OSError) as error:
      logger.error('the keys stay as they were: %s', error)


def _read(path: epath.Path) -> dict[bytes, Grant]:
  with reading.open_text(path, 'keys') as file:
    text = file.read()
  where, grants = '', []
  try:
    for name, table in msgspec.toml.decode(text, type=dict[str, dict]).items():
      where = f' [{name}]:'
      grants.append(msgspec.convert(table | {'name': name}, Grant))
  except msgspec.DecodeError as error:
    raise InputError(f'{path}:{where} {error}') from error
  by_key: dict[bytes, Grant] = {}
  for grant in grants:
    for digest in [grant.sha256] if isinstance(grant.sha256, str) else grant.sha256:
      key = bytes.fromhex(digest)
      if key == _EMPTY or by_key.setdefault(key, grant) != grant:
        what = 'no key at all' if key == _EMPTY else f'a key of {by_key[key].name}'
        raise InputError(f'{path}: [{grant.name}]: this is the SHA-256 of {what}')
  if not by_key:
    raise InputError(f'{path}: no keys in it')
  return by_key
