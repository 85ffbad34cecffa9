import collections
import threading

import pytest

from dprjax.serving.turns import FairPool, SlicedJob, Tenant, Turns, finish, slices

ONE, TWO, HEAVY = Tenant('one'), Tenant('two'), Tenant('heavy', 3.0)


def served(work, quantum, rounds):
  """The tenants in the order in which so many items are taken."""
  turns, left = Turns(quantum), {tenant: collections.deque(items) for tenant, items in work.items()}
  for tenant in left:
    turns.join(tenant)
  order = []
  while len(order) < rounds:
    tenant = turns.turn(lambda tenant: left[tenant][0] if left[tenant] else None)
    if tenant is None:
      break
    turns.pay(tenant, left[tenant].popleft())
    if not left[tenant]:
      turns.leave(tenant)
    order.append(tenant)
  return order


def test_turns_share_tokens_and_not_items():
  order = served({ONE: [100] * 999, TWO: [10] * 999}, 100, 330)
  assert order.count(ONE) * 100 == pytest.approx(order.count(TWO) * 10, abs=200)
  weighted = served({ONE: [10] * 999, HEAVY: [10] * 999}, 50, 400)
  assert weighted.count(HEAVY) == pytest.approx(3 * weighted.count(ONE), abs=15)


def test_who_comes_last_waits_for_one_turn_of_each_other():
  order = served({ONE: [50] * 100, TWO: [50]}, 100, 10)
  assert order.index(TWO) == 2
  assert served({ONE: [1000], TWO: [10]}, 100, 2) == [TWO, ONE]  # costs more than a turn pays for
  assert served({}, 100, 2) == []


def test_who_has_nothing_that_fits_keeps_its_turn():
  turns = Turns(10)
  for tenant in (ONE, TWO):
    turns.join(tenant)
  assert turns.turn(lambda tenant: None if tenant == ONE else 4) == TWO
  assert turns.turn(lambda tenant: 4) == ONE


def count(to, done):
  for number in range(to):
    yield 1.0
    done.append(number)
  return to


def test_a_job_in_slices():
  done: list[int] = []
  job = SlicedJob(count(3, done))
  assert job.cost == 1.0 and done == []
  for _ in range(3):
    job.advance()
  assert job.future.result(0) == 3 and done == [0, 1, 2]
  left = SlicedJob(count(9, done))
  left.advance()
  assert left.future.cancel()
  left.advance()
  assert done == [0, 1, 2, 0]
  assert finish(count(4, [])) == 4
  assert [*slices(['a' * 30_000, 'b' * 3000, 'c', 'd' * 90_000], len)] == [
    ['a' * 30_000],
    ['b' * 3000, 'c'],
    ['d' * 90_000],
  ]


def test_a_pool_serves_a_short_job_between_the_slices_of_a_long_one():
  pool, order, go = FairPool(1, 'test', 1.0), [], threading.Event()

  def steps(name, slices):
    for _ in range(slices):
      yield 1.0
      go.wait(10)
      order.append(name)
    if name == 'bad':
      raise ValueError(name)

  futures = [pool.submit(ONE, steps('long', 20)), pool.submit(TWO, steps('short', 1))]
  bad = pool.submit(TWO, steps('bad', 1))
  go.set()
  for future in futures:
    future.result(10)
  with pytest.raises(ValueError, match='bad'):
    bad.result(10)
  assert order.index('short') <= 2 and order.index('bad') <= 4 and order.count('long') == 20
  go.clear()
  running, waiting = (pool.submit(ONE, steps('late', 2)) for _ in range(2))
  go.set()
  pool.close(10)
  assert waiting.cancelled() or waiting.done()
  assert running.done() and pool.submit(ONE, steps('none', 1)).cancelled()
