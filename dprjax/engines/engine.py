"""The interface of engines for `dprjax.engines.collection`, and their addresses."""

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from etils import epath
from jaxtyping import Float

from dprjax.base import files, outputs, reading
from dprjax.base.errors import InputError, mask
from dprjax.engines.conditions import Condition

_SPACE, _BM25, _LOADING = 'dprjax.space', 'dprjax.bm25', 'dprjax.loading'
_FULL = re.compile(r'no space|disk ?full|disk usage|watermark|out of disk|read-only', re.I)
_DOWN = re.compile(r'refused|unreachable|timed? ?out|unavailable|name or service', re.I)


class Address(NamedTuple):
  """``ENGINE:PLACE``, where PLACE is a folder or the address of a server.

  Attributes:
    engine: a name of `dprjax.engines.ENGINES`.
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


@dataclasses.dataclass(frozen=True)
class Record:
  """The description stored in a collection.

  Attributes:
    space: settings of its vectors, `encoding.manifest.Meta.space`.
    bm25: settings of BM25: k1, b, language and, if the engine needs it, average_words; None without
      BM25.
    loading: the input and the number of written rows of an unfinished upsert; None otherwise.
  """

  space: Mapping[str, Any]
  bm25: Mapping[str, Any] | None = None
  loading: Mapping[str, Any] | None = None

  def as_json(self) -> str:
    values = {_SPACE: self.space, _BM25: self.bm25, _LOADING: self.loading}
    return json.dumps({name: value for name, value in values.items() if value}, sort_keys=True)

  @classmethod
  def of_json(cls, text: str | None) -> 'Record | None':
    """Reads a record; None for anything else."""
    try:
      values = reading.parse(text or '', 'collection', dict[str, dict[str, Any]])
      int(values[_SPACE]['dimension'])
    except (InputError, KeyError, TypeError, ValueError):
      return None
    return cls(values[_SPACE], values.get(_BM25), values.get(_LOADING))


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
    words: of each, for BM25; None without BM25.
  """

  ids: Sequence[str]
  vectors: Float[np.ndarray, 'n H']
  payloads: Sequence[Mapping[str, Any]] | None = None
  words: Sequence[Sequence[str]] | None = None


class Hits(NamedTuple):
  """The results of an engine for a query, best first."""

  ids: Sequence[str]
  scores: Sequence[float]


class Engine(Protocol):
  """A connection. `create`, `upsert`, `search`, `count` and `drop` are the core.

  Calls raise the errors of the client; `Engine.errors` turns them into InputError.

  Attributes:
    address, version: of the engine.
    index_types: names for `create`.
    most: the most results of a query.
    stores_nul: whether a text may have a null character.
    request_rows, request_bytes: documents, and bytes of their vectors, in a request.
    answer_rows: results of all queries of a request.
  """

  address: Address
  version: str
  index_types: Sequence[str]
  most: int
  stores_nul: bool
  request_rows: int
  request_bytes: int
  answer_rows: int

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


@runtime_checkable
class HasBm25(Protocol):
  """An engine that searches words, too."""

  def bm25(
    self, name: str, queries: Sequence[Sequence[str]], k: int, where: Sequence[Condition]
  ) -> list[Hits]:
    """The k best documents of each query (words) by BM25, if they share a word with it."""


@runtime_checkable
class Fuses(HasBm25, Protocol):
  """An engine that itself fuses both rankings."""

  def fuse(
    self,
    name: str,
    queries: Float[np.ndarray, 'queries H'],
    words: Sequence[Sequence[str]],
    k: int,
    *,
    rrf_k: int,
    depth: int,
    settings: Mapping[str, Any],
    where: Sequence[Condition],
  ) -> list[Hits]:
    """The k best by reciprocal ranks over the first ``depth`` documents of `search` and `bm25`."""


class EngineError(Exception):
  """An error answered by an engine, for which its client raises nothing."""

  def __init__(self, message: str):
    super().__init__(message)
    self.message = message


@contextlib.contextmanager
def errors(where: str, engine: str, *secrets: str) -> Iterator[None]:
  """Turns errors of an engine and its client into InputError, without secrets."""
  try:
    yield
  except (InputError, MemoryError, ModuleNotFoundError):
    raise
  except Exception as error:  # clients raise anything
    message = getattr(error, 'message', None) or f'{type(error).__name__}: {error}'
    message = ' '.join(str(message).split())
    for secret in secrets:
      message = message.replace(secret, '***') if secret else message
    hint = ''
    if _FULL.search(message):
      hint = '; free some space there and run the same command to continue'
    elif _DOWN.search(message):
      hint = '; once it answers, run the same command to continue'
    if len(message) > 240:
      message = f'{message[:240]}...'
    # The cause would expose secrets in a traceback.
    cause = None if any(secrets) else error
    raise InputError(mask(f'{where}: {engine} says: {message}{hint}')) from cause


def check_folder(address: Address, ours: Any, new: bool) -> None:
  """Raises InputError unless the folder is an index or, with ``new``, can become one."""
  folder = epath.Path(address.place)
  if new and (not folder.exists() or (folder.is_dir() and outputs.is_vacant(folder))):
    return
  files.existing(folder, 'local index')
  if not (folder.is_dir() and ours(folder)):
    raise InputError(f'{folder} is not a local index; nothing was changed')
