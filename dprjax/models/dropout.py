"""Dropout that stores no masks; the backward pass draws them again.

A stored mask is as large as the activations and is written to memory and read back. These masks
hash a seed and the place: a few products, which compilers fuse with neighbouring operations.
"""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from dprjax.models import splits

_GOLDEN = np.int32(-1640531527)  # 2**32 by the golden ratio


def stays(rate: float, seed: Array, places: Int32[Array, '*s']) -> Array:
  """Whether dropout keeps each number: bits of its place, mixed with the seed (fmix32 of
  MurmurHash3).

  Args:
    seed: int32, with one axis for each of ``places``.
    places: different numbers.
  """
  bits = seed + places * _GOLDEN
  for shift, factor in ((16, np.int32(-2048144789)), (13, np.int32(-1028477387)), (16, None)):
    bits = bits ^ jax.lax.shift_right_logical(bits, jnp.full(bits.shape, shift, jnp.int32))
    bits = bits if factor is None else bits * factor
  return jax.lax.shift_right_logical(bits, jnp.full(bits.shape, 8, jnp.int32)) >= round(
    rate * 2**24
  )


def seeds(key: Array, shape: tuple[int, ...]) -> Int32[Array, '*s']:
  return jax.lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint32), jnp.int32)


def row_seeds(key: Array, shape: tuple[int, ...]) -> Int32[Array, '*s']:
  """Random seeds of the rows of a batch (the first axis), independent of how it is split."""
  part = splits.part()
  batch_seeds = seeds(key, (part.parts * shape[0], *shape[1:]))
  if part.parts == 1:
    return batch_seeds
  return jax.lax.dynamic_slice_in_dim(batch_seeds, part.number * shape[0], shape[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _drop(x: Array, rate: float, seed: Int32[Array, '']) -> Array:
  places = jnp.zeros(x.shape, jnp.int32)
  for axis in range(x.ndim):
    after = math.prod(x.shape[axis + 1 :]) % 2**32  # beyond 2**32 numbers, some share a place
    stride = np.array(after, np.uint32).astype(np.int32)
    places = places + jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) * stride
  seed = jnp.reshape(seed, (1,) * x.ndim)
  return jnp.where(stays(rate, seed, places), x / (1 - rate), jnp.zeros_like(x))


def _drop_fwd(x, rate, seed):
  return _drop(x, rate, seed), seed


def _drop_bwd(rate, seed, gradient):
  return _drop(gradient, rate, seed), np.zeros((), jax.dtypes.float0)


_drop.defvjp(_drop_fwd, _drop_bwd)


def drop(x: Float[Array, '*s'], rate: float, key: Array, rows: bool = False) -> Float[Array, '*s']:
  """Applies dropout.

  Args:
    rate: the share left out, below 1; the rest is divided by 1 - rate.
    rows: whether the first axis is the rows of a batch or of a part of it.
  """
  seed = seeds(key, ())
  if rows and (part := splits.part()).parts > 1:
    # Places count from the first row of the first part.
    before = np.array(x.size % 2**32, np.uint32).astype(np.int32) * jnp.asarray(part.number)
    seed = seed + before * _GOLDEN
  return _drop(x, rate, seed)


class Dropout(nn.Module):
  """``drop`` on the rows of a batch, with a key of the stream 'dropout'."""

  rate: float
  deterministic: bool

  @nn.compact
  def __call__(self, x: Array) -> Array:
    if self.deterministic or not self.rate:
      return x
    return drop(x, self.rate, self.make_rng('dropout'), rows=True)
