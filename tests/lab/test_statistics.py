import math

import numpy as np
import pytest
import scipy.stats

from lab import statistics as analysis


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
  with pytest.raises(ValueError, match='uniformity'):
    analysis.uniformity(pole)


def test_uniformity_in_blocks_equals_the_pairs_one_by_one():
  x = random_units(2 * analysis._BLOCK + 3, 3).astype(np.float32)
  pairs = scipy.spatial.distance.pdist(x.astype(np.float64), 'sqeuclidean')
  assert analysis.uniformity(x) == pytest.approx(math.log(np.mean(np.exp(-2 * pairs))), rel=1e-9)


@pytest.mark.slow
def test_influences_on_uniformity_are_those_of_the_jackknife():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(300, 8)) / 4
  values, whole = analysis.uniformity_values(x), analysis.uniformity(x)
  assert values.mean() == pytest.approx(whole, rel=1e-9)
  without = np.array([analysis.uniformity(np.delete(x, i, axis=0)) for i in range(len(x))])
  np.testing.assert_allclose(values, whole + (len(x) - 1) * (whole - without), atol=0.02)
  assert values.std() > 0.3
