"""Splits of activations, also of one part of an axis of the mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dprjax.models import dropout, fused_attention, splits
from dprjax.runtime import mesh as meshes


@pytest.fixture
def mesh():
  return meshes.make_mesh({'data': 2, 'fsdp': 2, 'model': 2})


@pytest.mark.slow
@pytest.mark.parametrize('rate', [0.0, 0.25])
def test_attention_by_parts_is_that_of_the_whole_batch(mesh, rate):
  """Values and gradients of texts and of a shared prompt, in pieces of the axis data."""
  rng = np.random.default_rng(0)
  heads, width, batch = 4, 8, 8
  texts = [rng.normal(size=(batch, 6, heads * width)).astype(np.float32) for _ in 'qkv']
  prompt = rng.normal(size=(2, 3, heads * width)).astype(np.float32)
  bias = np.where(np.arange(6) < 4, 0, -1e9).astype(np.float32) * np.ones((batch, 1, 1, 1), 'f')
  split = meshes.activations(mesh)[1]

  def attend(q, k, v, bias, prompt):
    out = fused_attention.attend(
      *(q, k, v, bias, prompt),
      num_heads=heads,
      dropout=rate,
      dropout_key=jax.random.key(3),
      prompt_dropout=rate,
      prompt_key=jax.random.key(4),
      split=split,
      interpret=True,
    )
    return dropout.drop(jnp.sin(out), rate, jax.random.key(5), rows=True)

  def whole(texts, prompt):
    return jnp.sum(attend(*texts, bias, prompt) ** 2)

  def one(number, prompt, *arrays):
    with splits.part_of('data', number, 2):
      return attend(*arrays, prompt)

  def by_parts(texts, prompt):
    def cut(x):
      return x.reshape(2, batch // 2, *x.shape[1:])

    run = jax.vmap(one, (0, None, 0, 0, 0, 0), spmd_axis_name='data')
    return jnp.sum(run(jnp.arange(2), prompt, *map(cut, (*texts, bias))) ** 2)

  value, gradients = jax.jit(jax.value_and_grad(whole, (0, 1)))(texts, prompt)
  assert 1 < value < batch * 6 * heads * width
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-5),
    jax.jit(jax.value_and_grad(by_parts, (0, 1)))(texts, prompt),
    (value, gradients),
  )
