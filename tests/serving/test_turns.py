import collections
import threading

import pytest

from dprjax.serving.turns import FairPool, SlicedJob, Tenant, Turns, finish, slices

ONE, TWO, HEAVY = Tenant('one'), Tenant('two'), Tenant('heavy', 3.0)


def served(work, rounds):
  """The tenants in the order in which so many items are taken."""
  turns, left = Turns(), {tenant: collections.deque(items) for tenant, items in work.items()}
  for tenant in left:
    turns.join(tenant)
  order = []
  while len(order) < rounds and (tenant := turns.next()) is not None:
    turns.pay(tenant, left[tenant].popleft())
    if not left[tenant]:
      turns.leave(tenant)
    order.append(tenant)
  return order


def test_turns_share_costs_and_not_items():
  order = served({ONE: [100] * 999, TWO: [10] * 999}, 330)
  assert order.count(ONE) * 100 == pytest.approx(order.count(TWO) * 10, abs=200)
  weighted = served({ONE: [10] * 999, HEAVY: [10] * 999}, 400)
  assert weighted.count(HEAVY) == pytest.approx(3 * weighted.count(ONE), abs=15)
  assert served({}, 2) == []


def test_who_asks_for_less_than_its_share_is_next_and_who_left_saves_nothing():
  turns = Turns()
  turns.join(ONE)
  for _ in range(100):
    turns.pay(ONE, 50)
  turns.join(TWO)
  assert turns.next() == TWO
  turns.pay(TWO, 120)
  turns.leave(TWO)
  turns.join(TWO)  # its work is remembered, but not the turns of others before it came
  order = []
  for _ in range(6):
    order.append(turns.next())
    turns.pay(order[-1], 50)
  assert order == [ONE, ONE, TWO, ONE, TWO, ONE]
  assert turns.next([TWO]) == TWO and turns.next([]) is None


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
  pool, order, go = FairPool(1, 'test'), [], threading.Event()

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
  pool.close()
  assert waiting.cancelled() or waiting.done()
  assert running.done() and pool.submit(ONE, steps('none', 1)).cancelled()
