"""Vectors and reranking, as in OpenAI, Cohere (version 2) and Text Embeddings Inference.

The name of a prompt is ``prompt_name`` in Text Embeddings Inference, and ``model`` elsewhere.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from dprjax.serving import answers, messages
from dprjax.serving.answers import json_answer
from dprjax.serving.asked import Wanted, split
from dprjax.serving.indexes import probabilities
from dprjax.serving.messages import (
  Asked,
  CohereMeta,
  CohereUnits,
  Count,
  EmbeddingRequest,
  EmbeddingResponse,
  Format,
  ModelName,
  RerankRequest,
  RerankResponse,
  Task,
  Texts,
  Usage,
  serves,
)
from dprjax.serving.service import Service


class CohereEmbedRequest(Asked):
  """`truncate`: NONE refuses texts that are too long."""

  model: ModelName
  texts: Texts
  input_type: Task | None = None
  embedding_types: Annotated[list[Format], Meta(min_length=1)] | None = None
  output_dimension: Count | None = None
  truncate: Literal['NONE', 'END'] | None = None
  priority: int | None = None


class CohereEmbedResponse(Struct):
  """`embeddings` has a list of vectors for each of the `embedding_types`."""

  id: str
  embeddings: dict[str, list[list[float] | str]]
  meta: CohereMeta
  response_type: str = 'embeddings_by_type'


class TeiEmbedRequest(Asked):
  """`prompt_name`: a model, by default the backbone without a prompt.

  `normalize`: whether vectors get length 1; by default as in the prompt.
  """

  inputs: str | Texts
  prompt_name: ModelName | None = None
  normalize: bool | None = None
  truncate: bool | None = None
  truncation_direction: Literal['right', 'Right'] | None = None
  dimensions: Count | None = None


class TeiRerankRequest(Asked):
  """Texts to order by their relevance to a query, by the first reranker."""

  query: str
  texts: Texts
  raw_scores: bool | None = None
  return_text: bool | None = None
  truncate: Literal[True] | None = None
  truncation_direction: Literal['right', 'Right'] | None = None


class TeiRank(Struct):
  index: int
  score: float
  text: str | None


class Dialects(Service):
  """Handlers of an `App`."""

  @serves('POST', '/v1/embeddings', 'Vectors of texts', EmbeddingResponse, asked=EmbeddingRequest)
  async def _openai_embed(self, request: Request) -> Response:
    asked = await self.read(request, EmbeddingRequest)
    form = asked.encoding_format or 'float'
    wanted = Wanted(
      *split(asked.model, 'passage', asked.input_type),
      dimensions=asked.dimensions,
      cut=asked.truncate is not False,
    )
    texts = [asked.input] if isinstance(asked.input, str) else asked.input
    tokens, vectors = await self.embed(request, wanted, texts, 'input')

    def rows(start: int, stop: int) -> list[messages.Embedding]:
      values = answers.written(vectors[start:stop], form)
      return [messages.Embedding(index=start + i, embedding=one) for i, one in enumerate(values)]

    data: Any = await answers.in_parts(rows, len(vectors))
    usage = Usage(tokens.total, tokens.total)
    content = EmbeddingResponse(
      data=data, model=asked.model, usage=usage, truncated=tokens.truncated
    )
    return json_answer(content, headers=self.headers(tokens))

  @serves(
    'POST',
    '/v2/embed',
    'Vectors of texts (Cohere)',
    CohereEmbedResponse,
    asked=CohereEmbedRequest,
  )
  async def _cohere_embed(self, request: Request) -> Response:
    asked = await self.read(request, CohereEmbedRequest)
    wanted = Wanted(
      *split(asked.model, 'passage', asked.input_type),
      dimensions=asked.output_dimension,
      cut=asked.truncate != 'NONE',
    )
    tokens, vectors = await self.embed(request, wanted, asked.texts, 'texts')
    forms: list[Format] = asked.embedding_types or ['float']
    by_form: Any = {form: await answers.vectors_in(form, vectors) for form in forms}
    meta = CohereMeta(CohereUnits(tokens.total))
    content = CohereEmbedResponse(request.state.id, by_form, meta)
    return json_answer(content, headers=self.headers(tokens))

  @serves(
    'POST',
    '/embed',
    'Vectors of texts (Text Embeddings Inference)',
    list[list[float]],
    asked=TeiEmbedRequest,
  )
  async def _tei_embed(self, request: Request) -> Response:
    asked = await self.read(request, TeiEmbedRequest)
    wanted = Wanted(
      *split(asked.prompt_name or self.engine.library.name, 'passage'),
      dimensions=asked.dimensions,
      normalize=asked.normalize,
      cut=asked.truncate is not False,
    )
    texts = [asked.inputs] if isinstance(asked.inputs, str) else asked.inputs
    tokens, vectors = await self.embed(request, wanted, texts, 'inputs')
    content = await answers.vectors_in('float', vectors)
    return json_answer(content, headers=self.headers(tokens))

  @serves(
    'POST', '/v2/rerank', 'Documents by relevance (Cohere)', RerankResponse, asked=RerankRequest
  )
  @serves('POST', '/v1/rerank', 'Documents by relevance', RerankResponse, asked=RerankRequest)
  async def _rerank(self, request: Request) -> Response:
    asked = await self.read(request, RerankRequest)
    texts = [one if isinstance(one, str) else one.text for one in asked.documents]
    name = self.reranker(request, asked.model)
    order, logits, total = await self.score(request, name, asked.query, texts, 'documents')
    scores = probabilities(logits).tolist()
    results = [
      messages.Ranked(i, scores[i], messages.Document(texts[i]) if asked.return_documents else None)
      for i in order[: asked.top_n].tolist()
    ]
    meta = CohereMeta(CohereUnits(total))
    return json_answer(RerankResponse(name, results, Usage(total, total), meta))

  @serves(
    'POST',
    '/rerank',
    'Texts by relevance (Text Embeddings Inference)',
    list[TeiRank],
    asked=TeiRerankRequest,
  )
  async def _tei_rerank(self, request: Request) -> Response:
    asked = await self.read(request, TeiRerankRequest)
    name = self.reranker(request)
    order, logits, _ = await self.score(request, name, asked.query, asked.texts, 'texts')
    scores = (logits if asked.raw_scores else probabilities(logits)).tolist()
    return json_answer(
      [TeiRank(i, scores[i], asked.texts[i] if asked.return_text else None) for i in order.tolist()]
    )
