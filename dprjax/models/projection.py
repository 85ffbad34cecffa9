"""Dense layers after the pooling, as in EmbeddingGemma and sentence-transformers.

The encoder shape includes their shapes (``EncoderConfig.projection``); the encoder parameters
include their weights, ``projection/0/kernel`` and so on. `models.sentence` reads and writes them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dprjax.models import checkpoint_names as names

IDENTITY = 'torch.nn.modules.linear.Identity'
ACTIVATIONS = {
  IDENTITY: lambda x: x,
  'torch.nn.modules.activation.Tanh': jnp.tanh,
  'torch.nn.modules.activation.ReLU': jax.nn.relu,
  'torch.nn.modules.activation.Sigmoid': jax.nn.sigmoid,
  'torch.nn.modules.activation.GELU': lambda x: jax.nn.gelu(x, approximate=False),
}


class Dense(NamedTuple):
  """The shape of one layer: ``activation(x @ kernel + bias)``.

  Attributes:
    activation: the PyTorch class.
  """

  inputs: int
  outputs: int
  bias: bool
  activation: str

  def tensors(self) -> list[names.Tensor]:
    """The tensors in the file of the layer, and their places in its parameters."""
    weight = names.Tensor('linear.weight', (self.outputs, self.inputs), ('kernel',))
    return [weight, names.Tensor('linear.bias', (self.outputs,), ('bias',))][: 1 + self.bias]


def project(
  config: Any, params: Mapping[str, Any], vectors: Float[Array, 'B H']
) -> Float[Array, 'B D']:
  """Applies all dense layers of an encoder, in float32."""
  for number, dense in enumerate(config.projection):
    own = params['projection'][str(number)]
    vectors = vectors @ own['kernel'].astype(jnp.float32)
    if dense.bias:
      vectors = vectors + own['bias'].astype(jnp.float32)[None]
    vectors = ACTIVATIONS[dense.activation](vectors)
  return vectors


def tensors(shapes: Sequence[Dense], params: Mapping[str, Any]) -> list[tuple[str, np.ndarray]]:
  """All tensors by name, for a SHA-256."""
  return [
    (f'projection.{number}.{name}', array)
    for number, dense in enumerate(shapes)
    for name, array in sorted(names.export(dense.tensors(), params[str(number)]).items())
  ]
