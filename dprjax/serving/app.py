"""The HTTP interface: OpenAI's embeddings and models, Cohere's rerank, prompts, search, health.

Bodies of requests and keys are never logged.
"""

import asyncio
import base64
import concurrent.futures
import dataclasses
import logging
import math
import re
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import orjson
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from dprjax.base.errors import InputError
from dprjax.formats.texts import SIDES
from dprjax.retrieval import codes
from dprjax.serving import keys, messages, page
from dprjax.serving.batcher import Busy, NotFinite
from dprjax.serving.engine import Engine, ForeignIds, Tokens
from dprjax.serving.indexes import ServedIndex, ServedReranker
from dprjax.serving.library import NAME, About, NameTaken, UnknownPrompt
from dprjax.serving.messages import (
  EmbeddingRequest,
  EmbeddingResponse,
  ModelCard,
  ModelList,
  PromptCard,
  PromptList,
  RerankRequest,
  RerankResponse,
  SearchRequest,
  SearchResponse,
  Usage,
)

logger = logging.getLogger('dprjax')

_T = TypeVar('_T')
_Handler = Callable[[Request], Awaitable[Response]]
_OCTETS, _PROMPT = 'application/octet-stream', '/v1/prompts/{name}'
_LEFT = 499  # nginx's status for a client that left


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits of one request.

  Attributes:
    bytes, prompt_bytes: of a body, and of an uploaded prompt file.
    inputs: texts, queries or documents.
    tokens: of all texts, after truncation.
    requests: answered at a time.
    seconds: for the request to arrive, and again for the answer.
  """

  bytes: int = 8 << 20
  prompt_bytes: int = 256 << 20
  inputs: int = 2048
  tokens: int = 300_000
  requests: int = 512
  seconds: float = 60


class _Failure(Exception):
  def __init__(
    self,
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
  ):
    super().__init__(message)
    self.response = _error(status, message, param, code, headers)


class _Left(Exception):
  """The client closed the connection."""


def _serves(
  method: str, path: str, summary: str, *answered: type, role: str = keys.READ, **more: Any
) -> Callable[[_T], _T]:
  """Marks a method of `App` with the requests that it answers."""

  def mark(handler: Any) -> Any:
    handler.operation = messages.Operation(method, path, summary, answered, role=role, **more)
    return handler

  return mark


class App:
  """The server of an engine, with its indexes and rerankers.

  Attributes:
    asgi: the ASGI application.
    ready: set once everything is compiled.
    failed: why compilation failed.
  """

  def __init__(
    self,
    engine: Engine,
    indexes: Sequence[ServedIndex] = (),
    rerankers: Sequence[ServedReranker] = (),
    allowed: keys.Keys | None = None,
    limits: Limits | None = None,
  ):
    self._engine, self._keys, self._limits = engine, allowed, limits or Limits()
    self._indexes = {index.name: index for index in indexes}
    self._rerankers = {reranker.name: reranker for reranker in rerankers}
    self._started, self._active = int(time.time()), 0
    # Search and reranking share the devices with the batcher, one request at a time.
    self._side = concurrent.futures.ThreadPoolExecutor(1, 'search')
    self._files = concurrent.futures.ThreadPoolExecutor(2, 'files')
    self.ready, self.failed = threading.Event(), ''
    self._compiling: threading.Thread | None = None
    self._draining = False
    served = {
      handler.operation: getattr(self, name)
      for name, handler in vars(App).items()
      if hasattr(handler, 'operation')
    }
    document = messages.openapi([*served], self._limits.bytes, self._limits.prompt_bytes)
    self._document = orjson.dumps(document)
    self._pages = {'/': page.read(), '/docs': page.reference(document)}
    self.asgi = Starlette(
      routes=[
        Route('/', self._page),
        Route('/docs', self._page),
        Route('/openapi.json', self._openapi),
        *(self._route(operation, handler) for operation, handler in served.items()),
      ],
      exception_handlers={404: _no_such_path, 405: _no_such_method},
    )
    self.asgi.router.redirect_slashes = False

  def start(self) -> None:
    """Compiles in a thread."""
    self._compiling = threading.Thread(target=self.compile, name='compile', daemon=True)
    self._compiling.start()

  def compile(self) -> None:
    """Waits for the engine's shapes, compiles the others, and sets ``ready``."""
    try:
      self._engine.ready.result()
      parts: list[ServedIndex | ServedReranker] = [
        *self._indexes.values(),
        *self._rerankers.values(),
      ]
      for part in parts:
        if self._draining:
          return
        part.compile()
    except Exception as error:  # /readyz says it
      self.failed = f'{type(error).__name__}: {error}'
      logger.error('the server cannot become ready: %s', self.failed.partition('\n')[0])
      return
    self.ready.set()

  def drain(self) -> None:
    """Makes ``/readyz`` answer no; requests are still answered."""
    self._draining = True

  def close(self) -> None:
    """Ends the threads after their last work."""
    if self._compiling is not None:  # a process that exits while XLA compiles crashes
      self._compiling.join()
    self._side.shutdown()
    self._files.shutdown()
    self._engine.close()

  def _route(self, operation: messages.Operation, handler: _Handler) -> Route:
    """A route with keys, limits, metrics and OpenAI's errors. Without a role it is open."""
    metrics, path, method = self._engine.metrics, operation.path, operation.method
    role = operation.role
    if not role:
      return Route(path, handler, methods=[method])

    async def answer(request: Request) -> Response:
      started = time.monotonic()
      request.state.model = ''
      self._active += 1
      try:
        self._check_key(request, role)
        if method == 'POST':
          if not self.ready.is_set():
            raise _Failure(503, self.failed or 'still compiling; ask /readyz')
          if self._active > self._limits.requests:
            raise Busy(1)
        response = await handler(request)
      except (_Left, ClientDisconnect):
        response = Response(status_code=_LEFT)
      except Exception as error:  # a fault of one request must not end the server
        response = _failed(error, path)
      finally:
        self._active -= 1
      seconds = time.monotonic() - started
      response.headers['server-timing'] = f'total;dur={1000 * seconds:.1f}'
      metrics.requests.labels(f'{method} {path}', request.state.model, response.status_code).inc()
      metrics.request_seconds.labels(f'{method} {path}').observe(seconds)
      return response

    return Route(path, answer, methods=[method])

  def _check_key(self, request: Request, role: str) -> None:
    if self._keys is None:
      return
    allowed = self._keys.allow(role, request.headers.get('authorization', ''))
    if allowed is None:
      raise _Failure(
        401,
        'give a known key: Authorization: Bearer KEY',
        code='invalid_api_key',
        headers={'www-authenticate': 'Bearer'},
      )
    if not allowed:
      raise _Failure(403, "this needs an administrator's key")

  async def _body(self, request: Request, most: int) -> bytes:
    declared = request.headers.get('content-length', '')
    too_large = f'the body is larger than {most:,} bytes'
    if declared.isdecimal() and len(declared) < 18 and int(declared) > most:
      raise _Failure(413, too_large)
    content = bytearray()
    try:
      async with asyncio.timeout(self._limits.seconds):
        async for chunk in request.stream():
          content += chunk
          if len(content) > most:
            raise _Failure(413, too_large)
    except TimeoutError:
      raise _Failure(408, 'the request did not arrive in time') from None
    return bytes(content)

  async def _read(self, request: Request, kind: type[_T]) -> _T:
    content = await self._body(request, self._limits.bytes)
    try:
      return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
      raise _Failure(400, str(error), param=_field(str(error))) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
      raise _Failure(400, f'the body is not JSON: {error}') from error
    except RecursionError as error:
      raise _Failure(400, 'the body is too deep') from error

  async def _wait(self, request: Request, future: concurrent.futures.Future) -> Any:
    """The result. Cancels the work if the client leaves or the time is over."""
    asked = asyncio.wrap_future(future)
    # The body was read, so the next message is the end of the connection.
    left = asyncio.ensure_future(request.receive())
    try:
      await asyncio.wait(
        {asked, left}, timeout=self._limits.seconds, return_when=asyncio.FIRST_COMPLETED
      )
      if asked.done():
        return asked.result()
      future.cancel()
      if left.done():
        raise _Left
      raise _Failure(504, f'no answer within {self._limits.seconds:g} seconds')
    finally:
      left.cancel()
      asked.cancel()

  async def _embed(
    self,
    request: Request,
    name: str,
    side: str,
    texts: Sequence[Any],
    param: str,
    dimensions: int | None = None,
  ) -> tuple[Tokens, np.ndarray]:
    if len(texts) > self._limits.inputs:
      raise _Failure(413, f'{len(texts)} texts; {self._limits.inputs} at most', param=param)
    engine = self._engine
    tokens = await self._wait(request, engine.pool.submit(engine.tokenize, name, side, texts))
    request.state.model = name
    if tokens.total > self._limits.tokens:
      raise _Failure(413, f'{tokens.total} tokens; {self._limits.tokens} at most', param=param)
    whole, version = engine.backbone.config.vector_size, tokens.version
    shorter = {length for length in version.meta.get('matryoshka', ()) if length < whole}
    given = sorted({*shorter, whole}, reverse=True)
    if dimensions not in (None, *given):
      sizes = ' or '.join(map(str, given))
      raise _Failure(400, f'this model has vectors of {sizes} dimensions', param='dimensions')
    vectors = await self._wait(request, engine.queue(tokens))
    return tokens, codes.cut(vectors, dimensions or whole, version.spec.normalize)

  def _headers(self, tokens: Tokens) -> dict[str, str]:
    return {
      'x-dprjax-backbone-sha256': self._engine.backbone.sha256,
      'x-dprjax-prompt-sha256': tokens.version.sha256,
      'x-dprjax-truncated': str(len(tokens.truncated)),
    }

  @_serves('POST', '/v1/embeddings', 'Vectors of texts', EmbeddingResponse, asked=EmbeddingRequest)
  async def _embeddings(self, request: Request) -> Response:
    asked = await self._read(request, EmbeddingRequest)
    name, side = _split(asked.model, 'passage')
    tokens, vectors = await self._embed(
      request, name, side, _inputs(asked.input), 'input', asked.dimensions
    )
    values: Any = vectors
    if asked.encoding_format == 'base64':
      values = [base64.b64encode(vector.astype('<f4').tobytes()).decode() for vector in vectors]
    content = EmbeddingResponse(
      data=[messages.Embedding(index=index, embedding=value) for index, value in enumerate(values)],
      model=asked.model,
      usage=Usage(tokens.total, tokens.total),
      truncated=tokens.truncated,
    )
    return _json(content, headers=self._headers(tokens))

  @_serves(
    'POST', '/v1/search', 'The best passages of an index', SearchResponse, asked=SearchRequest
  )
  async def _search(self, request: Request) -> Response:
    asked = await self._read(request, SearchRequest)
    name, side = _split(asked.model, 'query')
    queries = [asked.query] if isinstance(asked.query, str) else asked.query
    index = await self._on_files(lambda: self._choose_index(name, asked.index))
    k = 10 if asked.k is None else asked.k
    if k > index.most:
      raise _Failure(413, f'k is {k}; {index.most} at most', param='k')
    tokens, vectors = await self._embed(request, name, side, queries, 'query')
    index.check(tokens.version, self._engine)
    found = await self._wait(request, self._side.submit(index.search, vectors, queries, k))
    content = SearchResponse(
      model=asked.model,
      index=index.name,
      results=found,
      usage=Usage(tokens.total, tokens.total),
      truncated=tokens.truncated,
    )
    return _json(content, headers=self._headers(tokens))

  def _choose_index(self, name: str, asked: str | None) -> ServedIndex:
    """By default the index that the prompt names, that of the prompt's name, or the only one."""
    if asked is None:
      named = self._engine.library.get(name).meta.get('index')
      names = [one for one in (named, name) if isinstance(one, str) and one in self._indexes]
      names += list(self._indexes) if len(self._indexes) == 1 else []
      if not names:
        known = ', '.join(self._indexes)
        raise _Failure(
          404,
          f'say which index to search: one of {known}'
          if known
          else 'this server has no index to search; start it with --index=NAME=DIR',
          param='index',
        )
      asked = names[0]
    if asked not in self._indexes:
      raise _Failure(404, 'there is no such index', param='index', code='index_not_found')
    return self._indexes[asked]

  @_serves('POST', '/v1/rerank', 'Documents by relevance', RerankResponse, asked=RerankRequest)
  async def _rerank(self, request: Request) -> Response:
    asked = await self._read(request, RerankRequest)
    name = asked.model or next(iter(self._rerankers), '')
    if name not in self._rerankers:
      raise _Failure(404, 'there is no such reranker', param='model', code='model_not_found')
    request.state.model = name
    if len(asked.documents) > self._limits.inputs:
      raise _Failure(
        413, f'{len(asked.documents)} documents; {self._limits.inputs} at most', param='documents'
      )
    texts = [one if isinstance(one, str) else one.text for one in asked.documents]
    score = self._rerankers[name].score
    scores = await self._wait(request, self._side.submit(score, asked.query, texts))
    order = np.argsort(-scores, kind='stable')[: asked.top_n]
    results = [messages.Ranked(int(i), float(scores[i])) for i in order]
    return _json(RerankResponse(name, results))

  async def _on_files(self, work: Callable[[], _T]) -> _T:
    return await asyncio.get_running_loop().run_in_executor(self._files, work)

  def _card(self, name: str, about: About) -> PromptCard:
    spec, index = about.spec, about.meta.get('index')
    return PromptCard(
      name=name,
      sha256=about.sha256,
      kind=about.meta.get('kind', ''),
      lengths=about.lengths,
      pooling=spec.pooling,
      normalize=spec.normalize,
      shift_positions=bool(about.meta.get('shift_positions')),
      query_max_length=spec.query_max_length,
      passage_max_length=spec.passage_max_length,
      bytes=about.nbytes,
      modified=about.modified,
      index=index if isinstance(index, str) else None,
      task=about.meta.get('task'),
      metrics=about.meta.get('metrics'),
      refused=about.refused,
    )

  @_serves('GET', '/v1/models', 'The backbone and the prompts', ModelList)
  async def _models(self, request: Request) -> Response:
    library = self._engine.library
    found = await self._on_files(library.listing)
    cards = [ModelCard(id=library.name, created=self._started)]
    cards += [
      ModelCard(id=name, created=int(about.modified)) for name, about in found if not about.refused
    ]
    return _json(ModelList(data=cards))

  @_serves('GET', '/v1/models/{name}', 'One of them', ModelCard)
  async def _model(self, request: Request) -> Response:
    asked = request.path_params['name']
    name, _ = _split(asked, 'passage')
    library = self._engine.library
    if name == library.name:
      return _json(ModelCard(id=asked, created=self._started))
    about = await self._on_files(lambda: library.about(name))
    if about.refused:
      raise InputError(about.refused)
    return _json(ModelCard(id=asked, created=int(about.modified)))

  @_serves('GET', '/v1/prompts', 'The prompts and their metadata', PromptList)
  async def _prompts(self, request: Request) -> Response:
    engine = self._engine
    found = await self._on_files(engine.library.listing)
    return _json(
      PromptList(
        backbone=engine.library.name,
        backbone_sha256=engine.backbone.sha256,
        tokenizer_sha256=engine.tokenizer.sha256,
        backbone_bytes=engine.backbone_bytes,
        prompts=[self._card(name, about) for name, about in found],
        indexes={name: len(index) for name, index in self._indexes.items()},
        rerankers=list(self._rerankers),
      )
    )

  @_serves('GET', _PROMPT, f'A prompt; its file where Accept is {_OCTETS}', PromptCard, bytes)
  async def _prompt(self, request: Request) -> Response:
    name, library = request.path_params['name'], self._engine.library
    if request.headers.get('accept', '') == _OCTETS:
      return Response(await self._on_files(lambda: library.content(name)), media_type=_OCTETS)
    return _json(self._card(name, await self._on_files(lambda: library.about(name))))

  @_serves(
    'PUT',
    _PROMPT,
    'Add or replace a prompt',
    PromptCard,
    asked=bytes,
    statuses=(200, 201),
    role=keys.ADMIN,
  )
  async def _put(self, request: Request) -> Response:
    name, library = request.path_params['name'], self._engine.library
    if not NAME.fullmatch(name):
      raise _Failure(
        400, "a new prompt's name has 1 to 64 of A-Z a-z 0-9 . _ -, no dot first", param='name'
      )
    content = await self._body(request, self._limits.prompt_bytes)
    _, new = await self._on_files(lambda: library.put(name, content))
    logger.info('prompt %s %s', name, 'added' if new else 'replaced')
    about = await self._on_files(lambda: library.about(name))
    return _json(self._card(name, about), 201 if new else 200)

  @_serves('DELETE', _PROMPT, 'Remove a prompt', statuses=(204,), role=keys.ADMIN)
  async def _delete(self, request: Request) -> Response:
    name = request.path_params['name']
    await self._on_files(lambda: self._engine.library.delete(name))
    logger.info('prompt %s removed', name)
    return Response(status_code=204)

  async def _page(self, request: Request) -> Response:
    content, headers = self._pages[request.url.path]
    return Response(content, headers=headers, media_type='text/html')

  @_serves('GET', '/healthz', 'Whether the process answers', str, role='')
  async def _healthz(self, request: Request) -> Response:
    return PlainTextResponse('ok\n')

  @_serves('GET', '/readyz', 'Whether all is compiled', str, role='', statuses=(200, 503))
  async def _readyz(self, request: Request) -> Response:
    if self.ready.is_set() and not self._draining:
      return PlainTextResponse('ready\n')
    reason = 'draining' if self._draining else 'failed' if self.failed else 'compiling'
    return PlainTextResponse(f'{reason}\n', 503)

  @_serves('GET', '/metrics', 'Counts and times, for Prometheus', str)
  async def _metrics(self, request: Request) -> Response:
    content = await self._on_files(self._engine.metrics.text)
    return Response(content, media_type='text/plain; version=0.0.4; charset=utf-8')

  async def _openapi(self, request: Request) -> Response:
    return Response(self._document, media_type='application/json')


def _split(model: str, default: str) -> tuple[str, str]:
  """A prompt's name and the side: 'qa:query' gives 'qa', 'query'."""
  name, colon, side = model.rpartition(':')
  if not colon:
    return model, default
  if side not in SIDES:
    raise UnknownPrompt(model)
  return name, side


def _field(message: str) -> str | None:
  found = re.search(r'at `\$\.(\w+)', message) or re.search(r'field `(\w+)`', message)
  return found and found[1]


def _inputs(given: str | list[Any]) -> list[Any]:
  if isinstance(given, str):
    return [given]
  kinds = {type(one) for one in given}
  if len(kinds) > 1:
    raise _Failure(
      400, 'expected a text, a list of texts, token ids, or a list of these', param='input'
    )
  return [given] if kinds == {int} else given


def _json(
  content: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
  # orjson writes float32 as it is, and NaN as null: vectors are checked before.
  encoded = orjson.dumps(content, msgspec.structs.asdict, orjson.OPT_SERIALIZE_NUMPY)
  return Response(encoded, status, headers, media_type='application/json')


def _error(
  status: int,
  message: str,
  param: str | None = None,
  code: str | None = None,
  headers: dict[str, str] | None = None,
) -> Response:
  kind = 'server_error' if status >= 500 else 'invalid_request_error'
  if status == 429:
    kind = 'rate_limit_error'
  message = message.encode(errors='backslashreplace').decode()  # half of a surrogate pair
  detail = messages.ErrorDetail(message, kind, param, code)
  return _json(messages.ErrorResponse(detail), status, headers)


def _failed(error: Exception, path: str) -> Response:
  if isinstance(error, _Failure):
    return error.response
  if isinstance(error, UnknownPrompt):
    return _error(404, 'there is no such model or prompt', 'model', 'model_not_found')
  if isinstance(error, NameTaken):
    return _error(409, "this is the backbone's name; choose another", 'name')
  if isinstance(error, Busy):
    wait = {'retry-after': str(math.ceil(error.seconds))}
    return _error(429, str(error), code='rate_limit_exceeded', headers=wait)
  if isinstance(error, InputError | NotFinite):
    return _error(422, str(error), 'input' if isinstance(error, ForeignIds) else None)
  if isinstance(error, OSError):
    logger.error('%s: %s', path, error)
    return _error(503, f"the server's files: {error.strerror or 'they cannot be used'}")
  # The message of an error may repeat the request.
  logger.error('a fault of dprjax in %s: %s', path, type(error).__name__)
  return _error(500, 'a fault of the server')


async def _no_such_path(request: Request, error: Exception) -> Response:
  return _error(404, 'there is no such path; see /openapi.json')


async def _no_such_method(request: Request, error: Exception) -> Response:
  headers = getattr(error, 'headers', None)
  return _error(405, 'this path does not take this method; see /openapi.json', headers=headers)
