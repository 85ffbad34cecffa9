"""Dropout whose masks are drawn from their places."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dprjax.models import dropout
from dprjax.runtime import mesh as meshes

KEY = jax.random.key(0)


def reference(x, rate, seed):
  """By 32-bit numbers without a sign."""
  bits = np.uint32(seed) + np.arange(x.size, dtype=np.uint32) * np.uint32(2654435769)
  bits ^= bits >> 16
  bits *= np.uint32(0x85EBCA6B)
  bits ^= bits >> 13
  bits *= np.uint32(0xC2B2AE35)
  bits ^= bits >> 16
  stay = (bits >> 8).reshape(x.shape) >= round(rate * 2**24)
  return np.where(stay, x / (1 - rate), 0)


@pytest.mark.parametrize('shape', [(4, 6, 32), (7,)])
def test_values_and_gradients_equal_numpy(shape):
  x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
  seed = np.asarray(dropout.seeds(KEY, ())).view(np.uint32)

  def loss(x):
    out = dropout.drop(x, 0.25, KEY)
    return jnp.sum(out**2), out

  gradient, out = jax.jit(jax.grad(loss, has_aux=True))(x)
  want = reference(x, 0.25, seed)
  np.testing.assert_allclose(out, want, rtol=1e-6)
  np.testing.assert_allclose(gradient, 2 * want / 0.75, rtol=1e-6)


def test_devices_that_split_an_array_draw_the_same_mask():
  mesh = meshes.make_mesh({'data': 4, 'model': 2})
  x = np.random.default_rng(0).normal(size=(8, 6, 4)).astype(np.float32)
  split = jax.device_put(x, jax.NamedSharding(mesh, jax.P('data', None, 'model')))
  run = jax.jit(dropout.drop, static_argnums=1)
  out = run(split, 0.5, KEY)
  assert len({shard.device for shard in out.addressable_shards}) == 8
  np.testing.assert_array_equal(out, run(x, 0.5, KEY))
