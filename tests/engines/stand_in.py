"""A server of JSON over HTTP that stands in for an engine."""

import http.server
import json
import threading
from typing import Any


class StandIn:
  """Listens on a free port of this machine; subclasses answer requests.

  Attributes:
    url: of the server.
    full: whether its disk is full.
    token: what it wants to know; '': nothing.
  """

  full, token = False, ''

  def __init__(self) -> None:
    server = self

    class Handler(http.server.BaseHTTPRequestHandler):
      protocol_version = 'HTTP/1.1'

      def log_message(self, *_: Any) -> None:
        pass

      def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
        status, found = server.answer(self.command, self.path, body, self.headers)
        content = json.dumps(found).encode()
        self.send_response(status)
        self.send_header('Content-Type', 'application/json')
        self.send_header('Content-Length', str(len(content)))
        self.end_headers()
        if self.command != 'HEAD':
          self.wfile.write(content)

      do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = answer

    self._http = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    self._http.daemon_threads = True
    self.url = f'http://127.0.0.1:{self._http.server_port}'
    threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

  def answer(self, method: str, path: str, body: bytes, headers: Any) -> tuple[int, Any]:
    """The status and the content of an answer."""
    raise NotImplementedError

  def close(self) -> None:
    self._http.shutdown()
    self._http.server_close()
