"""Connections from clients that say nothing, half of something, or do not read."""

import contextlib
import socket
import threading
import time
import types

import pytest

pytest.importorskip('starlette', reason="pip install 'dprjax[serve]'")

from dprjax.serving import server as http
from dprjax.serving.connections import most_connections

httpx = pytest.importorskip('httpx', reason="pip install 'dprjax[dev]'")

pytestmark = pytest.mark.xdist_group('serving')
HEAD = b'POST / HTTP/1.1\r\nHost: x\r\n'
PART = b'x' * (1 << 16)


class App:
  """Answers ``/`` with the size of the body, ``/early`` before it, and ``/long`` with 32 MB."""

  def __init__(self):
    self.ready, self.sent, self.draining = threading.Event(), 0, False

  def start(self):
    self.ready.set()

  def drain(self):
    self.draining = True

  async def asgi(self, scope, receive, send):
    size = 0
    while scope['path'] != '/early':
      message = await receive()
      size += len(message.get('body', b''))
      if not message.get('more_body'):
        break
    await send({'type': 'http.response.start', 'status': 200, 'headers': []})
    for _ in range(512 if scope['path'] == '/long' else 0):
      await send({'type': 'http.response.body', 'body': PART, 'more_body': True})
      self.sent += 1
    await send({'type': 'http.response.body', 'body': b'%d' % size})


@pytest.fixture
def served(monkeypatch):
  """An application in a server of 12 connections; ``connect(content)`` opens one."""
  monkeypatch.setattr(http, '_HEAD_S', 0.4)
  app, listening = App(), http.listen('127.0.0.1', 0)
  port = listening.getsockname()[1]
  server = http.make_server(app, 5, connections=12, read_seconds=0.4)
  thread = threading.Thread(target=server.run, kwargs={'sockets': [listening]})
  thread.start()
  with contextlib.ExitStack() as stack:

    def connect(content=b'', **options):
      opened = stack.enter_context(socket.socket())
      for option, value in options.items():
        opened.setsockopt(socket.SOL_SOCKET, getattr(socket, option), value)
      opened.settimeout(5)
      opened.connect(('127.0.0.1', port))
      opened.sendall(content)
      return opened

    yield types.SimpleNamespace(
      app=app, server=server, connect=connect, address=f'http://127.0.0.1:{port}'
    )
  server.should_exit = True
  thread.join()


def ends(connection):
  """The rest that a connection sends before its end."""
  with contextlib.suppress(ConnectionError):
    return b''.join(iter(lambda: connection.recv(1 << 16), b''))
  return b'reset'


def test_heads_have_a_time_and_bodies_hold_nobody_up(served):
  bodies = [served.connect(HEAD + b'Content-Length: 9\r\n\r\n{') for _ in range(5)]
  half, none = served.connect(HEAD), served.connect()
  assert httpx.post(served.address, content=b'abc').text == '3'
  assert ends(half).startswith(b'HTTP/1.1 408') and ends(none).startswith(b'HTTP/1.1 408')
  bodies[0].sendall(b'12345678')
  assert b'9' in bodies[0].recv(999)
  # A body that goes on behind its answer does not keep the connection.
  early = served.connect(b'POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n')
  assert early.recv(999).startswith(b'HTTP/1.1 200')
  for _ in range(3):
    early.sendall(b'1')
    time.sleep(0.1)
  assert not ends(early).startswith(b'HTTP/1.1 200')


def test_more_connections_than_there_may_be_end_the_longest_idle(served):
  with httpx.Client(base_url=served.address) as client:
    assert client.get('/').text == '0'
    begun = served.connect(HEAD + b'Content-Length: 2\r\n\r\n1')
    idle = [served.connect() for _ in range(30)]
    assert idle[0].recv(9) == b'' or idle[0].recv(9) == b'HTTP/1.1 '
    assert httpx.get(served.address).status_code == 200
    begun.sendall(b'2')
    assert b'HTTP/1.1 200' in begun.recv(999)


def test_a_client_that_does_not_read_is_cut_off(served):
  slow = served.connect(b'GET /long HTTP/1.1\r\nHost: x\r\n\r\n', SO_RCVBUF=4096)
  end = time.monotonic() + 10
  while served.app.sent < 512 and time.monotonic() < end:
    time.sleep(0.05)
  assert served.app.sent == 512  # nobody is there any more: it goes nowhere
  assert len(ends(slow)) < 512 * len(PART)
  quick = httpx.get(f'{served.address}/long')
  assert len(quick.content) == 512 * len(PART) + 1


def test_connections_that_arrive_with_the_end_are_answered(served):
  connections = []

  async def end(counter):
    connections.extend(served.connect(HEAD + b'\r\n') for _ in range(9))
    return True

  served.server.on_tick = end  # the loop takes no connection before its last tick returns
  while len(connections) < 9:
    time.sleep(0.01)
  assert [ends(one)[:12] for one in connections] == [b'HTTP/1.1 200'] * 9


def test_as_many_connections_as_descriptors():
  assert 1 <= most_connections(10) <= 10
  assert most_connections(10**9) < 10**6
