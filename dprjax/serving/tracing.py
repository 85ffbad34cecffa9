"""The id and log lines of requests.

None of these has a text, a key, or the message of an error, which may repeat a text.
"""

import contextvars
import datetime
import json
import logging
import re
import uuid
from typing import Any

from dprjax.base.errors import mask

logger = logging.getLogger('dprjax')

_ID = re.compile(rb'[A-Za-z0-9._:/+=-]{1,128}')
FIELDS = 'request'  # of a record of the log: more fields of its line
current: contextvars.ContextVar[str] = contextvars.ContextVar('request', default='')


def request_id(scope: Any) -> str:
  """The header X-Request-Id of an ASGI scope; a new id without one, or for an odd one."""
  for name, value in scope.get('headers', ()):
    if name == b'x-request-id' and _ID.fullmatch(value):
      return value.decode()
  return uuid.uuid4().hex


class TextLines(logging.Formatter):
  """Lines for people, with the id of the request."""

  def format(self, record: logging.LogRecord) -> str:
    id = current.get()
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
    if id := current.get():
      line['request_id'] = id
    line |= getattr(record, FIELDS, {})
    return json.dumps(line)


def set_lines(form: str) -> None:
  """Logs ``text`` or ``json`` from now on, to where the log goes already."""
  for handler in logger.handlers:
    handler.setFormatter(JsonLines() if form == 'json' else TextLines())
