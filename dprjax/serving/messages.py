"""What requests and answers look like: types that msgspec reads, and their OpenAPI document."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from dprjax.base.version import __version__

Model = Annotated[
  str,
  Meta(
    description="A prompt's name, `NAME:query` or `NAME:passage`; the backbone's own name is no "
    'prompt. `NAME` alone is `NAME:passage`.',
  ),
]


class EmbeddingRequest(Struct):
  """Texts, or token ids as the model's own tokenizer gives them, special tokens included.

  `encoding_format` is `float` by default. null stands for an absent field.
  """

  model: Model
  input: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
  encoding_format: Literal['float', 'base64'] | None = None
  dimensions: Annotated[int, Meta(ge=1)] | None = None
  user: str | None = None


class SearchRequest(Struct):
  """Queries for an index; by default the prompt's own, or the only one. `k` is 10 by default."""

  model: Model
  query: str | Annotated[list[str], Meta(min_length=1)]
  index: str | None = None
  k: Annotated[int, Meta(ge=1)] | None = None


class Document(Struct):
  text: str


class RerankRequest(Struct):
  """Documents to order by their relevance to a query."""

  query: str
  documents: Annotated[list[str | Document], Meta(min_length=1)]
  model: str | None = None
  top_n: Annotated[int, Meta(ge=1)] | None = None


class Usage(Struct):
  prompt_tokens: int
  total_tokens: int


class Embedding(Struct):
  object: Literal['embedding']
  index: int
  embedding: list[float] | str


class EmbeddingResponse(Struct):
  """``truncated``: the numbers of the texts that lost their end."""

  object: Literal['list']
  data: list[Embedding]
  model: str
  usage: Usage
  truncated: list[int]


class ModelCard(Struct):
  id: str
  object: Literal['model']
  created: int
  owned_by: str


class ModelList(Struct):
  object: Literal['list']
  data: list[ModelCard]


class PromptCard(Struct):
  """A prompt. ``refused``: why it is not served; then most of the rest is empty."""

  name: str
  sha256: str
  kind: str
  lengths: dict[str, int]
  pooling: str
  normalize: bool
  shift_positions: bool
  query_max_length: int
  passage_max_length: int
  bytes: int
  modified: float
  index: str | None
  task: Any
  metrics: Any
  refused: str


class PromptList(Struct):
  backbone: str
  backbone_sha256: str
  tokenizer_sha256: str
  backbone_bytes: int
  prompts: list[PromptCard]
  indexes: dict[str, int]
  rerankers: list[str]


class Hit(Struct):
  id: str
  score: float
  text: str | None


class SearchResponse(Struct):
  """One list of hits for each query, best first."""

  object: Literal['list']
  model: str
  index: str
  results: list[list[Hit]]
  usage: Usage
  truncated: list[int]


class Ranked(Struct):
  index: int
  relevance_score: float


class RerankResponse(Struct):
  """Best first; a score is the probability of relevance."""

  model: str
  results: list[Ranked]


class ErrorDetail(Struct):
  message: str
  type: str
  param: str | None
  code: str | None


class ErrorResponse(Struct):
  error: ErrorDetail


_ERRORS = {
  '400': 'the request is malformed',
  '401': 'no key, or an unknown one',
  '403': "the key is not an administrator's",
  '404': 'no such model, prompt or index',
  '408': 'the request came too slowly',
  '409': 'the name is that of the backbone',
  '413': 'too large: the body, the number of inputs or of tokens',
  '422': 'it cannot be used: the message says why',
  '429': 'the queue is full; Retry-After says when to come again',
  '503': 'not ready yet, or its files cannot be used',
  '504': 'no answer in time',
}
_NAME = {'name': 'name', 'in': 'path', 'required': True, 'schema': {'type': 'string'}}
_JSON, _BYTES = 'application/json', 'application/octet-stream'


def openapi(most_bytes: int, most_prompt_bytes: int) -> dict[str, Any]:
  """The OpenAPI document of a server."""
  types = [
    EmbeddingRequest,
    SearchRequest,
    RerankRequest,
    EmbeddingResponse,
    ModelList,
    ModelCard,
    PromptCard,
    PromptList,
    SearchResponse,
    RerankResponse,
    ErrorResponse,
  ]
  schemas, components = msgspec.json.schema_components(
    types, ref_template='#/components/schemas/{name}'
  )
  ref = dict(zip(types, schemas, strict=True))

  def answers(kind: Any, errors: str, **more: Any) -> dict[str, Any]:
    content = {_JSON: {'schema': ref[kind]}} | more
    failed = {_JSON: {'schema': ref[ErrorResponse]}}
    return {'200': {'description': 'done', 'content': content}} | {
      code: {'description': _ERRORS[code], 'content': failed} for code in errors.split()
    }

  def post(summary: str, asked: Any, answered: Any) -> dict[str, Any]:
    content = {_JSON: {'schema': ref[asked]}}
    errors = '400 401 403 404 408 413 422 429 503 504'
    return {
      'post': {
        'summary': summary,
        'requestBody': {'required': True, 'content': content},
        'responses': answers(answered, errors),
      }
    }

  file = {'schema': {'type': 'string', 'format': 'binary', 'maxLength': most_prompt_bytes}}
  created = {'201': {'description': 'added', 'content': {_JSON: {'schema': ref[PromptCard]}}}}
  plain = {'text/plain': {'schema': {'type': 'string'}}}
  paths: dict[str, Any] = {
    '/v1/embeddings': post('Vectors of texts', EmbeddingRequest, EmbeddingResponse),
    '/v1/search': post('The best passages of an index', SearchRequest, SearchResponse),
    '/v1/rerank': post('Documents by relevance to a query', RerankRequest, RerankResponse),
    '/v1/models': {
      'get': {
        'summary': 'The backbone and the prompts',
        'responses': answers(ModelList, '401 403 503'),
      }
    },
    '/v1/models/{name}': {
      'parameters': [_NAME],
      'get': {'summary': 'One of them', 'responses': answers(ModelCard, '401 403 404 503')},
    },
    '/v1/prompts': {
      'get': {
        'summary': 'The prompts with what is known of them',
        'responses': answers(PromptList, '401 403 503'),
      }
    },
    '/v1/prompts/{name}': {
      'parameters': [_NAME],
      'get': {
        'summary': 'A prompt; its file, where the client accepts application/octet-stream alone',
        'responses': answers(PromptCard, '401 403 404 503', **{_BYTES: file}),
      },
      'put': {
        'summary': 'Add or replace a prompt: the npz file',
        'requestBody': {'required': True, 'content': {_BYTES: file}},
        'responses': answers(PromptCard, '400 401 403 408 409 413 422 503') | created,
      },
      'delete': {
        'summary': 'Remove a prompt',
        'responses': {'204': {'description': 'removed'}}
        | {
          code: answer
          for code, answer in answers(PromptCard, '401 403 404 409 503').items()
          if code != '200'
        },
      },
    },
  }
  for path, summary in (
    ('/healthz', 'Whether the process answers'),
    ('/readyz', 'Whether everything is compiled'),
    ('/metrics', 'Counts and times, for Prometheus'),
  ):
    texts = {
      code: {'description': what, 'content': plain}
      for code, what in (('200', 'yes'), ('503', 'no'))
    }
    refused = {
      code: answer
      for code, answer in answers(PromptCard, '401 403').items()
      if code != '200' and path == '/metrics'
    }
    paths[path] = {'get': {'summary': summary, 'responses': texts | refused}}
  return {
    'openapi': '3.1.0',
    'info': {
      'title': 'dprjax',
      'version': __version__,
      'description': 'One backbone, many prompts. Request bodies have at most '
      f'{most_bytes:,} bytes, prompt files {most_prompt_bytes:,}.',
    },
    'paths': paths,
    'components': {
      'schemas': components,
      'securitySchemes': {'key': {'type': 'http', 'scheme': 'bearer'}},
    },
    'security': [{}, {'key': []}],
  }
