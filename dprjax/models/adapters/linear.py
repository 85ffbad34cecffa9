"""A linear map of text vectors, initially the identity."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dprjax.models.adapter import Adapter, AdapterTraining, Kind
from dprjax.models.pooling import IDENTITY, Dense


@flax.struct.dataclass
class Linear(Adapter):
  """Maps a vector x to ``x + x change``."""

  change: Float[Array | np.ndarray, '*B D D']

  def finish(self, x: Float[Array, 'B D']) -> Float[Array, 'B D']:
    change = self.change.astype(jnp.float32)
    return x + jnp.matmul(x[:, None], change)[:, 0]


def init(config: Any, model: Any, key: Array) -> dict[str, Any]:
  """Parameters of the identity. ``config.prompt.length`` above 0 only turns the map on."""
  return {'change': jnp.zeros((model.vector_size, model.vector_size), jnp.float32)}


def merge(model: Any, params: Mapping[str, Any], adapter: Linear) -> tuple[Any, Mapping[str, Any]]:
  """The encoder with the map as its last dense layer (`models.pooling`)."""
  size, number = len(adapter.change), str(len(model.projection))
  kernel = np.eye(size, dtype=np.float32) + np.asarray(adapter.change)
  dense = Dense(size, size, False, IDENTITY)
  model = dataclasses.replace(model, projection=(*model.projection, dense))
  projection = {**params.get('projection', {}), number: {'kernel': kernel}}
  return model, {**params, 'projection': projection}


ADAPTER = Kind(
  'linear',
  'a linear map of vectors',
  lambda where, meta: {'change': 'vector vector'},
  lambda meta, arrays: [Linear(arrays['change'])],
  AdapterTraining(
    init,
    lambda config, model, params: Linear(params['change']),
    lambda config, adapter: ({'change': adapter.change}, {}),
  ),
  merge=merge,
)
