"""The HTTP server around an `app.App`: connections, signals and the end."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from dprjax.base.errors import InputError

_HEAD_S = 15.0  # for the head of a request
_TAKEN_S = 0.05  # for the loop to begin with connections that it took


def make_server(
  app: Any,
  drain_seconds: int,
  *,
  lame_duck: float = 0.0,
  connections: int = 8192,
  read_seconds: float = 60.0,
  root_path: str = '',
) -> Any:
  """A ``uvicorn.Server`` of an ``App``, which begins to compile.

  At SIGTERM it goes on for ``lame_duck`` seconds, in which every answer ends its connection; at an
  interrupt it does not. Then requests in progress have ``drain_seconds``. ``interrupted`` says
  whether it ended by an interrupt.

  Args:
    drain_seconds, lame_duck: see above.
    connections: at a time, as far as the system allows.
    read_seconds: for a client to read 64 kB of an answer.
    root_path: the path that a proxy has for this server, and takes away.
  """
  import uvicorn

  from dprjax.serving.connections import Connections, most_connections

  class Server(uvicorn.Server):
    interrupted = False
    _frozen = False
    _ends_at: float | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
      # The handler of uvicorn ends the process by the signal, which supervisors take for a failure.
      if threading.current_thread() is not threading.main_thread():
        yield
        return
      before = {
        number: signal.signal(number, self.handle_exit)
        for number in (signal.SIGTERM, signal.SIGINT)
      }
      try:
        yield
      finally:
        for number, handler in before.items():
          signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: Any) -> None:
      app.drain()
      self.interrupted |= sig == signal.SIGINT
      if sig == signal.SIGTERM and self._ends_at is None and app.ready.is_set():
        self._ends_at = time.monotonic() + lame_duck
      else:
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
      if not self._frozen and app.ready.is_set():
        self._frozen = True
        if threading.current_thread() is threading.main_thread():  # the process is this server
          gc.freeze()  # no collection looks at what stays, which takes a tenth of a second
      if self._ends_at is not None and time.monotonic() >= self._ends_at:
        self.should_exit = True
      return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
      # The system has connections that the loop did not take yet, and would reset them.
      last = [taken for listening in sockets or () for taken in _take_all(listening)]
      for server in self.servers:
        server.close()
      loop = asyncio.get_running_loop()
      for taken in last:
        await loop.connect_accepted_socket(self._protocol, taken)
      await asyncio.sleep(_TAKEN_S)
      await super().shutdown(sockets)

    def _protocol(self) -> asyncio.Protocol:
      state = self.lifespan.state
      return self.config.http_protocol_class(  # type: ignore[call-arg]
        config=self.config, server_state=self.server_state, app_state=state
      )

  config = uvicorn.Config(
    app.asgi,
    interface='asgi3',
    http=Connections(most_connections(connections), _HEAD_S, read_seconds),  # type: ignore[arg-type]
    log_config=None,
    access_log=False,
    lifespan='off',
    server_header=False,
    root_path=root_path,
    timeout_graceful_shutdown=drain_seconds,
    h11_max_incomplete_event_size=1 << 16,  # of heads; the application limits bodies
    backlog=2048,
    timeout_keep_alive=75,  # longer than a balancer keeps an idle connection
  )
  logging.getLogger('uvicorn').setLevel(logging.CRITICAL)
  app.start()
  return Server(config)


def _take_all(listening: socket.socket) -> Iterator[socket.socket]:
  """The connections that wait at a listening socket, which does not block."""
  with contextlib.suppress(BlockingIOError):
    while True:
      taken, _ = listening.accept()
      taken.setblocking(False)
      yield taken


def listen(host: str, port: int) -> socket.socket:
  """A socket that listens on an address. Raises InputError if that fails."""
  try:
    family, _, _, _, address = socket.getaddrinfo(
      host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    return socket.create_server(address, family=family, backlog=2048, dualstack_ipv6=both)
  except OSError as error:
    raise InputError(
      f'--host={host} --port={port}: {error.strerror or error}; choose another'
    ) from error
