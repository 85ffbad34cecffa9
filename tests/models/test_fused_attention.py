"""The attention kernel, interpreted, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dprjax.base import mesh as meshes
from dprjax.models import dropout, fused_attention

N, D, T = 4, 8, 6
H = N * D


def texts(batch, keys, seed=0):
  """Queries, keys, values, biases, and a prompt of 3 vectors."""
  rng = np.random.default_rng(seed)
  lengths = rng.integers(1, keys + 1, batch)
  bias = np.where(np.arange(keys) < lengths[:, None], 0.0, -1e9)[:, None, None]
  shapes = (batch, T, H), (batch, keys, H), (batch, keys, H)
  q, k, v = (rng.normal(size=shape) for shape in shapes)
  return [x.astype(np.float32) for x in (q, k, v, bias, rng.normal(size=(2, 3, H)))]


def heads(x):
  """[..., S, H] -> [..., N, S, D]."""
  return np.swapaxes(x.reshape(*x.shape[:-1], N, D), -3, -2)


def kept(seeds, shape, rate):
  """Which weights stay, by 32-bit numbers without a sign."""
  rows, columns = np.indices(shape, np.uint32)
  bits = np.asarray(seeds).view(np.uint32) + (rows * np.uint32(8192) + columns) * np.uint32(
    2654435769
  )
  bits ^= bits >> 16
  bits *= np.uint32(0x85EBCA6B)
  bits ^= bits >> 13
  bits *= np.uint32(0xC2B2AE35)
  bits ^= bits >> 16
  return (bits >> 8) >= round(rate * 2**24)


def expected(q, k, v, bias, prompt=None, rate=0.0, seeds=None, prompt_rate=0.0, prompt_seeds=None):
  """In float64."""
  q, k, v = (heads(np.asarray(x, np.float64)) for x in (q, k, v))
  bias = np.asarray(bias, np.float64)
  if prompt is not None:
    own = np.broadcast_to(heads(np.asarray(prompt, np.float64)), (len(q), 2, N, 3, D))
    if prompt_rate:
      stay = kept(prompt_seeds, (3, 2 * D), prompt_rate)  # [B, N, 3, keys and values]
      stay = np.stack([stay[..., :D], stay[..., D:]], axis=1)
      own = np.where(stay, own / (1 - prompt_rate), 0)
    k, v = (np.concatenate([own[:, i], x], axis=2) for i, x in enumerate((k, v)))
    bias = np.pad(bias, ((0, 0), (0, 0), (0, 0), (3, 0)))
  scores = np.einsum('bntd,bnsd->bnts', q, k) / np.sqrt(D) + bias
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  if rate:
    weights = np.where(kept(seeds, weights.shape[2:], rate), weights / (1 - rate), 0)
  return np.swapaxes(np.einsum('bnts,bnsd->bntd', weights, v), 1, 2).reshape(len(q), T, H)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
  ('devices', 'keys', 'prompt', 'rate', 'prompt_rate'),
  [
    (None, 6, 'shared', 0.25, 0.5),
    (None, 9, '', 0.0, 0.5),
    (None, 6, 'own', 0.25, 0.5),
    ({'data': 2, 'fsdp': 2, 'model': 2}, 6, 'shared', 0.25, 0.5),
    ({'data': 8}, 6, 'shared', 0.0, 0.5),  # which do not divide the examples
  ],
)
def test_values_and_gradients_equal_numpy(devices, keys, prompt, rate, prompt_rate):
  given = texts(12 if devices and 'model' in devices else 4, keys)
  if prompt == 'own':
    given[4] = np.stack([np.sin(n + given[4]) for n in range(len(given[0]))])
  given = given if prompt else [*given[:4], None]
  split, key, prompt_key = None, jax.random.key(3), jax.random.key(4)
  if devices:
    split = meshes.activations(meshes.make_mesh(devices))[1]
  seeds, prompt_seeds = (dropout.seeds(one, (len(given[0]), N, 1, 1)) for one in (key, prompt_key))
  rates = rate, seeds, prompt_rate if prompt == 'shared' else 0.0, prompt_seeds
  direction = np.cos(np.arange(given[0].size, dtype=np.float32)).reshape(given[0].shape)
  trained = [0, 1, 2, 4] if prompt else [0, 1, 2]

  @jax.jit
  def run(arrays):
    def loss(arrays):
      q, k, v, bias, prompt = arrays
      out = fused_attention.attend(
        *(q, k, v, bias, prompt),
        num_heads=N,
        dropout=rate,
        dropout_key=key,
        prompt_dropout=prompt_rate,
        prompt_key=prompt_key,
        split=split,
        interpret=True,
      )
      return jnp.sum(out * direction), out

    return jax.grad(loss, has_aux=True)(arrays)

  gradients, out = run(given)
  np.testing.assert_allclose(out, expected(*given, *rates), rtol=0, atol=2e-6)
  # Along all gradients together, by central differences.
  steps = [None if x is None else np.asarray(x, np.float64) for x in gradients]
  assert not steps[3].any()  # the bias
  norm = np.sqrt(sum(np.sum(steps[i] ** 2) for i in trained))

  def moved(eps):
    arrays = [
      x if x is None else np.asarray(x, np.float64) + eps * step / norm
      for x, step in zip(given, steps, strict=True)
    ]
    return np.sum(expected(*arrays, *rates) * direction)

  eps = 1e-5
  assert (moved(eps) - moved(-eps)) / (2 * eps) == pytest.approx(norm, rel=1e-5)
  # Each by itself: a share of the slope that is missing would be seen.
  for i in trained:
    own = [x if x is None else np.asarray(x, np.float64) for x in given]
    slope = []
    for sign in (1, -1):
      one = [*own]
      one[i] = one[i] + sign * eps * steps[i] / norm
      slope.append(np.sum(expected(*one, *rates) * direction))
    assert (slope[0] - slope[1]) / (2 * eps) == pytest.approx(
      np.sum(steps[i] ** 2) / norm, rel=1e-4
    )


def test_bfloat16_is_added_up_in_float32():
  given = [jnp.asarray(x, jnp.bfloat16) if i != 3 else x for i, x in enumerate(texts(2, 6))]
  out = fused_attention.attend(*given, num_heads=N, interpret=True)
  assert out.dtype == jnp.bfloat16
  exact = expected(*(np.asarray(x, np.float32) for x in given))
  # The result is rounded once, and the weights before they are multiplied.
  assert np.abs(np.asarray(out, np.float32) - exact).max() < 2**-8 * np.abs(exact).max() * 2
