"""A client for chat completions by the OpenAI interface, which most model servers offer.

``POST ENDPOINT/chat/completions``, several at a time. Busy and failing servers are asked again
after a doubling pause, or the pause in ``Retry-After``. Redirects are not followed, since the key
would go to another host.
"""

import concurrent.futures
import http.client
import ipaddress
import itertools
import os
import random
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from dprjax.base.errors import InputError, mask
from dprjax.generation.prompts import Answer, Request

_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504, 529)
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_MOST_BYTES = 1 << 20  # of an answer
_SHOWN = 160  # characters of a server message


class Server(NamedTuple):
  """A server and the settings of requests.

  Attributes:
    url: up to and with ``/v1``.
    settings: of every request, such as ``temperature``.
    key: of the server; '' for none.
    timeout: seconds for an answer.
    retries: attempts after a first failure.
  """

  url: str
  model: str
  settings: dict[str, Any]
  key: str = ''
  timeout: float = 60.0
  retries: int = 5


class _Message(msgspec.Struct):
  content: str | None = None


class _Choice(msgspec.Struct):
  message: _Message
  finish_reason: str | None = None


class _Usage(msgspec.Struct):
  prompt_tokens: int = 0
  completion_tokens: int = 0


class _Completion(msgspec.Struct):
  choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
  usage: _Usage | None = None


class _Refuse(urllib.request.HTTPRedirectHandler):
  def redirect_request(self, *_: Any) -> None:
    return None


class _Busy(Exception):
  """The server may answer later, after ``pause`` seconds if it says so."""

  def __init__(self, message: str, pause: float | None = None):
    super().__init__(message)
    self.pause = pause


def check_url(url: str, key: str) -> None:
  """Raises InputError for an address that is invalid, has a password, or would expose the key."""
  parts = urllib.parse.urlsplit(url)
  secret = parts.username or parts.password or parts.query
  if parts.scheme not in ('http', 'https') or not parts.hostname or secret:
    raise InputError(
      f'--endpoint={parts.scheme}://{parts.hostname}: expected an address such as '
      'http://127.0.0.1:8000/v1; a key goes into an environment variable (--key_env)'
    )
  if key and parts.scheme == 'http' and not _is_here(parts.hostname):
    raise InputError(
      f'--endpoint={url}: the key would travel unencrypted; use https, or unset the variable of '
      '--key_env'
    )


def _is_here(host: str) -> bool:
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return host == 'localhost'


def ask(
  server: Server,
  requests: Sequence[Request],
  concurrency: int,
  pause: Callable[[float], None] = time.sleep,
) -> Iterator[Answer]:
  """Yields answers as they come."""
  stop = threading.Event()

  def one(request: Request) -> Answer:
    return _ask(server, request, stop, pause)

  todo = iter(requests)
  with concurrent.futures.ThreadPoolExecutor(concurrency) as pool:
    waiting = {pool.submit(one, request) for request in itertools.islice(todo, concurrency)}
    try:
      while waiting:
        done, waiting = concurrent.futures.wait(waiting, return_when='FIRST_COMPLETED')
        failed = None
        for future in done:
          if (error := future.exception()) is not None:
            failed = error
            continue
          yield future.result()
          if (request := next(todo, None)) is not None:
            waiting.add(pool.submit(one, request))
        if failed is not None:
          raise failed
    finally:
      stop.set()
      for future in waiting:
        future.cancel()


def _ask(
  server: Server, request: Request, stop: threading.Event, pause: Callable[[float], None]
) -> Answer:
  wait = _FIRST_PAUSE_S
  for attempt in range(server.retries + 1):
    try:
      return _post(server, request)
    except _Busy as error:
      if attempt == server.retries or stop.is_set():
        raise InputError(
          f'--endpoint={server.url}: {error}, {attempt + 1} times in a row; the answers so far are '
          'kept, and the same command continues from there'
        ) from error
      # Jitter, so that requests do not return together.
      pause(min(error.pause or wait * random.uniform(0.5, 1.5), _LONGEST_PAUSE_S))
      wait *= 2
  raise AssertionError


def _post(server: Server, request: Request) -> Answer:
  body = {
    'model': server.model,
    'messages': [{'role': 'user', 'content': request.prompt}],
    **server.settings,
  }
  headers = {'Content-Type': 'application/json', 'User-Agent': 'dprjax'}
  if server.key:
    headers['Authorization'] = f'Bearer {server.key}'
  call = urllib.request.Request(
    f'{server.url.rstrip("/")}/chat/completions', msgspec.json.encode(body), headers
  )
  opener = urllib.request.build_opener(_Refuse)
  try:
    with opener.open(call, timeout=server.timeout) as reply:
      content = reply.read(_MOST_BYTES)
  except urllib.error.HTTPError as error:
    with error:
      problem = _said(server, error)
      again = error.code in _AGAIN
      waits = _seconds(error.headers.get('Retry-After'))
    if again:
      raise _Busy(problem, waits) from None
    raise InputError(
      f'--endpoint={server.url}: {problem}; compare the address, --model and the key'
    ) from None
  except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
    reason = getattr(error, 'reason', None) or error
    raise _Busy(_plain(server, f'no answer ({reason})')) from None
  try:
    completion = msgspec.json.decode(content, type=_Completion)
  except (msgspec.DecodeError, UnicodeDecodeError) as error:
    raise InputError(
      f'--endpoint={server.url}: the answer is not a chat completion of at most {_MOST_BYTES:,} '
      f'bytes ({error}); the address usually ends with /v1'
    ) from None
  choice, usage = completion.choices[0], completion.usage
  return Answer(
    request.id,
    choice.message.content or '',
    key=request.key,
    model=server.model,
    prompt=request.prompt,
    settings=server.settings,
    finish=choice.finish_reason or '',
    tokens=(usage.prompt_tokens, usage.completion_tokens) if usage else None,
  )


def _said(server: Server, error: urllib.error.HTTPError) -> str:
  try:
    text = error.read(_MOST_BYTES).decode('utf-8', 'replace')
  except (OSError, http.client.HTTPException):
    text = ''
  return _plain(server, f'status {error.code} {" ".join(text.split())[:_SHOWN]}'.strip())


def _plain(server: Server, text: str) -> str:
  """The text without the key, which a server may echo."""
  return mask(text.replace(server.key, '***') if server.key else text)


def _seconds(value: str | None) -> float | None:
  try:
    return max(float(value or ''), 0.0)
  except ValueError:
    return None  # a date


def key_from(variable: str) -> str:
  """The key in an environment variable; '' if unset."""
  return os.environ.get(variable, '').strip()
