import math

import numpy as np
import pytest
import scipy.stats

from dprjax.analysis import statistics as analysis
from dprjax.data.similarity import Pair
from dprjax.formats.mediawiki import Article, Section
from dprjax.models import encoder
from dprjax.models.encoder_config import EncoderConfig
from tests.refusals import refused


def random_units(n, width, seed=0):
  x = np.random.default_rng(seed).normal(size=(n, width))
  return x / np.linalg.norm(x, axis=1, keepdims=True)


def test_alignment_known_by_hand():
  x = random_units(5, 4)
  assert analysis.alignment(x, x) == 0
  assert analysis.alignment(x, -x) == pytest.approx(4)  # the diameter, squared
  assert analysis.alignment(x, -x, alpha=1) == pytest.approx(2)
  assert analysis.alignment(
    np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([[0.0, 1.0], [1.0, 0.0]])
  ) == pytest.approx(1)


def test_uniformity_known_by_hand():
  pole = np.array([[1.0, 0.0, 0.0]])
  assert analysis.uniformity(np.concatenate([pole, -pole])) == pytest.approx(math.log(math.exp(-8)))
  assert analysis.uniformity(np.repeat(pole, 3, axis=0)) == pytest.approx(0, abs=1e-12)
  # Three pairs: one the same, two at a right angle (squared distance 2).
  corner = np.array([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
  assert analysis.uniformity(corner, t=3) == pytest.approx(math.log((1 + 2 * math.exp(-6)) / 3))
  with pytest.raises(ValueError, match='pairs of vectors'):
    analysis.uniformity(pole)


def test_uniformity_in_blocks_equals_the_pairs_one_by_one():
  x = random_units(2 * analysis._BLOCK + 3, 3).astype(np.float32)
  pairs = scipy.spatial.distance.pdist(x.astype(np.float64), 'sqeuclidean')
  assert analysis.uniformity(x) == pytest.approx(math.log(np.mean(np.exp(-2 * pairs))), rel=1e-9)


def cosine_of(a, b):
  return float(a @ b / math.sqrt((a @ a) * (b @ b)))


def test_mean_cosine_equals_the_pairs_one_by_one(monkeypatch):
  rng = np.random.default_rng(3)
  x, y = rng.normal(size=(11, 4)), rng.normal(size=(7, 4)).astype(np.float32)
  pairs = rng.random((11, 7)) < 0.4
  expected = np.mean([cosine_of(x[i], y[j]) for i in range(11) for j in range(7) if pairs[i, j]])
  for block in (1024, 4):
    monkeypatch.setattr(analysis, '_BLOCK', block)
    assert analysis.mean_cosine(x, y, pairs) == pytest.approx(expected)
  assert math.isnan(analysis.mean_cosine(x, y, pairs & False))


def test_shares_of_the_nearest_equal_a_loop(monkeypatch):
  rng = np.random.default_rng(4)
  x, labels = 3 * rng.normal(size=(40, 5)), rng.random((40, 6)) < 0.2
  shares = []
  for i in range(40):
    near = sorted((j for j in range(40) if j != i), key=lambda j: -cosine_of(x[i], x[j]))[:10]
    assert analysis.nearest(x, 10)[i].tolist() == near
    if labels[i].any():
      shares.append(np.mean([bool((labels[i] & labels[j]).any()) for j in near]))
  assert len(shares) < 40  # some have no label: they count as neighbours only
  for block in (1024, 7):
    monkeypatch.setattr(analysis, '_BLOCK', block)
    assert analysis.near_share(x, labels) == pytest.approx(np.mean(shares))


def test_labels_that_stand_apart():
  x = np.repeat(np.eye(3), 4, axis=0) + 0.01 * random_units(12, 3)
  own = np.repeat(np.eye(3, dtype=bool), 4, axis=0)
  assert analysis.near_share(x, own, k=3) == 1
  assert analysis.near_share(x, np.ones((12, 1), bool), k=50) == 1
  assert analysis.nearest(x, 50).shape == (12, 11)
  for vectors, labels in ((x, own & False), (x[:1], own[:1])):
    with pytest.raises(ValueError, match='of them with labels'):
      analysis.near_share(vectors, labels)


@pytest.mark.slow
def test_tsne_keeps_neighbours():
  own = np.repeat(np.eye(3, dtype=bool), 20, axis=0)
  x = np.repeat(np.eye(3), 20, axis=0) + 0.1 * random_units(60, 3)
  drawn = analysis.tsne(x)
  assert drawn.shape == (60, 2) and np.isfinite(drawn).all()
  np.testing.assert_array_equal(drawn, analysis.tsne(x))
  centred = drawn - drawn.mean(axis=0)
  assert analysis.near_share(centred, own, k=5) > 0.9
  assert analysis.tsne(x[:3]).shape == (3, 2)


def test_tsne_without_scikit_learn(monkeypatch):
  monkeypatch.setitem(sys.modules, 'sklearn', None)
  with refused('dprjax[tsne]'):
    analysis.tsne(np.eye(4))


def test_raw_vectors_as_in_plain_numpy():
  # Some 160 apart, as DPTDR's Table 8 has them: no kernel is above 0 in float64.
  draw = np.random.default_rng(0)
  x, y = (12 * draw.normal(size=(50, 4)).astype(np.float32) + 5 for _ in range(2))
  squares = [np.sum((a - b) ** 2) for a, b in zip(x.astype(float), y.astype(float), strict=True)]
  assert analysis.alignment(x, y) == pytest.approx(np.mean(squares)) and np.mean(squares) > 161
  x *= 100
  pairs = [np.sum((x[i].astype(float) - x[j]) ** 2) for i in range(50) for j in range(i)]
  nearest = min(pairs)
  assert math.exp(-2 * nearest) == 0
  expected = -2 * nearest + math.log(np.mean(np.exp([-2 * (pair - nearest) for pair in pairs])))
  assert analysis.uniformity(x) == pytest.approx(expected)
