"""Routes of prompts and models: lists, files, changes."""

import asyncio
import logging
import time

from starlette.requests import Request
from starlette.responses import Response

from dprjax.serving import keys
from dprjax.serving.answers import Failure, json_answer
from dprjax.serving.keys import Grant
from dprjax.serving.library import NAME, NAMES, UnknownPrompt, Version
from dprjax.serving.messages import ModelCard, ModelList, PromptCard, PromptList, serves
from dprjax.serving.service import Service
from dprjax.text.vector_spec import SIDES

logger = logging.getLogger('dprjax')

_STARTED = int(time.time())
_OCTETS, _PROMPT = 'application/octet-stream', '/v1/prompts/{name}'


class PromptRoutes(Service):
  """Handlers of an `App`."""

  def _searches(self, grant: Grant, prompt: Version) -> list[str]:
    """The indexes that a key sees and queries with this prompt can search."""
    return [
      name
      for name, index in self.indexes.items()
      if grant.may_use('indexes', name) and index.takes(prompt, self.engine)
    ]

  def _card(self, grant: Grant, name: str, about: Version) -> PromptCard:
    spec, index = about.spec, about.meta.get('index')
    return PromptCard(
      name=name,
      sha256=about.sha256,
      kind=about.meta.get('kind', ''),
      lengths=about.lengths,
      pooling=spec.pooling,
      normalize=spec.normalize,
      shift_positions=about.shift_positions,
      query_max_length=spec.query_max_length,
      passage_max_length=spec.passage_max_length,
      bytes=about.nbytes,
      modified=about.modified,
      index=index if isinstance(index, str) else None,
      searches=[] if about.refused else self._searches(grant, about),
      task=about.meta.get('task'),
      metrics=about.meta.get('metrics'),
      refused=about.refused,
    )

  async def _model_cards(self, request: Request) -> list[ModelCard]:
    library = self.engine.library
    models = [(library.name, library.bare)]
    models += [one for one in await asyncio.to_thread(library.listing) if not one[1].refused]
    return [
      ModelCard(id=id_, created=int(version.modified or _STARTED))
      for name, version in models
      if request.state.grant.may_use('prompts', name)
      for id_ in ([f'{name}:{side}' for side in SIDES] if version.two_sided else [name])
    ]

  @serves('GET', '/v1/models', 'The backbone and the prompts', ModelList)
  async def _models(self, request: Request) -> Response:
    return json_answer(ModelList(data=await self._model_cards(request)))

  @serves('GET', '/v1/models/{name:path}', 'One of them', ModelCard)
  async def _model(self, request: Request) -> Response:
    asked = request.path_params['name']
    for card in await self._model_cards(request):
      if card.id == asked:
        return json_answer(card)
    raise UnknownPrompt(asked)

  @serves('GET', '/v1/prompts', 'The prompts and their metadata', PromptList)
  async def _prompts(self, request: Request) -> Response:
    engine = self.engine
    found = await asyncio.to_thread(engine.library.listing)
    grant = request.state.grant
    may_use = grant.may_use
    return json_answer(
      PromptList(
        backbone=engine.library.name,
        backbone_sha256=engine.backbone.sha256,
        tokenizer_sha256=engine.tokenizer.sha256,
        backbone_bytes=engine.bank.backbone_bytes,
        prompts=[
          self._card(grant, name, about) for name, about in found if may_use('prompts', name)
        ],
        indexes={
          name: len(index) for name, index in self.indexes.items() if may_use('indexes', name)
        },
        searches=self._searches(grant, engine.library.bare),
        rerankers=[name for name in self.rerankers if may_use('rerankers', name)],
      )
    )

  @serves('GET', _PROMPT, f'A prompt; its file where Accept is {_OCTETS}', PromptCard, bytes)
  async def _prompt(self, request: Request) -> Response:
    name, library = request.path_params['name'], self.engine.library
    self.check_sees(request, name)
    about = await asyncio.to_thread(library.about, name)
    if request.headers.get('accept', '') == _OCTETS:
      self.enter(request)
      self.hold(request, about.nbytes)
      content = await asyncio.to_thread(library.content, name)
      return Response(content, media_type=_OCTETS)
    return json_answer(self._card(request.state.grant, name, about))

  @serves(
    'PUT',
    _PROMPT,
    'Add or replace a prompt',
    PromptCard,
    asked=bytes,
    statuses=(200, 201),
    role=keys.WRITE,
  )
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

  @serves('DELETE', _PROMPT, 'Remove a prompt', statuses=(204,), role=keys.WRITE)
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
    """Logs who changed a prompt, from which file to which."""
    logger.info(
      'audit: prompt %s %s by %s from %s: SHA-256 %s -> %s',
      name,
      done,
      request.state.grant.name or 'anyone',
      request.client.host if request.client else 'nowhere',
      before or 'none',
      after or 'none',
    )
