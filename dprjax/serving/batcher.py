"""A bounded queue of work for the device, and the thread that runs it, tenants in turn.

Texts go into batches that mix requests, prompts and tenants. A batch closes when it is full or its
first text has waited for the deadline. While the device is busy the next batch fills further; on an
accelerator a full one is sent at once behind the one in flight. The next batch is sent before the
vectors of the last one go to their requests. The tenant whose turn it is sets the padded length
with its first text; free rows go to texts that are no longer. While a tenant floods the device,
every second batch is a small one of the other tenants, and the batches between take at most
`_SHARED_S`.

Searches and reranking come in slices (`turns.SlicedJob`), and each slice runs by itself.

Within a tenant, work is ordered by its finishing time without other requests, so a short request
passes the rest of a long one.
"""

import collections
import concurrent.futures
import dataclasses
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from dprjax.base.programs import Programs
from dprjax.serving.bank import AdapterChoice, Bank
from dprjax.serving.metrics import ServerMetrics
from dprjax.serving.turns import NOBODY, SlicedJob, Steps, Tenant, Turns, settle

logger = logging.getLogger('dprjax')

_LONGEST_NAP_S = 0.2  # between checks for clients that left
_FIRST_RATE = 10_000.0  # tokens a second, before the first batch
_KEPT = 0.9  # of a moving mean
_SHARED_S = 0.1  # of a batch, if its rows can be fewer, while tenants with little work ask
_ASKED_S = 1.0  # such a tenant counts as asking for so long after its last batch


class Busy(Exception):
  """There is no room; retry after ``seconds``."""

  def __init__(self, seconds: float, why: str = 'the queue is full'):
    super().__init__(f'{why}; try again in {seconds:.0f} s')
    self.seconds = seconds


class NotFinite(Exception):
  """A vector has NaN or infinity. ``row``: of the first such text."""

  def __init__(self, row: int):
    super().__init__(
      f'the vector of text {row} is not finite: its prompt overflows in the arithmetic'
    )
    self.row = row


class QueuedText(NamedTuple):
  """Token ids and their prompt."""

  ids: np.ndarray
  choice: AdapterChoice


Spent = Callable[[float], None]  # called with finished tokens


@dataclasses.dataclass(eq=False)
class _Job:
  future: concurrent.futures.Future
  tenant: Tenant
  vectors: Float[np.ndarray, 'n H']
  left: int
  arrived: float
  spent: Spent
  begun: bool = False


class _Row(NamedTuple):
  text: QueuedText
  job: _Job
  number: int  # in the job


@dataclasses.dataclass(eq=False)
class _Sliced:
  """A job in slices, with its bookkeeping."""

  job: SlicedJob
  tenant: Tenant
  kind: str
  spent: Spent


class _Flight(NamedTuple):
  rows: list[_Row]
  vectors: Any
  sent: float


class _Landed(NamedTuple):
  """The rows of a batch and their vectors, which their requests do not have yet."""

  rows: list[_Row]
  vectors: np.ndarray


class _Heap:
  """Items by rising rank; equal ranks in the order they came."""

  def __init__(self) -> None:
    self._items: list[tuple[float, int, Any]] = []
    self._numbers = itertools.count()

  def __len__(self) -> int:
    return len(self._items)

  def push(self, rank: float, item: Any) -> None:
    heapq.heappush(self._items, (rank, next(self._numbers), item))

  def pop(self) -> Any:
    return heapq.heappop(self._items)[2]

  @property
  def rank(self) -> float:
    """The rank of the first item."""
    return self._items[0][0]

  @property
  def first(self) -> Any:
    return self._items[0][2]

  def keep(self, keeps: Callable[[Any], bool]) -> None:
    """Removes the other items."""
    self._items = [item for item in self._items if keeps(item[2])]
    heapq.heapify(self._items)


class _Waiting:
  """The work of one tenant: texts by padded length, and jobs in slices."""

  def __init__(self, lengths: Sequence[int]):
    self.rows = {length: _Heap() for length in lengths}
    self.sliced = _Heap()

  def __bool__(self) -> bool:
    return bool(self.sliced) or any(self.rows.values())

  def first(self) -> int | None:
    """The padded length of the first text; None: a slice is first."""
    lengths = [length for length, heap in self.rows.items() if heap]
    if not lengths:
      return None
    length = min(lengths, key=lambda length: self.rows[length].rank)
    return None if self.sliced and self.sliced.rank < self.rows[length].rank else length

  @property
  def number(self) -> int:
    """The number of texts."""
    return sum(map(len, self.rows.values()))

  def up_to(self, length: int) -> int:
    """The number of texts of at most this padded length."""
    return sum(len(heap) for n, heap in self.rows.items() if n <= length)

  def fitting(self, length: int) -> int | None:
    """The longest padded length with texts, up to ``length``."""
    return max((n for n, heap in self.rows.items() if n <= length and heap), default=None)


class Batcher:
  """Texts to vectors, in batches that mix requests and prompts; and other work in slices.

  Attributes:
    rate: tokens a second of a busy device; 0.0 before the first batch.
    ready: done when the bank is compiled, or its error.
  """

  def __init__(
    self,
    bank: Bank,
    hidden: int,
    *,
    deadline: float,
    most_queued: int,
    ahead: int,
    metrics: ServerMetrics,
    programs: Programs | None = None,
  ):
    """Starts the device thread, which compiles first (see `ready`).

    Args:
      bank: used by that thread only.
      hidden: H.
      deadline: seconds that a text waits for others.
      most_queued: texts that may wait.
      ahead: batches that may be in flight.
      metrics: counts and times.
      programs: see `Bank.compile`.
    """
    self._programs = programs
    self._bank, self._hidden, self._deadline = bank, hidden, deadline
    self._most_queued, self._ahead, self._metrics = most_queued, ahead, metrics
    self._changed = threading.Condition()
    self._turns = Turns(bank.shapes.lengths[-1])
    self._waiting: dict[Tenant, _Waiting] = {}
    self._counts = dict.fromkeys(bank.shapes.lengths, 0)  # of all tenants
    self._queued = 0
    self._wanted: collections.Counter[Hashable] = collections.Counter()
    self.rate = 0.0
    self._seconds: dict[str, float] = {}  # a token of each kind of slices, a moving mean
    self._idle_from = 0.0  # when the last batch was done
    self._went_on = False  # whether texts waited then
    self._was_small = False  # whether the last batch was one of `_small`
    self._shared_until = 0.0  # see `_ASKED_S`
    self._gone = False  # whether queued requests may have ended
    self._stopped = False
    self.ready: concurrent.futures.Future[None] = concurrent.futures.Future()
    self._thread = threading.Thread(target=self._run, name='device', daemon=True)
    self._thread.start()

  def submit(
    self, texts: Sequence[QueuedText], tenant: Tenant = NOBODY, spent: Spent = lambda tokens: None
  ) -> concurrent.futures.Future:
    """Queues the texts of a request; the result of the future is float32 ``[n, H]``.

    Cancelling the future removes the texts from the queue.

    Args:
      spent: called by the device thread with the tokens of each batch.

    Raises:
      Busy: the queue has no room for all.
    """
    future: concurrent.futures.Future = concurrent.futures.Future()
    vectors = np.empty((len(texts), self._hidden), np.float32)
    job = _Job(future, tenant, vectors, len(texts), time.monotonic(), spent)
    rank = job.arrived
    with self._changed:
      if self._stopped or self._queued + len(texts) > self._most_queued:
        raise Busy(min(30.0, max(1.0, self._queued_seconds())))
      future.add_done_callback(self._note_end)
      waiting = self._join(tenant)
      for number, text in enumerate(texts):
        length = self._bank.shapes.bucket(len(text.ids))
        waiting.rows[length].push(rank, _Row(text, job, number))
        rank += self._alone(len(text.ids))
        self._counts[length] += 1
        self._wanted[text.choice.key] += 1
      self._queued += len(texts)
      self._metrics.queued.set(self._queued)
      self._changed.notify()
    return future

  def submit_steps(
    self, kind: str, steps: Steps, tenant: Tenant = NOBODY, spent: Spent = lambda tokens: None
  ) -> concurrent.futures.Future:
    """Queues a job in slices, which the device thread does between batches.

    Args:
      kind: of slices whose tokens take the same time.
      steps: yields the tokens of each slice.
      tenant, spent: as for `submit`.

    Raises:
      Busy: the server ends.
    """
    job = SlicedJob(steps)
    if job.future.done():
      return job.future
    with self._changed:
      if self._stopped:
        raise Busy(1.0)
      job.future.add_done_callback(self._note_end)
      self._join(tenant).sliced.push(time.monotonic(), _Sliced(job, tenant, kind, spent))
      self._changed.notify()
    return job.future

  @property
  def busy(self) -> bool:
    """Whether work waits."""
    return bool(self._waiting)

  def price(self, kind: str) -> float:
    """Tokens of the backbone that take the time of one token of these slices."""
    return self._seconds.get(kind, 0.0) * self.rate or 1.0

  def close(self, drop: bool = False, seconds: float | None = None) -> bool:
    """Ends the thread after all queued work; returns whether it ended.

    Args:
      drop: whether to cancel queued work.
      seconds: to wait at most.
    """
    with self._changed:
      self._stopped = True
      if drop:
        for future in self._futures():
          future.cancel()
        self._gone = True
      self._changed.notify()
    self._thread.join(seconds)
    return not self._thread.is_alive()

  def _futures(self) -> list[concurrent.futures.Future]:
    found: list[concurrent.futures.Future] = []
    for waiting in self._waiting.values():
      found += [item.job.future for _, _, item in waiting.sliced._items]
      found += {row.job.future for heap in waiting.rows.values() for _, _, row in heap._items}
    return found

  def _alone(self, tokens: float) -> float:
    """Seconds for this many tokens."""
    return tokens / (self.rate or _FIRST_RATE)

  def _queued_seconds(self) -> float:
    tokens = sum(length * count for length, count in self._counts.items())
    return self._alone(tokens)

  def _join(self, tenant: Tenant) -> _Waiting:
    self._turns.join(tenant)
    return self._waiting.setdefault(tenant, _Waiting(self._bank.shapes.lengths))

  def _leave(self, tenant: Tenant) -> None:
    """Forgets a tenant without work."""
    if not self._waiting[tenant]:
      del self._waiting[tenant]
      self._turns.leave(tenant)

  def _run(self) -> None:
    try:
      self._bank.compile(self._programs)
    except BaseException as error:  # `ready` passes it on
      self.ready.set_exception(error)
      return
    self.ready.set_result(None)
    flights: collections.deque[_Flight] = collections.deque()
    landed: _Landed | None = None
    while True:
      free = not flights
      work = self._next(free, wait=free and landed is None, room=len(flights) < self._ahead)
      sliced, (rows, length) = (work, ([], 0)) if isinstance(work, _Sliced) else (None, work)
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

  def _next(self, free: bool, wait: bool, room: bool) -> _Sliced | tuple[list[_Row], int]:
    """A slice, or rows of a closed batch and its padded length.

    Args:
      free: the device has no batch; else only full batches are sent.
      wait: for work; then no rows mean the end.
    """
    with self._changed:
      while True:
        self._drop()
        tenant = self._turns.turn(self._first_cost)
        if tenant is None:
          if not wait or self._stopped:
            return [], 0
          self._changed.wait()
          continue
        if not room:
          return [], 0
        if (small := self._small()) is not None:
          return small
        waiting = self._waiting[tenant]
        length = waiting.first()
        if length is None:
          if not free:
            return [], 0
          sliced: _Sliced = waiting.sliced.pop()
          self._turns.pay(tenant, self._slice_cost(sliced))
          self._leave(tenant)
          return sliced
        if self._is_full(length):
          return self._take(length), length
        left = waiting.rows[length].first.job.arrived + self._deadline - time.monotonic()
        if free and (left <= 0 or self._stopped):
          return self._take(length), length
        full = next(filter(self._is_full, self._counts), None)
        if full is not None:
          return self._take(full), full
        if not wait:
          return [], 0
        self._changed.wait(min(left, _LONGEST_NAP_S))

  def _small(self) -> tuple[list[_Row], int] | None:
    """A batch for tenants with little work, if others have more than a batch and it is due."""
    most = self._bank.shapes.most_rows(self._bank.shapes.lengths[0])
    few = {
      tenant: waiting
      for tenant, waiting in self._waiting.items()
      if 0 < waiting.number < most and waiting.first() is not None
    }
    many = any(
      one.number >= most or one.sliced for tenant, one in self._waiting.items() if tenant not in few
    )
    self._was_small = not self._was_small and bool(few) and many
    if not self._was_small:
      return None
    length = max(waiting.first() or 0 for waiting in few.values())
    waiting_rows = sum(waiting.up_to(length) for waiting in few.values())
    self._shared_until = time.monotonic() + _ASKED_S
    return self._take(length, waiting_rows, few), length

  def _is_full(self, length: int) -> bool:
    return self._counts[length] >= self._most_rows(length)

  def _most_rows(self, length: int) -> int:
    """The most rows of a batch now; see `_SHARED_S`."""
    shared = self.rate and time.monotonic() < self._shared_until
    return self._bank.shapes.most_rows(length, self.rate * _SHARED_S if shared else None)

  def _first_cost(self, tenant: Tenant) -> float | None:
    waiting = self._waiting[tenant]
    length = waiting.first()
    if length is not None:
      return len(waiting.rows[length].first.text.ids)
    return self._slice_cost(waiting.sliced.first) if waiting.sliced else None

  def _slice_cost(self, sliced: _Sliced) -> float:
    return sliced.job.cost * self.price(sliced.kind)

  def _take(
    self, length: int, number: int | None = None, of: Collection[Tenant] | None = None
  ) -> list[_Row]:
    """Rows of a batch, tenants in turn.

    Args:
      length: padded.
      number: of texts that decide the rows; default: all of this length, but no shorter ones.
      of: tenants that may have rows; default: all.
    """
    number = self._counts[length] if number is None else number
    count = self._bank.shapes.choose_rows(number, self._most_rows(length))
    rows: list[_Row] = []

    def cost_of(tenant: Tenant) -> float | None:
      waiting = self._waiting[tenant]
      fitting = waiting.fitting(length) if of is None or tenant in of else None
      return None if fitting is None else len(waiting.rows[fitting].first.text.ids)

    while len(rows) < count and (tenant := self._turns.turn(cost_of)) is not None:
      waiting = self._waiting[tenant]
      fitting = waiting.fitting(length)
      assert fitting is not None
      row: _Row = waiting.rows[fitting].pop()
      self._turns.pay(tenant, len(row.text.ids))
      self._release(row)
      self._leave(tenant)
      rows.append(row)
    return rows

  def _drop(self) -> None:
    """Removes work of requests that were cancelled or failed."""
    if not self._gone:
      return
    self._gone, gone = False, 0

    def keeps(row: _Row) -> bool:
      nonlocal gone
      if not row.job.future.done():
        return True
      self._release(row)
      gone += 1
      return False

    for tenant, waiting in list(self._waiting.items()):
      for heap in waiting.rows.values():
        heap.keep(keeps)
      waiting.sliced.keep(lambda sliced: not sliced.job.future.done())
      self._leave(tenant)
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
    self._counts[self._bank.shapes.bucket(len(row.text.ids))] -= 1
    self._queued -= 1
    self._metrics.queued.set(self._queued)

  def _slice(self, sliced: _Sliced) -> None:
    """Does a slice, and queues the rest by the time taken."""
    job, cost = sliced.job, sliced.job.cost
    began = time.monotonic()
    job.advance()
    seconds = time.monotonic() - began
    self._metrics.stage_seconds.labels('slice').observe(seconds)
    before = self._seconds.get(sliced.kind, seconds / max(cost, 1.0))
    self._seconds[sliced.kind] = _KEPT * before + (1 - _KEPT) * seconds / max(cost, 1.0)
    self._end_turn(time.monotonic())
    sliced.spent(cost * self.price(sliced.kind))
    if job.future.done():
      return
    with self._changed:
      self._join(sliced.tenant).sliced.push(began + seconds, sliced)

  def _send(self, rows: list[_Row], length: int) -> list[_Flight]:
    """Starts a batch; none if it fails, along with its requests."""
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
      return []
    tokens = sum(len(row.text.ids) for row in rows)
    metrics.batches.labels(count, length).inc()
    metrics.rows.inc(len(rows))
    metrics.row_places.inc(count)
    metrics.tokens.inc(tokens)
    metrics.token_places.inc(count * length)
    return [_Flight(rows, vectors, sent)]

  def _land(self, flight: _Flight) -> _Landed | None:
    """Waits for a batch; None if it fails, along with its requests."""
    try:
      vectors = np.asarray(flight.vectors)
    except Exception as error:
      self._fail(flight.rows, error)
      return None
    now = time.monotonic()
    self._metrics.stage_seconds.labels('device').observe(now - flight.sent)
    began = self._idle_from if self._went_on else max(flight.sent, self._idle_from)
    rate = sum(len(row.text.ids) for row in flight.rows) / max(now - began, 1e-6)
    self._end_turn(now)
    if not self.rate or rate > self.rate or self._queued:  # how fast it is when it is busy
      self.rate = _KEPT * (self.rate or rate) + (1 - _KEPT) * rate
    return _Landed(flight.rows, vectors)

  def _answer(self, landed: _Landed) -> None:
    tokens = collections.Counter[_Job]()
    for row, vector in zip(landed.rows, landed.vectors, strict=False):
      tokens[row.job] += len(row.text.ids)
      row.job.vectors[row.number] = vector
      row.job.left -= 1
    for job, count in tokens.items():
      job.spent(count)
      if job.left == 0:
        bad = np.flatnonzero(~np.isfinite(job.vectors).all(axis=1))
        settle(job.future, NotFinite(int(bad[0])) if bad.size else None, job.vectors)

  def _end_turn(self, now: float) -> None:
    """The next batch begins now, if texts wait."""
    self._idle_from, self._went_on = now, self._queued > 0

  def _fail(self, rows: Sequence[_Row], error: Exception) -> None:
    logger.error('a batch failed: %s: %s', type(error).__name__, str(error).partition('\n')[0])
    for job in _jobs(rows):
      settle(job.future, error)
    self._gone = True


def _jobs(rows: Sequence[_Row]) -> Iterator[_Job]:
  yield from {id(row.job): row.job for row in rows}.values()
