import resource
import shutil

import numpy as np
import pytest

from dprjax.retrieval import exact, scann
from tests.platforms import needs_scann
from tests.refusals import refused

pytestmark = needs_scann


def clustered(count, seed, dimension=64, clusters=400):
  """Unit vectors around common centres; a tree would find nothing in uniform random ones."""
  centres = np.random.default_rng(0).standard_normal((clusters, dimension), np.float32)
  rng = np.random.default_rng(seed)
  vectors = centres[rng.integers(0, clusters, count)] + 0.35 * rng.standard_normal(
    (count, dimension), np.float32
  )
  return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_brute_force_equals_exact():
  corpus, queries = clustered(3000, 1), clustered(20, 2)
  index = scann.build(corpus, 10)
  assert index.kind == 'brute_force'
  found, truth = index.search(queries, 50, index.settings(50)), exact.search(queries, corpus, 50)
  np.testing.assert_array_equal(found.rows, truth.rows)
  np.testing.assert_allclose(found.scores, truth.scores, rtol=1e-5)
  assert index.tune(queries, truth.rows, 1.0) == (scann.ScannSettings(0, 0), 1.0)


def test_saved_moved_and_loaded(tmp_path):
  corpus, queries = clustered(500, 1), clustered(3, 2)
  index = scann.build(corpus, 10)
  assert scann.load(tmp_path / 'index', 'abc') is None
  scann.save(index, tmp_path / 'index', 'abc')
  (tmp_path / 'index').rename(tmp_path / 'moved')
  again = scann.load(tmp_path / 'moved', 'abc')
  assert (again.count, again.leaves) == (500, 0)
  for before, after in zip(
    index.search(queries, 10, index.settings(10)),
    again.search(queries, 10, again.settings(10)),
    strict=True,
  ):
    np.testing.assert_array_equal(before, after)
  assert scann.load(tmp_path / 'moved', 'other vectors') is None


@pytest.fixture(scope='module')
def kept(tmp_path_factory):
  folder = tmp_path_factory.mktemp('scann') / 'index'
  scann.save(scann.build(clustered(500, 1), 10), folder, 'abc')
  return folder


def _flip(file, place):
  content = bytearray(file.read_bytes())
  content[place] ^= 1
  file.write_bytes(content)


@pytest.mark.parametrize('fingerprint', ['abc', 'other vectors'])
@pytest.mark.parametrize(
  'harm, message, also',
  [
    (lambda f: _flip(f / 'dataset.npy', -7), 'dataset.npy', False),
    (lambda f: (f / 'thesis.tex').write_text('years of work'), 'thesis.tex', True),
  ],
)
def test_a_kept_index_that_was_changed(tmp_path, kept, fingerprint, harm, message, also):
  """Nothing of it is loaded; one of other vectors may be replaced if all of it is ours."""
  folder = tmp_path / 'index'
  shutil.copytree(kept, folder)
  harm(folder)
  if fingerprint == 'abc' or also:
    with refused(message):
      scann.load(folder, fingerprint)
  else:
    assert scann.load(folder, fingerprint) is None


def test_recall_known_by_hand():
  assert scann.recall(
    np.array([[1, 2, 3], [4, -1, -1]]), np.array([[3, 9, 1], [4, 5, 6]])
  ) == pytest.approx((2 / 3 + 1 / 3) / 2)


def test_bad_vectors():
  with refused('0'):
    scann.build(np.full((2, 2), np.nan, np.float32), 1)


@pytest.mark.slow
def test_tree_reaches_its_recall_on_40000_clustered_vectors(tmp_path):
  corpus, queries = clustered(40_000, 1), clustered(200, 2)
  truth = exact.search(queries, corpus, 1000)
  index = scann.build(corpus, 100)
  assert index.kind == 'tree_ah' and index.leaves == 200
  scann.save(index, tmp_path / 'index', 'abc')
  index = scann.load(tmp_path / 'index', 'abc')
  for k in (10, 100, 1000):
    settings, reached = index.tune(queries, truth.rows[:, :k], 0.95)
    found = index.search(queries, k, settings)
    print(f'k = {k}: {settings}, recall {reached:.4f}')
    assert reached == pytest.approx(scann.recall(found.rows, truth.rows[:, :k]), abs=1e-6)
    assert reached >= 0.95
    # Reordered scores are exact.
    expected = np.einsum('qh,qkh->qk', queries, corpus[found.rows])
    np.testing.assert_allclose(found.scores, expected, rtol=1e-4, atol=1e-5)
  # Two leaves of some 200 vectors cannot hold 1,000.
  few = index.search(queries, 1000, scann.ScannSettings(2, 1000))
  assert (few.rows == -1).any() and np.isneginf(few.scores[few.rows == -1]).all()
  assert few.rows.min() == -1 and (np.diff(few.scores[:, :100], axis=1) <= 0).all()


def test_a_full_disk(tmp_path):
  index = scann.build(clustered(500, 1), 10)
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
  try:
    with refused('ScaNN'):
      scann.save(index, tmp_path / 'index', 'abc')
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
  assert not list(tmp_path.iterdir())
