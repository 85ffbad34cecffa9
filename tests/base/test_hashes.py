import hashlib

import numpy as np
import pytest

from dprjax.base import hashes


def test_keys_depend_only_on_the_id():
  ids = ['', 'a', 'b', 'a ', 'ab', '12345678', '123456789', '1234567890123456']
  ids += ['12345678901234567', 'MED-10', 'é', '語' * 20, 'a' * 300]
  together = hashes.keys_of(ids)
  assert len(set(together.tolist())) == len(ids)
  assert [int(hashes.keys_of([id_])[0]) for id_ in ids] == together.tolist()
  text = np.frombuffer(b'xx12345678yyab', np.uint8)
  keys = hashes.keys_at(text, np.array([2, 12]), np.array([10, 14]))
  assert keys.tolist() == hashes.keys_of(['12345678', 'ab']).tolist()
  assert hashes.keys_of([]).shape == (0,)


def test_find():
  values = np.array([2, 5, 5, 9], np.uint64)
  wanted = np.array([9, 1, 5, 10, 2, 6], np.uint64)
  assert hashes.positions(values, wanted).tolist() == [3, -1, 1, -1, 0, -1]
  assert hashes.positions(values[:0], wanted).tolist() == [-1] * 6


def test_copies_of_digests():
  values = np.random.default_rng(0).integers(0, 40, 100).tolist()
  copies = hashes.Copies()
  for start in range(0, 100, 7):
    some = values[start : start + 7]
    digests = b''.join(hashlib.md5(bytes([value])).digest() for value in some)
    copies.add(digests, range(start, start + len(some)))
  expected = [[values.index(value), i] for i, value in enumerate(values) if value in values[:i]]
  assert copies.pairs().tolist() == expected
  assert hashes.Copies().pairs().shape == (0, 2)


@pytest.mark.slow
def test_choices_by_one_seed_are_independent():
  ids = [f'2101.{i:05d}' for i in range(5_000)]
  for seed in (0, 1, 42):
    split = np.array([hashes.fraction(id_, seed, '') for id_ in ids])
    for choice in ('hold_out', 'max_queries', 'fold', 'topics', 'random topics', 'random words'):
      other = np.array([hashes.fraction(id_, seed, choice) for id_ in ids])
      # Four standard deviations of a correlation of independent numbers.
      assert abs(np.corrcoef(split, other)[0, 1]) < 4 / len(ids) ** 0.5
