import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dprjax.models import embed, pooling

HIDDEN = jnp.array([[[1.0, 2.0], [3.0, 6.0], [100.0, 100.0]], [[5.0, 0.0], [7.0, 7.0], [9.0, 9.0]]])
MASK = jnp.array([[True, True, False], [True, False, False]])


def test_pooling():
  np.testing.assert_array_equal(pooling.find('cls').pool(HIDDEN, MASK), [[1, 2], [5, 0]])
  mean = pooling.find('mean').pool
  np.testing.assert_array_equal(mean(HIDDEN, MASK), [[2, 4], [5, 0]])
  np.testing.assert_array_equal(mean(HIDDEN, jnp.zeros((2, 3), bool)), np.zeros((2, 2)))


def test_normalize():
  np.testing.assert_allclose(
    embed.unit(jnp.array([[3.0, 4.0], [0.0, -2.0]])), [[0.6, 0.8], [0, -1]], rtol=1e-6
  )


@pytest.mark.slow
def test_normalize_of_zero_and_of_tiny_vectors():
  np.testing.assert_array_equal(embed.unit(jnp.zeros((1, 2))), np.zeros((1, 2)))
  gradient = jax.grad(lambda x: embed.unit(x)[..., 0].sum())(jnp.array([[0.0, 0.0], [3.0, 4.0]]))
  # d (x / |x|) / dx at (3, 4): (16, -12) / 125.
  np.testing.assert_allclose(gradient, [[0, 0], [16 / 125, -12 / 125]], atol=1e-7)
