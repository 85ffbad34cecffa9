"""The id, log lines and traces of requests.

None of these has a text, a key, or the message of an error, which may repeat a text.
"""

import contextlib
import contextvars
import datetime
import json
import logging
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from dprjax.base.errors import InputError, mask

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


class Traces:
  """Spans of requests, sent by OpenTelemetry to where its ``OTEL_*`` variables say.

  A request continues the trace in its header ``traceparent``.

  Raises:
    InputError: the packages are missing.
  """

  def __init__(self) -> None:
    try:
      from opentelemetry import propagate, trace
      from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
      from opentelemetry.sdk.resources import Resource
      from opentelemetry.sdk.trace import TracerProvider
      from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
      raise InputError(f"--traces: {error}; pip install 'dprjax[otel]'") from error
    name = os.environ.get('OTEL_SERVICE_NAME', 'dprjax')
    self._provider = TracerProvider(resource=Resource.create({'service.name': name}))
    self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    self._tracer = self._provider.get_tracer('dprjax')
    self._server, self._error = trace.SpanKind.SERVER, trace.StatusCode.ERROR
    self._extract = propagate.extract

  @contextlib.contextmanager
  def request(self, name: str, headers: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """A span of a request; entries of the dictionary become its attributes."""
    attributes: dict[str, Any] = {}
    with self._tracer.start_as_current_span(
      name,
      context=self._extract(headers),
      kind=self._server,
      record_exception=False,
      set_status_on_exception=False,
    ) as span:
      try:
        yield attributes
      finally:
        span.set_attributes(attributes)
        if attributes.get('http.response.status_code', 200) >= 500:
          span.set_status(self._error)

  def stage(self, name: str) -> contextlib.AbstractContextManager[Any]:
    """A span of a part of the request."""
    return self._tracer.start_as_current_span(
      name, record_exception=False, set_status_on_exception=False
    )

  def close(self, seconds: float | None = None) -> None:
    """Sends the remaining spans."""
    self._provider.force_flush(int(1000 * (5.0 if seconds is None else seconds)))


@contextlib.contextmanager
def untraced(name: str, headers: Mapping[str, str]) -> Iterator[dict[str, Any]]:
  """`Traces.request` where nothing is sent."""
  yield {}


def unstaged(name: str) -> contextlib.AbstractContextManager[Any]:
  """`Traces.stage` where nothing is sent."""
  return contextlib.nullcontext()
