"""Connections to Milvus, and its collections of vectors."""

import contextlib
import importlib.util
import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath
from jaxtyping import Float, Int

from dprjax.base import files, outputs, reading
from dprjax.base.errors import InputError
from dprjax.formats.rankings import Ranking
from dprjax.retrieval import best, bm25_index
from dprjax.retrieval.best import check_finite
from dprjax.retrieval.manifest import check_same_space

MAX_K = 16_384  # the most that Milvus returns for a query
_LITE_TYPES = ('FLAT', 'AUTOINDEX', 'HNSW', 'IVF_FLAT', 'IVF_SQ8')
INDEX_TYPES = ('auto', 'SCANN', *_LITE_TYPES)

# pymilvus pings every ten seconds, at which milvus-lite ends the connection.
_LITE_OPTIONS = {'grpc.keepalive_time_ms': 2**31 - 1}
_LITE_FILES = {'LOCK', 'collections', 'databases', 'aliases.json', 'database_properties.json'}
_SPACE = 'dprjax.space'
_BM25 = 'dprjax.bm25'
_ID, _VECTOR = 'id', 'vector'
# Fields of a collection with BM25: the words of a passage, joined by spaces, and Milvus's counts.
_WORDS, _COUNTS = 'words', 'counts'
_MAX_WORDS = 65_535  # bytes of a field
_MAX_ID = 1024  # bytes
_SEGMENT_BYTES = 1 << 30  # data that a server indexes at once, by default
# Requests and answers are limited to 64 MB.
_REQUEST_BYTES, _REQUEST_ROWS, _ANSWER_ROWS = 1 << 24, 1_000, 100_000
_IDS = 1_000  # in one expression
_log = logging.getLogger('dprjax')

ProgressFn = Callable[[int], None]


def check_uri(uri: str) -> None:
  """Raises InputError for anything but a local name in .db or the address of a server.

  Addresses appear in messages and reports, so they may hold no secret.
  """
  remote = re.fullmatch(r'(https?|tcp|unix)://[^@?#\s]+', uri) and not uri.endswith('.db')
  if not (remote or (is_local(uri) and uri.endswith('.db') and '@' not in uri)):
    # The address may hold a password.
    raise InputError(
      '--uri: expected a local name that ends in .db, or http://host:port (or https) without user, '
      'query or fragment; a password goes into --token or MILVUS_TOKEN'
    )


def is_local(uri: str) -> bool:
  """Whether an address is that of a local folder."""
  return '://' not in uri


def is_index(folder: epath.Path) -> bool:
  """Whether a folder holds only what milvus-lite writes."""
  names = {path.name for path in folder.iterdir() if not path.name.startswith('.')}
  return bool(names) and names <= _LITE_FILES


def check_index_type(uri: str, index_type: str) -> None:
  """Raises InputError for a type of index that milvus-lite lacks."""
  # milvus-lite accepts any name, and searches without an index.
  if is_local(uri) and index_type not in ('auto', *_LITE_TYPES):
    raise InputError(f'{uri}: milvus-lite has no index {index_type}, only {", ".join(_LITE_TYPES)}')


def check_name(name: str) -> None:
  """Raises InputError for an impossible name of a collection."""
  if not re.fullmatch(r'[A-Za-z_][A-Za-z0-9_]{0,254}', name):
    raise InputError(
      f'--collection={name!r:.80}: expected letters, digits and underscores, 255 at most'
    )


class Found(NamedTuple):
  """The results of each query, best first.

  Attributes:
    ids: of all documents found, each once.
    rows: places in ``ids``; -1 where fewer than k were found.
    scores: inner products; -inf where fewer were found.
  """

  ids: list[str]
  rows: Int[np.ndarray, 'queries k']
  scores: Float[np.ndarray, 'queries k']


class Server:
  """A connection to milvus-lite or a server; close it after use.

  Attributes:
    uri: the address.
    version: of the server.
    lite: whether it is milvus-lite.
    client: pymilvus's.
  """

  def __init__(self, uri: str, token: str = '', *, new: bool = False, timeout: float = 30.0):
    """Connects.

    Args:
      uri: a local folder whose name ends in .db, or http(s)://host:port.
      token: 'user:password' or an API key, where the server requires one.
      new: make a missing local folder.
      timeout: seconds.

    Raises:
      InputError: pymilvus or milvus-lite is missing, the folder is missing, or no server answers.
    """
    check_uri(uri)
    self.uri, self._folder = uri, epath.Path(uri) if is_local(uri) else None
    for package in ('pymilvus', 'milvus_lite') if is_local(uri) else ('pymilvus',):
      if importlib.util.find_spec(package) is None:
        raise InputError(f"{package} is not installed: pip install 'dprjax[milvus]'")
    if self._folder is not None:
      _check_local(self._folder, new)
    import pymilvus  # an extra

    # They log tracebacks of errors that are raised anyway.
    for name in ('pymilvus', 'milvus_lite', 'grpc'):
      logging.getLogger(name).setLevel(logging.CRITICAL)
    self._token = token
    with self.errors(f'{uri} (another process may have it open)' if self._folder else uri):
      self.client = pymilvus.MilvusClient(
        uri,
        token=token,
        timeout=timeout,
        **({'grpc_options': _LITE_OPTIONS} if self._folder else {}),
      )
      self.version = str(self.client.get_server_version())
    # milvus-lite can run as a server too.
    self.lite = 'lite' in self.version

  def close(self) -> None:
    """Ends the connection and completes a local index."""
    with self.errors(self.uri):
      self.client.close()
      if self._folder is not None:
        from milvus_lite.server_manager import server_manager_instance

        server_manager_instance.release_server(str(self._folder))

  @contextlib.contextmanager
  def errors(self, where: str) -> Iterator[None]:
    """Turns errors of Milvus into InputError without the token."""
    try:
      yield
    except (InputError, MemoryError):
      raise
    except Exception as error:  # of pymilvus, grpc and milvus-lite
      message = getattr(error, 'message', None) or f'{type(error).__name__}: {error}'
      for secret in (self._token, self._token.partition(':')[2]):
        message = message.replace(secret, '***') if secret else message
      # The cause would show the token in a traceback.
      raise InputError(f'{where}: Milvus says: {message}') from (None if self._token else error)

  def __contains__(self, name: str) -> bool:
    with self.errors(self.uri):
      return bool(self.client.has_collection(name))

  def open(self, name: str) -> 'Collection':
    """An existing collection. Raises InputError if it is missing or not of dprjax."""
    check_name(name)
    if name not in self:
      with self.errors(self.uri):
        names = sorted(self.client.list_collections())
      raise InputError(
        f'{self.uri}: no collection {name!r}, only {", ".join(names) or "none"}; fill one with '
        'dprjax.index --upsert'
      )
    with self.errors(self.uri):
      described = self.client.describe_collection(name)
      index = self.client.describe_index(name, _VECTOR) or {}
      self._load(name)
    try:
      text = described['properties'].get(_SPACE) or described['description']
      record = reading.parse(text, 'collection', dict[str, dict[str, Any]])
      space = record[_SPACE]
      int(space['dimension'])
    except (InputError, KeyError, TypeError, AttributeError):
      raise InputError(
        f'{self.uri}: collection {name!r} was not made by dprjax; choose another name'
      ) from None
    return Collection(
      self,
      name,
      space,
      str(index.get('index_type', 'FLAT')),
      int(index.get('nlist', 128)),
      record.get(_BM25),
    )

  def _load(self, name: str) -> None:
    try:
      self.client.load_collection(name)
    except Exception:  # of milvus-lite
      # A killed command leaves half of an .idx file; milvus-lite makes it again from the vectors.
      pattern = f'collections/{name}/partitions/*/indexes/*.idx'
      broken = list(self._folder.glob(pattern)) if self._folder is not None else []
      if not broken:
        raise
      for path in broken:
        path.unlink()
      _log.info('%s: the index of collection %s is made again', self.uri, name)
      self.client.load_collection(name)

  def create(
    self,
    name: str,
    space: Mapping[str, Any],
    *,
    index_type: str = 'auto',
    rows: int = 0,
    bm25: Mapping[str, Any] | None = None,
  ) -> 'Collection':
    """Creates an empty collection.

    Args:
      name: letters, digits and underscores.
      space: of its vectors, `manifest.Meta.space`.
      index_type: one of INDEX_TYPES. 'auto' is SCANN, or FLAT (exact) on milvus-lite.
      rows: expected rows, which set the number of lists of SCANN and IVF.
      bm25: settings of ``retrieval.bm25_index.build`` for a collection that BM25 searches too; its
        passages have texts.

    Raises:
      InputError: the server has no such index, or another error of Milvus.
    """
    check_name(name)
    check_index_type(self.uri, index_type)
    if index_type == 'auto':
      index_type = 'FLAT' if self.lite else 'SCANN'
      if self.lite:
        _log.info('%s: milvus-lite has no SCANN index; FLAT compares every passage', self.uri)
    import pymilvus

    dimension = int(space['dimension'])
    lists = max(
      1, min(65_536, round(4 * math.sqrt(min(max(rows, 1), _SEGMENT_BYTES // (4 * dimension)))))
    )
    about = {_SPACE: dict(space)} | ({_BM25: dict(bm25)} if bm25 else {})
    record = json.dumps(about, sort_keys=True)
    client = self.client
    schema = client.create_schema(auto_id=False, enable_dynamic_field=False, description=record)
    schema.add_field(_ID, pymilvus.DataType.VARCHAR, is_primary=True, max_length=_MAX_ID)
    schema.add_field(_VECTOR, pymilvus.DataType.FLOAT_VECTOR, dim=dimension)
    index = client.prepare_index_params()
    index.add_index(
      _VECTOR,
      index_type=index_type,
      metric_type='IP',
      params={'nlist': lists} if index_type.startswith(('IVF', 'SCANN')) else {},
    )
    if bm25:
      # Words between spaces, in lower case, stay as they are.
      schema.add_field(
        _WORDS,
        pymilvus.DataType.VARCHAR,
        max_length=_MAX_WORDS,
        enable_analyzer=True,
        analyzer_params={'tokenizer': 'standard'},
      )
      schema.add_field(_COUNTS, pymilvus.DataType.SPARSE_FLOAT_VECTOR)
      schema.add_function(
        pymilvus.Function('bm25', pymilvus.FunctionType.BM25, [_WORDS], [_COUNTS])
      )
      index.add_index(
        _COUNTS,
        index_type='SPARSE_INVERTED_INDEX',
        metric_type='BM25',
        params={'bm25_k1': bm25['k1'], 'bm25_b': bm25['b']},
      )
    # milvus-lite keeps properties but not descriptions; servers keep descriptions.
    properties = {'properties': {_SPACE: record}} if self.lite else {}
    with self.errors(f'{self.uri}: collection {name!r} with index {index_type}'):
      client.create_collection(name, schema=schema, consistency_level='Strong', **properties)
      # pymilvus would wait half a second for the index of no vectors.
      client.create_index(name, index, sync=not self.lite)
      client.load_collection(name)
    return self.open(name)

  def drop(self, name: str) -> None:
    """Removes a collection with its content."""
    with self.errors(self.uri):
      self.client.drop_collection(name)


class Collection:
  """Vectors of one space under their documents' ids; from `Server.open` or `Server.create`.

  Attributes:
    server, name: where it is.
    space: what made the vectors, `manifest.Meta.space`.
    index_type: the server's name for it.
    bm25: settings of its BM25; None if it has none.
  """

  def __init__(
    self,
    server: Server,
    name: str,
    space: dict[str, Any],
    index_type: str,
    lists: int,
    bm25: dict[str, Any] | None = None,
  ):
    self.server, self.name, self.space, self.index_type = server, name, space, index_type
    self.bm25 = bm25
    self._client, self._lists = server.client, lists
    self._where = f'{server.uri}, collection {name!r}'

  def __len__(self) -> int:
    with self.server.errors(self._where):
      return int(
        self._client.query(self.name, filter='', output_fields=['count(*)'])[0]['count(*)']
      )

  def check_space(self, space: Mapping[str, Any], what: str) -> None:
    """Raises InputError if ``what`` has another space."""
    check_same_space(self._where, self.space, what, space)

  def upsert(
    self,
    ids: Sequence[str],
    vectors: Float[np.ndarray, 'n H'],
    progress: ProgressFn | None = None,
    texts: Sequence[str] | None = None,
  ) -> None:
    """Writes vectors and replaces those under the same ids.

    Args:
      ids, vectors: of the documents.
      progress: called with the number of documents done.
      texts: of the documents, where the collection has BM25. The words of a text beyond 65,535
        bytes are left out.

    Raises:
      InputError: another dimension, NaN or infinity, an id above 1,024 bytes, texts that are
        missing or that the collection cannot hold, or Milvus fails.
    """
    if (texts is None) != (self.bm25 is None):
      raise InputError(f'{self._where} {"has no" if self.bm25 is None else "needs texts for"} BM25')
    self._check_dimension(vectors, 'vectors')
    check_finite(vectors, 'document', 0)
    long = next(
      (id_ for id_ in ids if len(id_) * 4 > _MAX_ID and len(id_.encode()) > _MAX_ID), None
    )
    if long is not None:
      raise InputError(f'{self._where}: the id {long[:40]!r}... has more than {_MAX_ID} bytes')
    for part in _slices(len(ids), self._batch(vectors.shape[1]), progress):
      vectors_of = np.ascontiguousarray(vectors[part], np.float32)
      rows = [
        {_ID: id_, _VECTOR: vector} for id_, vector in zip(ids[part], vectors_of, strict=True)
      ]
      if texts is not None:
        for row, words in zip(rows, self._words(texts[part]), strict=True):
          row[_WORDS] = words
      with self.server.errors(self._where):
        self._client.upsert(self.name, rows)

  def _words(self, texts: Sequence[str]) -> list[str]:
    """The words of each text, with spaces between them."""
    assert self.bm25 is not None
    joined = [' '.join(words) for words in bm25_index.words_of(texts, self.bm25['language'])]
    return [
      words
      if len(words.encode()) <= _MAX_WORDS
      else words.encode()[:_MAX_WORDS].rpartition(b' ')[0].decode()
      for words in joined
    ]

  def flush(self) -> None:
    """Makes the server write and index all upserts."""
    with self.server.errors(self._where):
      self._client.flush(self.name)

  def delete(self, ids: Sequence[str], progress: ProgressFn | None = None) -> list[str]:
    """Deletes documents; returns ids that were missing."""
    missing: list[str] = []
    for part in _slices(len(ids), _IDS, progress):
      stored = {row[_ID] for row in self._rows(ids[part], [_ID])}
      missing += [id_ for id_ in ids[part] if id_ not in stored]
      if stored:
        with self.server.errors(self._where):
          self._client.delete(self.name, filter=_among(sorted(stored)))
    return missing

  def vectors(self, ids: Sequence[str]) -> Float[np.ndarray, 'n H']:
    """The stored vectors of these documents. Raises InputError for missing ones."""
    vectors: dict[str, np.ndarray] = {}
    for part in _slices(len(ids), min(_IDS, self._batch(int(self.space['dimension'])))):
      vectors |= {
        row[_ID]: np.asarray(row[_VECTOR], np.float32)
        for row in self._rows(ids[part], [_ID, _VECTOR])
      }
    missing = [id_ for id_ in dict.fromkeys(ids) if id_ not in vectors]
    if missing:
      raise InputError(f'{self._where} lacks {len(missing)} ids: {", ".join(missing[:5])}')
    return np.stack([vectors[id_] for id_ in ids])

  def search(
    self,
    queries: Float[np.ndarray, 'queries H'],
    k: int,
    *,
    settings: Mapping[str, Any] | None = None,
    progress: ProgressFn | None = None,
  ) -> Found:
    """The best ``min(k, number of documents)`` of each query that the index finds.

    Args:
      queries: vectors of the collection's space.
      k: at most MAX_K.
      settings: Milvus's own for this index type (nprobe, reorder_k, ef, ...); override `settings`.
      progress: called with the number of queries done.

    Raises:
      InputError: another dimension, k too large, an empty collection, or an error of Milvus.
    """
    self._check_dimension(queries, 'queries')
    check_finite(queries, 'query', 0)
    if k > MAX_K:
      raise InputError(
        f'Milvus returns at most {MAX_K:,} passages a query, not {k:,}; use fewer or --index=exact'
      )
    count = len(self)
    if not count or not len(queries):
      raise InputError(
        f'nothing to search: {len(queries)} queries, and {count} documents in {self._where}'
      )
    parameters = self.settings

    def ask(some: Int[np.ndarray, ' some'], wanted: int, places: dict[str, int]) -> best.TopK:
      how = {'metric_type': 'IP', 'params': parameters(wanted) | dict(settings or {})}
      vectors = np.ascontiguousarray(queries[some], np.float32)
      return self._ask([*vectors], _VECTOR, how, wanted, self._batch(queries.shape[1]), places)

    return self._best(ask, len(queries), k, count, progress)

  def rankings(self, queries: Sequence[str], k: int) -> list[Ranking]:
    """The best k documents of each query, a text, by BM25, of those that share a word with it.

    k is at most MAX_K. Milvus's BM25 sees the words of ``retrieval.bm25_index``; milvus-lite takes
    their frequencies segment by segment.

    Raises:
      InputError: the collection has no BM25, or an error of Milvus.
    """
    if self.bm25 is None:
      raise InputError(f'{self._where} has no BM25: make another with dprjax.index --texts')
    words, count = self._words(queries), len(self)
    used = np.array([row for row, one in enumerate(words) if one], np.int64)
    ranked = [Ranking([], np.empty(0)) for _ in queries]
    if not len(used) or not count:
      return ranked

    def ask(some: Int[np.ndarray, ' some'], wanted: int, places: dict[str, int]) -> best.TopK:
      how = {'metric_type': 'BM25', 'params': {}}
      texts = [words[row] for row in used[some].tolist()]
      found = self._ask(texts, _COUNTS, how, wanted, _REQUEST_ROWS, places)
      # milvus-lite has distances, a server scores.
      return found._replace(scores=np.where(found.rows < 0, -np.inf, np.abs(found.scores)))

    ids, rows, scores = self._best(ask, len(used), min(k, MAX_K), count)
    for row, one in zip(used, best.rankings(best.TopK(scores, rows), ids), strict=True):
      ranked[row] = one
    return ranked

  def _best(
    self,
    ask: Callable[[Int[np.ndarray, ' some'], int, dict[str, int]], best.TopK],
    queries: int,
    k: int,
    count: int,
    progress: ProgressFn | None = None,
  ) -> Found:
    """The k best of ``count`` documents, with ties by id; ``ask`` finds those of some queries."""
    places: dict[str, int] = {}
    done = 0

    def found(some: Int[np.ndarray, ' some'], wanted: int) -> best.TopK:
      nonlocal done
      parts = []
      for start in range(0, len(some), max(1, _ANSWER_ROWS // wanted)):
        part = some[start : start + max(1, _ANSWER_ROWS // wanted)]
        parts.append(ask(part, wanted, places))
        done += len(part)
        if progress is not None and done <= queries:  # repeated queries do not count
          progress(done)
      return best.TopK(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def ids_at(some: Int[np.ndarray, ' some']) -> list[str]:
      ids = list(places)
      return [ids[row] for row in some.tolist()]

    scores, rows = best.whole_ties(found, queries, min(k, count), min(count, MAX_K), ids_at)
    return Found(list(places), rows, scores)

  def _ask(
    self,
    data: Sequence[Any],
    field: str,
    how: Mapping[str, Any],
    k: int,
    size: int,
    places: dict[str, int],
  ) -> best.TopK:
    """What an index finds. A row is a place in ``places``, to which new ids are added."""
    rows = np.full((len(data), k), -1, np.int32)
    scores = np.full((len(data), k), -np.inf, np.float32)
    for part in _slices(len(data), size):
      with self.server.errors(self._where):
        answers = self._client.search(
          self.name,
          data=list(data[part]),
          limit=k,
          output_fields=[_ID],
          search_params=dict(how),
          anns_field=field,
        )
      for number, hits in enumerate(answers, start=part.start):
        rows[number, : len(hits)] = [places.setdefault(hit[_ID], len(places)) for hit in hits]
        scores[number, : len(hits)] = [hit['distance'] for hit in hits]
    return best.TopK(scores, rows)

  def like(
    self,
    ids: Sequence[str],
    k: int,
    *,
    settings: Mapping[str, Any] | None = None,
    progress: ProgressFn | None = None,
  ) -> Found:
    """The k best other documents for each stored one.

    Raises:
      InputError: as `search` and `vectors`.
    """
    found = self.search(self.vectors(ids), k + 1, settings=settings, progress=progress)
    place = {id_: number for number, id_ in enumerate(found.ids)}
    own = np.array([place.get(id_, -2) for id_ in ids])[:, None]
    # The stable sort moves the document itself to the end; if it was not found, the last of the
    # others is dropped.
    order = np.argsort(found.rows == own, axis=1, kind='stable')
    rows, scores = (
      np.take_along_axis(array, order, axis=1) for array in (found.rows, found.scores)
    )
    rows, scores = np.where(rows == own, -1, rows), np.where(rows == own, -np.inf, scores)
    k = min(k, rows.shape[1])
    return Found(found.ids, rows[:, :k], scores[:, :k])

  def settings(self, k: int) -> dict[str, int]:
    """Default search settings.

    SCANN and IVF search a tenth of the lists, and SCANN scores 4 k vectors again, exactly.
    """
    lists = {'nprobe': max(8, self._lists // 10)}
    # HNSW's list of candidates must be as long as k.
    return {
      'SCANN': lists | {'reorder_k': max(4 * k, 100)},
      'IVF_FLAT': lists,
      'IVF_SQ8': lists,
      'HNSW': {'ef': min(max(2 * k, 64), 32_768)},
    }.get(self.index_type, {})

  def _rows(self, ids: Sequence[str], fields: list[str]) -> list[dict[str, Any]]:
    with self.server.errors(self._where):
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


def _slices(count: int, size: int, progress: ProgressFn | None = None) -> Iterator[slice]:
  """Slices of at most ``size``; reports each when it is done."""
  for start in range(0, count, size):
    stop = min(start + size, count)
    yield slice(start, stop)
    if progress is not None:
      progress(stop)


def _among(ids: Sequence[str]) -> str:
  # JSON strings: pymilvus does not escape quotes in ids.
  return f'{_ID} in {json.dumps(list(ids), ensure_ascii=False)}'


def _check_local(folder: epath.Path, new: bool) -> None:
  """Raises InputError unless the folder is a local index or, with ``new``, one may be made."""
  if new and (not folder.exists() or (folder.is_dir() and outputs.is_vacant(folder))):
    return
  files.existing(folder, 'local index')
  if not (folder.is_dir() and is_index(folder)):
    raise InputError(f'{folder} is not a local index; nothing was changed')
