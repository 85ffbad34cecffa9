"""The interfaces of Cohere (version 2) and of Text Embeddings Inference.

The name of a prompt is ``model`` in Cohere and ``prompt_name`` in Text Embeddings Inference.
"""

from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from dprjax.base.version import __version__
from dprjax.serving import answers, indexes
from dprjax.serving.answers import Failure, json_answer
from dprjax.serving.asked import Wanted, inputs, split
from dprjax.serving.messages import Asked, Format, InputType, ModelName, serves
from dprjax.serving.service import Service

Count = Annotated[int, Meta(ge=1)]


class CohereContent(Asked):
  type: Literal['text']
  text: str


class CohereInput(Asked):
  content: Annotated[list[CohereContent], Meta(min_length=1, max_length=1)]


class CohereEmbedRequest(Asked):
  """`texts` or `inputs` (only texts). `truncate`: NONE refuses texts that are too long."""

  model: ModelName
  input_type: InputType | None = None
  texts: Annotated[list[str], Meta(min_length=1)] | None = None
  inputs: Annotated[list[CohereInput], Meta(min_length=1)] | None = None
  embedding_types: Annotated[list[Format], Meta(min_length=1)] | None = None
  output_dimension: Count | None = None
  truncate: Literal['NONE', 'END'] | None = None
  priority: int | None = None


class CohereVersion(Struct, frozen=True):
  version: str = '2'


class CohereUnits(Struct):
  input_tokens: int


class CohereMeta(Struct):
  billed_units: CohereUnits
  api_version: CohereVersion = CohereVersion()


class CohereEmbedResponse(Struct):
  """`embeddings` has a list of vectors for each of the `embedding_types`."""

  id: str
  embeddings: dict[str, list[list[float] | str]]
  meta: CohereMeta
  response_type: str = 'embeddings_by_type'


class CohereRerankRequest(Asked):
  """Documents to order by their relevance to a query."""

  model: str
  query: str
  documents: Annotated[list[str], Meta(min_length=1)]
  top_n: Count | None = None
  max_tokens_per_doc: Count | None = None
  priority: int | None = None


class CohereRanked(Struct):
  index: int
  relevance_score: float


class CohereRerankResponse(Struct):
  id: str
  results: list[CohereRanked]
  meta: CohereMeta


class TeiEmbedRequest(Asked):
  """`prompt_name`: a model, by default the backbone without a prompt.

  `normalize`: whether vectors get length 1; by default as in the prompt.
  """

  inputs: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
  prompt_name: ModelName | None = None
  normalize: bool | None = None
  truncate: bool | None = None
  truncation_direction: Literal['right', 'Right'] | None = None
  dimensions: Count | None = None


class TeiRerankRequest(Asked):
  """Texts to order by their relevance to a query, by the first reranker."""

  query: str
  texts: Annotated[list[str], Meta(min_length=1)]
  raw_scores: bool | None = None
  return_text: bool | None = None
  truncate: Literal[True] | None = None
  truncation_direction: Literal['right', 'Right'] | None = None


class TeiRank(Struct):
  index: int
  score: float
  text: str | None


class TeiPooling(Struct):
  pooling: str


class TeiModelType(Struct):
  embedding: TeiPooling


class TeiInfo(Struct):
  model_id: str
  model_sha: str
  model_dtype: str
  model_type: TeiModelType
  max_concurrent_requests: int
  max_input_length: int
  max_batch_tokens: int
  max_batch_requests: int
  max_client_batch_size: int
  auto_truncate: bool
  tokenization_workers: int
  version: str


class Dialects:
  """Handlers of an `App`."""

  def __init__(self, service: Service):
    self._service = service

  @serves(
    'POST',
    '/v2/embed',
    'Vectors of texts (Cohere)',
    CohereEmbedResponse,
    asked=CohereEmbedRequest,
  )
  async def _cohere_embed(self, request: Request) -> Response:
    service = self._service
    asked = await service.read(request, CohereEmbedRequest)
    if (asked.texts is None) == (asked.inputs is None):
      raise Failure(400, 'give texts or inputs', param='texts')
    texts = asked.texts or [one.content[0].text for one in asked.inputs or ()]
    wanted = Wanted(
      *split(asked.model, 'passage', {'input_type': asked.input_type}),
      dimensions=asked.output_dimension,
      cut=asked.truncate != 'NONE',
    )
    param = 'texts' if asked.inputs is None else 'inputs'
    tokens, vectors = await service.embed(request, wanted, texts, param)
    forms: list[Format] = list(dict.fromkeys(asked.embedding_types or ('float',)))
    content = CohereEmbedResponse(
      request.state.id, {form: [] for form in forms}, CohereMeta(CohereUnits(tokens.total))
    )

    def rows_as(form: Format) -> answers.Rows:
      return lambda start, stop: answers.written(vectors[start:stop], form)

    lists: dict[str, answers.Rows] = {form: rows_as(form) for form in forms}
    return answers.filled_answer(content, lists, len(vectors), service.headers(tokens))

  @serves(
    'POST',
    '/v2/rerank',
    'Documents by relevance (Cohere)',
    CohereRerankResponse,
    asked=CohereRerankRequest,
  )
  async def _cohere_rerank(self, request: Request) -> Response:
    service = self._service
    asked = await service.read(request, CohereRerankRequest)
    name = service.reranker(request, asked.model)
    service.check_cut(name, asked.max_tokens_per_doc)
    logits, total = await service.score(request, name, asked.query, asked.documents, 'documents')
    scores = indexes.probabilities(logits)
    results = [
      CohereRanked(number, float(scores[number]))
      for number in np.argsort(-logits, kind='stable')[: asked.top_n].tolist()
    ]
    meta = CohereMeta(CohereUnits(total))
    return json_answer(CohereRerankResponse(request.state.id, results, meta))

  @serves(
    'POST',
    '/embed',
    'Vectors of texts (Text Embeddings Inference)',
    list[list[float]],
    asked=TeiEmbedRequest,
  )
  async def _tei_embed(self, request: Request) -> Response:
    service = self._service
    asked = await service.read(request, TeiEmbedRequest)
    wanted = Wanted(
      *split(asked.prompt_name or service.engine.library.name, 'passage'),
      dimensions=asked.dimensions,
      normalize=asked.normalize,
      cut=asked.truncate is not False,
    )
    texts = inputs(asked.inputs, 'inputs')
    tokens, vectors = await service.embed(request, wanted, texts, 'inputs')
    rows: dict[str, answers.Rows] = {'': lambda start, stop: vectors[start:stop]}
    return answers.filled_answer(None, rows, len(vectors), service.headers(tokens))

  @serves(
    'POST',
    '/rerank',
    'Texts by relevance (Text Embeddings Inference)',
    list[TeiRank],
    asked=TeiRerankRequest,
  )
  async def _tei_rerank(self, request: Request) -> Response:
    service = self._service
    asked = await service.read(request, TeiRerankRequest)
    name = service.reranker(request, None)
    logits, _ = await service.score(request, name, asked.query, asked.texts, 'texts')
    scores = logits if asked.raw_scores else indexes.probabilities(logits)
    ranks = [
      TeiRank(number, float(scores[number]), asked.texts[number] if asked.return_text else None)
      for number in np.argsort(-logits, kind='stable').tolist()
    ]
    return answers.list_answer(ranks)

  @serves('POST', '/embed_sparse', 'Refused: this server has no sparse vectors', statuses=())
  async def _tei_sparse(self, request: Request) -> Response:
    raise Failure(424, 'this server has no sparse vectors; ask /embed, or /v1/search for BM25')

  @serves('GET', '/info', 'About the server (Text Embeddings Inference)', TeiInfo)
  async def _tei_info(self, request: Request) -> Response:
    engine, limits = self._service.engine, self._service.limits
    options, spec = engine.options, engine.library.bare.spec
    return json_answer(
      TeiInfo(
        model_id=engine.library.name,
        model_sha=engine.backbone.sha256,
        model_dtype=options.dtype,
        model_type=TeiModelType(TeiPooling(spec.pooling)),
        max_concurrent_requests=limits.requests,
        max_input_length=spec.max_length('passage'),
        max_batch_tokens=options.budget or 0,
        max_batch_requests=options.rows[-1],
        max_client_batch_size=limits.inputs,
        auto_truncate=True,
        tokenization_workers=options.threads,
        version=__version__,
      )
    )
