"""Answers and errors as OpenAI clients expect them, and long answers in parts."""

import asyncio
import base64
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import orjson
from jaxtyping import Float
from starlette.responses import Response, StreamingResponse

from dprjax.base.errors import InputError
from dprjax.serving import messages
from dprjax.serving.batcher import Busy, NotFinite
from dprjax.serving.engine import ForeignIds
from dprjax.serving.library import Changed, NameTaken, UnknownPrompt

logger = logging.getLogger('dprjax')

_JSON = 'application/json'
_ROWS = 64  # vectors of a part of an answer


class Failure(Exception):
  """An answer that is an error."""

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
    self.response = error_answer(status, message, param, code, headers)


def json_answer(
  content: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
  """A JSON body."""
  return Response(_encode(content), status, headers, media_type=_JSON)


def vectors_answer(
  content: messages.EmbeddingResponse,
  vectors: Float[np.ndarray, 'n H'],
  as_base64: bool,
  headers: dict[str, str],
) -> Response:
  """``content`` with vectors as its data; of many, a part at a time.

  So a client that does not read costs its vectors, and not their text as well.
  """

  def rows(start: int, stop: int) -> list[messages.Embedding]:
    values: Any = vectors[start:stop]
    if as_base64:
      values = [base64.b64encode(one.astype('<f4').tobytes()).decode() for one in values]
    return [messages.Embedding(index=start + i, embedding=one) for i, one in enumerate(values)]

  count = len(vectors)
  if count <= _ROWS:
    content.data = rows(0, count)
    return json_answer(content, headers=headers)
  before, after = _encode(content).split(b'"data":[]', 1)

  def parts() -> Iterator[bytes]:
    for start in range(0, count, _ROWS):
      lead = b',' if start else before + b'"data":['
      yield lead + _encode(rows(start, start + _ROWS))[1:-1]
    yield b']' + after

  return StreamingResponse(_once(parts()), 200, headers, media_type=_JSON)


def error_answer(
  status: int,
  message: str,
  param: str | None = None,
  code: str | None = None,
  headers: dict[str, str] | None = None,
) -> Response:
  """An error in the OpenAI form."""
  kind = 'server_error' if status >= 500 else 'invalid_request_error'
  if status == 429:
    kind = 'rate_limit_error'
  message = message.encode(errors='backslashreplace').decode()  # half of a surrogate pair
  detail = messages.ErrorDetail(message, kind, param, code)
  return json_answer(messages.ErrorResponse(detail), status, headers)


def failed(error: Exception, path: str) -> Response:
  """The answer to a request that raised this."""
  if isinstance(error, Failure):
    return error.response
  if isinstance(error, UnknownPrompt):
    return error_answer(404, 'there is no such model or prompt', 'model', 'model_not_found')
  if isinstance(error, NameTaken):
    return error_answer(409, 'this is the backbone name; choose another', 'name')
  if isinstance(error, Changed):
    return error_answer(412, str(error), code='precondition_failed')
  if isinstance(error, Busy):
    wait = {'retry-after': str(math.ceil(error.seconds))}
    return error_answer(429, str(error), code='rate_limit_exceeded', headers=wait)
  if isinstance(error, InputError | NotFinite):
    return error_answer(422, str(error), 'input' if isinstance(error, ForeignIds) else None)
  if isinstance(error, OSError):
    logger.error('%s: %s', path, error)
    return error_answer(503, f'the server files: {error.strerror or "they cannot be used"}')
  # The message of an error may repeat the request.
  logger.error('a fault of dprjax in %s: %s', path, type(error).__name__)
  return error_answer(500, 'a fault of the server')


async def _once(parts: Iterator[bytes]) -> Any:
  for part in parts:
    yield part
    await asyncio.sleep(0)  # others are served between two parts


def _encode(content: msgspec.Struct | Sequence[msgspec.Struct]) -> bytes:
  # orjson writes float32 as it is, and NaN as null: vectors are checked before.
  return orjson.dumps(content, msgspec.structs.asdict, orjson.OPT_SERIALIZE_NUMPY)
