"""From the hidden states of a text to one vector, as in sentence-transformers.

An extension (`base.extensions`) adds a pooling as its value ``POOLING``. Dense layers may follow,
as in EmbeddingGemma: ``EncoderConfig.projection`` has their shapes, and the encoder parameters
their weights, ``projection/0/kernel`` and so on. `models.sentence` reads and writes them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from dprjax.base import extensions
from dprjax.base.errors import InputError
from dprjax.models import checkpoint_names as names

States = Float[Array, 'B T H']
Mask = Bool[Array, 'B T']


class Pooling(NamedTuple):
  """One way to pool.

  Attributes:
    pool: ``(states, mask) -> vectors [B, H]``, finite for a row of padding.
    flag: its key in 1_Pooling/config.json before version 5.4.
    text: a description of the vector, for a model card.
  """

  name: str
  pool: Callable[[States, Mask], Float[Array, 'B H']]
  flag: str = ''
  text: str = ''


def _first(states: States, mask: Mask) -> Float[Array, 'B H']:
  return states[:, 0]


def _mean(states: States, mask: Mask) -> Float[Array, 'B H']:
  weights = mask.astype(states.dtype)[:, :, None]
  return jnp.sum(states * weights, axis=1) / jnp.maximum(jnp.sum(weights, axis=1), 1)


def _mean_over_root(states: States, mask: Mask) -> Float[Array, 'B H']:
  weights = mask.astype(states.dtype)[:, :, None]
  return jnp.sum(states * weights, axis=1) / jnp.sqrt(jnp.maximum(jnp.sum(weights, axis=1), 1))


def _weighted_mean(states: States, mask: Mask) -> Float[Array, 'B H']:
  """Later tokens weigh more (SGPT, Muennighoff 2022, section 3.1)."""
  places = jnp.arange(1, mask.shape[1] + 1, dtype=states.dtype)
  weights = (mask.astype(states.dtype) * places[None])[:, :, None]
  return jnp.sum(states * weights, axis=1) / jnp.maximum(jnp.sum(weights, axis=1), 1)


def _max(states: States, mask: Mask) -> Float[Array, 'B H']:
  lowest = jnp.finfo(states.dtype).min
  return jnp.max(jnp.where(mask[:, :, None], states, lowest), axis=1)


def _last(states: States, mask: Mask) -> Float[Array, 'B H']:
  last = mask.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)
  return jnp.take_along_axis(states, last[:, None, None], axis=1)[:, 0]


_OURS = (
  Pooling('cls', _first, 'pooling_mode_cls_token', 'its first state'),
  Pooling('mean', _mean, 'pooling_mode_mean_tokens', 'the mean of its states'),
  Pooling('max', _max, 'pooling_mode_max_tokens', 'the maximum of its states'),
  Pooling(
    'mean_sqrt_len_tokens',
    _mean_over_root,
    'pooling_mode_mean_sqrt_len_tokens',
    'the sum of its states over the root of their number',
  ),
  Pooling(
    'weightedmean',
    _weighted_mean,
    'pooling_mode_weightedmean_tokens',
    'the mean of its states, weighted by their places',
  ),
  Pooling('lasttoken', _last, 'pooling_mode_lasttoken', 'its last state'),
)


def every() -> dict[str, Pooling]:
  """All poolings by name, those of dprjax first."""
  return {pooling.name: pooling for pooling in (*_OURS, *extensions.values('POOLING'))}


def find(name: str, where: str = 'pooling') -> Pooling:
  poolings = every()
  if not isinstance(name, str) or name not in poolings:
    raise InputError(f'{where}: expected one of {", ".join(poolings)}, not {name!r:.60}')
  return poolings[name]


IDENTITY = 'torch.nn.modules.linear.Identity'
DENSE_ACTIVATIONS = {
  IDENTITY: lambda x: x,
  'torch.nn.modules.activation.Tanh': jnp.tanh,
  'torch.nn.modules.activation.ReLU': jax.nn.relu,
  'torch.nn.modules.activation.Sigmoid': jax.nn.sigmoid,
  'torch.nn.modules.activation.GELU': lambda x: jax.nn.gelu(x, approximate=False),
}


class Dense(NamedTuple):
  """The shape of one layer: ``activation(x @ kernel + bias)``."""

  inputs: int
  outputs: int
  bias: bool
  activation: str

  def tensors(self) -> list[names.Tensor]:
    return list(names.weights('linear', (), (self.outputs, self.inputs), self.bias))


def project(
  config: Any, params: Mapping[str, Any], vectors: Float[Array, 'B H']
) -> Float[Array, 'B D']:
  for number, dense in enumerate(config.projection):
    layer = params['projection'][str(number)]
    vectors = vectors @ layer['kernel'].astype(jnp.float32)
    if dense.bias:
      vectors = vectors + layer['bias'].astype(jnp.float32)[None]
    vectors = DENSE_ACTIVATIONS[dense.activation](vectors)
  return vectors


def dense_tensors(
  shapes: Sequence[Dense], params: Mapping[str, Any]
) -> list[tuple[str, np.ndarray]]:
  return [
    (f'projection.{number}.{name}', array)
    for number, dense in enumerate(shapes)
    for name, array in sorted(names.export(dense.tensors(), params[str(number)]).items())
  ]
