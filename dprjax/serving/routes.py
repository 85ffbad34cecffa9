"""The routes of vectors, search and prompts; docs/serving-api.md has their fields."""

import asyncio
import base64
import logging
import time
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from dprjax.serving import answers
from dprjax.serving.answers import Failure, json_answer
from dprjax.serving.indexes import ServedIndex
from dprjax.serving.keys import Grant
from dprjax.serving.library import NAME, NAMES, UnknownPrompt, Version
from dprjax.serving.service import Service, Wanted, split
from dprjax.text.vector_spec import SIDES

logger = logging.getLogger('dprjax')

_STARTED = int(time.time())

Count = Annotated[int, Meta(ge=1)]
Texts = Annotated[list[str], Meta(min_length=1)]


class Asked(Struct, forbid_unknown_fields=True):
  """A part of a request, which ignores no field."""


class EmbeddingRequest(Asked):
  """Texts, not token ids; null means an absent field."""

  model: str
  input: str | Texts
  encoding_format: Literal['float', 'base64'] | None = None
  dimensions: Count | None = None
  user: str | None = None
  input_type: Literal['query', 'passage', 'document'] | None = None
  truncate: bool | None = None


class SearchRequest(Asked):
  """Queries for an index (default: of the prompt, or the only one). `k` is 10 by default."""

  model: str
  query: str | Texts
  index: str | None = None
  k: Count | None = None


class Routes(Service):
  async def _embeddings(self, request: Request) -> Response:
    body = await self.read(request, EmbeddingRequest)
    wanted = Wanted(
      *split(body.model, 'passage', body.input_type),
      dimensions=body.dimensions,
      cut=body.truncate is not False,
    )
    texts = [body.input] if isinstance(body.input, str) else body.input
    tokens, vectors = await self.embed(request, wanted, texts, 'input')

    def rows(start: int, stop: int) -> list[dict[str, Any]]:
      values: Any = vectors[start:stop]
      if body.encoding_format == 'base64':
        values = [base64.b64encode(one.astype('<f4').tobytes()).decode() for one in values]
      return [
        {'object': 'embedding', 'index': start + i, 'embedding': one}
        for i, one in enumerate(values)
      ]

    content = {
      'object': 'list',
      'data': await answers.in_parts(rows, len(vectors)),
      'model': body.model,
      'usage': _usage(tokens.total),
      'truncated': tokens.truncated,
    }
    return json_answer(content, headers=self.headers(tokens))

  async def _search(self, request: Request) -> Response:
    body = await self.read(request, SearchRequest)
    name, side, _ = split(body.model, 'query')
    wanted = Wanted(name, side)
    queries = [body.query] if isinstance(body.query, str) else body.query
    self.check_sees(request, name)
    index = await asyncio.to_thread(self._choose_index, request, name, body.index)
    k = 10 if body.k is None else body.k
    if k > index.most:
      raise Failure(413, f'k is {k}; {index.most} at most', param='k')
    more = index.seconds(len(queries))
    tokens, vectors = await self.embed(request, wanted, queries, 'query', more)
    index.check(tokens.version, self.engine)
    top = await self.on_device(request, index.find(vectors))
    hits = await self.on_threads(request, index.rank(top, queries, k))
    content = {
      'object': 'list',
      'model': body.model,
      'index': index.name,
      'results': hits,
      'usage': _usage(tokens.total),
      'truncated': tokens.truncated,
    }
    return json_answer(content, headers=self.headers(tokens))

  def _choose_index(self, request: Request, name: str, index: str | None) -> ServedIndex:
    """The index; by default the one named in the prompt, the one with its name, or the only one."""
    may_use = request.state.grant.may_use
    seen = [one for one in self.indexes if may_use('indexes', one)]
    if index is None:
      defaults = (self.engine.library.get(name).meta.get('index'), name)
      names = [*defaults, *seen] if len(seen) == 1 else [*defaults]
    else:
      names = [index]
    chosen = next((one for one in names if one in seen), None)
    if chosen is None:
      raise Failure(
        404,
        f'there is no such index, or it must be named; known: {", ".join(seen) or "none"}',
        param='index',
        code='index_not_found',
      )
    return self.indexes[chosen]

  def _searches(self, grant: Grant, prompt: Version) -> list[str]:
    return [
      name
      for name, index in self.indexes.items()
      if grant.may_use('indexes', name) and index.takes(prompt, self.engine)
    ]

  def _card(self, grant: Grant, name: str, about: Version) -> dict[str, Any]:
    """What the server says of a prompt; of a refused one, most fields are empty."""
    spec, index = about.spec, about.meta.get('index')
    return {
      'name': name,
      'sha256': about.sha256,
      'kind': about.meta.get('kind', ''),
      'lengths': about.lengths,
      'pooling': spec.pooling,
      'normalize': spec.normalize,
      'shift_positions': about.shift_positions,
      'query_max_length': spec.query_max_length,
      'passage_max_length': spec.passage_max_length,
      'bytes': about.nbytes,
      'modified': about.modified,
      'index': index if isinstance(index, str) else None,
      'searches': [] if about.refused else self._searches(grant, about),
      'task': about.meta.get('task'),
      'metrics': about.meta.get('metrics'),
      'refused': about.refused,
    }

  async def _model_cards(self, request: Request) -> list[dict[str, Any]]:
    library = self.engine.library
    models = [(library.name, library.bare)]
    models += [one for one in await asyncio.to_thread(library.listing) if not one[1].refused]
    return [
      {
        'id': id_,
        'object': 'model',
        'created': int(version.modified or _STARTED),
        'owned_by': 'dprjax',
      }
      for name, version in models
      if request.state.grant.may_use('prompts', name)
      for id_ in ([f'{name}:{side}' for side in SIDES] if version.two_sided else [name])
    ]

  async def _models(self, request: Request) -> Response:
    return json_answer({'object': 'list', 'data': await self._model_cards(request)})

  async def _model(self, request: Request) -> Response:
    name = request.path_params['name']
    for card in await self._model_cards(request):
      if card['id'] == name:
        return json_answer(card)
    raise UnknownPrompt(name)

  async def _prompts(self, request: Request) -> Response:
    engine = self.engine
    prompts = await asyncio.to_thread(engine.library.listing)
    grant = request.state.grant
    may_use = grant.may_use
    return json_answer(
      {
        'backbone': engine.library.name,
        'backbone_sha256': engine.backbone.sha256,
        'tokenizer_sha256': engine.tokenizer.sha256,
        'backbone_bytes': engine.bank.backbone_bytes,
        'prompts': [
          self._card(grant, name, about) for name, about in prompts if may_use('prompts', name)
        ],
        'indexes': {
          name: len(index) for name, index in self.indexes.items() if may_use('indexes', name)
        },
        'searches': self._searches(grant, engine.library.bare),
      }
    )

  async def _prompt(self, request: Request) -> Response:
    name = request.path_params['name']
    self.check_sees(request, name)
    about = await asyncio.to_thread(self.engine.library.about, name)
    return json_answer(self._card(request.state.grant, name, about))

  async def _put(self, request: Request) -> Response:
    name, library = request.path_params['name'], self.engine.library
    if not NAME.fullmatch(name):
      raise Failure(400, f'the name of a prompt has {NAMES}', param='name')
    self._check_change(request, name)
    content = await self.body(request, self.limits.prompt_bytes)
    before = await asyncio.to_thread(library.put, name, content)
    about = await asyncio.to_thread(library.about, name)
    self._audit(request, 'added' if before is None else 'replaced', name, before, about.sha256)
    card = self._card(request.state.grant, name, about)
    return json_answer(card, 201 if before is None else 200)

  async def _delete(self, request: Request) -> Response:
    name = request.path_params['name']
    self._check_change(request, name)
    self.enter(request)
    library = self.engine.library
    before = await asyncio.to_thread(library.delete, name)
    self._audit(request, 'removed', name, before, None)
    return Response(status_code=204)

  def _check_change(self, request: Request, name: str) -> None:
    if not request.state.grant.may_use('prompts', name):
      raise Failure(403, 'this key may not change prompts of this name')

  def _audit(
    self, request: Request, done: str, name: str, before: str | None, after: str | None
  ) -> None:
    logger.info(
      'audit: prompt %s %s by %s from %s: SHA-256 %s -> %s',
      name,
      done,
      request.state.grant.name or 'anyone',
      request.client.host if request.client else 'nowhere',
      before or 'none',
      after or 'none',
    )


def _usage(tokens: int) -> dict[str, int]:
  return {'prompt_tokens': tokens, 'total_tokens': tokens}
