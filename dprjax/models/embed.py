"""One vector a text: encoded, pooled and, where asked for, scaled to unit length."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dprjax.models import encoder
from dprjax.models import pooling as poolings
from dprjax.models.encoder_config import EncoderConfig


def embed_text(
  config: EncoderConfig,
  params: Mapping[str, Any],
  tokens: Int[Array, 'B T'],
  mask: Bool[Array, 'B T'],
  *,
  pooling: str,
  normalize: bool,
  **kwargs: Any,
) -> Float[Array, 'B H']:
  """Vectors of texts, float32.

  Args:
    config, params, tokens, mask, kwargs: as for ``encoder.encode``.
    pooling, normalize: as for ``pool``.

  Raises:
    InputError: as ``encoder.encode`` and ``pool`` do.
  """
  return pool(encoder.encode(config, params, tokens, mask, **kwargs), mask, pooling, normalize)


def pool(
  hidden: Float[Array, 'B T H'],
  mask: Bool[Array, 'B T'],
  pooling: str = 'cls',
  normalize: bool = False,
) -> Float[Array, 'B H']:
  """One vector a row.

  Args:
    hidden: the last hidden states.
    mask: True at real tokens.
    pooling: a name of `models.pooling`.
    normalize: scale to unit length.

  Raises:
    InputError: ``pooling`` is another word.
  """
  vectors = poolings.find(pooling).pool(hidden, mask)
  return unit(vectors) if normalize else vectors


def unit(x: Float[Array, '... H']) -> Float[Array, '... H']:
  """Vectors scaled to unit length; a zero vector stays zero, with gradient zero rather than NaN."""
  square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
  zero = square == 0
  return jnp.where(zero, 0, x * jax.lax.rsqrt(jnp.where(zero, 1, square)))
