"""The vector of a text: encode, pool, project and normalize.

Training, `dprjax.encode`, the server and mteb share this. The settings are a
`text.vector_spec.VectorSpec`; the projection is part of the encoder shape.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dprjax.models import encoder
from dprjax.models import pooling as poolings
from dprjax.models.adapter import Adapter
from dprjax.models.encoder_config import EncoderConfig
from dprjax.text.vector_spec import VectorSpec


def embed_text(
  config: EncoderConfig,
  params: Mapping[str, Any],
  tokens: Int[Array, 'B T'],
  mask: Bool[Array, 'B T'],
  specs: VectorSpec | Sequence[VectorSpec],
  which: Int[Array, ' B'] | None = None,
  *,
  adapter: Adapter | None = None,
  **kwargs: Any,
) -> Float[Array, 'B H']:
  """Vectors of texts, float32."""
  states = encoder.encode(config, params, tokens, mask, adapter=adapter, **kwargs)
  return of_states(config, params, states, mask, specs, which, adapter)


def of_states(
  config: EncoderConfig,
  params: Mapping[str, Any],
  states: Float[Array, 'B T H'],
  mask: Bool[Array, 'B T'],
  specs: VectorSpec | Sequence[VectorSpec],
  which: Int[Array, ' B'] | None = None,
  adapter: Adapter | None = None,
) -> Float[Array, 'B H']:
  """One vector for each row of hidden states.

  Args:
    mask: True at the tokens to pool.
    which: the index into ``specs`` of each row, if there are several.
  """
  specs = (specs,) if isinstance(specs, VectorSpec) else specs

  def of_rows(values: Sequence[Any]) -> Array:
    assert which is not None
    return jnp.take(jnp.array(values), which)[:, None]

  names = list(dict.fromkeys(spec.pooling for spec in specs))
  vectors, *others = (poolings.find(name).pool(states, mask) for name in names)
  if others:
    number = of_rows([names.index(spec.pooling) for spec in specs])
    for place, pooled in enumerate(others, start=1):
      vectors = jnp.where(number == place, pooled, vectors)
  vectors = poolings.project(config, params, vectors)
  if adapter is not None:
    vectors = adapter.finish(vectors)
  scaled = [spec.normalize for spec in specs]
  if any(scaled):
    units = unit(vectors)
    vectors = units if all(scaled) else jnp.where(of_rows(scaled), units, vectors)
  return vectors


def unit(x: Float[Array, '... H']) -> Float[Array, '... H']:
  """Scales to unit length. A zero vector stays zero and has gradient zero rather than NaN."""
  square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
  zero = square == 0
  return jnp.where(zero, 0, x * jax.lax.rsqrt(jnp.where(zero, 1, square)))
