"""A bounded queue of work for the device, and the thread that runs it, tenants in turn.

Texts go into batches that mix requests, prompts and tenants. The tenant whose turn it is sets the
padded length with its first text; free rows go to texts that are no longer. While several tenants
ask, a batch takes at most `SLICE_S`, unless a single row takes longer. It closes when it is full,
when more than a slice of work waits, or when its first text has waited for the deadline. On an
accelerator the next batch is sent behind the one in flight, and always before the vectors of the
last one go to their requests.

A tenant with less work than a slice shares its batch only with tenants like it. So it waits for the
slice that runs, and its batch takes no longer than its texts.

Searches come in slices (`turns.SlicedJob`), and each slice runs by itself.

Within a tenant, requests have turns as tenants do: a short one passes the rest of a long one.
"""

import collections
import concurrent.futures
import dataclasses
import heapq
import itertools
import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from dprjax.base.errors import InputError
from dprjax.serving.bank import AdapterChoice, Bank
from dprjax.serving.metrics import ServerMetrics
from dprjax.serving.turns import (
  NOBODY,
  SLICE_S,
  SlicedJob,
  Spent,
  Steps,
  Tenant,
  Turns,
  ignore,
  learn,
  settle,
)

logger = logging.getLogger('dprjax')

_LONGEST_NAP_S = 0.2  # between checks for clients that left
_SHARED_S = 10.0  # for so long after a change of turns, several tenants ask


class QueuedText(NamedTuple):
  """Token ids and their prompt."""

  ids: np.ndarray
  choice: AdapterChoice


@dataclasses.dataclass(eq=False)
class _Job:
  future: concurrent.futures.Future
  tenant: Tenant
  vectors: Float[np.ndarray, 'n H']
  left: int
  arrived: float
  spent: Spent


class _Row(NamedTuple):
  text: QueuedText
  job: _Job
  number: int  # in the job

  @property
  def future(self) -> concurrent.futures.Future:
    return self.job.future


class _Flight(NamedTuple):
  rows: list[_Row]
  shape: tuple[int, int]
  vectors: Any
  sent: float


class _Heap:
  """Items by rising rank; equal ranks in the order they came."""

  def __init__(self) -> None:
    self.items: list[tuple[float, int, Any]] = []
    self._numbers = itertools.count()

  def __len__(self) -> int:
    return len(self.items)

  def push(self, rank: float, item: Any) -> None:
    heapq.heappush(self.items, (rank, next(self._numbers), item))

  @property
  def rank(self) -> float:
    return self.items[0][0]

  def clean(self) -> None:
    self.items = [item for item in self.items if not item[2].future.done()]
    heapq.heapify(self.items)


class _Waiting:
  """The work of one tenant: texts by padded length, and jobs in slices.

  A rank is the cost of the work of its request before it, from ``now`` on when the request came.

  Attributes:
    now: the lowest rank when work was taken last.
  """

  def __init__(self, lengths: Sequence[int]):
    self.rows = {length: _Heap() for length in lengths}
    self.sliced = _Heap()
    self.now = 0.0

  def __bool__(self) -> bool:
    return bool(self.sliced) or any(self.rows.values())

  def first(self) -> int | None:
    """The padded length of the first text; None: a slice is first."""
    lengths = [length for length, heap in self.rows.items() if heap]
    if not lengths:
      return None
    length = min(lengths, key=lambda length: self.rows[length].rank)
    return None if self.sliced and self.sliced.rank < self.rows[length].rank else length

  def seconds(self, costs: Mapping[int, float]) -> float:
    """The time that it takes; infinite with a job in slices."""
    if self.sliced:
      return math.inf
    return sum(len(heap) * costs[length] for length, heap in self.rows.items())

  def pop(self, heap: _Heap) -> Any:
    """Takes the first item of one of its heaps."""
    # Short texts that fill a batch may have a higher rank than work that waits.
    self.now = max(self.now, min(one.rank for one in (*self.rows.values(), self.sliced) if one))
    return heapq.heappop(heap.items)[2]

  def fitting(self, length: int) -> int | None:
    """The longest padded length with texts, up to ``length``."""
    return max((n for n, heap in self.rows.items() if n <= length and heap), default=None)


class Batcher:
  """Texts to vectors, in batches that mix requests and prompts; and other work in slices.

  Attributes:
    costs: seconds of a row of a full batch, by padded length; zero until ``ready``.
    ready: done when the bank is compiled, or its error.
  """

  def __init__(
    self,
    bank: Bank,
    hidden: int,
    ahead: int,
    metrics: ServerMetrics,
  ):
    """Starts the device thread, which compiles first (see `ready`).

    Args:
      ahead: batches that may be in flight.
    """
    self._bank, self._options, self._hidden = bank, bank.options, hidden
    self._ahead, self._metrics = ahead, metrics
    metrics.queued.set_function(lambda: self._number(*bank.options.lengths))
    self._changed = threading.Condition()
    self._turns = Turns()
    self._waiting: dict[Tenant, _Waiting] = {}
    self.costs = dict.fromkeys(bank.options.lengths, 0.0)
    self._idle_from = 0.0  # when the last batch was done
    self._went_on = False  # whether texts waited then
    self._served: Tenant | None = None  # the tenant of the last turn
    self._shared_until = 0.0  # see `_SHARED_S`
    self._gone = False  # whether queued requests may have ended
    self._stopped = False
    self.ready: concurrent.futures.Future[None] = concurrent.futures.Future()
    self._thread = threading.Thread(target=self._run, name='device', daemon=True)
    self._thread.start()

  def submit(
    self, texts: Sequence[QueuedText], tenant: Tenant = NOBODY, spent: Spent = ignore
  ) -> concurrent.futures.Future:
    """Queues the texts of a request; the result of the future is float32 ``[n, H]``.

    Cancelling the future removes the texts from the queue.

    Args:
      spent: called by the device thread with the seconds of each batch.
    """
    future: concurrent.futures.Future = concurrent.futures.Future()
    vectors = np.empty((len(texts), self._hidden), np.float32)
    job = _Job(future, tenant, vectors, len(texts), time.monotonic(), spent)
    with self._changed:
      if self._stopped:
        future.cancel()
        return future
      future.add_done_callback(self._note_end)
      waiting = self._join(tenant)
      rank = waiting.now
      for number, text in enumerate(texts):
        length = self._options.bucket(len(text.ids))
        waiting.rows[length].push(rank, _Row(text, job, number))
        rank += self.costs[length]
      self._changed.notify()
    return future

  def submit_steps(
    self, steps: Steps, tenant: Tenant = NOBODY, spent: Spent = ignore
  ) -> concurrent.futures.Future:
    """Queues a job in slices, which the device thread does between batches."""
    job = SlicedJob(steps, tenant, spent)
    with self._changed:
      if self._stopped:
        job.future.cancel()
      if job.future.done():
        return job.future
      job.future.add_done_callback(self._note_end)
      waiting = self._join(tenant)
      waiting.sliced.push(waiting.now, job)
      self._changed.notify()
    return job.future

  def seconds(self, tokens: float) -> float:
    """The time of a text of so many tokens; 0.0 until ``ready``."""
    return self.costs[self._options.bucket(min(int(tokens), self._options.lengths[-1]))]

  def close(self) -> None:
    """Ends the thread after all queued work."""
    with self._changed:
      self._stopped = True
      self._changed.notify()
    self._thread.join()

  def _join(self, tenant: Tenant) -> _Waiting:
    self._turns.join(tenant)
    return self._waiting.setdefault(tenant, _Waiting(self._options.lengths))

  def _leave(self, tenant: Tenant) -> None:
    if not self._waiting[tenant]:
      del self._waiting[tenant]
      self._turns.leave(tenant)

  def _run(self) -> None:
    try:
      self._bank.compile()
      self._measure()
    except BaseException as error:  # `ready` passes it on
      self.ready.set_exception(error)
      return
    self.ready.set_result(None)
    flights: collections.deque[_Flight] = collections.deque()
    landed: _Flight | None = None
    while True:
      free = not flights
      work = self._next(free, wait=free and landed is None, room=len(flights) < self._ahead)
      sliced, (rows, length) = (work, ([], 0)) if isinstance(work, SlicedJob) else (None, work)
      if rows:
        flights += self._send(rows, length)
      if landed is not None:
        self._answer(landed)
        landed = None
      elif free and not rows and sliced is None:
        return
      if sliced is not None:
        self._slice(sliced)
      elif flights and (not rows or len(flights) >= self._ahead):
        landed = self._land(flights.popleft())

  def _measure(self) -> None:
    """Learns the costs: from one row, then from as many as fit into a slice."""
    options = self._options
    for length in options.lengths:
      rows, seconds = options.rows[0], 0.0
      for _ in range(2):
        began = time.monotonic()
        np.asarray(self._bank.run([], [], rows, length))
        seconds = (time.monotonic() - began) / rows
        rows = options.most_rows(length, _rows_within(SLICE_S, seconds, options.rows[-1]))
      self.costs[length] = seconds

  def _next(self, free: bool, wait: bool, room: bool) -> SlicedJob | tuple[list[_Row], int]:
    """A slice, or rows of a closed batch and its padded length.

    Args:
      free: the device has no batch; else only batches that need not fill further are sent.
    """
    with self._changed:
      while True:
        self._drop()
        tenant = self._turns.next()
        if tenant is None:
          if not wait or self._stopped:
            return [], 0
          self._changed.wait()
          continue
        if not room:
          return [], 0
        if tenant != self._served and self._served is not None:
          self._shared_until = time.monotonic() + _SHARED_S
        self._served = tenant
        waiting = self._waiting[tenant]
        length = waiting.first()
        if length is None:
          if not free:
            return [], 0
          sliced: SlicedJob = waiting.pop(waiting.sliced)
          self._turns.pay(tenant, sliced.cost)
          return sliced  # the tenant leaves after the slice, if that was all
        first: _Row = waiting.rows[length].items[0][2]
        left = first.job.arrived + self._options.deadline - time.monotonic()
        if (
          self._number(length) >= self._most_rows(length)
          or sum(one.seconds(self.costs) for one in self._waiting.values()) > SLICE_S
          or (free and (left <= 0 or self._stopped))
        ):
          return self._take(tenant, length), length
        if not wait:
          return [], 0
        self._changed.wait(min(left, _LONGEST_NAP_S))

  def _number(self, *lengths: int) -> int:
    waiting = [*self._waiting.values()]  # a copy, as other threads ask
    return sum(len(one.rows[length]) for one in waiting for length in lengths)

  def _most_rows(self, length: int) -> int:
    options, most = self._options, self._options.rows[-1]
    if time.monotonic() < self._shared_until:
      most = _rows_within(SLICE_S, self.costs[length], most)
    return options.most_rows(length, most)

  def _take(self, first: Tenant, length: int) -> list[_Row]:
    """Rows of a batch, tenants in turn.

    Texts of this padded length decide the number of rows, shorter ones fill it.
    """
    few = {tenant for tenant, one in self._waiting.items() if one.seconds(self.costs) <= SLICE_S}
    sharing = few if first in few else {*self._waiting}
    number = sum(len(self._waiting[tenant].rows[length]) for tenant in sharing)
    count = self._options.choose_rows(number, self._most_rows(length))
    rows: list[_Row] = []
    fitting = {tenant: self._waiting[tenant].fitting(length) for tenant in sharing}
    fitting = {tenant: longest for tenant, longest in fitting.items() if longest is not None}
    while len(rows) < count and (tenant := self._turns.next(fitting)) is not None:
      waiting, longest = self._waiting[tenant], fitting.pop(tenant)
      assert longest is not None
      row: _Row = waiting.pop(waiting.rows[longest])
      self._turns.pay(tenant, self.costs[longest])
      if (longest := waiting.fitting(length)) is not None:
        fitting[tenant] = longest
      self._leave(tenant)
      rows.append(row)
    return rows

  def _drop(self) -> None:
    if not self._gone:
      return
    self._gone, before = False, self._number(*self._options.lengths)
    for tenant, waiting in list(self._waiting.items()):
      for heap in (*waiting.rows.values(), waiting.sliced):
        heap.clean()
      self._leave(tenant)
    self._metrics.dropped.inc(before - self._number(*self._options.lengths))

  def _note_end(self, future: concurrent.futures.Future) -> None:
    if future.cancelled():
      self._gone = True

  def _slice(self, job: SlicedJob) -> None:
    began, cost = time.monotonic(), job.cost
    job.advance()
    now = time.monotonic()
    self._metrics.stage_seconds.labels('slice').observe(now - began)
    self._end_turn(now)
    job.spent(cost)
    with self._changed:
      waiting = self._waiting[job.tenant]
      if not job.future.done():
        waiting.sliced.push(waiting.now + cost, job)
      self._leave(job.tenant)

  def _send(self, rows: list[_Row], length: int) -> list[_Flight]:
    """Starts a batch; none if it fails, along with its requests."""
    metrics, sent = self._metrics, time.monotonic()
    for row in rows:
      if row.number == 0:
        metrics.stage_seconds.labels('queue').observe(sent - row.job.arrived)
    count = next(n for n in self._options.rows if n >= len(rows))
    try:
      choices = [row.text.choice for row in rows]
      vectors = self._bank.run([row.text.ids for row in rows], choices, count, length)
    except Exception as error:  # requests fail, the thread goes on
      self._fail(rows, error)
      return []
    tokens = sum(len(row.text.ids) for row in rows)
    metrics.batches.labels(count, length).inc()
    metrics.rows.inc(len(rows))
    metrics.row_places.inc(count)
    metrics.tokens.inc(tokens)
    metrics.token_places.inc(count * length)
    return [_Flight(rows, (count, length), vectors, sent)]

  def _land(self, flight: _Flight) -> _Flight | None:
    """Waits for the vectors of a batch; None if it fails, along with its requests."""
    try:
      vectors = np.asarray(flight.vectors)
    except Exception as error:
      self._fail(flight.rows, error)
      return None
    now = time.monotonic()
    self._metrics.stage_seconds.labels('device').observe(now - flight.sent)
    began = self._idle_from if self._went_on else max(flight.sent, self._idle_from)
    count, length = flight.shape
    seconds = (now - began) / count
    self._end_turn(now)
    # A row of a batch with fewer rows than fit costs more.
    if count == self._most_rows(length) or seconds < self.costs[length]:
      learn(self.costs, length, seconds)
    return flight._replace(vectors=vectors)

  def _answer(self, landed: _Flight) -> None:
    seconds: dict[_Job, float] = {}
    for row, vector in zip(landed.rows, landed.vectors, strict=False):
      seconds[row.job] = seconds.get(row.job, 0.0) + self.seconds(len(row.text.ids))
      row.job.vectors[row.number] = vector
      row.job.left -= 1
    for job, spent in seconds.items():
      job.spent(spent)
      if job.left == 0:
        bad = np.flatnonzero(~np.isfinite(job.vectors).all(axis=1))
        error = f'the vector of text {bad[:1]} is not finite: its prompt overflows'
        settle(job.future, InputError(error) if bad.size else None, job.vectors)

  def _end_turn(self, now: float) -> None:
    """The next batch begins now, if texts wait."""
    self._idle_from, self._went_on = now, self._number(*self._options.lengths) > 0

  def _fail(self, rows: Sequence[_Row], error: Exception) -> None:
    logger.error('a batch failed: %s: %s', type(error).__name__, str(error).partition('\n')[0])
    for row in rows:
      settle(row.future, error)
    self._gone = True


def _rows_within(seconds: float, row_seconds: float, most: int) -> int:
  """The rows of a step of so many seconds: a power of two from 1 to ``most``."""
  rows = 1
  while 2 * rows <= most and 2 * rows * row_seconds <= seconds:
    rows *= 2
  return rows
