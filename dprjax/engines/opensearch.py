"""OpenSearch and Elasticsearch: a collection is an index of documents with a vector.

opensearch-py talks to both. Requests follow the documentation of each: ``knn_vector`` and the query
``knn`` in OpenSearch, ``dense_vector`` and the search option ``knn`` in Elasticsearch. The record
of a collection is the ``_meta`` of its mapping.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from dprjax.engines.conditions import Condition
from dprjax.engines.engine import Address, EngineError, Hits, Opened, Record, Rows

_VECTOR, _WORDS = 'vector', 'words'
_RECORD, _KIND = 'dprjax', 'dprjax_index'
_SIMILARITY = 'dprjax_words'
_M, _EF = 16, 128  # of HNSW
_json = msgspec.json.Encoder()


class _Server:
  """The common part of OpenSearch and Elasticsearch; OpenSearch where they differ."""

  most = 10_000
  stores_nul = True
  request_rows, request_bytes, answer_rows = 500, 1 << 22, 100_000
  index_types: Sequence[str] = ('HNSW', 'HNSW_FP16')

  def __init__(self, address: Address, *, new: bool = False, timeout: float = 30.0):
    del new
    import opensearchpy  # an extra

    for name in ('opensearch', 'urllib3'):
      logging.getLogger(name).setLevel(logging.CRITICAL)
    user, colon, password = address.token().partition(':')
    access: dict[str, Any] = {}
    if colon:
      access['http_auth'] = (user, password)
    elif user:
      access['headers'] = {'Authorization': f'ApiKey {user}'}
    self.address = address
    self.client = opensearchpy.OpenSearch(
      address.place, timeout=timeout, max_retries=3, retry_on_timeout=True, **access
    )
    found = self._ask('GET', '/')['version']
    self.version = str(found['number'])
    self._kinds: dict[str, str] = {}

  def close(self) -> None:
    self.client.close()

  def names(self) -> list[str]:
    return [one['index'] for one in self._ask('GET', '/_cat/indices?format=json&h=index')]

  def open(self, name: str) -> Opened | None:
    import opensearchpy

    try:
      found = self._ask('GET', f'/{name}/_mapping')
    except opensearchpy.NotFoundError:
      return None
    # An alias names another index.
    meta = next(iter(found.values()))['mappings'].get('_meta', {})
    self._kinds[name] = kind = str(meta.get(_KIND, 'none'))
    return Opened(Record.of_json(meta.get(_RECORD)), kind)

  def create(self, name: str, record: Record, *, index_type: str = 'auto', rows: int = 0) -> None:
    """'auto' is HNSW."""
    del rows
    kind = self._kinds[name] = 'HNSW' if index_type == 'auto' else index_type
    properties: dict[str, Any] = {_VECTOR: self._vector(int(record.space['dimension']), kind)}
    for field in ('title', 'text'):
      properties[field] = {'type': 'keyword', 'index': False, 'doc_values': False}
    settings = dict(self._index)
    if record.bm25:
      settings['similarity'] = {
        _SIMILARITY: {'type': 'BM25', 'k1': record.bm25['k1'], 'b': record.bm25['b']}
      }
      # Words between spaces are kept unchanged.
      properties[_WORDS] = {'type': 'text', 'analyzer': 'whitespace', 'similarity': _SIMILARITY}
    strings = {'match_mapping_type': 'string', 'mapping': {'type': 'keyword', 'ignore_above': 8191}}
    mappings = {
      '_meta': {_RECORD: record.as_json(), _KIND: kind},
      'dynamic_templates': [{'strings': strings}],
      'date_detection': False,
      'properties': properties,
    }
    self._ask('PUT', f'/{name}', {'settings': {'index': settings}, 'mappings': mappings})

  _index: Mapping[str, Any] = {'knn': True}

  def _vector(self, dimension: int, kind: str) -> dict[str, Any]:
    small = {'encoder': {'name': 'sq', 'parameters': {'type': 'fp16'}}}
    return {
      'type': 'knn_vector',
      'dimension': dimension,
      'method': {
        'name': 'hnsw',
        'engine': 'faiss',
        'space_type': 'innerproduct',
        'parameters': {
          'm': _M,
          'ef_construction': _EF,
          **(small if kind == 'HNSW_FP16' else {}),
        },
      },
    }

  def note(self, name: str, record: Record) -> None:
    meta = {_RECORD: record.as_json(), _KIND: self._kinds[name]}
    self._ask('PUT', f'/{name}/_mapping', {'_meta': meta})

  def upsert(self, name: str, rows: Rows) -> None:
    lines: list[Any] = []
    for row, (id_, vector) in enumerate(zip(rows.ids, rows.vectors.tolist(), strict=True)):
      document = dict(rows.payloads[row]) if rows.payloads is not None else {}
      document[_VECTOR] = vector
      if rows.words is not None:
        document[_WORDS] = ' '.join(rows.words[row])
      lines += [{'index': {'_id': id_}}, document]
    self._bulk(name, lines)

  def _bulk(self, name: str, lines: Iterable[Any], refresh: str = 'false') -> None:
    answer = self._ask('POST', f'/{name}/_bulk?refresh={refresh}', _lines(lines))
    if answer['errors']:
      for item in answer['items']:
        ((_, result),) = item.items()
        if 'error' in result:
          error = result['error']
          cause = error.get('caused_by', {}).get('reason', '')
          raise EngineError(
            f'document {result["_id"]!r:.60}: {error["type"]}: {error["reason"]} {cause}'.strip()
          )

  def flush(self, name: str) -> None:
    self._ask('POST', f'/{name}/_refresh')

  def count(self, name: str) -> int:
    self.flush(name)
    return int(self._ask('GET', f'/{name}/_count')['count'])

  def delete(self, name: str, ids: Sequence[str]) -> None:
    self._bulk(name, ({'delete': {'_id': id_}} for id_ in ids), 'true')

  def fetch(self, name: str, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    found = self._ask(
      'POST', f'/{name}/_mget?_source_excludes={_WORDS},{_VECTOR}', {'ids': list(ids)}
    )
    return {one['_id']: one['_source'] for one in found['docs'] if one.get('found')}

  def drop(self, name: str) -> None:
    self._ask('DELETE', f'/{name}')

  def settings(self, name: str, k: int) -> dict[str, Any]:
    del name
    return {'ef_search': max(2 * k, 100)}

  def search(
    self,
    name: str,
    queries: np.ndarray,
    k: int,
    settings: Mapping[str, Any],
    where: Sequence[Condition],
  ) -> list[Hits]:
    bodies = [self._near(query, k, settings, where) for query in queries.tolist()]
    return self._hits(name, bodies, k, inner_products=True)

  def _near(
    self, query: list[float], k: int, settings: Mapping[str, Any], where: Sequence[Condition]
  ) -> dict[str, Any]:
    near: dict[str, Any] = {'vector': query, 'k': k, 'method_parameters': dict(settings)}
    if where:
      near['filter'] = {'bool': {'filter': _clauses(where)}}
    return {'query': {'knn': {_VECTOR: near}}}

  def bm25(
    self, name: str, queries: Sequence[Sequence[str]], k: int, where: Sequence[Condition]
  ) -> list[Hits]:
    return self._hits(name, [{'query': _matches(words, where)} for words in queries], k)

  def _hits(
    self, name: str, bodies: Sequence[dict[str, Any]], k: int, inner_products: bool = False
  ) -> list[Hits]:
    lines: list[Any] = []
    for body in bodies:
      lines += [{}, body | {'size': k, '_source': False, 'track_total_hits': False}]
    answers = self._ask('POST', f'/{name}/_msearch', _lines(lines))['responses']
    for answer in answers:
      if 'error' in answer:
        error = answer['error']
        causes = error.get('root_cause') or [error]
        raise EngineError(f'{causes[0]["type"]}: {causes[0]["reason"]}')
    found = [_hit(answer) for answer in answers]
    return [Hits(one.ids, _products(one.scores)) for one in found] if inner_products else found

  def _ask(self, method: str, path: str, body: Any = None) -> Any:
    headers = None
    if isinstance(body, bytes):
      headers = {'content-type': 'application/x-ndjson'}
    elif body is not None:
      body, headers = _json.encode(body), {'content-type': 'application/json'}
    return self.client.transport.perform_request(method, path, body=body, headers=headers)


class OpenSearch(_Server):
  """A connection to OpenSearch."""

  def fuse(
    self,
    name: str,
    queries: np.ndarray,
    words: Sequence[Sequence[str]],
    k: int,
    *,
    rrf_k: int,
    depth: int,
    settings: Mapping[str, Any],
    where: Sequence[Condition],
  ) -> list[Hits]:
    ranks = {'combination': {'technique': 'rrf', 'rank_constant': rrf_k}}
    hits = []
    for query, own in zip(queries.tolist(), words, strict=True):
      near = self._near(query, depth, settings, where)['query']
      body = {
        'query': {'hybrid': {'queries': [near, _matches(own, where)], 'pagination_depth': depth}},
        'size': k,
        '_source': False,
        'search_pipeline': {'phase_results_processors': [{'score-ranker-processor': ranks}]},
      }
      hits.append(_hit(self._ask('POST', f'/{name}/_search', body)))
    return hits


class Elasticsearch(_Server):
  """A connection to Elasticsearch. Its fusion needs a licence, so rankings are fused here."""

  index_types: Sequence[str] = ('HNSW', 'HNSW_SQ8', 'FLAT')
  _index: Mapping[str, Any] = {}

  def _vector(self, dimension: int, kind: str) -> dict[str, Any]:
    options: dict[str, Any] = {'type': 'flat'}
    if kind != 'FLAT':
      options = {
        'type': 'hnsw' if kind == 'HNSW' else 'int8_hnsw',
        'm': _M,
        'ef_construction': _EF,
      }
    return {
      'type': 'dense_vector',
      'dims': dimension,
      'index': True,
      'similarity': 'max_inner_product',
      'index_options': options,
    }

  def settings(self, name: str, k: int) -> dict[str, Any]:
    del name
    return {'num_candidates': min(max(2 * k, 100), self.most)}

  def _near(
    self, query: list[float], k: int, settings: Mapping[str, Any], where: Sequence[Condition]
  ) -> dict[str, Any]:
    near: dict[str, Any] = {'field': _VECTOR, 'query_vector': query, 'k': k, **settings}
    if where:
      near['filter'] = _clauses(where)
    return {'knn': near}

  def fetch(self, name: str, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    self.flush(name)
    body: dict[str, Any] = {
      'query': {'ids': {'values': list(ids)}},
      'size': len(ids),
      '_source': {'excludes': [_WORDS, _VECTOR]},
    }
    found = self._ask('POST', f'/{name}/_search', body)
    return {one['_id']: one['_source'] for one in found['hits']['hits']}


def _lines(values: Iterable[Any]) -> bytes:
  return b''.join(_json.encode(value) + b'\n' for value in values)


def _hit(answer: Mapping[str, Any]) -> Hits:
  hits = answer['hits']['hits']
  return Hits([one['_id'] for one in hits], [one['_score'] for one in hits])


def _products(scores: Sequence[float]) -> list[float]:
  """Converts scores to inner products s: scores are s + 1 for s >= 0 and 1 / (1 - s) below."""
  return [score - 1 if score >= 1 else 1 - 1 / score for score in scores]


def _matches(words: Sequence[str], where: Sequence[Condition]) -> dict[str, Any]:
  match = {'match': {_WORDS: {'query': ' '.join(words)}}}
  return {'bool': {'must': [match], 'filter': _clauses(where)}} if where else match


def _clauses(where: Sequence[Condition]) -> list[dict[str, Any]]:
  """Conditions as queries; a term matches a list that contains it."""
  names = {'<': 'lt', '<=': 'lte', '>': 'gt', '>=': 'gte'}
  return [
    {'terms': {field: list(values)}}
    if operator == '='
    else {'range': {field: {names[operator]: values[0]}}}
    for field, operator, values in where
  ]
