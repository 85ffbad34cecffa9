import contextlib
import weakref

import jax
import numpy as np
import pytest

from dprjax.encoding import codes, embeddings
from dprjax.retrieval import best, exact
from tests.refusals import refused


@pytest.fixture
def compiling_nothing(caplog):
  """``with compiling_nothing():`` fails where a program is compiled."""

  @contextlib.contextmanager
  def watch():
    caplog.clear()
    with jax.log_compiles(), caplog.at_level('WARNING', logger='jax'):
      yield
    assert [one.getMessage() for one in caplog.records if 'ompil' in one.getMessage()] == []

  return watch


def reference(queries, corpus, k):
  """Top k in float64, by falling score, then falling id, which is the row number as text."""
  scores = queries.astype(np.float64) @ corpus.astype(np.float64).T
  by_id = np.array(sorted(range(len(corpus)), key=str, reverse=True))
  rows = by_id[np.argsort(-scores[:, by_id], axis=1, kind='stable')[:, :k]]
  return np.take_along_axis(scores, rows, axis=1), rows


# 1,000 documents do not divide into blocks of 256, nor 7 queries into blocks of 4; k exceeds a
# device's part of the corpus.
@pytest.mark.slow_but_first
@pytest.mark.parametrize('devices', [1, 8])
@pytest.mark.parametrize(
  'n, k, block_rows, block_queries',
  [(1000, 300, 256, 4), (1000, 2000, 32768, 512), (5, 10, 256, 4), (1, 1, 256, 4)],
)
def test_equals_float64(devices, n, k, block_rows, block_queries):
  rng = np.random.default_rng(0)
  queries, corpus = (rng.standard_normal((count, 24), np.float32) for count in (7, n))
  found = exact.search(
    queries,
    corpus,
    k,
    devices=jax.devices()[:devices],
    block_rows=block_rows,
    block_queries=block_queries,
  )
  scores, rows = reference(queries, corpus, k)
  assert found.rows.shape == (7, min(k, n))
  np.testing.assert_array_equal(found.rows, rows)
  np.testing.assert_allclose(found.scores, scores, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('dtype', codes.LEVELS)
@pytest.mark.parametrize('devices', [1, 8])
def test_codes_from_disk(
  tmp_path, write_embeddings, monkeypatch, compiling_nothing, dtype, devices
):
  """Scores are those of decoded values; the devices hold codes."""
  monkeypatch.setattr(exact, '_DECODED', 32)  # several pieces of a block
  rng = np.random.default_rng(4)
  corpus, queries = rng.standard_normal((500, 13), np.float32), rng.standard_normal((3, 13))
  write_embeddings(
    tmp_path, [f'd{i}' for i in range(500)], corpus, shard_rows=123, dtype=dtype, normalize=False
  )
  found = embeddings.load_embeddings(tmp_path)
  queries = queries.astype(np.float32)
  scores, rows = reference(queries, found.vectors(), 20)
  index = exact.ExactIndex(found.shards, devices=jax.devices()[:devices], block_rows=64)
  assert {block.rows.dtype for block in index._kept} == {codes.stored(dtype)}
  np.testing.assert_allclose(index.search(queries, 20).scores, scores, rtol=1e-5, atol=1e-5)
  if dtype == 'int8':  # of few values, scores tie
    np.testing.assert_array_equal(index.search(queries, 20).rows, rows)
  truth = reference(queries, corpus, 20)[1]
  shared = np.mean([np.isin(some, others) for some, others in zip(rows, truth, strict=True)])
  assert shared > {'int8': 0.9, 'binary': 0.2}[dtype]
  # Queries of some other number need no other program.
  with compiling_nothing():
    index.search(np.tile(queries, (2, 1))[:4], 20)
  # A part of it, and only the first numbers.
  part = exact.search_part(queries, found.shards, 5, 1, 3)
  assert (part.rows >= 166).all() and (part.rows < 333).all()
  short = found.cut(6, '--corpus')
  expected = reference(queries[:, :6], short.vectors(), 5)[0]
  again = exact.search(queries[:, :6], short.shards, 5, block_rows=64)
  np.testing.assert_allclose(again.scores, expected, rtol=1e-5, atol=1e-5)


def test_compiles_once_for_corpora_of_about_a_size(compiling_nothing):
  rng = np.random.default_rng(3)
  queries = rng.standard_normal((3, 16), np.float32)
  exact.search(queries, rng.standard_normal((900, 16), np.float32), 10, block_rows=256)
  with compiling_nothing():
    exact.search(queries, rng.standard_normal((1000, 16), np.float32), 10, block_rows=256)


@pytest.mark.parametrize(
  'queries, corpus, message',
  [
    (np.full((1, 2), np.nan), np.zeros((3, 2)), '0'),
    (np.zeros((1, 2)), np.array([[0, 0], [0, np.inf]]), '1'),
  ],
)
def test_bad_input(queries, corpus, message):
  with refused(message):
    exact.search(queries.astype(np.float32), corpus.astype(np.float32), 1)


def merge_parts(queries, shards, k, parts, ids_at=best.numbers):
  found = [exact.search_part(queries, shards, k, part, parts, ids_at) for part in range(parts)]
  scores, rows = (np.stack(arrays) for arrays in zip(*found, strict=True))
  return exact.merge(scores, rows, ids_at)


@pytest.mark.slow_but_first
@pytest.mark.parametrize('devices', [1, 8])
@pytest.mark.parametrize('kind', ['few values', 'all the same', 'the last rows'])
def test_ties_at_every_cut(devices, kind, monkeypatch):
  """Whatever k, blocks, devices, parts and queries: a prefix of the whole ranking by ids."""
  only = jax.devices()[:devices]
  monkeypatch.setattr(jax, 'local_devices', lambda: only)
  rng = np.random.default_rng(7)
  corpus = rng.integers(-1, 2, (9000, 6)).astype(np.float32)
  if kind != 'few values':
    corpus[5 if kind == 'all the same' else 8000 :] = 1
  ids = [f'{place:x}' for place in rng.permutation(9000)]
  queries = rng.integers(0, 2, (5, 6)).astype(np.float32)
  scores = queries @ corpus.T
  truth = [sorted(range(9000), key=lambda r, s=s: (s[r], ids[r]), reverse=True) for s in scores]
  index = exact.ExactIndex(corpus, block_rows=512, ids_at=best.ids_of(ids))
  for k in (1, 5, 100, 1500):
    expected = [rows[:k] for rows in truth]
    assert index.search(queries, k, block_queries=2).rows.tolist() == expected
    merged = merge_parts(queries, [corpus[:10], corpus[10:]], k, 3, best.ids_of(ids))
    assert merged.rows.tolist() == expected


@pytest.mark.slow_but_first
@pytest.mark.parametrize('parts', [2, 7])
@pytest.mark.parametrize('devices', [1, 8])
def test_parts_of_the_corpus_merge_to_the_bits_of_the_whole(parts, devices, monkeypatch):
  only = jax.devices()[:devices]
  monkeypatch.setattr(jax, 'local_devices', lambda: only)
  # numpy kernels for few rows round differently, by the size of the product.
  size, width = (5, 61), 16
  if devices == 1:
    size, width = (5, 9000), 100
  rng = np.random.default_rng(5)
  queries, corpus = (rng.standard_normal((count, width)).astype(np.float32) for count in size)
  corpus[40:50] = corpus[3]  # equal scores in several parts
  shards = [corpus[:9], corpus[9:9], corpus[9:]]
  whole = exact.search(queries, corpus, 20)
  merged = merge_parts(queries, shards, 20, parts)
  np.testing.assert_array_equal(merged.rows, whole.rows)
  np.testing.assert_array_equal(merged.scores, whole.scores)


@pytest.mark.parametrize('devices', [1, 8])
def test_a_shard_is_read_a_block_at_a_time_and_released(devices):
  """So that memory does not grow with the corpus; benchmarks/exact_search.py measures it."""
  read = []

  class Rows:
    def __init__(self, array):
      self._array, self.shape = array, array.shape

    def __len__(self):
      return len(self._array)

    def __getitem__(self, rows):
      copy = self._array[rows].copy()
      assert sum(earlier() is not None for earlier, _ in read) <= 1
      read.append((weakref.ref(copy), len(copy)))
      return copy

  rng = np.random.default_rng(4)
  # A block has at least 4,096 rows where numpy multiplies.
  unit = {1: 4, 8: 1}[devices]
  queries, corpus = (rng.standard_normal((count, 8), np.float32) for count in (3, 8000 * unit))
  found = exact.search(
    queries,
    [Rows(part) for part in np.split(corpus, [2400 * unit, 5600 * unit])],
    10,
    block_rows=1024 * unit,
    devices=jax.devices()[:devices],
  )
  np.testing.assert_array_equal(found.rows, reference(queries, corpus, 10)[1])
  # 2,400 is 2 * 1,024 + 352: the third block ends in the second shard.
  sizes = [1024, 1024, 352, 672, 1024, 1024, 480, 544, 1024, 832]
  assert [size for _, size in read] == [size * unit for size in sizes]


def test_more_parts_than_rows():
  queries, corpus = np.eye(2, dtype=np.float32), np.array([[1, 0], [0, 2]], np.float32)
  merged = merge_parts(queries, [corpus], 2, 5)
  assert merged.rows.tolist() == [[0, 1], [1, 0]]
  assert merged.scores.tolist() == [[1.0, 0.0], [2.0, 0.0]]
