import contextlib

import pytest

from dprjax.serving.admission import UNLIMITED, Admission, TenantLimits
from dprjax.serving.batcher import Busy
from dprjax.serving.turns import Tenant

ONE, TWO = Tenant('one'), Tenant('two')


class Clock:
  now = 100.0

  def __call__(self):
    return self.now


@pytest.fixture
def clock():
  return Clock()


def admission(clock, rate=100.0, **changes):
  options = {'requests': 100, 'wait': 10.0, 'seconds': 60.0, 'bytes': 1000} | changes
  return Admission(lambda: rate, clock=clock, **options)


def busy(admission, *args, **options):
  """When to come again; None: it may enter."""
  try:
    with admission.enter(*args, **options):
      return None
  except Busy as error:
    return error.seconds


def test_a_request_enters_by_the_wait_that_is_predicted(clock):
  door = admission(clock)
  with contextlib.ExitStack() as stack:
    big = stack.enter_context(door.enter(ONE, UNLIMITED, tokens=9000))  # nobody is before it
    assert door.predict(ONE) == 90.0
    assert busy(door, ONE, UNLIMITED, tokens=10) == 80.0
    # Another tenant gets half of the device: it does not wait for all that is there.
    assert door.predict(TWO) == 0.0 and busy(door, TWO, UNLIMITED, tokens=2000) is None
    stack.enter_context(door.enter(TWO, UNLIMITED, tokens=600))
    assert door.predict(TWO) == 12.0 and busy(door, TWO, UNLIMITED, tokens=1) == 2.0
    assert busy(door, TWO, UNLIMITED) is None  # nothing for the device
    big.spend(8500)
    assert door.predict(ONE) == 10.0 and busy(door, ONE, UNLIMITED, tokens=100) is None
    big.know(100)
    assert door.predict(ONE) == 2.0
    big.spend(1000)  # more than it was
    assert door.predict(ONE) == 0.0
  assert not door.waiting and busy(door, ONE, UNLIMITED, tokens=10**6) is None


def test_one_that_could_not_be_done_in_time_is_told_at_once(clock):
  for options, later in (
    ({'tokens': 5600}, 1.0),
    ({'tokens': 5000, 'price': 2.0}, 5.0),
    ({'tokens': 5000}, None),
  ):
    door = admission(clock)
    with door.enter(ONE, UNLIMITED, tokens=500):
      assert busy(door, ONE, UNLIMITED, **options) == later
  assert busy(admission(clock, rate=0.0), ONE, UNLIMITED, tokens=10**9) is None  # not known yet


def test_refused_requests_do_not_return_together(clock):
  door = admission(clock)
  with door.enter(ONE, UNLIMITED, tokens=1100) as first, door.enter(TWO, UNLIMITED, tokens=1100):
    # Each of them takes 4 seconds at half of the device.
    assert [busy(door, ONE, UNLIMITED, tokens=200) for _ in range(3)] == [12.0, 16.0, 20.0]
    assert busy(door, TWO, UNLIMITED, tokens=200) == 12.0
    assert busy(door, ONE, UNLIMITED, tokens=6000) == 24.0
    assert busy(door, ONE, UNLIMITED, tokens=1) == 60.0  # not later than the time of a request
    first.spend(700)
    assert busy(door, ONE, UNLIMITED, tokens=200) is None
  with door.enter(ONE, UNLIMITED, tokens=1100):  # the work was done, nothing is left of them
    assert busy(door, ONE, UNLIMITED, tokens=200) == 1.0


def test_limits_of_a_key(clock):
  door = admission(clock)
  two = TenantLimits(concurrent=2)
  with door.enter(ONE, two), door.enter(ONE, two):
    assert busy(door, ONE, two) == 1.0 and busy(door, TWO, two) is None
  assert busy(door, ONE, two) is None
  each = TenantLimits(requests=2)
  assert [busy(door, ONE, each) for _ in range(3)] == [None, None, 30.0]
  clock.now += 30
  assert [busy(door, ONE, each) for _ in range(2)] == [None, 30.0]
  tokens = TenantLimits(tokens=600)
  with door.enter(TWO, tokens, tokens=300) as permit:
    permit.know(900)  # the next ones pay for it
  assert busy(door, TWO, tokens, tokens=100) == 40.0
  clock.now += 120
  assert busy(door, TWO, tokens, tokens=10_000) is None  # more than a minute has: it needs all
  assert busy(door, TWO, tokens, tokens=1) > 900
  door.forget({'one'})
  assert busy(door, TWO, tokens, tokens=1) is None
  bytes = TenantLimits(bytes=100)
  assert [busy(door, ONE, bytes, size=60) for _ in range(2)] == [None, 12.0]


def test_requests_and_bytes_of_all(clock):
  door = admission(clock, requests=1)
  with door.enter(ONE, UNLIMITED):
    assert busy(door, TWO, UNLIMITED) == 1.0
  door.hold(900)
  with pytest.raises(Busy):
    door.hold(101)
  door.release(900)
  door.hold(1000)
