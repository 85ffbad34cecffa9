"""Connections with time-outs and a limit of their number, so that none harms others.

uvicorn waits without end for the head of a request, and for a client that does not read.
"""

import asyncio
import resource
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_OWN = 256  # descriptors of the server files and libraries
_MOST = 65_536  # descriptors that are asked for
_LAST_S = 0.5  # for a request on an open connection, after the last one was taken
_GRACE_S = 5.0  # to send what is left, before a connection is cut


def most_connections(wanted: int) -> int:
  """As many as wanted, within the limit of descriptors, which is raised first."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
  if soft != resource.RLIM_INFINITY and soft < most:
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    soft = most
  room = wanted if soft == resource.RLIM_INFINITY else max(soft - _OWN, soft // 2)
  return min(wanted, room)


class Connections:
  """The connections of a server; called by uvicorn as a protocol.

  Args:
    most: at a time. One more ends the one that has been idle longest.
    head_seconds: for the head of a request to arrive, from the connection or its first byte.
  """

  def __init__(self, most: int, head_seconds: float, read_seconds: float):
    self.most, self.head_seconds, self.read_seconds = most, head_seconds, read_seconds
    self.idle: dict[Connection, None] = {}  # without a request, the longest idle one first
    self.number = 0

  def __call__(self, **options: Any) -> 'Connection':
    return Connection(self, **options)


class Connection(H11Protocol):
  """One connection."""

  def __init__(self, all: Connections, **options: Any):
    super().__init__(**options)
    self._all = all
    self._head: asyncio.TimerHandle | None = None
    self._stall: asyncio.TimerHandle | None = None

  def connection_made(self, transport: Any) -> None:
    super().connection_made(transport)
    self._all.number += 1
    self._all.idle[self] = None
    self._watch_head()
    if self._all.number > self._all.most:
      next(iter(self._all.idle)).transport.abort()  # it may be this one

  def connection_lost(self, exc: Exception | None) -> None:
    self._all.number -= 1
    self._all.idle.pop(self, None)
    for timer in (self._head, self._stall):
      if timer is not None:
        timer.cancel()
    self._unset_keepalive_if_required()
    super().connection_lost(exc)

  def data_received(self, data: bytes) -> None:
    super().data_received(data)
    if self._in_request():
      self._all.idle.pop(self, None)
      self._unwatch_head()
    elif not self.transport.is_closing():
      self._watch_head()

  def on_response_complete(self) -> None:
    super().on_response_complete()
    if not self._in_request() and not self.transport.is_closing():
      self._all.idle[self] = None
      if self.conn.their_state is not h11.IDLE:  # its body goes on
        self._watch_head()

  def pause_writing(self) -> None:
    super().pause_writing()
    self._stall = self.loop.call_later(self._all.read_seconds, self.transport.abort)

  def resume_writing(self) -> None:
    super().resume_writing()
    if self._stall is not None:
      self._stall.cancel()
      self._stall = None

  def shutdown(self) -> None:
    # A client may have sent a request that is not here yet.
    if self._in_request() or self.transport.is_closing():
      super().shutdown()
    else:
      self.loop.call_later(_LAST_S, self._end_idle)

  def _end_idle(self) -> None:
    if not self.transport.is_closing():
      super().shutdown()

  def timeout_keep_alive_handler(self) -> None:
    super().timeout_keep_alive_handler()
    self.loop.call_later(_GRACE_S, self.transport.abort)

  def _in_request(self) -> bool:
    return self.cycle is not None and not self.cycle.response_complete

  def _watch_head(self) -> None:
    if self._head is None:
      self._head = self.loop.call_later(self._all.head_seconds, self._end)

  def _unwatch_head(self) -> None:
    if self._head is not None:
      self._head.cancel()
      self._head = None

  def _end(self) -> None:
    self._head = None
    if not self._in_request() and not self.transport.is_closing():
      if self.conn.our_state is h11.IDLE:
        self.transport.write(
          b'HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n'
        )
      self.transport.close()
      self.loop.call_later(_GRACE_S, self.transport.abort)
