import numpy as np

from dprjax.data import batches, sampling


def test_rows_of_a_group_go_to_different_batches():
  order = np.random.default_rng(0).permutation(np.arange(96, dtype=np.int32))
  group = np.arange(96) // 3
  found = sampling.spread(order, group, 8)
  assert sorted(found) == list(range(96))
  # The last batches take the rest.
  for batch in found.reshape(-1, 8)[:-2]:
    assert len(set(group[batch])) == 8
  # Rows that need not move keep their order.
  assert (sampling.spread(order, np.arange(96), 8) == order).all()


def test_too_few_others():
  found = sampling.spread(np.arange(8, dtype=np.int32), np.array([0] * 6 + [1, 2]), 4)
  assert sorted(found) == list(range(8)) and found.tolist()[:3] == [0, 6, 7]


def test_the_order_is_that_of_the_step():
  group = np.arange(40) % 20
  rows_of = batches.shuffle_rows(np.arange(40), 8, [1], group)
  assert rows_of(7)[0] == 1 and len(set(group[rows_of(7)[1]])) == 8
  assert sorted(np.concatenate([rows_of(step)[1] for step in range(5)])) == list(range(40))


class Cache:
  """Four queries; the positives of the first two are the same passage."""

  num_queries = 4
  canonical = np.array([0, 0, 2, 3])
  texts = ([*range(100)], [*range(100)], [*range(99), 500], [*range(200, 300)])

  class _Rows:
    def __init__(self, lists):
      self._lists = [np.array(one, np.int32).tobytes() for one in lists]

    def read(self, rows, _):
      return [[self._lists[row] for row in rows]]

  queries, passages = _Rows([[0], [1], [2], [3]]), _Rows(texts)


def test_groups():
  assert len(set(sampling.groups(Cache, near=False)[:2])) == 1
  assert len(set(sampling.groups(Cache, near=False))) == 3
  near = sampling.groups(Cache, near=True)
  assert len(set(near[:3])) == 1 and len(set(near)) == 2


def test_near_duplicates_by_signature():
  found = np.random.default_rng(0).integers(0, 1 << 40, (3, 64)).astype(np.uint64)
  found[1] = found[0]
  found[1, :8] = 7  # 56 of 64 agree
  found[2, :32] = found[0, :32]
  assert sampling.near_duplicates(found) == [(1, 0)]


def test_rows_that_fill_no_batch_of_their_kind_join_the_next():
  order = np.array([4, 9, 2, 7, 0, 5, 8, 1, 3, 6], np.int32)
  kind = np.array([0, 0, 0, 0, 0, 1, 1, 1, 2, 2])
  found = sampling.fill(order, kind, [3, 3, 2])
  # Kind 0 has 4, 2, 0, 1, 3, and two of them move to kind 1; kind 1 has 7, 5, 6; kind 2 has 9, 8.
  assert [rows.tolist() for rows in found] == [[4, 2, 0], [1, 3, 7], [5, 6], [9, 8]]
  apart = sampling.fill(order, kind, [2, 3, 2], group=np.array([0, 0, 0, 1, 1, 2, 3, 4, 5, 6]))
  assert [rows.tolist() for rows in apart[:2]] == [[4, 2], [0, 3]]
  # Rows that fill no batch are left out.
  assert sampling.fill(order, kind, [11, 11, 11]) == []
