"""Types of requests and answers, and their OpenAPI document."""

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Struct

from dprjax.base.version import __version__

ModelName = Annotated[
  str,
  Meta(
    description='The name of a prompt, as `NAME:query` or `NAME:passage` if their vectors differ '
    'and no other field says which; the name of the backbone for no prompt.',
  ),
]


Format = Literal['float', 'base64']
Count = Annotated[int, Meta(ge=1)]
Texts = Annotated[list[str], Meta(min_length=1)]


class Asked(Struct, forbid_unknown_fields=True):
  """A part of a request, which ignores no field."""


class Document(Asked):
  text: str


class EmbeddingRequest(Asked):
  """Texts, not token ids.

  `input_type` says query or passage if `model` does not. `truncate`: false refuses texts that are
  too long. null means an absent field.
  """

  model: ModelName
  input: str | Texts
  encoding_format: Format | None = None
  dimensions: Count | None = None
  user: str | None = None
  input_type: Literal['query', 'passage', 'document'] | None = None
  truncate: bool | None = None


class SearchRequest(Asked):
  """Queries for an index (default: of the prompt, or the only one). `k` is 10 by default."""

  model: ModelName
  query: str | Texts
  index: str | None = None
  k: Count | None = None


class RerankRequest(Asked):
  """Documents to order by their relevance to a query."""

  query: str
  documents: Annotated[list[str | Document], Meta(min_length=1)]
  model: str | None = None
  top_n: Count | None = None
  return_documents: bool | None = None


class Usage(Struct):
  prompt_tokens: int
  total_tokens: int


class Embedding(Struct, kw_only=True):
  object: Literal['embedding'] = 'embedding'
  index: int
  embedding: list[float] | str


class EmbeddingResponse(Struct, kw_only=True):
  """``truncated``: numbers of the texts that lost their end."""

  object: Literal['list'] = 'list'
  data: list[Embedding]
  model: str
  usage: Usage
  truncated: list[int]


class ModelCard(Struct, kw_only=True):
  id: str
  object: Literal['model'] = 'model'
  created: int
  owned_by: str = 'dprjax'


class ModelList(Struct, kw_only=True):
  object: Literal['list'] = 'list'
  data: list[ModelCard]


class PromptCard(Struct):
  """A prompt.

  ``searches``: indexes that its queries can search. ``refused``: why it is not served; most other
  fields are then empty.
  """

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
  searches: list[str]
  task: Any
  metrics: Any
  refused: str


class PromptList(Struct):
  """The prompts. ``searches``: indexes that the backbone without a prompt can search."""

  backbone: str
  backbone_sha256: str
  tokenizer_sha256: str
  backbone_bytes: int
  prompts: list[PromptCard]
  indexes: dict[str, int]
  searches: list[str]
  rerankers: list[str]


class Hit(Struct):
  id: str
  score: float
  text: str | None


class SearchResponse(Struct, kw_only=True):
  """One list of hits for each query, best first."""

  object: Literal['list'] = 'list'
  model: str
  index: str
  results: list[list[Hit]]
  usage: Usage
  truncated: list[int]


class Ranked(Struct):
  index: int
  relevance_score: float
  document: Document | None = None


class RerankResponse(Struct):
  """Best first; a score is the probability of relevance."""

  model: str
  results: list[Ranked]
  usage: Usage


class ErrorDetail(Struct):
  message: str
  type: str
  param: str | None
  code: str | None


class ErrorResponse(Struct):
  """Why a request failed.

  400: malformed. 401: unknown key. 403: the key may not do this. 404: no such model, prompt or
  index. 408, 504: too slow. 409: the backbone name. 413: too large. 415: not JSON. 422: unusable.
  429: too busy, or too many requests of the key; see Retry-After. 503: not ready, or the files of
  the server cannot be used.
  """

  error: ErrorDetail


class Operation(NamedTuple):
  """A request that the server answers.

  Attributes:
    answered: types of the answer: of JSON, str for plain text, bytes for a prompt file.
    role: required of a key; '' for none.
  """

  method: str
  path: str
  summary: str
  answered: tuple[Any, ...]
  asked: Any = None
  statuses: tuple[int, ...] = (200,)
  role: str = ''

  @property
  def shown(self) -> str:
    return self.path.replace(':path}', '}')


T = TypeVar('T')


def serves(
  method: str, path: str, summary: str, *answered: Any, role: str = 'read', **more: Any
) -> Callable[[T], T]:
  """Marks a method with the requests that it answers."""

  def mark(handler: Any) -> Any:
    own = Operation(method, path, summary, answered, role=role, **more)
    handler.operations = [*getattr(handler, 'operations', ()), own]
    return handler

  return mark


def openapi(operations: Sequence[Operation]) -> dict[str, Any]:
  kinds = dict.fromkeys(
    kind for one in operations for kind in (*one.answered, one.asked, ErrorResponse)
  )
  structs = [kind for kind in kinds if kind not in (str, bytes, None)]
  schemas, components = msgspec.json.schema_components(
    structs, ref_template='#/components/schemas/{name}'
  )
  media: dict[Any, tuple[str, dict[str, Any]]] = {
    str: ('text/plain', {'type': 'string'}),
    bytes: ('application/octet-stream', {'type': 'string', 'format': 'binary'}),
  }
  for kind, schema in zip(structs, schemas, strict=True):
    media[kind] = 'application/json', schema

  def body(kinds: Sequence[Any], **more: Any) -> dict[str, Any]:
    return {'content': {media[kind][0]: {'schema': media[kind][1]} for kind in kinds}, **more}

  paths: dict[str, Any] = {}
  for one in operations:
    done = body(one.answered, description='done')
    about: dict[str, Any] = {
      'summary': one.summary,
      'security': [{}, {'key': []}] if one.role else [],
      'parameters': [
        {'name': name, 'in': 'path', 'required': True, 'schema': {'type': 'string'}}
        for name in re.findall(r'{(\w+)}', one.shown)
      ],
      'responses': dict.fromkeys(map(str, one.statuses), done)
      | {'default': body([ErrorResponse], description='an error')},
    }
    if one.asked is not None:
      about['requestBody'] = body([one.asked], required=True)
    paths.setdefault(one.shown, {})[one.method.lower()] = about
  return {
    'openapi': '3.1.0',
    'info': {'title': 'dprjax', 'version': __version__},
    'paths': paths,
    'components': {
      'schemas': components,
      'securitySchemes': {'key': {'type': 'http', 'scheme': 'bearer'}},
    },
  }
