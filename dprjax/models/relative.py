"""Relative positions of T5 (Raffel et al., 2020): a score bias by distance."""

import math

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dprjax.models import layers
from dprjax.models.encoder_config import EncoderConfig


class RelativeBias(nn.Module):
  """A number for each head and each bucket of distances, the same in all layers."""

  config: EncoderConfig
  count: int = 32
  far: int = 128

  @nn.compact
  def __call__(self, length: int) -> Float[Array, '1 N T T']:
    table = layers.Embed(self.config, self.count, self.config.num_heads, name='buckets')
    return jnp.moveaxis(table(jnp.asarray(buckets(length, self.count, self.far))), 2, 0)[None]


def buckets(length: int, count: int, far: int) -> Int[np.ndarray, 'T T']:
  """The bucket of the distance between each query and key, on both sides.

  Half of the buckets of a side have one distance each; the others grow logarithmically up to
  ``far``.
  """
  place = np.arange(length, dtype=np.int32)
  distance = place[None, :] - place[:, None]
  side, exact = count // 2, count // 4
  size = np.abs(distance)
  # In float32, as in PyTorch: a logarithm may lie on the border of two buckets.
  share = np.log(np.maximum(size, 1).astype(np.float32) / np.float32(exact))
  share = share / np.float32(math.log(far / exact)) * np.float32(side - exact)
  large = np.minimum(exact + share.astype(np.int32), side - 1)
  return (distance > 0) * side + np.where(size < exact, size, large)
