"""An adapter in one file: a vector that is added to the output of every layer.

DPRJAX_EXTENSIONS=tests.toys.bias python -m dprjax.train --config.prompt.kind=bias ...
"""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dprjax.models.adapter import Adapter, AdapterTraining, Kind


@flax.struct.dataclass
class Bias(Adapter):
  bias: Float[Array, 'L *B H']

  by_layer = ('bias',)

  def leave_layer(self, x):
    bias = self.bias.astype(x.dtype)
    return x + (bias[None, None] if bias.ndim == 1 else bias[:, None])


def init(config, model, key):
  shape = model.num_layers, model.hidden_size
  return {'bias': config.prompt.init_std * jax.random.normal(key, shape, jnp.float32)}


ADAPTER = Kind(
  'bias',
  'a vector that every layer adds',
  lambda where, meta: {'bias': 'L H'},
  lambda meta, arrays: [Bias(arrays['bias'])],
  AdapterTraining(
    init,
    lambda config, model, params: Bias(params['bias']),
    lambda config, adapter: ({'bias': adapter.bias}, {}),
  ),
)
