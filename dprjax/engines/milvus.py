"""Milvus: milvus-lite in this process with a local folder (``index.db``), or a server."""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from dprjax.engines import engine
from dprjax.engines.engine import Address, Condition, Hits, Opened, Record, Rows

_LITE_TYPES = ('FLAT', 'AUTOINDEX', 'HNSW', 'IVF_FLAT', 'IVF_SQ8')
# pymilvus pings every ten seconds, which makes milvus-lite end the connection.
_LITE_OPTIONS = {'grpc.keepalive_time_ms': 2**31 - 1}
_LITE_FILES = {'LOCK', 'collections', 'databases', 'aliases.json', 'database_properties.json'}
_RECORD = 'dprjax.space'  # the property with the record
_ID, _VECTOR = 'id', 'vector'
_PAYLOAD = 'payload'
_MOST_BYTES = 65_535  # of a field
_SEGMENT_BYTES = 1 << 30  # default amount of data that a server indexes at once
_LONGEST_ID = 1024  # bytes
_log = logging.getLogger('dprjax')


class _Kind(NamedTuple):
  """The index of an open collection, and its lists."""

  name: str
  lists: int


class Milvus:
  """A connection to milvus-lite or a server."""

  most = 16_384
  stores_nul = True
  request_rows, request_bytes = 1_000, 1 << 24  # a request is limited to 64 MB

  def __init__(self, address: Address, *, new: bool = False, timeout: float = 30.0):
    import pymilvus  # an extra

    if address.is_local:
      import milvus_lite  # noqa: F401
    self.address, uri = address, address.place
    self._folder = epath.Path(uri) if address.is_local else None
    if self._folder is not None:
      engine.check_folder(address, self.is_index, new)

    # They log tracebacks of errors that are also raised.
    for name in ('pymilvus', 'milvus_lite', 'grpc'):
      logging.getLogger(name).setLevel(logging.CRITICAL)
    self.client = pymilvus.MilvusClient(
      uri,
      token=address.token(),
      timeout=timeout,
      **({'grpc_options': _LITE_OPTIONS} if self._folder else {}),
    )
    self.version = str(self.client.get_server_version())
    # milvus-lite can also run as a server.
    self._lite = 'lite' in self.version
    self._opened: dict[str, _Kind] = {}

  @staticmethod
  def is_index(folder: epath.Path) -> bool:
    names = {path.name for path in folder.iterdir() if not path.name.startswith('.')}
    return bool(names) and names <= _LITE_FILES

  @staticmethod
  def types_at(address: Address) -> Sequence[str]:
    # milvus-lite accepts any name, and searches without an index.
    return _LITE_TYPES if address.is_local else ('SCANN', *_LITE_TYPES)

  def close(self) -> None:
    self.client.close()
    if self._folder is not None:
      from milvus_lite.server_manager import server_manager_instance

      server_manager_instance.release_server(str(self._folder))  # completes a local index

  def names(self) -> list[str]:
    return list(self.client.list_collections())

  def open(self, name: str) -> Opened | None:
    if not self.client.has_collection(name):
      return None
    described = self.client.describe_collection(name)
    index = self.client.describe_index(name, _VECTOR) or {}
    self._load(name)
    properties = described.get('properties') or {}
    record = Record.of_json(properties.get(_RECORD) or described.get('description'))
    kind = str(index.get('index_type', 'FLAT'))
    self._opened[name] = _Kind(kind, int(index.get('nlist', 128)))
    return Opened(record, kind)

  def _load(self, name: str) -> None:
    try:
      self.client.load_collection(name)
    except Exception:  # milvus-lite raises anything
      # A killed command leaves a partial .idx file; milvus-lite rebuilds it from the vectors.
      pattern = f'collections/{name}/partitions/*/indexes/*.idx'
      broken = list(self._folder.glob(pattern)) if self._folder is not None else []
      if not broken:
        raise
      for path in broken:
        path.unlink()
      _log.info('%s: rebuilding the index of collection %s', self.address, name)
      self.client.load_collection(name)

  def create(self, name: str, record: Record, *, index_type: str = 'auto', rows: int = 0) -> None:
    """``rows`` set the lists of SCANN and IVF. 'auto' is SCANN, or FLAT on milvus-lite."""
    if index_type == 'auto':
      index_type = 'FLAT' if self._lite else 'SCANN'
      if self._lite:
        _log.info('%s: milvus-lite has no SCANN index; FLAT compares all passages', self.address)
    import pymilvus

    dimension = int(record.space['dimension'])
    most = max(min(max(rows, 1), _SEGMENT_BYTES // (4 * dimension)), 1)
    lists = max(1, min(65_536, round(4 * math.sqrt(most))))
    client, text = self.client, record.as_json()
    schema = client.create_schema(auto_id=False, enable_dynamic_field=False, description=text)
    schema.add_field(_ID, pymilvus.DataType.VARCHAR, is_primary=True, max_length=_LONGEST_ID)
    schema.add_field(_VECTOR, pymilvus.DataType.FLOAT_VECTOR, dim=dimension)
    # Upserts do not remove dynamic fields.
    schema.add_field(_PAYLOAD, pymilvus.DataType.JSON)
    index = client.prepare_index_params()
    index.add_index(
      _VECTOR,
      index_type=index_type,
      metric_type='IP',
      params={'nlist': lists} if index_type.startswith(('IVF', 'SCANN')) else {},
    )
    client.create_collection(
      name, schema=schema, consistency_level='Strong', properties={_RECORD: text}
    )
    # pymilvus would wait half a second for an index without vectors.
    client.create_index(name, index, sync=not self._lite)
    client.load_collection(name)

  def note(self, name: str, record: Record) -> None:
    self.client.alter_collection_properties(name, {_RECORD: record.as_json()})

  def upsert(self, name: str, rows: Rows) -> None:
    documents: list[dict[str, Any]] = [
      {_ID: id_, _VECTOR: vector} for id_, vector in zip(rows.ids, rows.vectors, strict=True)
    ]
    payloads = rows.payloads if rows.payloads is not None else [{}] * len(documents)
    for document, payload in zip(documents, payloads, strict=True):
      document[_PAYLOAD] = _fitting(payload)
    self.client.upsert(name, documents)

  def flush(self, name: str) -> None:
    self.client.flush(name)

  def count(self, name: str) -> int:
    return int(self.client.query(name, filter='', output_fields=['count(*)'])[0]['count(*)'])

  def delete(self, name: str, ids: Sequence[str]) -> None:
    self.client.delete(name, filter=_among(ids))

  def fetch(self, name: str, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    fields = [_ID, _PAYLOAD]
    payloads = {}
    for row in self.client.query(name, filter=_among(ids), output_fields=fields):
      payload = row.get(_PAYLOAD) or {}
      # milvus-lite has text.
      payloads[row[_ID]] = json.loads(payload) if isinstance(payload, str | bytes) else payload
    return payloads

  def drop(self, name: str) -> None:
    self.client.drop_collection(name)

  def settings(self, name: str, k: int) -> dict[str, Any]:
    """SCANN and IVF search a tenth of the lists; SCANN scores 4 k vectors again, exactly."""
    kind = self._opened[name]
    probes = {'nprobe': max(8, kind.lists // 10)}
    # The candidate list of HNSW must have at least k places.
    return {
      'SCANN': probes | {'reorder_k': max(4 * k, 100)},
      'IVF_FLAT': probes,
      'IVF_SQ8': probes,
      'HNSW': {'ef': min(max(2 * k, 64), 32_768)},
    }.get(kind.name, {})

  def search(
    self,
    name: str,
    queries: np.ndarray,
    k: int,
    settings: Mapping[str, Any],
    where: Sequence[Condition],
  ) -> list[Hits]:
    answers = self.client.search(
      name,
      data=[*queries],
      limit=k,
      filter=_expression(where),
      output_fields=[_ID],  # without names, milvus-lite sends all fields
      search_params={'metric_type': 'IP', 'params': dict(settings)},
      anns_field=_VECTOR,
    )
    return [Hits(hits.ids, hits.distances) for hits in answers]


def _fitting(payload: Mapping[str, Any]) -> dict[str, Any]:
  """A payload with its text cut to fit into a field."""
  values = dict(payload)
  size = len(json.dumps(values, ensure_ascii=False).encode())
  if size > _MOST_BYTES and 'text' in values:
    limit = max(len(values['text'].encode()) - (size - _MOST_BYTES) - 1, 0)
    values['text'] = values['text'].encode()[:limit].decode(errors='ignore')
  return values


def _among(ids: Sequence[str]) -> str:
  # JSON strings: pymilvus does not escape quotes in ids.
  return f'{_ID} in {json.dumps(list(ids), ensure_ascii=False)}'


def _expression(where: Sequence[Condition]) -> str:
  """Conditions in the language of Milvus."""
  parts = []
  for name, operator, values in where:
    field = f'{_PAYLOAD}["{name}"]'
    if operator == '=':
      one = [json.dumps(value, ensure_ascii=False) for value in values]
      options = [f'{field} == {value} or json_contains({field}, {value})' for value in one]
      parts.append(f'({" or ".join(options)})')
    else:
      parts.append(f'{field} {operator} {json.dumps(values[0])}')
  return ' and '.join(parts)
