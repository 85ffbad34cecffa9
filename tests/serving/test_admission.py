import contextlib

import pytest

from dprjax.serving.admission import Admission, Busy, TooSoon
from dprjax.serving.options import Limits
from dprjax.serving.turns import Tenant, Work

ONE, TWO, HEAVY = Tenant('one'), Tenant('two'), Tenant('heavy', 4.0)


class Clock:
  now = 100.0

  def __call__(self):
    return self.now


@pytest.fixture
def clock():
  return Clock()


def admission(clock, **changes):
  options = {'requests': 100, 'wait': 10.0, 'seconds': 60.0, 'memory': 1000} | changes
  return Admission(Limits(**options), clock)


@contextlib.contextmanager
def entered(admission, tenant, concurrent=None, seconds=0.0, size=0):
  with admission.enter(tenant, concurrent, size) as permit:
    admission.ask(permit, Work(0.0, seconds))
    yield permit


def busy(*args, **options):
  """When to come again; None: its work may begin."""
  try:
    with entered(*args, **options):
      return None
  except Busy as error:
    return error.seconds


def enters(*args, **options):
  return busy(*args, **options) is None


def test_a_request_waits_for_as_much_of_others_as_it_asks_for(clock):
  door = admission(clock)
  with contextlib.ExitStack() as stack:
    big = stack.enter_context(entered(door, ONE, seconds=55))  # nobody is before it
    assert enters(door, ONE, seconds=10) and not enters(door, ONE, seconds=11)
    # Another tenant has its share of the device at once.
    assert enters(door, TWO, seconds=30) and not enters(door, TWO, seconds=31)
    assert enters(door, HEAVY, seconds=48) and not enters(door, HEAVY, seconds=49)
    stack.enter_context(entered(door, TWO, seconds=3))
    assert enters(door, ONE, seconds=7) and not enters(door, ONE, seconds=8)
    assert enters(door, ONE)  # nothing for the device
    door.spend(big, 50)
    assert enters(door, ONE, seconds=52) and not enters(door, ONE, seconds=53)
    door.know(big, Work(0, 6.0))
    assert enters(door, ONE, seconds=51) and not enters(door, ONE, seconds=52)
    door.spend(big, 10)  # more than it was
    assert enters(door, ONE, seconds=57) and not enters(door, ONE, seconds=58)
  assert not door.waiting and busy(door, ONE, seconds=10**6) is None


def test_one_that_could_not_be_done_in_time_is_told_at_once(clock):
  for seconds, later in ((56, 1.0), (100, 5.0), (55, None)):
    door = admission(clock)
    with entered(door, ONE, seconds=5):
      assert busy(door, ONE, seconds=seconds) == later


def test_refused_requests_do_not_return_together(clock):
  door = admission(clock)
  with entered(door, ONE, seconds=24) as first, entered(door, TWO, seconds=24):
    # The first waits 16 seconds at half of the device, and takes as long.
    assert [busy(door, ONE, seconds=8) for _ in range(3)] == [6.0, 22.0, 38.0]
    assert busy(door, TWO, seconds=8) == 6.0
    assert [busy(door, ONE, seconds=8) for _ in range(2)] == [54.0, 60.0]  # the time of a request
    door.spend(first, 23)
    assert busy(door, ONE, seconds=1) is None
  with entered(door, ONE, seconds=11):  # the work was done, nothing is left of them
    assert busy(door, ONE, seconds=11) == 1.0


def test_who_returns_at_once_is_refused_unread(clock):
  door = admission(clock)
  with entered(door, ONE, seconds=30):
    assert busy(door, ONE, seconds=20, size=500) == 10.0
    with pytest.raises(TooSoon), door.enter(ONE, None, 500):
      pass
    with door.enter(ONE, None, 499), door.enter(TWO, None, 500):
      clock.now += 1
    with door.enter(ONE, None, 500):
      pass


def test_a_key_has_so_many_requests_at_a_time(clock):
  door = admission(clock)
  with entered(door, ONE, 2), entered(door, ONE, 2):
    assert busy(door, ONE, 2) == 1.0 and busy(door, TWO, 2) is None
  assert busy(door, ONE, 2) is None


def test_requests_and_bytes_of_all(clock):
  door = admission(clock, requests=1)
  with entered(door, ONE):
    assert busy(door, TWO) == 1.0
  with door.hold(900), pytest.raises(Busy), door.hold(101):
    pass
  with door.hold(1000):
    pass
