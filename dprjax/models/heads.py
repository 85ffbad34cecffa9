"""From hidden states to one vector a text."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dprjax.errors import InputError

POOLINGS = ('cls', 'mean')


def pool(hidden: Float[Array, 'B T H'], mask: Bool[Array, 'B T'], pooling: str = 'cls') -> Float[Array, 'B H']:
  """One vector a row: the first token's (``cls``) or the mean over real tokens (``mean``; 0 where a row has none).

  Raises:
    InputError: ``pooling`` is another word.
  """
  if pooling == 'cls':
    return hidden[:, 0]
  if pooling == 'mean':
    weights = mask.astype(hidden.dtype)[:, :, None]
    return jnp.sum(hidden * weights, axis=1) / jnp.maximum(jnp.sum(weights, axis=1), 1)
  raise InputError(f'pooling {pooling!r} is not supported; use one of: {", ".join(POOLINGS)}')


def normalize(x: Float[Array, '... H']) -> Float[Array, '... H']:
  """Scales vectors to unit length; a zero vector stays zero, and its gradient is zero rather than NaN."""
  square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
  zero = square == 0
  return jnp.where(zero, 0, x * jax.lax.rsqrt(jnp.where(zero, 1, square)))
