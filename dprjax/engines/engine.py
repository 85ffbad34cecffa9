"""Engines by address, their interface for `dprjax.engines.collection`, and conditions on fields."""

import contextlib
import dataclasses
import importlib
import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from etils import epath
from jaxtyping import Float

from dprjax.base import files, outputs, reading
from dprjax.base.errors import InputError, mask

Value = str | int | float | bool

RESERVED = ('id', 'vector', 'payload')
"""Names that engines reserve."""

_PATTERN = re.compile(r'([A-Za-z_][A-Za-z0-9_]{0,62})(>=|<=|=|>|<)(.*)', re.S)
ENGINES = {'milvus': 'Milvus', 'qdrant': 'Qdrant', 'pgvector': 'Pgvector'}
_FOLDERS = ('milvus', 'qdrant')
_log = logging.getLogger('dprjax')
_SPACE, _LOADING = 'dprjax.space', 'dprjax.loading'
_FULL = re.compile(r'no space|disk ?full|disk usage|watermark|out of disk|read-only', re.I)
_DOWN = re.compile(r'refused|unreachable|timed? ?out|unavailable|name or service', re.I)


class Address(NamedTuple):
  """``ENGINE:PLACE``, where PLACE is a folder or the address of a server.

  Attributes:
    engine: a name of `ENGINES`.
    place: in the form of the client of the engine.
  """

  engine: str
  place: str

  def __str__(self) -> str:
    return f'{self.engine}:{self.place}'

  @property
  def is_local(self) -> bool:
    """Whether the place is a folder and not a server."""
    return '://' not in self.place

  def token(self) -> str:
    """The secret of the engine from the environment (``MILVUS_TOKEN`` and so on), or ''."""
    return os.environ.get(f'{self.engine.upper()}_TOKEN', '')


def address_of(text: str) -> Address:
  """Reads ``ENGINE:PLACE``."""
  engine, _, place = text.partition(':')
  address, scheme = Address(engine, place), 'postgresql' if engine == 'pgvector' else 'https?'
  served = engine in ENGINES and re.fullmatch(rf'({scheme})://[^@?#\s]*', place)
  if served and not place.endswith(('.db', 'http://')):
    return address
  local = engine in _FOLDERS and address.is_local and place and '@' not in place
  if local and (engine != 'milvus' or place.endswith('.db')):
    return address
  # The text may be an address with a password.
  folders = ' or '.join(f'{name}:FOLDER' for name in _FOLDERS)
  raise InputError(
    f'--uri: expected {folders}, where that of milvus ends in .db, or ENGINE:ADDRESS without user, '
    f'query or fragment, with an engine of {", ".join(ENGINES)}, such as '
    'qdrant:http://localhost:6333; a secret goes into ENGINE_TOKEN'
  )


def class_of(address: Address) -> Any:
  module = importlib.import_module(f'dprjax.engines.{address.engine}')
  return getattr(module, ENGINES[address.engine])


def check_index_type(address: Address, index_type: str) -> None:
  """Raises InputError for an index type that an engine at such a place lacks."""
  types = class_of(address).types_at(address)
  if index_type not in ('auto', *types):
    raise InputError(f'{address} has no index {index_type}, only {", ".join(types)}')


def connect(address: Address | str, *, new: bool = False, timeout: float = 30.0) -> 'Engine':
  """Connects to an engine; close it after use.

  Args:
    timeout: seconds.
  """
  place = address_of(address) if isinstance(address, str) else address
  kind = class_of(place)
  if place.token() and place.place.startswith('http://'):
    _log.info('%s: the secret is sent without encryption; use https', place)
  where = f'{place} (another process may have it open)' if place.is_local else str(place)
  with errors(place, where):
    return kind(place, new=new, timeout=timeout)  # type: ignore[no-any-return]


class Condition(NamedTuple):
  """A condition on a field.

  Attributes:
    field: a name; documents without the field do not match.
    operator: '=', '<', '<=', '>' or '>='.
    values: one, or several after '='. A list field matches '=' if it contains one of them.
  """

  field: str
  operator: str
  values: tuple[Value, ...]


@dataclasses.dataclass(frozen=True)
class Record:
  """The description stored in a collection.

  Attributes:
    space: settings of its vectors, `encoding.manifest.Meta.space`.
    loading: the input and the number of written rows of an unfinished upsert; None otherwise.
  """

  space: Mapping[str, Any]
  loading: Mapping[str, Any] | None = None

  def as_json(self) -> str:
    values = {_SPACE: self.space, _LOADING: self.loading}
    return json.dumps({name: value for name, value in values.items() if value}, sort_keys=True)

  @classmethod
  def of_json(cls, text: str | None) -> 'Record | None':
    """Reads a record; None for anything else."""
    try:
      values = reading.parse(text or '', 'collection', dict[str, dict[str, Any]])
      int(values[_SPACE]['dimension'])
    except (InputError, KeyError, TypeError, ValueError):
      return None
    return cls(values[_SPACE], values.get(_LOADING))


class Opened(NamedTuple):
  """An open collection of an engine.

  Attributes:
    record: of the collection; None if another program made it.
    kind: the index, by its name in the engine.
  """

  record: Record | None
  kind: str


class Rows(NamedTuple):
  """Documents to write.

  Attributes:
    ids: unique.
    vectors: float32, contiguous.
    payloads: title, text and other fields of each; None without texts.
  """

  ids: Sequence[str]
  vectors: Float[np.ndarray, 'n H']
  payloads: Sequence[Mapping[str, Any]] | None = None


class Hits(NamedTuple):
  """The results of an engine for a query, best first."""

  ids: Sequence[str]
  scores: Sequence[float]


class Engine(Protocol):
  """A connection. `create`, `upsert`, `search`, `count` and `drop` are the core.

  Calls raise the errors of the client; `errors` turns them into InputError.

  Attributes:
    address, version: of the engine.
    most: the most results of a query.
    stores_nul: whether a text may have a null character.
    request_rows, request_bytes: documents, and bytes of their vectors, in a request.
  """

  address: Address
  version: str
  most: int
  stores_nul: bool
  request_rows: int
  request_bytes: int

  @staticmethod
  def types_at(address: Address) -> Sequence[str]:
    """The index types for `create` of an engine at such a place."""

  def create(self, name: str, record: Record, *, index_type: str = 'auto', rows: int = 0) -> None:
    """Makes an empty collection for about this many rows."""

  def upsert(self, name: str, rows: Rows) -> None:
    """Writes documents, replacing those with the same ids."""

  def search(
    self,
    name: str,
    queries: Float[np.ndarray, 'queries H'],
    k: int,
    settings: Mapping[str, Any],
    where: Sequence[Condition],
  ) -> list[Hits]:
    """The k best documents of each query by inner product."""

  def count(self, name: str) -> int:
    """The number of documents in a collection."""

  def drop(self, name: str) -> None:
    """Removes a collection."""

  def names(self) -> list[str]:
    """Names of collections made by any program."""

  def open(self, name: str) -> Opened | None:
    """Opens a collection for searches; None if it is missing."""

  def note(self, name: str, record: Record) -> None:
    """Replaces the record of a collection."""

  def flush(self, name: str) -> None:
    """Makes the engine write and index all upserts."""

  def delete(self, name: str, ids: Sequence[str]) -> None:
    """Deletes documents; ids may be missing."""

  def fetch(self, name: str, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Payloads by id, without missing documents."""

  def settings(self, name: str, k: int) -> dict[str, Any]:
    """Default settings of a search."""

  def close(self) -> None:
    """Ends the connection."""


@contextlib.contextmanager
def errors(address: Address, where: str) -> Iterator[None]:
  """Turns errors of an engine and its client into InputError, without secrets."""
  token = address.token()
  secrets = [one for one in (token, token.partition(':')[2]) if one]  # user:password, or a key
  try:
    yield
  except (InputError, MemoryError, ModuleNotFoundError):
    raise
  except Exception as error:  # clients raise anything
    message = getattr(error, 'message', None) or f'{type(error).__name__}: {error}'
    message = ' '.join(str(message).split())
    for secret in secrets:
      message = message.replace(secret, '***')
    hint = ''
    if _FULL.search(message):
      hint = '; free some space there and run the same command to continue'
    elif _DOWN.search(message):
      hint = '; once it answers, run the same command to continue'
    if len(message) > 240:
      message = f'{message[:240]}...'
    # The cause would expose secrets in a traceback.
    cause = None if secrets else error
    text = f'{where}: {ENGINES[address.engine]} says: {message}{hint}'
    raise InputError(mask(text)) from cause


def check_folder(address: Address, ours: Any, new: bool) -> None:
  """Raises InputError unless the folder is an index or, with ``new``, can become one."""
  folder = epath.Path(address.place)
  if new and (not folder.exists() or (folder.is_dir() and outputs.is_vacant(folder))):
    return
  files.existing(folder, 'local index')
  if not (folder.is_dir() and ours(folder)):
    raise InputError(f'{folder} is not a local index; nothing was changed')


def parse_condition(text: str) -> Condition:
  """Reads ``NAME=VALUE``, ``NAME=VALUE,VALUE``, or ``NAME>=NUMBER`` (also >, <, <=).

  Numbers, true and false are parsed; a value in double quotes is a string.
  """
  match = _PATTERN.fullmatch(text)
  if match is None or match[1] in RESERVED or not match[3]:
    raise _error(text)
  name, operator, rest = match.groups()
  values = tuple(_value(one) for one in (_split(rest) if operator == '=' else [rest]))
  if operator != '=' and not _is_number(values[0]):
    raise _error(text)
  return Condition(name, operator, values)


def _error(text: str) -> InputError:
  return InputError(
    f'--where={text!r:.80}: expected a condition on a field of the texts such as lang=en, '
    'lang=en,de or, for numbers, year>=2020'
  )


def _split(text: str) -> list[str]:
  # Commas inside double quotes do not separate.
  return re.findall(r'(?:"(?:[^"\\]|\\.)*"|[^,])+', text)


def _value(text: str) -> Value:
  try:
    value = json.loads(text)
  except ValueError:
    return text
  usable = isinstance(value, str | bool) or _is_number(value)
  return value if usable else text


def _is_number(value: object) -> bool:
  number = isinstance(value, int | float) and not isinstance(value, bool)
  return number and math.isfinite(float(value))  # type: ignore[arg-type]
