import hashlib

import numpy as np
import pytest

from dprjax.base import outofcore


def test_rows_come_back_by_bucket_in_their_order(tmp_path):
  buckets = outofcore.Buckets(tmp_path / 'rows', np.dtype([('a', '<i4'), ('b', '<f8')]))
  rng = np.random.default_rng(0)
  everything, numbers = [], []
  for size in (1000, 1, 0, 500):
    rows = np.zeros(size, [('a', '<i4'), ('b', '<f8')])
    rows['a'], rows['b'] = rng.integers(0, 100, size), rng.standard_normal(size)
    numbers.append(rng.integers(0, 7, size))
    everything.append(rows)
    buckets.append(rows, numbers[-1])
  everything, numbers = np.concatenate(everything), np.concatenate(numbers)
  for bucket in range(8):
    assert np.array_equal(buckets.read(bucket), everything[numbers == bucket])
  assert len(buckets.pop(3)) and not len(buckets.pop(3))
  assert not len(buckets.read(3)) and len(buckets.read(4))


def test_keys_depend_only_on_the_id():
  ids = ['', 'a', 'b', 'a ', 'ab', '12345678', '123456789', '1234567890123456']
  ids += ['12345678901234567', 'MED-10', 'é', '語' * 20, 'a' * 300]
  together = outofcore.keys_of(ids)
  assert len(set(together.tolist())) == len(ids)
  assert [int(outofcore.keys_of([id_])[0]) for id_ in ids] == together.tolist()
  text = np.frombuffer(b'xx12345678yyab', np.uint8)
  keys = outofcore.keys_at(text, np.array([2, 12]), np.array([10, 14]))
  assert keys.tolist() == outofcore.keys_of(['12345678', 'ab']).tolist()
  assert outofcore.keys_of([]).shape == (0,)


def test_keys_of_many_ids_do_not_collide():
  ids = [str(number) for number in range(100_000)] + [
    f'https://example.org/page/{number}' for number in range(100_000)
  ]
  keys = outofcore.keys_of(ids)
  assert len(np.unique(keys)) == len(ids)
  # Even in its first bits, by which a corpus is divided.
  parts = np.bincount((keys >> np.uint64(56)).astype(np.int64), minlength=256)
  assert parts.min() > 650 and parts.max() < 920


def test_find():
  values = np.array([2, 5, 5, 9], np.uint64)
  wanted = np.array([9, 1, 5, 10, 2, 6], np.uint64)
  assert outofcore.positions(values, wanted).tolist() == [3, -1, 1, -1, 0, -1]
  assert outofcore.positions(values[:0], wanted).tolist() == [-1] * 6


@pytest.mark.parametrize('in_memory', [1000, 10])
def test_copies_of_digests(monkeypatch, in_memory):
  monkeypatch.setattr(outofcore.Copies, 'IN_MEMORY', in_memory)
  values = np.random.default_rng(0).integers(0, 40, 100).tolist()
  copies = outofcore.Copies()
  for start in range(0, 100, 7):
    some = values[start : start + 7]
    digests = b''.join(hashlib.md5(bytes([value])).digest() for value in some)
    copies.add(digests, range(start, start + len(some)))
  expected = [[values.index(value), i] for i, value in enumerate(values) if value in values[:i]]
  assert copies.pairs().tolist() == expected
  assert outofcore.Copies().pairs().shape == (0, 2)
