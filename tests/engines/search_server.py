"""A stand-in for OpenSearch and Elasticsearch: their HTTP interface over a few documents in memory.

Neither server is in a package index that tests may assume. The bodies of requests are checked
against the published schemas, which the classes below repeat for requests of dprjax. They answer an
unknown key, a missing one or another type with status 400, as the servers do.
"""

import base64
import collections
import json
import math
from typing import Any, Literal

import msgspec
import numpy as np

from tests.engines.stand_in import StandIn


class Strict(msgspec.Struct, forbid_unknown_fields=True):
  pass


# Mappings: https://docs.opensearch.org/latest/mappings/supported-field-types/knn-methods-engines
class Encoder(Strict):
  name: Literal['sq', 'pq']
  parameters: dict[str, Any] = {}


class HnswParameters(Strict):
  m: int = 16
  ef_construction: int = 100
  encoder: Encoder | None = None


class KnnMethod(Strict):
  name: Literal['hnsw', 'ivf']
  engine: Literal['faiss', 'lucene']
  space_type: Literal['innerproduct', 'l2', 'cosinesimil']
  parameters: HnswParameters


class KnnVector(Strict, tag='knn_vector', tag_field='type'):
  dimension: int
  method: KnnMethod


class HnswOptions(Strict):
  type: Literal['hnsw', 'int8_hnsw', 'flat', 'int8_flat']
  m: int | None = None
  ef_construction: int | None = None


class DenseVector(Strict, tag='dense_vector', tag_field='type'):
  dims: int
  index: bool
  similarity: Literal['max_inner_product', 'dot_product', 'cosine', 'l2_norm']
  index_options: HnswOptions


class Keyword(Strict, tag='keyword', tag_field='type'):
  index: bool = True
  doc_values: bool = True
  ignore_above: int = 2**31 - 1


class TextField(Strict, tag='text', tag_field='type'):
  analyzer: Literal['standard', 'whitespace'] = 'standard'
  similarity: str = 'BM25'


class Similarity(Strict):
  type: Literal['BM25']
  k1: float
  b: float


class IndexSettings(Strict):
  knn: bool = False
  similarity: dict[str, Similarity] = {}


class Settings(Strict):
  index: IndexSettings


class Template(Strict):
  match_mapping_type: Literal['string']
  mapping: Keyword


class OpenSearchMappings(Strict):
  properties: dict[str, KnnVector | Keyword | TextField] = {}
  meta: dict[str, Any] = msgspec.field(name='_meta', default_factory=dict)
  dynamic_templates: list[dict[str, Template]] = []
  date_detection: bool = True


class ElasticMappings(Strict):
  properties: dict[str, DenseVector | Keyword | TextField] = {}
  meta: dict[str, Any] = msgspec.field(name='_meta', default_factory=dict)
  dynamic_templates: list[dict[str, Template]] = []
  date_detection: bool = True


class OpenSearchIndex(Strict):
  settings: Settings
  mappings: OpenSearchMappings


class ElasticIndex(Strict):
  settings: Settings
  mappings: ElasticMappings


# Queries: the query DSL of both.
class Range(Strict):
  lt: float | None = None
  lte: float | None = None
  gt: float | None = None
  gte: float | None = None


class Filters(Strict):
  filter: list['Query']
  must: list['Query'] = []


class Match(Strict):
  query: str


class Ids(Strict):
  values: list[str]


class Knn(Strict):
  vector: list[float]
  k: int
  method_parameters: dict[Literal['ef_search', 'nprobes'], int] = {}
  filter: 'Query | None' = None


class Hybrid(Strict):
  queries: list['Query']
  pagination_depth: int = 10


class Query(Strict):
  knn: dict[str, Knn] | None = None
  hybrid: Hybrid | None = None
  both: Filters | None = msgspec.field(name='bool', default=None)
  match: dict[str, Match] | None = None
  terms: dict[str, list[str | int | float | bool]] | None = None
  range: dict[str, Range] | None = None
  ids: Ids | None = None


class ElasticKnn(Strict):
  field: str
  query_vector: list[float]
  k: int
  num_candidates: int
  filter: list[Query] = []

  def __post_init__(self) -> None:
    if not self.k <= self.num_candidates <= 10_000:
      raise ValueError('num_candidates has to be from k to 10000')


class Combination(Strict):
  technique: Literal['rrf']
  rank_constant: int


class Ranker(Strict):
  combination: Combination


class Processors(Strict):
  phase_results_processors: list[dict[Literal['score-ranker-processor'], Ranker]]


class Search(Strict):
  size: int = 10
  query: Query | None = None
  source: bool | dict[Literal['excludes', 'includes'], list[str]] = msgspec.field(
    name='_source', default=True
  )
  track_total_hits: bool = True

  def __post_init__(self) -> None:
    if self.size > 10_000:
      raise ValueError('Result window is too large')


class OpenSearchSearch(Search):
  search_pipeline: Processors | None = None


class ElasticSearch(Search):
  knn: ElasticKnn | None = None
  fields: list[str] = []


class Failure(Exception):
  """An answer with an error."""

  def __init__(self, status: int, kind: str, reason: str):
    self.status, self.error = status, {'type': kind, 'reason': reason}


class Index(msgspec.Struct):
  made: Any
  documents: dict[str, dict[str, Any]] = {}
  shown: dict[str, dict[str, Any]] = {}  # since the last refresh


class SearchServer(StandIn):
  """A server of this distribution, which may want the token 'user:password'."""

  def __init__(self, distribution: str = 'opensearch'):
    self.distribution = distribution
    self.indexes: dict[str, Index] = {}
    opensearch = distribution == 'opensearch'
    self._search = OpenSearchSearch if opensearch else ElasticSearch
    self._made = OpenSearchIndex if opensearch else ElasticIndex
    super().__init__()

  def answer(self, method: str, path: str, body: bytes, headers: Any) -> tuple[int, Any]:
    try:
      expected = 'Basic ' + base64.b64encode(self.token.encode()).decode()
      if self.token and headers.get('Authorization') != expected:
        raise Failure(401, 'security_exception', 'missing authentication credentials')
      return 200, self.handle(method, path, body)
    except Failure as failure:
      return failure.status, {'error': failure.error, 'status': failure.status}
    except (msgspec.ValidationError, ValueError) as error:
      return 400, {'error': {'type': 'parsing_exception', 'reason': str(error)}, 'status': 400}

  def handle(self, method: str, path: str, body: bytes) -> Any:
    path, _, options = path.partition('?')
    name, _, rest = path.lstrip('/').partition('/')
    if not name:
      version = {'number': '3.3.0'}
      if self.distribution == 'opensearch':
        version['distribution'] = 'opensearch'
      return {'version': version, 'tagline': ''}
    if name == '_cat':
      return [{'index': one} for one in self.indexes]
    if method == 'PUT' and not rest:
      if name in self.indexes:
        raise Failure(400, 'resource_already_exists_exception', f'index [{name}] already exists')
      if name != name.lower() or name.startswith('_'):
        raise Failure(400, 'invalid_index_name_exception', f'[{name}] must be lowercase')
      self.indexes[name] = Index(msgspec.json.decode(body, type=self._made))
      return {'acknowledged': True}
    if name not in self.indexes:
      raise Failure(404, 'index_not_found_exception', f'no such index [{name}]')
    index = self.indexes[name]
    if method == 'DELETE' and not rest:
      del self.indexes[name]
      return {'acknowledged': True}
    if rest == '_mapping' and method == 'PUT':
      change = msgspec.json.decode(body, type=type(index.made.mappings))
      index.made.mappings.meta = change.meta
      return {'acknowledged': True}
    if rest == '_mapping':
      return {name: {'mappings': msgspec.to_builtins(index.made.mappings)}}
    if rest == '_refresh':
      index.shown = dict(index.documents)
      return {'_shards': {'failed': 0}}
    if rest == '_count':
      return {'count': len(index.shown)}
    if rest == '_bulk':
      return self._bulk(index, body, 'refresh=true' in options)
    if rest == '_mget':
      ids = msgspec.json.decode(body, type=dict[Literal['ids'], list[str]])['ids']
      hidden = options.removeprefix('_source_excludes=').split(',')
      return {'docs': [self._got(index, id_, hidden) for id_ in ids]}
    if rest == '_search':
      return self._answer(index, msgspec.json.decode(body, type=self._search))
    if rest == '_msearch':
      return {'responses': [self._one(index, line) for line in body.splitlines()[1::2]]}
    raise Failure(405, 'illegal_argument_exception', f'{method} {path}')

  def _one(self, index: Index, line: bytes) -> Any:
    try:
      return self._answer(index, msgspec.json.decode(line, type=self._search))
    except (msgspec.ValidationError, ValueError) as error:
      return {'error': {'type': 'parsing_exception', 'reason': str(error)}, 'status': 400}

  def _bulk(self, index: Index, body: bytes, refresh: bool) -> Any:
    items: list[Any] = []
    lines = iter(body.splitlines())
    if not body.endswith(b'\n'):
      raise Failure(400, 'illegal_argument_exception', 'must be terminated by a newline')
    for line in lines:
      ((action, about),) = msgspec.json.decode(
        line, type=dict[Literal['index', 'delete'], dict[Literal['_id'], str]]
      ).items()
      id_ = about['_id']
      result: dict[str, Any] = {'_id': id_, 'status': 200}
      if action == 'delete':
        index.documents.pop(id_, None)
      elif len(id_.encode()) > 512:
        raise Failure(400, 'illegal_argument_exception', 'id is too long')
      else:
        document = json.loads(next(lines))
        if self.full:
          reason = (
            'index has read-only-allow-delete block: disk usage exceeded flood-stage watermark'
          )
          result |= {'status': 429, 'error': {'type': 'cluster_block_exception', 'reason': reason}}
        elif error := self._wrong(index, document):
          result |= {'status': 400, 'error': {'type': 'mapper_parsing_exception', 'reason': error}}
        else:
          index.documents[id_] = document
      items.append({action: result})
    if refresh:
      index.shown = dict(index.documents)
    return {'errors': any('error' in next(iter(one.values())) for one in items), 'items': items}

  def _wrong(self, index: Index, document: dict[str, Any]) -> str:
    field = index.made.mappings.properties['vector']
    size = getattr(field, 'dimension', None) or field.dims
    vector = document.get('vector')
    if not isinstance(vector, list) or len(vector) != size:
      return f'Vector dimension mismatch. Expected: {size}'
    return ''

  def _got(self, index: Index, id_: str, hidden: list[str]) -> Any:
    if id_ not in index.documents:
      return {'_id': id_, 'found': False}
    source = {key: one for key, one in index.documents[id_].items() if key not in hidden}
    return {'_id': id_, 'found': True, '_source': source}

  def _answer(self, index: Index, search: Any) -> Any:
    if search.query is not None and search.query.hybrid is not None:
      scores: dict[str, float] = collections.Counter()
      (processor,) = search.search_pipeline.phase_results_processors
      constant = processor['score-ranker-processor'].combination.rank_constant
      for one in search.query.hybrid.queries:
        ranked = _best(self._scores(index, one))[: search.query.hybrid.pagination_depth]
        for rank, (id_, _) in enumerate(ranked, start=1):
          scores[id_] += 1 / (constant + rank)
    elif getattr(search, 'knn', None) is not None:
      near = search.knn
      scores = self._near(index, near.query_vector, near.k, near.filter)
    else:
      scores = self._scores(index, search.query)
    hits = []
    for id_, score in _best(scores)[: search.size]:
      hit: dict[str, Any] = {'_id': id_, '_score': float(np.float32(score))}
      if search.source is not False:
        hidden = search.source['excludes']
        hit |= {'_source': self._got(index, id_, hidden)['_source']}
        hit['fields'] = {one: index.shown[id_][one] for one in search.fields}
      hits.append(hit)
    return {'hits': {'hits': hits}, 'timed_out': False}

  def _near(
    self, index: Index, vector: list[float], k: int, filters: list[Query]
  ) -> dict[str, float]:
    """As both servers score inner products."""
    documents = [(id_, one) for id_, one in index.shown.items() if _meets(one, filters)]
    if not documents:
      return {}
    products = np.array([one['vector'] for _, one in documents], np.float32) @ np.array(
      vector, np.float32
    )
    scores = np.where(products >= 0, products + 1, 1 / (1 - np.minimum(products, 0)))
    found = dict(zip([id_ for id_, _ in documents], scores.tolist(), strict=True))
    return dict(_best(found)[:k])

  def _scores(self, index: Index, query: Query) -> dict[str, float]:
    if query.knn is not None:
      ((_, near),) = query.knn.items()
      filters = near.filter.both.filter if near.filter is not None and near.filter.both else []
      return self._near(index, near.vector, near.k, filters)
    if query.ids is not None:
      return dict.fromkeys([id_ for id_ in query.ids.values if id_ in index.shown], 1.0)
    if query.both is not None:
      (one,) = query.both.must
      found = self._scores(index, one)
      return {
        id_: score for id_, score in found.items() if _meets(index.shown[id_], query.both.filter)
      }
    assert query.match is not None
    ((field, match),) = query.match.items()
    text = index.made.mappings.properties[field]
    how = index.made.settings.index.similarity[text.similarity]
    counts = {id_: collections.Counter(one[field].split()) for id_, one in index.shown.items()}
    mean = sum(count.total() for count in counts.values()) / max(len(counts), 1)
    scores: dict[str, float] = {}
    for word in match.query.split():
      having = sum(word in count for count in counts.values())
      rarity = math.log(1 + (len(counts) - having + 0.5) / (having + 0.5))
      for id_, count in counts.items():
        if word in count:
          length = how.k1 * (1 - how.b + how.b * count.total() / mean)
          part = rarity * count[word] * (how.k1 + 1) / (count[word] + length)
          scores[id_] = scores.get(id_, 0) + part
    return scores


def _best(scores: dict[str, float]) -> list[tuple[str, float]]:
  return sorted(scores.items(), key=lambda one: -one[1])


def _meets(document: dict[str, Any], filters: list[Query]) -> bool:
  for one in filters:
    if one.terms is not None:
      ((field, values),) = one.terms.items()
      own = document.get(field)
      if not any(value in values for value in (own if isinstance(own, list) else [own])):
        return False
    else:
      assert one.range is not None
      ((field, bounds),) = one.range.items()
      own = document.get(field)
      if not isinstance(own, int | float) or not (
        (bounds.lt is None or own < bounds.lt)
        and (bounds.lte is None or own <= bounds.lte)
        and (bounds.gt is None or own > bounds.gt)
        and (bounds.gte is None or own >= bounds.gte)
      ):
        return False
  return True
