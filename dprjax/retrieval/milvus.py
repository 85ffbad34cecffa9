"""Milvus: an index that changes while it is asked. Vectors under their documents' ids, written
again, deleted, searched.

The same code for two kinds of server: milvus-lite, which runs within this process on a local folder
(``index.db``), and a server or cluster (``http://host:19530``). Both come with ``pip install
'dprjax[milvus]'``.

A collection remembers whose vectors it was filled with (`dprjax.retrieval.embeddings.Meta.space`);
those of another backbone or prompt are refused, be they queries or documents. Scores are inner
products.

    server = Server('index.db', new=True)
    collection = server.create('passages', corpus.meta.space(), rows=len(corpus))
    collection.upsert(ids, vectors)                  # an id that is there already is replaced
    collection.search(queries, k=10)                 # Found: ids, rows, scores
    collection.like(['d7'], k=10)                    # what is near a stored document
    collection.delete(['d7'])
"""

import contextlib
import importlib.util
import json
import logging
import math
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from dprjax.base import files
from dprjax.base.errors import InputError
from dprjax.retrieval.embeddings import differences
from dprjax.retrieval.exact import check_finite

MAX_K = 16_384  # Milvus returns no more for a query
INDEX_TYPES = ('auto', 'SCANN', 'FLAT', 'AUTOINDEX', 'HNSW', 'IVF_FLAT', 'IVF_SQ8')

_LITE_TYPES = ('FLAT', 'AUTOINDEX', 'HNSW', 'IVF_FLAT', 'IVF_SQ8')
# milvus-lite ends the connection of who asks every ten seconds, as pymilvus does, whether it is
# still there.
_LITE_OPTIONS = {'grpc.keepalive_time_ms': 2**31 - 1}
_SPACE = 'dprjax.space'
_ID, _VECTOR = 'id', 'vector'
_MAX_ID = 1024  # bytes
_SEGMENT_BYTES = 1 << 30  # a server builds one index for so much data, by its default settings
# A request may have 64 MB, an answer too.
_REQUEST_BYTES, _REQUEST_ROWS, _ANSWER_ROWS = 1 << 24, 1_000, 100_000
_IDS = 1_000  # in one expression
_log = logging.getLogger('dprjax')

Progress = Callable[[int], None]


class Found(NamedTuple):
  """What was found for each query, best first.

  Attributes:
    ids: of all documents that were found, each once.
    rows: places in ``ids``; -1 where fewer than k were found.
    scores: their inner products; -inf likewise.
  """

  ids: list[str]
  rows: Int[np.ndarray, 'queries k']
  scores: Float[np.ndarray, 'queries k']


class Server:
  """A connection.

  ``uri`` is as messages and reports may show it, without a password; ``version`` what the server
  calls itself.
  """

  def __init__(self, uri: str, token: str = '', *, new: bool = False, timeout: float = 30.0):
    """Connects.

    Args:
      uri: a local folder whose name ends in .db, or http(s)://host:port.
      token: of a server that asks for one, 'user:password' or an API key.
      new: a local folder that is not there is made.
      timeout: seconds to wait for the connection.

    Raises:
      InputError: pymilvus or milvus-lite is not installed, there is no such folder, or nobody
        answers there.
    """
    if importlib.util.find_spec('pymilvus') is None:
      raise InputError(
        "Milvus needs pymilvus, which is not installed: pip install 'dprjax[milvus]'"
      )
    self.lite = '://' not in uri
    if self.lite and not uri.endswith('.db'):
      raise InputError(f'--uri={uri}: expected a local name that ends in .db, or http://host:port')
    if self.lite and importlib.util.find_spec('milvus_lite') is None:
      raise InputError(
        f'--uri={uri}: a local index needs milvus-lite, which is not installed: pip install '
        "'dprjax[milvus]'"
      )
    if self.lite and not new:
      files.existing(uri, 'local index')
    import pymilvus  # here, because it is an extra

    # What goes wrong is raised; they would write tracebacks of it besides, and of each call that
    # milvus-lite does not have.
    for name in ('pymilvus', 'milvus_lite', 'grpc'):
      logging.getLogger(name).setLevel(logging.CRITICAL)
    self.uri = _public(uri)
    with _told(f'{self.uri} (another process may have it open)' if self.lite else self.uri):
      self.client = pymilvus.MilvusClient(
        uri, token=token, timeout=timeout, **({'grpc_options': _LITE_OPTIONS} if self.lite else {})
      )
      self.version = str(self.client.get_server_version())
    # milvus-lite can be a server of its own as well.
    self.lite = 'lite' in self.version

  def __contains__(self, name: str) -> bool:
    with _told(self.uri):
      return bool(self.client.has_collection(name))

  def open(self, name: str) -> 'Collection':
    """A collection that is there. Raises InputError if it is not, or was not filled by dprjax."""
    if name not in self:
      with _told(self.uri):
        names = sorted(self.client.list_collections())
      raise InputError(
        f'{self.uri}: no collection {name!r} '
        f'({"there are " + ", ".join(names) if names else "there are none"}); '
        'fill one with dprjax.index --upsert'
      )
    with _told(self.uri):
      described = self.client.describe_collection(name)
      index = self.client.describe_index(name, _VECTOR) or {}
      self.client.load_collection(name)
    try:
      space = json.loads(described['properties'].get(_SPACE) or described['description'])[_SPACE]
    except (KeyError, TypeError, json.JSONDecodeError):
      raise InputError(
        f'{self.uri}: collection {name!r} was not made by dprjax: nothing says what its vectors '
        'are of; choose another name'
      ) from None
    return Collection(
      self, name, space, str(index.get('index_type', 'FLAT')), int(index.get('nlist', 128))
    )

  def create(
    self, name: str, space: Mapping[str, Any], *, index_type: str = 'auto', rows: int = 0
  ) -> 'Collection':
    """A new, empty collection.

    Args:
      name: letters, digits and underscores.
      space: of the vectors that it is for, `embeddings.Meta.space`.
      index_type: one of INDEX_TYPES. 'auto': SCANN where the server has it, which milvus-lite does
        not: there FLAT, which is exact.
      rows: how many there will be, about: decides how many lists SCANN and IVF cut them into.

    Raises:
      InputError: the server has no such index, or refuses for another reason; milvus-lite takes any
        name of an index, and would search without.
    """
    if self.lite and index_type not in ('auto', *_LITE_TYPES):
      raise InputError(
        f'{self.uri}: milvus-lite has no index {index_type}; choose among '
        f'{", ".join(_LITE_TYPES)}, or use a server'
      )
    if index_type == 'auto':
      index_type = 'FLAT' if self.lite else 'SCANN'
      if self.lite:
        _log.info(
          '%s: milvus-lite has no SCANN index: FLAT, which compares with every passage '
          '(--index_type chooses another)',
          self.uri,
        )
    import pymilvus

    dimension = int(space['dimension'])
    lists = max(
      1, min(65_536, round(4 * math.sqrt(min(max(rows, 1), _SEGMENT_BYTES // (4 * dimension)))))
    )
    said = json.dumps({_SPACE: dict(space)}, sort_keys=True)
    client = self.client
    schema = client.create_schema(auto_id=False, enable_dynamic_field=False, description=said)
    schema.add_field(_ID, pymilvus.DataType.VARCHAR, is_primary=True, max_length=_MAX_ID)
    schema.add_field(_VECTOR, pymilvus.DataType.FLOAT_VECTOR, dim=dimension)
    index = client.prepare_index_params()
    index.add_index(
      _VECTOR,
      index_type=index_type,
      metric_type='IP',
      params={'nlist': lists} if index_type.startswith(('IVF', 'SCANN')) else {},
    )
    # milvus-lite keeps properties and forgets descriptions; for servers a description is what has
    # always been free to use.
    properties = {'properties': {_SPACE: said}} if self.lite else {}
    with _told(f'{self.uri}: collection {name!r} with index {index_type}'):
      client.create_collection(
        name, schema=schema, index_params=index, consistency_level='Strong', **properties
      )
    return self.open(name)

  def drop(self, name: str) -> None:
    """Removes a collection and all that is in it."""
    with _told(self.uri):
      self.client.drop_collection(name)


class Collection:
  """Vectors of one space under their documents' ids; see `Server.open` and `Server.create`.

  Attributes:
    space: what made the vectors, as in `embeddings.Meta.space`.
    index_type: as the server calls it.
  """

  def __init__(self, server: Server, name: str, space: dict[str, Any], index_type: str, lists: int):
    self.server, self.name, self.space, self.index_type = server, name, space, index_type
    self._client, self._lists = server.client, lists
    self._where = f'{server.uri}, collection {name!r}'

  def __len__(self) -> int:
    with _told(self._where):
      return int(
        self._client.query(self.name, filter='', output_fields=['count(*)'])[0]['count(*)']
      )

  def check_space(self, space: Mapping[str, Any], what: str) -> None:
    """Raises InputError if ``what`` is of other vectors than the collection: another backbone,
    prompt, pooling, dimension.
    """
    different = differences(self.space, space)
    if different:
      raise InputError(
        f'{self._where} and {what} do not belong together: {different}; '
        'encode both with the same backbone, prompt and settings'
      )

  def upsert(
    self, ids: Sequence[str], vectors: Float[np.ndarray, 'n H'], progress: Progress | None = None
  ) -> None:
    """Writes vectors; those of ids that are there already are replaced. The same call again after
    an interruption does no harm.

    Raises:
      InputError: vectors of another length, NaN or infinity among them, an id of more than 1,024
        bytes, or what Milvus complains of.
    """
    self._check_dimension(vectors, 'vectors')
    check_finite(vectors, 'document', 0)
    long = next(
      (id_ for id_ in ids if len(id_) * 4 > _MAX_ID and len(id_.encode()) > _MAX_ID), None
    )
    if long is not None:
      raise InputError(
        f'{self._where}: the id {long[:40]!r}... has more than {_MAX_ID} bytes; give shorter ids'
      )
    size = self._batch(vectors.shape[1])
    for start in range(0, len(ids), size):
      part = np.ascontiguousarray(vectors[start : start + size], np.float32)
      with _told(self._where):
        self._client.upsert(
          self.name,
          [
            {_ID: id_, _VECTOR: vector}
            for id_, vector in zip(ids[start : start + size], part, strict=True)
          ],
        )
      if progress is not None:
        progress(min(start + size, len(ids)))

  def flush(self) -> None:
    """Has the server write what it holds and index it: worth a call after many upserts."""
    with _told(self._where):
      self._client.flush(self.name)

  def delete(self, ids: Sequence[str], progress: Progress | None = None) -> list[str]:
    """Deletes documents; returns the ids that were not there."""
    missing: list[str] = []
    for start in range(0, len(ids), _IDS):
      part = ids[start : start + _IDS]
      there = {row[_ID] for row in self._rows(part, [_ID])}
      missing += [id_ for id_ in part if id_ not in there]
      if there:
        with _told(self._where):
          self._client.delete(self.name, filter=_among(sorted(there)))
      if progress is not None:
        progress(min(start + _IDS, len(ids)))
    return missing

  def vectors(self, ids: Sequence[str]) -> Float[np.ndarray, 'n H']:
    """The stored vectors of these documents, in this order.

    Raises InputError if one is not there.
    """
    found: dict[str, np.ndarray] = {}
    size = min(_IDS, self._batch(int(self.space['dimension'])))
    for start in range(0, len(ids), size):
      found |= {
        row[_ID]: np.asarray(row[_VECTOR], np.float32)
        for row in self._rows(ids[start : start + size], [_ID, _VECTOR])
      }
    missing = [id_ for id_ in dict.fromkeys(ids) if id_ not in found]
    if missing:
      raise InputError(
        f'{self._where}: {len(missing)} of these ids are not there, for instance '
        f'{", ".join(missing[:5])}'
      )
    return np.stack([found[id_] for id_ in ids])

  def search(
    self,
    queries: Float[np.ndarray, 'queries H'],
    k: int,
    *,
    settings: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
  ) -> Found:
    """The best ``min(k, number of documents)`` of each query, as far as the index finds them.

    Args:
      queries: vectors of the collection's space.
      k: at most MAX_K.
      settings: Milvus's own of this index type (nprobe, reorder_k, ef, ...), in place of those of
        `settings`.
      progress: told the number of queries done.

    Raises:
      InputError: vectors of another length, k too large, an empty collection, or what Milvus
        complains of.
    """
    self._check_dimension(queries, 'queries')
    check_finite(queries, 'query', 0)
    if k > MAX_K:
      raise InputError(
        f'Milvus returns at most {MAX_K:,} passages a query, not {k:,}; ask for fewer, or search '
        'with --index=exact'
      )
    count = len(self)
    if not count or not len(queries):
      raise InputError(
        f'nothing to search: {len(queries)} queries, and {count} documents in {self._where}'
      )
    k = min(k, count)
    parameters = {'metric_type': 'IP', 'params': self.settings(k) | dict(settings or {})}
    size = max(1, min(self._batch(queries.shape[1]), _ANSWER_ROWS // k))
    places: dict[str, int] = {}
    rows, scores = (
      np.full((len(queries), k), -1, np.int32),
      np.full((len(queries), k), -np.inf, np.float32),
    )
    for start in range(0, len(queries), size):
      part = np.ascontiguousarray(queries[start : start + size], np.float32)
      with _told(self._where):
        answers = self._client.search(
          self.name,
          data=list(part),
          limit=k,
          output_fields=[_ID],
          search_params=parameters,
          anns_field=_VECTOR,
        )
      for number, hits in enumerate(answers, start=start):
        rows[number, : len(hits)] = [places.setdefault(hit[_ID], len(places)) for hit in hits]
        scores[number, : len(hits)] = [hit['distance'] for hit in hits]
      if progress is not None:
        progress(min(start + size, len(queries)))
    return Found(list(places), rows, scores)

  def like(
    self,
    ids: Sequence[str],
    k: int,
    *,
    settings: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
  ) -> Found:
    """For each of these stored documents the k best others.

    Raises InputError as `search` and `vectors` do.
    """
    found = self.search(self.vectors(ids), k + 1, settings=settings, progress=progress)
    place = {id_: number for number, id_ in enumerate(found.ids)}
    own = np.array([place.get(id_, -2) for id_ in ids])[:, None]
    # Stable: the others keep their order, and one falls off at the end where the document itself
    # was not among the k + 1.
    order = np.argsort(found.rows == own, axis=1, kind='stable')
    rows, scores = (
      np.take_along_axis(array, order, axis=1) for array in (found.rows, found.scores)
    )
    rows, scores = np.where(rows == own, -1, rows), np.where(rows == own, -np.inf, scores)
    k = min(k, rows.shape[1])
    return Found(found.ids, rows[:, :k], scores[:, :k])

  def settings(self, k: int) -> dict[str, int]:
    """What a search looks at unless it is told: of SCANN and IVF a tenth of the lists, and with
    SCANN 4 k vectors scored again exactly.
    """
    lists = {'nprobe': max(8, self._lists // 10)}
    # HNSW keeps a list of its best, which must be as long as k.
    return {
      'SCANN': lists | {'reorder_k': max(4 * k, 100)},
      'IVF_FLAT': lists,
      'IVF_SQ8': lists,
      'HNSW': {'ef': min(max(2 * k, 64), 32_768)},
    }.get(self.index_type, {})

  def _rows(self, ids: Sequence[str], fields: list[str]) -> list[dict[str, Any]]:
    with _told(self._where):
      return list(self._client.query(self.name, filter=_among(ids), output_fields=fields))

  def _check_dimension(self, vectors: np.ndarray, what: str) -> None:
    if vectors.ndim != 2 or vectors.shape[1] != self.space['dimension']:
      raise InputError(
        f'{self._where} has vectors of {self.space["dimension"]} dimensions, the {what} have '
        f'{vectors.shape[-1]}'
      )

  @staticmethod
  def _batch(dimension: int) -> int:
    return max(1, min(_REQUEST_ROWS, _REQUEST_BYTES // (4 * dimension)))


def _among(ids: Sequence[str]) -> str:
  # As JSON strings: pymilvus itself puts ids between quotes as they are, and one with a quote in it
  # ends the expression.
  return f'{_ID} in {json.dumps(list(ids), ensure_ascii=False)}'


def _public(uri: str) -> str:
  """Without the user and the password that it may carry."""
  if '://' not in uri:
    return uri
  parts = urllib.parse.urlsplit(uri)
  return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition('@')[2]))


@contextlib.contextmanager
def _told(where: str) -> Iterator[None]:
  """Turns what Milvus complains of inside the block into an InputError."""
  from pymilvus.exceptions import MilvusException

  try:
    yield
  except MilvusException as error:
    raise InputError(f'{where}: Milvus says: {error.message}') from error
