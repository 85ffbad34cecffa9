import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dprjax.models import layers


@pytest.mark.parametrize('shape', [(5, 7), (3, 5, 7)])
def test_a_rounded_product_and_its_gradients(shape):
  draw = np.random.default_rng(0)
  x, kernel = (draw.normal(size=size).astype(np.float32) for size in (shape, (7, 4)))
  weights = draw.normal(size=(*shape[:-1], 4)).astype(np.float32)

  def round_(array):
    return np.asarray(jnp.asarray(array, jnp.bfloat16), np.float64)

  def loss(x, kernel):
    return jnp.sum(layers._round_and_multiply(jnp.dtype('bfloat16'), x, kernel) * weights)

  value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(x, kernel)
  np.testing.assert_allclose(value, np.sum(round_(x) @ round_(kernel) * weights), rtol=1e-5)
  np.testing.assert_allclose(gradients[0], round_(weights) @ round_(kernel).T, rtol=1e-5, atol=1e-5)
  flat = round_(x).reshape(-1, 7).T @ round_(weights).reshape(-1, 4)
  np.testing.assert_allclose(gradients[1], flat, rtol=1e-5, atol=1e-5)
