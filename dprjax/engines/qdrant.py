"""Qdrant: a server, or the embedded mode of its client with a local folder."""

import logging
import uuid
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from dprjax.engines import engine
from dprjax.engines.engine import Address, Condition, Hits, Opened, Record, Rows

_VECTOR = 'vector'
_ID = 'id'  # in the payload: points have numbers or UUIDs
_RECORD = 'dprjax'
_FILES = {'meta.json', 'collection', 'aliases.json'}
_NAMES = uuid.UUID('6c1d1d0e-1b1f-5b1c-9d5e-0d5a1f7c2f11')


class Qdrant:
  """A connection to a server or a local folder."""

  most = 100_000
  stores_nul = True
  # A server takes requests of 32 MB.
  request_rows, request_bytes = 1_000, 1 << 22

  def __init__(self, address: Address, *, new: bool = False, timeout: float = 30.0):
    import qdrant_client  # an extra

    self.address = address
    if address.is_local:
      engine.check_folder(address, self.is_index, new)

    logging.getLogger('httpx').setLevel(logging.WARNING)  # it logs every request
    warnings.filterwarnings('ignore', 'Local mode is not|Api key is used')
    if address.is_local:
      self.client = qdrant_client.QdrantClient(path=address.place)
      self.version = f'embedded, qdrant-client {_version()}'
    else:
      self.client = qdrant_client.QdrantClient(
        url=address.place,
        api_key=address.token() or None,
        timeout=round(timeout) or 1,
        check_compatibility=False,
      )
      self.version = self.client.info().version

  @staticmethod
  def is_index(folder: epath.Path) -> bool:
    names = {path.name for path in folder.iterdir() if not path.name.startswith('.')}
    return 'meta.json' in names and names <= _FILES

  @staticmethod
  def types_at(address: Address) -> Sequence[str]:
    return ('FLAT',) if address.is_local else ('HNSW', 'HNSW_SQ8')

  def close(self) -> None:
    self.client.close()

  def names(self) -> list[str]:
    return [one.name for one in self.client.get_collections().collections]

  def open(self, name: str) -> Opened | None:
    if not self.client.collection_exists(name):
      return None
    config = self.client.get_collection(name).config
    record = Record.of_json((config.metadata or {}).get(_RECORD))
    kind = 'HNSW_SQ8' if config.quantization_config else 'HNSW'
    return Opened(record, 'FLAT' if self.address.is_local else kind)

  def create(self, name: str, record: Record, *, index_type: str = 'auto', rows: int = 0) -> None:
    """'auto' is HNSW; the embedded mode compares all passages."""
    del rows
    from qdrant_client import models

    small = None
    if index_type == 'HNSW_SQ8':
      small = models.ScalarQuantization(
        scalar=models.ScalarQuantizationConfig(type=models.ScalarType.INT8, always_ram=True)
      )
    size = int(record.space['dimension'])
    self.client.create_collection(
      name,
      {
        _VECTOR: models.VectorParams(
          size=size, distance=models.Distance.DOT, on_disk=True if small else None
        )
      },
      quantization_config=small,
      metadata={_RECORD: record.as_json()},
    )

  def note(self, name: str, record: Record) -> None:
    self.client.update_collection(name, metadata={_RECORD: record.as_json()})

  def upsert(self, name: str, rows: Rows) -> None:
    from qdrant_client import models

    vectors: dict[str, Any] = {_VECTOR: rows.vectors.tolist()}
    payloads = [
      {**(rows.payloads[row] if rows.payloads is not None else {}), _ID: id_}
      for row, id_ in enumerate(rows.ids)
    ]
    self.client.upsert(
      name, models.Batch(ids=_points(rows.ids), vectors=vectors, payloads=payloads), wait=True
    )

  def flush(self, name: str) -> None:
    """Qdrant indexes in the background, but searches find all written vectors."""

  def count(self, name: str) -> int:
    return self.client.count(name, exact=True).count

  def delete(self, name: str, ids: Sequence[str]) -> None:
    self.client.delete(name, _points(ids), wait=True)

  def fetch(self, name: str, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    payloads = {}
    for point in self.client.retrieve(name, _points(ids), with_payload=True):
      payload = dict(point.payload or {})
      payloads[payload.pop(_ID)] = payload
    return payloads

  def drop(self, name: str) -> None:
    self.client.delete_collection(name)

  def settings(self, name: str, k: int) -> dict[str, Any]:
    del name
    return {} if self.address.is_local else {'hnsw_ef': max(2 * k, 128)}

  def search(
    self,
    name: str,
    queries: np.ndarray,
    k: int,
    settings: Mapping[str, Any],
    where: Sequence[Condition],
  ) -> list[Hits]:
    from qdrant_client import models

    how, only = _parameters(settings), _filter(where)
    requests = [
      models.QueryRequest(
        query=query, using=_VECTOR, params=how, filter=only, limit=k, with_payload=[_ID]
      )
      for query in queries.tolist()
    ]
    answers = self.client.query_batch_points(name, requests)
    return [
      Hits([point.payload[_ID] for point in one.points], [point.score for point in one.points])  # type: ignore[index]
      for one in answers
    ]


def _version() -> str:
  from importlib import metadata

  return metadata.version('qdrant-client')


def _points(ids: Sequence[str]) -> list[Any]:
  return [str(uuid.uuid5(_NAMES, id_)) for id_ in ids]


def _parameters(settings: Mapping[str, Any]) -> Any:
  from qdrant_client import models

  values = dict(settings)
  if 'exact' in values:
    values['exact'] = bool(values['exact'])
  return models.SearchParams(**values) if values else None


def _filter(where: Sequence[Condition]) -> Any:
  """Conditions for Qdrant, where a list matches if one of its items does."""
  from qdrant_client import models

  if not where:
    return None
  names = {'<': 'lt', '<=': 'lte', '>': 'gt', '>=': 'gte'}
  must: list[Any] = []
  for field, operator, values in where:
    if operator == '=':
      # Qdrant cannot match floats, but a range from the float to itself does.
      options: list[Any] = [
        models.FieldCondition(key=field, range=models.Range(gte=value, lte=value))
        if isinstance(value, float)
        else models.FieldCondition(key=field, match=models.MatchValue(value=value))
        for value in values
      ]
      must.append(options[0] if len(options) == 1 else models.Filter(should=options))
    else:
      bound = models.Range(**{names[operator]: float(values[0])})
      must.append(models.FieldCondition(key=field, range=bound))
  return models.Filter(must=must)
