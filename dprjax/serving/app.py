"""The server: its paths, keys, hosts, end, and the routes of health. Other routes: `routes`."""

import asyncio
import base64
import contextlib
import hashlib
import logging
import pathlib
import re
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from dprjax.serving import answers, keys, server
from dprjax.serving.answers import Failure
from dprjax.serving.engine import Engine
from dprjax.serving.indexes import ServedIndex
from dprjax.serving.keys import ANYONE
from dprjax.serving.options import Limits
from dprjax.serving.routes import Routes
from dprjax.serving.service import Left

logger = logging.getLogger('dprjax')

_Handler = Callable[[Request], Awaitable[Response]]
THIS_MACHINE = ('localhost', '*.localhost', '127.0.0.1', '[::1]')
_LEFT = 499  # the status of nginx for a client that left
_FOLDER_S = 2.0  # for the folder of prompts to answer /readyz


class App(Routes):
  """The server of an engine, with its indexes."""

  def __init__(
    self,
    engine: Engine,
    indexes: Sequence[ServedIndex] = (),
    allowed: keys.Keys | None = None,
    limits: Limits | None = None,
    hosts: Sequence[str] | None = None,
    log_requests: bool = False,
  ):
    """See `serve`.

    Args:
      hosts: names of this server in requests, as *.example.org; None: any. Without keys, names of
        other sites should have no answer: they may point to this machine (DNS rebinding).
    """
    self._log_requests = log_requests
    super().__init__(engine, indexes, limits or Limits())
    self._keys = allowed
    self._guards = [
      Middleware(TrustedHostMiddleware, allowed_hosts=hosts or ['*'], www_redirect=False)
    ]
    self.ready, self.failed = threading.Event(), ''
    self._draining = False
    self._routes = Starlette(
      routes=[
        Route('/', _page()),
        Route('/livez', self._livez),
        Route('/readyz', self._readyz),
        self._route('GET', '/metrics', self._metrics, keys.METRICS),
        self._route('POST', '/v1/embeddings', self._embeddings),
        self._route('POST', '/v1/search', self._search),
        self._route('GET', '/v1/models', self._models),
        self._route('GET', '/v1/models/{name:path}', self._model),
        self._route('GET', '/v1/prompts', self._prompts),
        self._route('GET', '/v1/prompts/{name}', self._prompt),
        self._route('PUT', '/v1/prompts/{name}', self._put, keys.WRITE),
        self._route('DELETE', '/v1/prompts/{name}', self._delete, keys.WRITE),
      ],
      exception_handlers={HTTPException: _no_route},
    )
    self._routes.router.redirect_slashes = False

  async def asgi(self, scope: Any, receive: Any, send: Any) -> None:
    """The ASGI application. While it drains, every answer ends its connection."""
    id = server.request_id(scope)
    scope.setdefault('state', {})['id'] = id
    names = {name for name, _ in scope.get('headers', ())}
    # Both may be an attempt to smuggle a request (RFC 9112, section 6.1).
    ends = {b'content-length', b'transfer-encoding'} <= names

    async def tell(message: Any) -> None:
      if message['type'] == 'http.response.start':
        headers = [(b'x-request-id', id.encode())]
        if self._draining or ends:
          headers.append((b'connection', b'close'))
        message['headers'] = [*message.get('headers', ()), *headers]
      await send(message)

    server.current.set(id)  # each request has a context of its own
    with contextlib.ExitStack() as stack:
      scope['state']['stack'] = stack  # closed when the answer is sent
      await self._routes(scope, receive, tell)

  def start(self) -> None:
    threading.Thread(target=self.compile, name='compile', daemon=True).start()

  def compile(self) -> None:
    """Waits for the engine, compiles the other shapes, and sets ``ready``."""
    try:
      self.engine.ready.result()
      for index in self.indexes.values():
        index.compile()
    except Exception as error:  # /readyz says it
      self.failed = f'{type(error).__name__}: {error}'
      logger.error('the server cannot become ready: %s', self.failed.partition('\n')[0])
      return
    self.ready.set()

  def drain(self) -> None:
    """Makes ``/readyz`` answer no; requests are still answered, and end their connections."""
    self._draining = True

  def _route(self, method: str, path: str, handler: _Handler, role: str = keys.READ) -> Route:
    """A route with keys, limits, metrics and OpenAI errors; ``role`` is required of a key."""
    label = f'{method} {path.replace(":path", "")}'

    async def answer(request: Request) -> Response:
      started = time.monotonic()
      request.state.model, request.state.grant = '', ANYONE
      try:
        self._check_key(request, role)
        if method == 'POST' and not self.ready.is_set():
          raise Failure(503, self.failed or 'still compiling; ask /readyz')
        response = await handler(request)
      except (Left, ClientDisconnect):
        response = Response(status_code=_LEFT)
      except Exception as error:  # a fault of one request must not end the server
        response = answers.failed(error, path).response
      seconds = time.monotonic() - started
      model, tenant = request.state.model, request.state.grant.name
      self.engine.metrics.count_request(label, model, response.status_code, tenant, seconds)
      if self._log_requests:
        self._log(request, label, response.status_code, seconds)
      return response

    return Route(path, answer, methods=[method], middleware=self._guards)

  def _log(self, request: Request, label: str, status: int, seconds: float) -> None:
    state = request.state
    fields = {
      'route': label,
      'status': status,
      'seconds': round(seconds, 6),
      'model': state.model,
      'tenant': state.grant.name,
      'client': request.client.host if request.client else '',
    }
    line = f'{label} {status} {1000 * seconds:.1f} ms {state.model}'
    logger.info(line, extra={server.FIELDS: fields})

  def _check_key(self, request: Request, role: str) -> None:
    """Finds the rights of the request. Raises Failure without this one."""
    if self._keys is None:
      return
    grant = self._keys.find(request.headers.get('authorization', ''))
    if grant is None:
      raise Failure(
        401,
        'give a known key: Authorization: Bearer KEY',
        code='invalid_api_key',
        headers={'www-authenticate': 'Bearer'},
      )
    request.state.grant = grant
    if not grant.may(role):
      raise Failure(403, f'this key lacks the scope {role}')

  async def _livez(self, request: Request) -> Response:
    return PlainTextResponse('ok\n')

  async def _readyz(self, request: Request) -> Response:
    reason = 'draining' if self._draining else 'failed' if self.failed else 'compiling'
    if self.ready.is_set() and not self._draining:
      try:
        found = await asyncio.wait_for(
          asyncio.to_thread(self.engine.library.folder.is_dir), _FOLDER_S
        )
      except (OSError, TimeoutError):
        found = False
      if found:
        return PlainTextResponse('ready\n')
      reason = 'the folder of prompts is not there'
    return PlainTextResponse(f'{reason}\n', 503)

  async def _metrics(self, request: Request) -> Response:
    content = await asyncio.to_thread(self.engine.metrics.text)
    return Response(content, media_type='text/plain; version=0.0.4; charset=utf-8')


def _page() -> _Handler:
  page = pathlib.Path(__file__).with_name('page.html').read_text(encoding='utf-8')
  sources = []
  for tag in ('script', 'style'):
    match = re.search(f'<{tag}>(.*?)</{tag}>', page, re.DOTALL)
    assert match is not None
    digest = base64.b64encode(hashlib.sha256(match[1].encode()).digest()).decode()
    sources.append(f"{tag}-src 'sha256-{digest}'")
  policy = ["default-src 'none'", "connect-src 'self'", 'img-src data:', *sources]
  policy += ["base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"]
  headers = {
    'content-security-policy': '; '.join(policy),
    'x-content-type-options': 'nosniff',
    'referrer-policy': 'no-referrer',
    'cache-control': 'no-cache',
  }

  async def show(request: Request) -> Response:
    return Response(page, headers=headers, media_type='text/html')

  return show


async def _no_route(request: Request, error: Any) -> Response:
  message = f'{error.detail}; see docs/serving-api.md'
  return Failure(error.status_code, message, headers=error.headers).response
