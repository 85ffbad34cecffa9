"""What is told of a request: its id, in answers and in lines of the log."""

import contextlib
import contextvars
import re
import uuid
from collections.abc import Iterator
from typing import Any

_ID = re.compile(rb'[A-Za-z0-9._:/+=-]{1,128}')
_current: contextvars.ContextVar[str] = contextvars.ContextVar('request', default='')


def request_id(scope: Any) -> str:
  """The header X-Request-Id of an ASGI scope; a new id without one, or for an odd one."""
  for name, value in scope.get('headers', ()):
    if name == b'x-request-id' and _ID.fullmatch(value):
      return value.decode()
  return uuid.uuid4().hex


@contextlib.contextmanager
def of_request(id: str) -> Iterator[None]:
  """Lines of the log that are written inside are of this request."""
  token = _current.set(id)
  try:
    yield
  finally:
    _current.reset(token)


def current() -> str:
  """The id of the request that is answered, or ''."""
  return _current.get()
