"""A bounded queue of texts, and the thread that runs batches of them on the device.

A batch closes when it is full or its oldest text has waited for the deadline. While the device is
busy the next batch fills further; a full one is sent at once behind the one in flight. The text
that has waited longest sets the padded length; free rows go to shorter texts.
"""

import collections
import concurrent.futures
import dataclasses
import logging
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from dprjax.serving.bank import AdapterChoice, Bank
from dprjax.serving.metrics import ServerMetrics

logger = logging.getLogger('dprjax')

_LONGEST_NAP_S = 0.2  # until texts of clients that left are looked for


class Busy(Exception):
  """The queue is full. ``seconds``: when to try again."""

  def __init__(self, seconds: float):
    super().__init__(f'the queue is full; try again in {seconds:.0f} s')
    self.seconds = seconds


class NotFinite(Exception):
  """A vector holds NaN or infinity. ``row``: of the first such text."""

  def __init__(self, row: int):
    super().__init__(
      f'the vector of text {row} is not finite: its prompt overflows in the arithmetic'
    )
    self.row = row


class QueuedText(NamedTuple):
  """Token ids and their prompt."""

  ids: np.ndarray
  choice: AdapterChoice


@dataclasses.dataclass(eq=False)
class _Job:
  future: concurrent.futures.Future
  vectors: Float[np.ndarray, 'n H']
  left: int
  arrived: float
  begun: bool = False


class _Row(NamedTuple):
  text: QueuedText
  job: _Job
  number: int  # in the job


class _Flight(NamedTuple):
  rows: list[_Row]
  vectors: Any
  sent: float


class Batcher:
  """Texts to vectors, in batches that mix requests and prompts."""

  def __init__(
    self, bank: Bank, hidden: int, *, deadline: float, most_queued: int, metrics: ServerMetrics
  ):
    """Starts the device's thread, which compiles first (see `ready`).

    Args:
      bank: used by that thread only.
      hidden: H.
      deadline: seconds that a text waits for others.
      most_queued: texts that may wait.
      metrics: counts and times.
    """
    self._bank, self._hidden, self._deadline = bank, hidden, deadline
    self._most_queued, self._metrics = most_queued, metrics
    self._changed = threading.Condition()
    self._queues: dict[int, collections.deque[_Row]] = {
      length: collections.deque() for length in bank.shapes.lengths
    }
    self._queued = 0
    self._wanted: collections.Counter[Hashable] = collections.Counter()
    self._rate = 0.0  # texts a second, a moving mean
    self._gone = False  # whether queued requests may have ended
    self._stopped = False
    self.ready: concurrent.futures.Future[None] = concurrent.futures.Future()
    self._thread = threading.Thread(target=self._run, name='device', daemon=True)
    self._thread.start()

  def submit(self, texts: Sequence[QueuedText]) -> concurrent.futures.Future:
    """Queues a request's texts; the future's result is float32 ``[n, H]``.

    Cancelling the future removes the texts from the queue.

    Raises:
      Busy: the queue has no room for all.
    """
    future: concurrent.futures.Future = concurrent.futures.Future()
    job = _Job(
      future, np.empty((len(texts), self._hidden), np.float32), len(texts), time.monotonic()
    )
    with self._changed:
      if self._stopped or self._queued + len(texts) > self._most_queued:
        raise Busy(min(30.0, max(1.0, self._queued / self._rate if self._rate else 1.0)))
      future.add_done_callback(self._note_end)
      for number, text in enumerate(texts):
        self._queues[self._bank.shapes.bucket(len(text.ids))].append(_Row(text, job, number))
        self._wanted[text.choice.key] += 1
      self._queued += len(texts)
      self._metrics.queued.set(self._queued)
      self._changed.notify()
    return future

  def close(self) -> None:
    """Ends the thread after all queued texts."""
    with self._changed:
      self._stopped = True
      self._changed.notify()
    self._thread.join()

  def _run(self) -> None:
    try:
      self._bank.compile()
    except BaseException as error:  # `ready` passes it on
      self.ready.set_exception(error)
      return
    self.ready.set_result(None)
    flights: collections.deque[_Flight] = collections.deque()
    while True:
      rows, length = self._next(wait=not flights)
      if rows:
        flight = self._send(rows, length)
        if flight is not None:
          flights.append(flight)
      elif not flights:
        return
      if flights and (not rows or len(flights) > 1):
        self._finish(flights.popleft())

  def _next(self, wait: bool) -> tuple[list[_Row], int]:
    """Rows of a closed batch, and its padded length.

    With ``wait``, no rows mean the end; without it, that no batch is full.
    """
    with self._changed:
      while True:
        self._drop()
        heads = {length: queue[0].job.arrived for length, queue in self._queues.items() if queue}
        shapes = self._bank.shapes
        full = [n for n in heads if len(self._queues[n]) >= shapes.most_rows(n)]
        if full:
          return self._take(min(full, key=heads.__getitem__))
        if not wait:
          return [], 0
        if not heads:
          if self._stopped:
            return [], 0
          self._changed.wait()
          continue
        oldest = min(heads, key=heads.__getitem__)
        left = heads[oldest] + self._deadline - time.monotonic()
        if left <= 0 or self._stopped:
          return self._take(oldest)
        self._changed.wait(min(left, _LONGEST_NAP_S))

  def _take(self, length: int) -> tuple[list[_Row], int]:
    shapes = self._bank.shapes
    shorter = [n for n in reversed(shapes.lengths) if n <= length]
    own = len(self._queues[length])
    # Shorter texts do not enlarge a batch.
    count = shapes.choose_rows(own, length)
    rows: list[_Row] = []
    for n in shorter:
      queue = self._queues[n]
      while queue and len(rows) < count:
        rows.append(queue.popleft())
        self._release(rows[-1])
    return rows, length

  def _drop(self) -> None:
    """Removes texts of requests that were cancelled or failed."""
    if not self._gone:
      return
    self._gone, gone = False, 0
    for queue in self._queues.values():
      rows = list(queue)
      queue.clear()
      for row in rows:
        if row.job.future.done():
          self._release(row)
          gone += 1
        else:
          queue.append(row)
    self._metrics.dropped.inc(gone)

  def _note_end(self, future: concurrent.futures.Future) -> None:
    if future.cancelled():
      self._gone = True

  def _release(self, row: _Row) -> None:
    """Counts a row that leaves its queue."""
    key = row.text.choice.key
    self._wanted[key] -= 1
    if not self._wanted[key]:
      del self._wanted[key]
    self._queued -= 1
    self._metrics.queued.set(self._queued)

  def _send(self, rows: list[_Row], length: int) -> _Flight | None:
    """Starts a batch; None if it fails, along with its requests."""
    metrics, sent = self._metrics, time.monotonic()
    for job in _jobs(rows):
      if not job.begun:
        job.begun = True
        metrics.stage_seconds.labels('queue').observe(sent - job.arrived)
    count = next(n for n in self._bank.shapes.rows if n >= len(rows))
    try:
      choices = [row.text.choice for row in rows]
      leases = self._bank.assign(choices, self._wanted)
      vectors = self._bank.run([row.text.ids for row in rows], choices, leases, count, length)
    except Exception as error:  # requests fail, the thread goes on
      self._fail(rows, error)
      return None
    tokens = sum(len(row.text.ids) for row in rows)
    metrics.batches.labels(count, length).inc()
    metrics.rows.inc(len(rows))
    metrics.row_places.inc(count)
    metrics.tokens.inc(tokens)
    metrics.token_places.inc(count * length)
    return _Flight(rows, vectors, sent)

  def _finish(self, flight: _Flight) -> None:
    try:
      vectors = np.asarray(flight.vectors)
    except Exception as error:
      self._fail(flight.rows, error)
      return
    seconds = time.monotonic() - flight.sent
    self._metrics.stage_seconds.labels('device').observe(seconds)
    rate = len(flight.rows) / max(seconds, 1e-6)
    self._rate = rate if not self._rate else 0.9 * self._rate + 0.1 * rate
    for row, vector in zip(flight.rows, vectors, strict=False):
      row.job.vectors[row.number] = vector
      row.job.left -= 1
    for job in _jobs(flight.rows):
      if job.left == 0:
        bad = np.flatnonzero(~np.isfinite(job.vectors).all(axis=1))
        _settle(job.future, NotFinite(int(bad[0])) if bad.size else None, job.vectors)

  def _fail(self, rows: Sequence[_Row], error: Exception) -> None:
    logger.error('a batch failed: %s: %s', type(error).__name__, str(error).partition('\n')[0])
    for job in _jobs(rows):
      _settle(job.future, error)
    self._gone = True


def _jobs(rows: Sequence[_Row]) -> Iterator[_Job]:
  yield from {id(row.job): row.job for row in rows}.values()


def _settle(future: concurrent.futures.Future, error: Exception | None, result: Any = None) -> None:
  # From here on the client cannot cancel it.
  if future.done() or not future.set_running_or_notify_cancel():
    return
  if error is not None:
    future.set_exception(error)
  else:
    future.set_result(result)
