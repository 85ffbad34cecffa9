"""Turns of tenants by start-time fair queuing, and threads that work through jobs in slices.

Goyal, Vin and Cheng, "Start-time fair queuing" (1996). A tenant is the holder of a key. Its tag is
the cost of its finished work, divided by its weight; the lowest tag has the turn. A tenant that
comes back takes at least the tag of the work that runs. So it is served next if it asked for less
than its share, and gains nothing by having waited.

A job in slices is a generator: it yields the cost of each slice before doing it, and returns the
result. Between slices others have their turn, and a job without a client is dropped.
"""

import collections
import concurrent.futures
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

T = TypeVar('T')
Steps = Generator[float, None, Any]


SLICE = 32_768  # characters of a slice of tokenising
SLICE_S = 0.05  # seconds of a slice of the device, where a single row takes no longer
_KEPT = 0.9  # of a moving mean


def finish(steps: Steps) -> Any:
  """Does all slices, and returns the result."""
  while True:
    try:
      next(steps)
    except StopIteration as end:
      return end.value


def slices(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
  """Items in lists of at most `SLICE` characters; a longer item has its own list."""
  held: list[T] = []
  size = 0
  for item in items:
    item_size = size_of(item)
    if held and size + item_size > SLICE:
      yield held
      held, size = [], 0
    held.append(item)
    size += item_size
  if held:
    yield held


class Work(NamedTuple):
  """The size of a request: its tokens, and the seconds that they take on the device."""

  tokens: float
  seconds: float


class Tenant(NamedTuple):
  """The owner of work. ``weight``: its share relative to others."""

  name: str = ''
  weight: float = 1.0


NOBODY = Tenant()
Spent = Callable[[float], None]  # called with the seconds of finished work


def ignore(seconds: float) -> None:
  """Counts nothing."""


class Turns:
  def __init__(self) -> None:
    self._now = 0.0  # the tag of the work that runs
    self._tags: dict[Tenant, float] = {}  # of tenants with work
    self._past: dict[Tenant, float] = {}  # of the others, if above `_now`

  def join(self, tenant: Tenant) -> None:
    if tenant not in self._tags:
      self._tags[tenant] = max(self._now, self._past.pop(tenant, 0.0))

  def leave(self, tenant: Tenant) -> None:
    self._past[tenant] = self._tags.pop(tenant)
    self._past = {tenant: tag for tenant, tag in self._past.items() if tag > self._now}

  def next(self, among: Iterable[Tenant] | None = None) -> Tenant | None:
    """The tenant to serve; the first to join of those with equal tags."""
    return min(self._tags if among is None else among, key=self._tags.__getitem__, default=None)

  def pay(self, tenant: Tenant, cost: float) -> None:
    self._now = max(self._now, self._tags[tenant])
    self._tags[tenant] += cost / tenant.weight


def learn(costs: dict[int, float], shape: int, seconds: float) -> None:
  """Moves the cost of a shape, a moving mean, towards the seconds that it took now."""
  costs[shape] = _KEPT * costs[shape] + (1 - _KEPT) * seconds


def settle(
  future: concurrent.futures.Future, error: BaseException | None, result: Any = None
) -> None:
  """Gives a future its result or error, unless it was cancelled."""
  if future.done() or not future.set_running_or_notify_cancel():
    return
  if error is not None:
    future.set_exception(error)
  else:
    future.set_result(result)


class SlicedJob:
  """A job in slices.

  Attributes:
    future: its result. Cancelling it ends the job after the slice that runs.
  """

  def __init__(self, steps: Steps, tenant: Tenant = NOBODY, spent: Spent = ignore):
    self.tenant, self.spent = tenant, spent
    self.future: concurrent.futures.Future = concurrent.futures.Future()
    self.cost, self._steps = 0.0, steps
    self.advance()

  def advance(self) -> None:
    """Does the slice that was announced, if any, and asks for the next cost.

    The first call only asks. `future` is done when the job is.
    """
    if self.future.done():
      self._steps.close()
      return
    try:
      self.cost = next(self._steps)
    except StopIteration as end:
      settle(self.future, None, end.value)
    except BaseException as error:  # the future passes it on
      settle(self.future, error)


class FairPool:
  """Threads that do slices of jobs: tenants in turn, and the jobs of each tenant in turn."""

  def __init__(self, threads: int, name: str):
    self._turns = Turns()
    self._jobs: dict[Tenant, collections.deque[SlicedJob]] = {}
    self._changed = threading.Condition()
    self._stopped = False
    self._threads = [
      threading.Thread(target=self._run, name=f'{name}-{number}', daemon=True)
      for number in range(threads)
    ]
    for thread in self._threads:
      thread.start()

  def submit(self, tenant: Tenant, steps: Steps) -> concurrent.futures.Future:
    job = SlicedJob(steps, tenant)
    with self._changed:
      if self._stopped:
        job.future.cancel()
      else:
        self._put(job)
    return job.future

  def close(self) -> None:
    """Drops waiting work and ends the threads after their slices."""
    with self._changed:
      self._stopped = True
      for jobs in self._jobs.values():
        for job in jobs:
          job.future.cancel()
      self._changed.notify_all()
    for thread in self._threads:
      thread.join()

  def _put(self, job: SlicedJob) -> None:
    if job.future.done():
      return
    self._jobs.setdefault(job.tenant, collections.deque()).append(job)
    self._turns.join(job.tenant)
    self._changed.notify()

  def _take(self) -> SlicedJob | None:
    tenant = self._turns.next()
    if tenant is None:
      return None
    jobs = self._jobs[tenant]
    job = jobs.popleft()
    self._turns.pay(tenant, job.cost)
    if not jobs:
      del self._jobs[tenant]
      self._turns.leave(tenant)
    return job

  def _run(self) -> None:
    while True:
      with self._changed:
        while (job := self._take()) is None:
          if self._stopped:
            return
          self._changed.wait()
      job.advance()
      with self._changed:
        if self._stopped:
          job.future.cancel()
        self._put(job)
