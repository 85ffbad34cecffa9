"""Admission of requests: a decision for every request, before its work begins.

A request enters when its body has arrived. It gets the device unless
it would wait too long. Until it is done, each waiting request of its tenant takes at most as much
of the device as it does, and each other tenant as much as the weights say; that is the prediction.
Refused requests are sent back one behind the other, so that they do not return together. One that
returns at once, with as large a body, is refused before it is decoded, and waits for the answer.
"""

import contextlib
import dataclasses
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

from dprjax.serving.options import Limits
from dprjax.serving.turns import Tenant, Work

AGAIN_S = 0.5  # for so long a refusal stands for requests of the same size


class Busy(Exception):
  def __init__(self, seconds: float, why: str):
    super().__init__(f'{why}; try again in {seconds:.0f} s')
    self.seconds = seconds


class TooSoon(Busy):
  """A request returned at once after a refusal. Its answer is to wait for `AGAIN_S`."""


@dataclasses.dataclass(eq=False)
class Permit:
  """An admitted request."""

  tenant: Tenant
  size: int
  waiting: float = 0.0


class Admission:
  """The waiting work of a server, by tenant."""

  def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic):
    self._limits, self._clock, self._lock = limits, clock, threading.Lock()
    self.waiting: defaultdict[Tenant, float] = defaultdict(float)
    self._active: defaultdict[Tenant, set[Permit]] = defaultdict(set)
    self._room: dict[Tenant, float] = {}  # when those that were sent back are done
    self._refused: dict[Tenant, tuple[int, float, float]] = {}  # size of one, until when, its end
    self._held = 0

  @contextlib.contextmanager
  def enter(self, tenant: Tenant, concurrent: int | None = None, size: int = 0) -> Iterator[Permit]:
    """Lets a request in, until ``with`` ends.

    Args:
      concurrent: the most requests of the tenant at a time.
      size: bytes of the body, which has arrived.

    Raises:
      Busy: the request must be retried later.
    """
    with self._lock:
      active = self._active.get(tenant, ())
      later = max(1.0, min(self.waiting.get(tenant, 0.0), self._limits.seconds))
      if sum(map(len, self._active.values())) >= self._limits.requests:
        raise Busy(later, f'{self._limits.requests} requests are answered at a time')
      if concurrent is not None and len(active) >= concurrent:
        raise Busy(later, f'this key may have {concurrent} requests at a time')
      least, until, end = self._refused.get(tenant, (0, 0.0, 0.0))
      now = self._clock()
      if size and size >= least and now < until:
        raise TooSoon(max(1.0, end - now), 'a request of this size was refused just now')
      permit = Permit(tenant, size)
      self._active[tenant].add(permit)
    try:
      yield permit
    finally:
      self._wait_for(permit, 0.0)
      with self._lock:
        self._active[tenant].discard(permit)
        if not self._active[tenant]:
          del self._active[tenant]
          self.waiting.pop(tenant, None)
          self._room.pop(tenant, None)

  @contextlib.contextmanager
  def hold(self, size: int) -> Iterator[None]:
    """Counts bytes of bodies and answers as kept, until ``with`` ends.

    Raises:
      Busy: there would be too many.
    """
    if self._held + size > self._limits.memory:
      raise Busy(1.0, f'requests and answers of {self._held >> 20} MB are being sent')
    self._held += size
    try:
      yield
    finally:
      self._held -= size

  def ask(self, permit: Permit, work: Work) -> None:
    """Asks for the device, by an estimate of the work.

    Raises:
      Busy: the request must be retried later.
    """
    tenant, now = permit.tenant, self._clock()
    with self._lock:
      before = sum(min(one.waiting, work.seconds) for one in self._active[tenant])
      wait = self._until(tenant, before)
      end = self._until(tenant, before + work.seconds)
      late = max(wait - self._limits.wait, end - self._limits.seconds)
      if late > 0 and end > work.seconds:
        later = self._send_back(tenant, min(late, end - work.seconds), end - wait, now)
        self._refused[tenant] = permit.size, now + AGAIN_S, now + later
        raise Busy(later, f'the answer would take {end:.0f} s')
    self._wait_for(permit, work.seconds)

  def know(self, permit: Permit, work: Work) -> None:
    """Replaces the estimate."""
    self._wait_for(permit, work.seconds)

  def spend(self, permit: Permit, seconds: float) -> None:
    self._wait_for(permit, max(0.0, permit.waiting - seconds))

  def refuse(self, permit: Permit) -> None:
    """Lets no request of its tenant in for a moment that is as large."""
    now = self._clock()
    self._refused[permit.tenant] = permit.size, now + AGAIN_S, now + 1.0

  def _until(self, tenant: Tenant, seconds: float) -> float:
    """Seconds until so much work of a tenant is done."""
    return seconds + sum(
      min(waiting, seconds * rival.weight / tenant.weight)
      for rival, waiting in self.waiting.items()
      if rival != tenant
    )

  def _send_back(self, tenant: Tenant, late: float, work: float, now: float) -> float:
    """Seconds until a refused request finds room, behind the ones that were refused before it.

    Args:
      late: seconds until there is room for one.
      work: seconds of its work, at the share of the tenant.
    """
    room = max(self._room.get(tenant, 0.0), now + late)
    most = now + max(late, self._limits.seconds)
    self._room[tenant] = min(room + work, most)
    return max(1.0, min(room, most) - now)

  def _wait_for(self, permit: Permit, seconds: float) -> None:
    with self._lock:
      if seconds != permit.waiting:
        self.waiting[permit.tenant] += seconds - permit.waiting
        permit.waiting = seconds
