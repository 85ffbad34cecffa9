"""Admission of requests: a decision for every request, before its work begins.

A request enters if it will not wait too long. The wait is predicted from the waiting tokens, the
token rate of the device, and the share of the tenant. If it is too long, the answer says when to
retry: refused requests are sent back one behind the other, so that they do not return together.
The limits of keys are also counted here.

Limits count only in this process: each of n servers behind a balancer allows them.
"""

import dataclasses
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Self

from dprjax.serving.batcher import Busy
from dprjax.serving.turns import Tenant

_MINUTE = 60.0


@dataclasses.dataclass(frozen=True)
class TenantLimits:
  """Limits of one tenant; None: no limit.

  Attributes:
    requests, tokens, bytes: a minute; bytes are those of bodies.
    concurrent: requests at a time.
  """

  requests: int | None = None
  tokens: int | None = None
  bytes: int | None = None
  concurrent: int | None = None


UNLIMITED = TenantLimits()


class _Minute:
  """A bucket that holds the allowance of a minute and fills steadily.

  A request larger than all of it needs a full bucket, and empties the next ones.
  """

  def __init__(self) -> None:
    self._level, self._at, self._most = 0.0, 0.0, 0.0

  def wait(self, most: int, cost: float, now: float) -> float:
    """Seconds until ``cost`` can be taken of ``most`` a minute."""
    self._fill(most, now)
    return max(0.0, min(cost, most) - self._level) * _MINUTE / most

  def take(self, most: int, cost: float, now: float) -> None:
    self._fill(most, now)
    self._level -= cost

  def _fill(self, most: int, now: float) -> None:
    if most != self._most:  # at first, and when the limits of a key change
      self._level, self._most = self._level + most - self._most, most
    self._level = min(most, self._level + (now - self._at) * most / _MINUTE)
    self._at = now


class Permit:
  """An admitted request, until ``with`` ends.

  Attributes:
    tenant: of the request.
    waiting: its waiting tokens, in backbone tokens.
  """

  def __init__(self, admission: 'Admission', tenant: Tenant, limits: TenantLimits, tokens: float):
    self._admission, self.tenant, self._limits = admission, tenant, limits
    self.waiting, self._counted = 0.0, tokens

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self._admission._leave(self)

  def know(self, tokens: float, price: float = 1.0) -> None:
    """Replaces the estimate of tokens by their number. ``price``: as of `Admission.enter`."""
    self._admission._wait_for(self, tokens * price)
    self._admission._count(self.tenant, self._limits, tokens - self._counted)
    self._counted = tokens

  def spend(self, tokens: float) -> None:
    """Records finished backbone tokens."""
    self._admission._wait_for(self, max(0.0, self.waiting - tokens))


class Admission:
  """The waiting work of a server, by tenant.

  Attributes:
    waiting: tokens by tenant.
  """

  def __init__(
    self,
    rate: Callable[[], float],
    *,
    requests: int,
    wait: float,
    seconds: float,
    bytes: int,
    clock: Callable[[], float] = time.monotonic,
  ):
    """See `enter`.

    Args:
      rate: tokens a second of the device; 0 if not known yet.
      requests: at a time.
      wait: the most seconds before the work on a request begins.
      seconds: the most until it is done, if others are before it.
      bytes: limit of bodies and vectors kept by all requests.
      clock: seconds.
    """
    self._rate, self._clock = rate, clock
    self._requests, self._wait, self._seconds, self._bytes = requests, wait, seconds, bytes
    self._lock = threading.Lock()
    self.waiting: defaultdict[Tenant, float] = defaultdict(float)
    self._active: Counter[Tenant] = Counter()
    self._minutes: defaultdict[tuple[str, str], _Minute] = defaultdict(_Minute)
    self._room: dict[Tenant, float] = {}  # when those that were sent back are done
    self._held = 0

  def enter(
    self,
    tenant: Tenant,
    limits: TenantLimits,
    *,
    tokens: float = 0.0,
    price: float = 1.0,
    size: int = 0,
  ) -> Permit:
    """Lets a request in.

    Args:
      tokens: an estimate of the tokens for the device.
      price: backbone tokens that take the time of one of these tokens.
      size: bytes of the body, which has arrived.

    Raises:
      Busy: the request must be retried later.
    """
    now = self._clock()
    with self._lock:
      ahead = self._ahead(tenant)
      later = max(1.0, min(ahead, self._seconds))
      if self._active.total() >= self._requests:
        raise Busy(later, f'{self._requests} requests are answered at a time')
      if limits.concurrent is not None and self._active[tenant] >= limits.concurrent:
        raise Busy(later, f'this key may have {limits.concurrent} requests at a time')
      costs = {'requests': 1.0, 'tokens': tokens, 'bytes': float(size)}
      for what, cost in costs.items():
        most = getattr(limits, what)
        if most is None or not cost:
          continue
        later = self._minutes[tenant.name, what].wait(most, cost, now)
        if later > 0:
          raise Busy(max(1.0, later), f'this key may use {most:,} {what} a minute')
      if tokens and ahead:
        own = tokens * price / self._rate()
        late = max(ahead - self._wait, ahead + own - self._seconds)
        if late > 0:
          later = self._send_back(tenant, min(late, ahead), own * self._parts(tenant), now)
          raise Busy(later, f'the wait would be {ahead:.0f} s')
      for what, cost in costs.items():
        if (most := getattr(limits, what)) is not None:
          self._minutes[tenant.name, what].take(most, cost, now)
      self._active[tenant] += 1
    permit = Permit(self, tenant, limits, tokens)
    self._wait_for(permit, tokens * price)
    return permit

  def hold(self, size: int) -> None:
    """Counts bytes of bodies and answers as kept, until `release`.

    Raises:
      Busy: there would be too many.
    """
    with self._lock:
      if self._held + size > self._bytes:
        raise Busy(1.0, f'requests and answers of {self._held >> 20} MB are being sent')
      self._held += size

  def release(self, size: int) -> None:
    """Counts bytes as no longer kept."""
    with self._lock:
      self._held -= size

  def predict(self, tenant: Tenant) -> float:
    """Seconds until the work on a request of this tenant would begin."""
    with self._lock:
      return self._ahead(tenant)

  def forget(self, kept: set[str]) -> None:
    """Drops the counts of removed tenants."""
    with self._lock:
      for name, what in list(self._minutes):
        if name not in kept:
          del self._minutes[name, what]

  def _ahead(self, tenant: Tenant) -> float:
    rate = self._rate()
    if not rate:
      return 0.0
    own = self.waiting.get(tenant, 0.0)
    return min(own * self._parts(tenant), sum(self.waiting.values())) / rate

  def _parts(self, tenant: Tenant) -> float:
    """The server divided by the share of a tenant."""
    others = (
      other.weight for other, tokens in self.waiting.items() if tokens > 0 and other != tenant
    )
    return (tenant.weight + sum(others)) / tenant.weight

  def _send_back(self, tenant: Tenant, late: float, own: float, now: float) -> float:
    """Seconds until a refused request finds room, behind the ones that were refused before it.

    Args:
      late: seconds until there is room for one.
      own: seconds of its work, at the share of the tenant.
    """
    room = max(self._room.get(tenant, 0.0), now + late)
    most = now + max(late, self._seconds)
    self._room[tenant] = min(room + own, most)
    return max(1.0, min(room, most) - now)

  def _count(self, tenant: Tenant, limits: TenantLimits, tokens: float) -> None:
    with self._lock:
      if limits.tokens is not None:
        self._minutes[tenant.name, 'tokens'].take(limits.tokens, tokens, self._clock())

  def _wait_for(self, permit: Permit, tokens: float) -> None:
    with self._lock:
      if tokens != permit.waiting:
        self.waiting[permit.tenant] += tokens - permit.waiting
        permit.waiting = tokens

  def _leave(self, permit: Permit) -> None:
    self._wait_for(permit, 0.0)
    with self._lock:
      self._active[permit.tenant] -= 1
      if not self._active[permit.tenant]:
        del self._active[permit.tenant]
        self.waiting.pop(permit.tenant, None)
        self._room.pop(permit.tenant, None)
