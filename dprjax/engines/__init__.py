"""Engines with mutable indexes: Milvus, Qdrant, pgvector, OpenSearch.

A collection stores vectors under the ids of their documents, with texts and fields. It records the
settings of its vectors (`dprjax.encoding.manifest.Meta.space`) and refuses vectors with others.
Scores are inner products.

    engine = connect('qdrant:http://localhost:6333')
    collection = create(engine, 'passages', corpus.meta.space(), rows=len(corpus))
    collection.upsert(ids, vectors)                  # replaces the vectors of these ids
    collection.search(queries, k=10)                 # Found: ids, rows, scores
    collection.delete(['d7'])
"""

import importlib
import logging
import re
from typing import Any

from etils import epath

from dprjax.base.errors import InputError
from dprjax.engines.collection import (
  Collection,
  Found,
  check_index_type,
  check_name,
  check_text,
  create,
  exists,
  open_collection,
  secrets,
)
from dprjax.engines.conditions import Condition, parse
from dprjax.engines.engine import Address, Engine, errors

__all__ = [
  'ENGINES',
  'Address',
  'Collection',
  'Condition',
  'Engine',
  'Found',
  'address_of',
  'check_index_type',
  'check_name',
  'check_text',
  'connect',
  'create',
  'exists',
  'index_types',
  'is_index',
  'open_collection',
  'parse',
]

ENGINES = {
  'milvus': 'milvus.Milvus',
  'qdrant': 'qdrant.Qdrant',
  'pgvector': 'pgvector.Pgvector',
  'opensearch': 'opensearch.OpenSearch',
  'elasticsearch': 'opensearch.Elasticsearch',
}
_log = logging.getLogger('dprjax')
_FOLDERS = ('milvus', 'qdrant')
_SERVERS = dict.fromkeys(ENGINES, 'https?') | {'pgvector': 'postgresql'}


def address_of(text: str) -> Address:
  """Reads ``ENGINE:PLACE``."""
  engine, _, place = text.partition(':')
  address, server = Address(engine, place), _SERVERS.get(engine, '')
  served = server and re.fullmatch(rf'({server})://[^@?#\s]*', place)
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


def _class_of(address: Address) -> Any:
  module, _, name = ENGINES[address.engine].partition('.')
  return getattr(importlib.import_module(f'dprjax.engines.{module}'), name)


def is_index(address: Address, folder: epath.Path) -> bool:
  """Whether a folder has only files of the engine of this address."""
  kind = _class_of(address)
  return hasattr(kind, 'is_index') and bool(kind.is_index(folder))


def index_types(address: Address) -> tuple[str, ...]:
  """The index types of an engine at such a place, before connecting."""
  kind = _class_of(address)
  return tuple(kind.types_at(address) if hasattr(kind, 'types_at') else kind.index_types)


def connect(address: Address | str, *, new: bool = False, timeout: float = 30.0) -> Engine:
  """Connects to an engine; close it after use.

  Args:
    timeout: seconds.
  """
  place = address_of(address) if isinstance(address, str) else address
  kind = _class_of(place)
  if place.token() and place.place.startswith('http://'):
    _log.info('%s: the secret is sent without encryption; use https', place)
  where = f'{place} (another process may have it open)' if place.is_local else str(place)
  with errors(where, kind.__name__, *secrets(place.token())):
    return kind(place, new=new, timeout=timeout)  # type: ignore[no-any-return]
