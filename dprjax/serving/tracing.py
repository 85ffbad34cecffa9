"""The id and log lines of requests.

None of these has a text, a key, or the message of an error, which may repeat a text.
"""

import contextlib
import contextvars
import datetime
import json
import logging
import re
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from dprjax.base.errors import mask

logger = logging.getLogger('dprjax')

_ID = re.compile(rb'[A-Za-z0-9._:/+=-]{1,128}')
_FIELDS = 'request'  # of a record of the log
_current: contextvars.ContextVar[str] = contextvars.ContextVar('request', default='')


def request_id(scope: Any) -> str:
  """The header X-Request-Id of an ASGI scope; a new id without one, or for an odd one."""
  for name, value in scope.get('headers', ()):
    if name == b'x-request-id' and _ID.fullmatch(value):
      return value.decode()
  return uuid.uuid4().hex


@contextlib.contextmanager
def of_request(id: str) -> Iterator[None]:
  """Log lines written inside have the id of this request."""
  token = _current.set(id)
  try:
    yield
  finally:
    _current.reset(token)


def log_request(line: str, fields: Mapping[str, Any]) -> None:
  """Logs an answered request: a line, or its fields where the log is of JSON."""
  logger.info('%s', line, extra={_FIELDS: fields})


class TextLines(logging.Formatter):
  """Lines for people, with the id of the request."""

  def format(self, record: logging.LogRecord) -> str:
    id = _current.get()
    return mask(record.getMessage()) + (f' (request {id})' if id else '')


class JsonLines(logging.Formatter):
  """An object of JSON a line: time, level, message, the id of the request and its fields."""

  def format(self, record: logging.LogRecord) -> str:
    at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    line: dict[str, Any] = {
      'time': at.isoformat(timespec='milliseconds'),
      'level': record.levelname.lower(),
      'message': mask(record.getMessage()),
    }
    if id := _current.get():
      line['request_id'] = id
    line |= getattr(record, _FIELDS, {})
    return json.dumps(line, default=str)


def set_lines(form: str) -> None:
  """Logs ``text`` or ``json`` from now on, to where the log goes already."""
  for handler in logger.handlers:
    handler.setFormatter(JsonLines() if form == 'json' else TextLines())
