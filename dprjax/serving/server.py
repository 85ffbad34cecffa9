"""The HTTP server around an `app.App`: its socket, signals, end, and lines of the log.

No line has a text, a key, or the message of an error, which may repeat a text.
"""

import contextvars
import datetime
import gc
import ipaddress
import json
import logging
import re
import signal
import socket
import threading
import uuid
from typing import Any

from dprjax.base.errors import InputError, mask
from dprjax.serving.options import Network

logger = logging.getLogger('dprjax')


def check(network: Network) -> None:
  """Raises InputError for a server that is open to others without keys, or a bad name."""
  if not is_loopback(network.host):
    if network.keys is None:
      raise InputError(f'--host={network.host} is open to others and needs --keys')
    logger.warning('%s is open to others: put a proxy with TLS before it', network.host)
  for name in network.allowed_hosts:
    if '*' in name.removeprefix('*.'):
      raise InputError(f'--allowed_hosts={name}: expected NAME or *.NAME')


def is_loopback(host: str) -> bool:
  try:
    return host == 'localhost' or ipaddress.ip_address(host).is_loopback
  except ValueError:
    return False


def make_server(app: Any, drain_seconds: int, *, lame_duck: float = 0.0) -> Any:
  """A ``uvicorn.Server`` of an ``App``, which begins to compile.

  At SIGTERM it goes on for ``lame_duck`` seconds, in which every answer ends its connection; at an
  interrupt it does not. Then requests in progress have ``drain_seconds``. ``interrupted`` says
  whether it ended by an interrupt.
  """
  import uvicorn

  class Server(uvicorn.Server):
    interrupted = False
    _leaving = False

    # The handler of uvicorn ends the process by the signal, which supervisors take for a failure.
    def handle_exit(self, sig: int, frame: Any) -> None:
      app.drain()
      self.interrupted |= sig == signal.SIGINT
      if sig == signal.SIGTERM and not self._leaving and app.ready.is_set():
        self._leaving = True
        threading.Timer(lame_duck, setattr, (self, 'should_exit', True)).start()
      else:
        self.force_exit = self.should_exit
        self.should_exit = True

  config = uvicorn.Config(
    app.asgi,
    interface='asgi3',
    http='h11',
    log_config=None,
    access_log=False,
    lifespan='off',
    server_header=False,
    timeout_graceful_shutdown=drain_seconds,
    timeout_keep_alive=75,  # longer than a balancer keeps an idle connection
  )
  logging.getLogger('uvicorn').setLevel(logging.CRITICAL)
  app.start()
  return Server(config)


def freeze_when_ready(app: Any) -> None:
  """Once the server is ready, no collection looks at what stays. That takes a tenth of a second."""

  def freeze() -> None:
    app.ready.wait()
    gc.freeze()

  threading.Thread(target=freeze, daemon=True).start()


def listen(host: str, port: int) -> socket.socket:
  """A socket that listens on an address. Raises InputError if that fails."""
  family = socket.AF_INET6 if ':' in host else socket.AF_INET
  try:
    return socket.create_server(
      (host, port), family=family, backlog=2048, dualstack_ipv6=host == '::'
    )
  except OSError as error:
    raise InputError(
      f'--host={host} --port={port}: {error.strerror or error}; choose another'
    ) from error


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
  def format(self, record: logging.LogRecord) -> str:
    id = current.get()
    return mask(record.getMessage()) + (f' (request {id})' if id else '')


class JsonLines(logging.Formatter):
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
