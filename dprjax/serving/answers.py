"""Answers and errors in the OpenAI format, and long answers in parts."""

import asyncio
import dataclasses
import logging
import math
from collections.abc import Callable
from typing import Any

import orjson
from starlette.responses import Response

from dprjax.base.errors import InputError, trail
from dprjax.serving.admission import Busy
from dprjax.serving.library import NameTaken, UnknownPrompt

logger = logging.getLogger('dprjax')

_ROWS = 64  # items of a part of an answer


@dataclasses.dataclass(eq=False)
class Failure(Exception):
  status: int
  message: str
  param: str | None = None
  code: str | None = None
  headers: dict[str, str] | None = None

  @property
  def response(self) -> Response:
    kind = 'server_error' if self.status >= 500 else 'invalid_request_error'
    if self.status == 429:
      kind = 'rate_limit_error'
    detail = {'message': self.message, 'type': kind, 'param': self.param, 'code': self.code}
    return json_answer({'error': detail}, self.status, self.headers)


def json_answer(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
  return Response(encode(content), status, headers, media_type='application/json')


async def in_parts(rows: Callable[[int, int], Any], count: int) -> orjson.Fragment:
  """A list of JSON of ``count`` items, made in parts, between which others are served.

  ``rows`` gives the items of a range of numbers.
  """
  parts = []
  for start in range(0, count, _ROWS):
    parts.append(encode(rows(start, min(start + _ROWS, count)))[1:-1])
    await asyncio.sleep(0)
  return orjson.Fragment(b'[%s]' % b','.join(parts))


def failed(error: Exception, path: str) -> Failure:
  match error:
    case Failure():
      return error
    case UnknownPrompt():
      return Failure(404, 'there is no such model or prompt', 'model', 'model_not_found')
    case NameTaken():
      return Failure(409, 'the backbone or a retriever has this name; choose another', 'name')
    case Busy():
      wait = {'retry-after': str(math.ceil(error.seconds))}
      return Failure(429, str(error), code='rate_limit_exceeded', headers=wait)
    case InputError():
      return Failure(422, str(error))
    case OSError():
      logger.error('%s: %s', path, error)
      return Failure(503, f'the server files: {error.strerror or "they cannot be used"}')
  # The message of an error may repeat the request.
  logger.error('a fault of dprjax in %s: %s', path, trail(error))
  return Failure(500, 'a fault of the server')


def encode(content: Any) -> bytes:
  """JSON of values, arrays and their containers."""
  # orjson writes float32 exactly, but NaN as null: vectors are checked before.
  return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
