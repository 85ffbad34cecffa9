import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dprjax.models import embed


@pytest.mark.slow
def test_normalize_of_zero_and_of_tiny_vectors():
  np.testing.assert_array_equal(embed.unit(jnp.zeros((1, 2))), np.zeros((1, 2)))
  gradient = jax.grad(lambda x: embed.unit(x)[..., 0].sum())(jnp.array([[0.0, 0.0], [3.0, 4.0]]))
  # d (x / |x|) / dx at (3, 4): (16, -12) / 125.
  np.testing.assert_allclose(gradient, [[0, 0], [16 / 125, -12 / 125]], atol=1e-7)
