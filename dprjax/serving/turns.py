"""Deficit round robin among tenants, and threads that work through jobs in slices.

Shreedhar and Varghese, "Efficient fair queuing using deficit round robin" (1995). A tenant is the
holder of a key. Its turn pays for ``quantum * weight``; costs beyond that wait for later turns, so
that a tenant with long texts gets no more than one with short texts.

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
    own = size_of(item)
    if held and size + own > SLICE:
      yield held
      held, size = [], 0
    held.append(item)
    size += own
  if held:
    yield held


class Tenant(NamedTuple):
  """The owner of work. ``weight``: its share relative to others."""

  name: str = ''
  weight: float = 1.0


NOBODY = Tenant()


class Turns:
  """The turns of tenants. Not thread-safe.

  Args:
    quantum: the cost that a turn pays for, at weight 1.
  """

  def __init__(self, quantum: float):
    self._quantum = quantum
    self._left: collections.OrderedDict[Tenant, float] = collections.OrderedDict()

  def __len__(self) -> int:
    return len(self._left)

  def __iter__(self) -> Iterator[Tenant]:
    """Tenants, the next one first."""
    return iter([*self._left])

  def join(self, tenant: Tenant) -> None:
    """A tenant has work; it comes last, unless it is there already."""
    self._left.setdefault(tenant, self._quantum * tenant.weight)

  def leave(self, tenant: Tenant) -> None:
    """A tenant has no more work."""
    self._left.pop(tenant, None)

  def turn(self, cost_of: Callable[[Tenant], float | None]) -> Tenant | None:
    """The tenant to serve; it keeps its turn until it cannot pay.

    Args:
      cost_of: of the next item of a tenant; None if it has none, and keeps its place.
    """
    while True:
      idle = True
      for tenant in self:
        cost = cost_of(tenant)
        if cost is None:
          continue
        idle = False
        if self._left[tenant] >= cost:
          return tenant
        self._left[tenant] += self._quantum * tenant.weight
        self._left.move_to_end(tenant)
      if idle:
        return None

  def pay(self, tenant: Tenant, cost: float) -> None:
    """The tenant was served."""
    self._left[tenant] -= cost


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
    cost: of the next slice.
  """

  def __init__(self, steps: Steps):
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
  """Threads that do slices of jobs, tenants in turn, jobs of a tenant in order."""

  def __init__(self, threads: int, name: str, quantum: float):
    self._turns = Turns(quantum)
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
    """The result of a job."""
    job = SlicedJob(steps)
    with self._changed:
      if self._stopped:
        job.future.cancel()
      else:
        self._put(tenant, job)
    return job.future

  def close(self, seconds: float | None = None) -> None:
    """Drops waiting work and ends the threads after their slices, in at most ``seconds`` each."""
    with self._changed:
      self._stopped = True
      for jobs in self._jobs.values():
        for job in jobs:
          job.future.cancel()
      self._changed.notify_all()
    for thread in self._threads:
      thread.join(seconds)

  def _put(self, tenant: Tenant, job: SlicedJob, first: bool = False) -> None:
    if job.future.done():
      return
    jobs = self._jobs.setdefault(tenant, collections.deque())
    (jobs.appendleft if first else jobs.append)(job)
    self._turns.join(tenant)
    self._changed.notify()

  def _take(self) -> tuple[Tenant, SlicedJob] | None:
    tenant = self._turns.turn(lambda tenant: self._jobs[tenant][0].cost)
    if tenant is None:
      return None
    jobs = self._jobs[tenant]
    job = jobs.popleft()
    self._turns.pay(tenant, job.cost)
    if not jobs:
      del self._jobs[tenant]
      self._turns.leave(tenant)
    return tenant, job

  def _run(self) -> None:
    while True:
      with self._changed:
        while (taken := self._take()) is None:
          if self._stopped:
            return
          self._changed.wait()
      tenant, job = taken
      job.advance()
      with self._changed:
        if self._stopped:
          job.future.cancel()
        self._put(tenant, job, first=True)
