"""What every route does: takes a request in, and embeds its texts."""

import asyncio
import concurrent.futures
import functools
import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from starlette.requests import Request

from dprjax.encoding import codes
from dprjax.serving.admission import AGAIN_S, Admission, TooSoon
from dprjax.serving.answers import Failure
from dprjax.serving.batcher import QueuedText
from dprjax.serving.engine import Engine, Tokens
from dprjax.serving.indexes import ServedIndex
from dprjax.serving.library import UnknownPrompt
from dprjax.serving.options import Limits
from dprjax.serving.turns import Steps, Work
from dprjax.text.vector_spec import SIDES

_T = TypeVar('_T')
_NUMBER = 16  # bytes of a number of a vector and of its text in the answer
_LARGE = 1 << 16  # bytes of a body whose values are counted before it is decoded


class Wanted(NamedTuple):
  """The vectors that a request asks for.

  Attributes:
    cut: whether texts that are too long may lose their end.
  """

  name: str
  side: str
  named: bool = True
  dimensions: int | None = None
  cut: bool = True

  def check(self, tokens: Tokens, whole: int) -> None:
    """Raises Failure if the prompt does not give such vectors for these texts."""
    version = tokens.version
    if version.two_sided and not self.named:
      names = ' or '.join(f'{self.name}:{side}' for side in SIDES)
      raise Failure(
        400, f'queries and passages have different vectors: ask for {names}', param='model'
      )
    if self.dimensions is not None and self.dimensions > whole:
      raise Failure(400, f'this model has vectors of {whole} dimensions', param='dimensions')
    if tokens.truncated and not self.cut:
      most = version.spec.max_length(self.side)
      raise Failure(
        413,
        f'text {tokens.truncated[0]} has more than the {most} tokens of this model',
        param='truncate',
      )


def decode(content: bytes, kind: type[_T]) -> _T:
  try:
    return msgspec.json.decode(content, type=kind)
  except msgspec.ValidationError as error:
    raise Failure(400, str(error), param=_field(str(error))) from error
  except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
    raise Failure(400, f'the body is not JSON, or a text is not Unicode: {error}') from error


def count_values(content: bytes) -> Steps:
  """The number of values in JSON, without building them, as a job of one slice."""
  yield len(content)
  data = np.frombuffer(content.replace(rb'\\', b'').replace(rb'\"', b''), np.uint8)
  inside = np.add.accumulate(data == ord('"'), dtype=np.uint8) & 1  # of a string
  begins = (data == ord(',')) | (data == ord('[')) | (data == ord('{'))
  return int(np.count_nonzero(begins > inside))


def _field(message: str) -> str | None:
  match = re.search(r'at `\$\.(\w+)', message) or re.search(r'field `(\w+)`', message)
  return match and match[1]


def split(model: str, default: str, task: str | None = None) -> tuple[str, str, bool]:
  """The name of a prompt, the side, and whether it was named: 'qa:query' gives 'qa', 'query', True.

  Args:
    task: ``input_type`` of the request, which may name the side.

  Raises:
    UnknownPrompt: an unknown side.
    Failure: contradictory sides.
  """
  name, colon, side = model.rpartition(':')
  if not colon:
    name, side = model, ''
  elif side not in SIDES:
    raise UnknownPrompt(model)
  by_task = 'passage' if task == 'document' else task or ''
  if side and by_task and side != by_task:
    raise Failure(400, f'input_type says {by_task}, model says {side}', param='input_type')
  return name, side or by_task or default, bool(side or task)


class Left(Exception):
  """The client closed the connection."""


class Service:
  """An engine with its indexes, within limits."""

  def __init__(self, engine: Engine, indexes: Sequence[ServedIndex], limits: Limits):
    self.engine, self.limits = engine, limits
    self.admission = Admission(limits)
    self.indexes = {index.name: index for index in indexes}

  def check_sees(self, request: Request, name: str) -> None:
    if not request.state.grant.may_use('prompts', name):
      raise UnknownPrompt(name)

  def enter(self, request: Request, size: int = 0) -> None:
    """Admits the request until it is answered, and starts its time."""
    grant = request.state.grant
    entered = self.admission.enter(grant.tenant, grant.concurrent, size)
    request.state.until = time.monotonic() + self.limits.seconds
    request.state.permit = request.state.stack.enter_context(entered)

  def hold(self, request: Request, size: int) -> None:
    request.state.stack.enter_context(self.admission.hold(size))

  async def body(self, request: Request, most: int) -> bytes:
    """The body of a request, which enters with it, refused or not.

    Raises Failure for more than ``most`` bytes, or if it does not arrive in time.
    """
    content = bytearray()
    try:
      await self._receive(request, content, most)
    finally:
      try:
        self.enter(request, len(content))
      except TooSoon:
        content.clear()
        request.state.stack.close()  # nobody else lacks the memory while the client waits
        await asyncio.sleep(AGAIN_S)
        raise
    return bytes(content)

  async def _receive(self, request: Request, content: bytearray, most: int) -> None:
    too_large = f'the body is larger than {most:,} bytes'
    if int(request.headers.get('content-length', 0)) > most:
      raise Failure(413, too_large)
    try:
      async with asyncio.timeout(self.limits.seconds):
        async for chunk in request.stream():
          self.hold(request, len(chunk))
          content += chunk
          if len(content) > most:
            raise Failure(413, too_large)
    except TimeoutError:
      raise Failure(408, 'the request did not arrive in time') from None

  async def read(self, request: Request, kind: type[_T]) -> _T:
    form = request.headers.get('content-type', '').partition(';')[0].strip().lower()
    if form != 'application/json' and not form.endswith('+json'):
      raise Failure(415, 'send JSON, with the header Content-Type: application/json')
    if request.headers.get('content-encoding', 'identity').lower() != 'identity':
      raise Failure(415, 'send JSON without compression')
    content = await self.body(request, self.limits.bytes)
    if len(content) > _LARGE:
      counted = await self.on_threads(request, count_values(content))
      most = 16 * self.limits.inputs  # texts and their fields make no more
      if counted > most:
        self.admission.refuse(request.state.permit)
        raise Failure(413, f'{counted:,} values in the JSON; {most:,} at most')
    return decode(content, kind)

  async def wait(self, request: Request, future: concurrent.futures.Future) -> Any:
    """The result. Cancels the work if the client leaves or the time is over."""
    answer = asyncio.wrap_future(future)
    # The body was read, so the next message is the end of the connection.
    left = asyncio.ensure_future(request.receive())
    try:
      await asyncio.wait(
        {answer, left},
        timeout=max(0.0, request.state.until - time.monotonic()),
        return_when=asyncio.FIRST_COMPLETED,
      )
      if answer.done():
        return answer.result()
      future.cancel()
      if left.done():
        raise Left
      raise Failure(504, f'no answer within {self.limits.seconds:g} seconds')
    finally:
      left.cancel()
      answer.cancel()

  async def on_threads(self, request: Request, steps: Steps) -> Any:
    """The result of a job of the threads that tokenise."""
    return await self.wait(request, self.engine.pool.submit(request.state.grant.tenant, steps))

  async def on_device(self, request: Request, work: list[QueuedText] | Steps) -> Any:
    """The vectors of texts, or the result of a job, by the device thread."""
    batcher, tenant = self.engine.batcher, request.state.grant.tenant
    spent = functools.partial(self.admission.spend, request.state.permit)
    if isinstance(work, list):
      return await self.wait(request, batcher.submit(work, tenant, spent))
    return await self.wait(request, batcher.submit_steps(work, tenant, spent))

  async def embed(
    self,
    request: Request,
    wanted: Wanted,
    texts: Sequence[str],
    param: str,
    more: float = 0.0,
  ) -> tuple[Tokens, np.ndarray]:
    """Vectors of texts of the field ``param``.

    ``more``: seconds of the device for the rest of the request.
    """
    name, side = wanted.name, wanted.side
    self.check_sees(request, name)
    engine = self.engine
    work = engine.estimate(name, side, texts)
    self._ask(request, Work(work.tokens, work.seconds + more), len(texts), param)
    whole = engine.backbone.config.vector_size
    self.hold(request, _NUMBER * whole * len(texts))
    tokens: Tokens = await self.on_threads(request, engine.tokenize_steps(name, side, texts))
    request.state.model = name
    work = engine.work(len(text.ids) for text in tokens.texts)
    self._know(request, Work(tokens.total, work.seconds + more), param)
    wanted.check(tokens, whole)
    vectors = await self.on_device(request, tokens.texts)
    dimensions = wanted.dimensions or vectors.shape[1]
    return tokens, codes.cut(vectors, dimensions, tokens.version.spec.normalize)

  def _ask(self, request: Request, estimate: Work, texts: int, param: str) -> None:
    if texts > self.limits.inputs:
      raise Failure(413, f'{texts} texts; {self.limits.inputs} at most', param=param)
    self.admission.ask(request.state.permit, estimate)

  def _know(self, request: Request, work: Work, param: str) -> None:
    """Replaces the estimate of the work. Raises Failure if it is too much for a request."""
    self.admission.know(request.state.permit, work)
    most = self.limits
    if work.tokens > most.tokens:
      raise Failure(413, f'{work.tokens:.0f} tokens; {most.tokens} at most', param=param)
    if work.seconds > most.seconds:
      raise Failure(
        413,
        f'these texts take about {work.seconds:.0f} s, an answer {most.seconds:g} s at most; send '
        'them in parts',
        param=param,
      )
    if tenant := request.state.grant.name:
      self.engine.metrics.key_tokens.labels(tenant).inc(work.tokens)

  def headers(self, tokens: Tokens) -> dict[str, str]:
    return {
      'x-dprjax-backbone-sha256': self.engine.backbone.sha256,
      'x-dprjax-prompt-sha256': tokens.version.sha256,
      'x-dprjax-truncated': str(len(tokens.truncated)),
    }
