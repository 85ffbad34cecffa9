"""API keys: tenants, their rights and their limits.

A file has the SHA-256 of each key. Lines such as ``read SHA256 NAME`` suffice for keys that may use
everything within a scope; # begins a comment. A file that ends in ``.toml`` has a table for each
tenant:

    [search-team]
    sha256 = ["...", "..."]         # two while a key is exchanged
    scopes = ["read", "write"]      # or metrics, admin; default: read
    prompts = ["qa", "chat-*"]      # default: all; so indexes and rerankers
    requests_per_minute = 600       # also tokens_per_minute, megabytes_per_minute, concurrent
    weight = 2                      # its share of a busy server beside others; default: 1

A key is drawn at random (``secrets.token_urlsafe(32)``), so a plain SHA-256 hides it: salts and
slow hashes protect passwords, which can be guessed. The file is read again when it changes.
"""

import dataclasses
import fnmatch
import hashlib
import hmac
import logging
import os
import pathlib
import re
import threading
import time
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

import msgspec

from dprjax.base import reading
from dprjax.base.errors import InputError
from dprjax.base.files import PathLike
from dprjax.serving.admission import UNLIMITED, TenantLimits
from dprjax.serving.turns import NOBODY, Tenant

logger = logging.getLogger('dprjax')

READ, WRITE, METRICS, ADMIN = 'read', 'write', 'metrics', 'admin'
_LINE = re.compile(rf'\s*({READ}|{METRICS}|{ADMIN})\s+([0-9a-fA-F]{{64}})(\s.*)?')
_LONGEST_NAME = 64
_LOOK_S = 1.0  # between looks at the file
_EMPTY = hashlib.sha256(b'').digest()

_Digest = Annotated[str, msgspec.Meta(pattern='^[0-9a-fA-F]{64}$')]
_Count = Annotated[int, msgspec.Meta(ge=1)]
_Names = list[str] | None
_Scope = Literal['read', 'write', 'metrics', 'admin']


class _Table(msgspec.Struct, forbid_unknown_fields=True):
  """A tenant in a TOML file."""

  sha256: _Digest | Annotated[list[_Digest], msgspec.Meta(min_length=1)]
  scopes: Annotated[list[_Scope], msgspec.Meta(min_length=1)] = msgspec.field(
    default_factory=lambda: ['read']
  )
  prompts: _Names = None
  indexes: _Names = None
  rerankers: _Names = None
  requests_per_minute: _Count | None = None
  tokens_per_minute: _Count | None = None
  megabytes_per_minute: _Count | None = None
  concurrent: _Count | None = None
  weight: Annotated[float, msgspec.Meta(ge=0.01, le=100)] = 1.0


@dataclasses.dataclass(frozen=True)
class Grant:
  """The rights of a key.

  Attributes:
    tenant: of the key; several keys may share a tenant.
    scopes: of `READ`, `WRITE`, `METRICS` and `ADMIN`; the last allows everything. Metrics name all
      prompts and tenants, so a key that reads everything may read them too.
    prompts, indexes, rerankers: patterns of names; None: all. A key file that limits one of them
      gives nothing of another that it does not name.
    limits: of use.
  """

  tenant: Tenant = NOBODY
  scopes: frozenset[str] = frozenset({ADMIN})
  prompts: tuple[str, ...] | None = None
  indexes: tuple[str, ...] | None = None
  rerankers: tuple[str, ...] | None = None
  limits: TenantLimits = UNLIMITED

  def may(self, scope: str) -> bool:
    if scope in self.scopes or ADMIN in self.scopes:
      return True
    whole = (self.prompts, self.indexes, self.rerankers) == (None,) * 3
    return scope == METRICS and READ in self.scopes and whole

  def may_use(self, what: str, name: str) -> bool:
    """Whether it allows a name of ``prompts``, ``indexes`` or ``rerankers``."""
    patterns = getattr(self, what)
    return patterns is None or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


ANYONE = Grant()  # of a server without keys


class Keys:
  """The keys of a file, as it is now."""

  def __init__(
    self, path: PathLike, grants: Iterable[tuple[bytes, Grant]], signature: tuple[int, ...] = ()
  ):
    self._path, self._signature = path, signature
    self._grants = [*grants]
    self._looked, self._told = time.monotonic(), ''  # the last error of the file
    self._lock = threading.Lock()
    self.changed: Callable[[], None] = lambda: None

  @classmethod
  def load(cls, path: PathLike) -> 'Keys':
    """Reads a file of keys.

    Raises:
      InputError: it cannot be read, has a line or field of another form, or no key.
    """
    signature = _signature(path)
    return cls(path, _read(path), signature)

  @property
  def tenants(self) -> set[str]:
    return {grant.tenant.name for _, grant in self._grants}

  def find(self, authorization: str) -> Grant | None:
    """The rights of ``Authorization: Bearer KEY``; None for an unknown key.

    All digests are compared, each in constant time.
    """
    self._look()
    scheme, _, key = authorization.partition(' ')
    digest = hashlib.sha256(key.strip().encode(errors='surrogateescape')).digest()
    found = None
    for expected, grant in self._grants:
      if hmac.compare_digest(digest, expected):
        found = grant
    return found if scheme.lower() == 'bearer' else None

  def _look(self) -> None:
    """Reads the file again if it changed. A file that cannot be used changes nothing."""
    now = time.monotonic()
    if now < self._looked + _LOOK_S or not self._lock.acquire(blocking=False):
      return
    try:
      self._looked = now
      try:
        signature = _signature(self._path)
        if signature == self._signature:
          return
        grants = _read(self._path)
      except (InputError, OSError) as error:
        if str(error) != self._told:
          logger.error('the keys stay as they were: %s', error)
        self._told = str(error)
        return
      self._signature, self._grants, self._told = signature, grants, ''
      logger.info('%d keys were read again from %s', len(grants), self._path)
      self.changed()
    finally:
      self._lock.release()


def _signature(path: PathLike) -> tuple[int, ...]:
  try:
    stat = os.stat(path)
  except FileNotFoundError as error:
    raise InputError(f'{path}: there is no such file of keys') from error
  return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _read(path: PathLike) -> list[tuple[bytes, Grant]]:
  found = _read_tables(path) if pathlib.Path(path).suffix == '.toml' else _read_lines(path)
  if not found:
    raise InputError(f'{path}: no keys in it')
  known: dict[bytes, str] = {}
  for digest, grant in found:
    if digest == _EMPTY:
      raise InputError(f'{path}: {grant.tenant.name}: this is the SHA-256 of no key at all')
    if known.setdefault(digest, grant.tenant.name) != grant.tenant.name:
      raise InputError(f'{path}: {known[digest]} and {grant.tenant.name} have the same key')
  return found


def _read_lines(path: PathLike) -> list[tuple[bytes, Grant]]:
  found = []
  for number, line in reading.read_lines(path, 'keys'):
    if line.lstrip().startswith('#'):
      continue
    parts = _LINE.fullmatch(line.rstrip('\r'))
    if parts is None:
      raise InputError(
        f'{path}, line {number}: expected read, metrics or admin, a SHA-256 in hexadecimal, and a '
        'name'
      )
    name = (parts[3] or '').strip() or parts[2][:8].lower()
    found.append((bytes.fromhex(parts[2]), Grant(Tenant(name), frozenset({parts[1]}))))
  return found


def _read_tables(path: PathLike) -> list[tuple[bytes, Grant]]:
  with reading.open_text(path, 'keys') as file:
    text = file.read()
  try:
    tables = msgspec.toml.decode(text)
  except msgspec.DecodeError as error:
    raise InputError(f'{path}: {error}') from error
  found = []
  for name, value in tables.items():
    try:
      table = msgspec.convert(value, _Table)
    except msgspec.ValidationError as error:
      raise InputError(f'{path}: [{name}]: {error}') from error
    if not name.isprintable() or not 0 < len(name) <= _LONGEST_NAME:
      raise InputError(f'{path}: [{name!r:.80}] is no name of 1 to {_LONGEST_NAME} characters')
    given = {what: getattr(table, what) for what in ('prompts', 'indexes', 'rerankers')}
    names: dict[str, Any] = {}
    if any(patterns is not None for patterns in given.values()):
      names = {what: tuple(patterns or ()) for what, patterns in given.items()}
    megabytes = table.megabytes_per_minute
    limits = TenantLimits(
      table.requests_per_minute,
      table.tokens_per_minute,
      None if megabytes is None else megabytes << 20,
      table.concurrent,
    )
    grant = Grant(Tenant(name, table.weight), frozenset(table.scopes), limits=limits, **names)
    digests = [table.sha256] if isinstance(table.sha256, str) else table.sha256
    found += [(bytes.fromhex(digest), grant) for digest in digests]
  return found
