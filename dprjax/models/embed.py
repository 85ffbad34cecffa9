"""One vector a text: encoded, pooled, projected and, where asked for, scaled to unit length.

Training, `dprjax.encode`, the server and mteb all make their vectors here. A record says how
(`formats.vector_spec.VectorSpec`), the encoder's shape which projection comes behind the pooling.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dprjax.formats.vector_spec import VectorSpec
from dprjax.models import encoder, projection
from dprjax.models import pooling as poolings
from dprjax.models.encoder_config import EncoderConfig


def embed_text(
  config: EncoderConfig,
  params: Mapping[str, Any],
  tokens: Int[Array, 'B T'],
  mask: Bool[Array, 'B T'],
  specs: VectorSpec | Sequence[VectorSpec],
  which: Int[Array, ' B'] | None = None,
  **kwargs: Any,
) -> Float[Array, 'B H']:
  """Vectors of texts, float32.

  Args:
    config, params, tokens, mask, kwargs: as for ``encoder.encode``.
    specs, which: as for ``of_states``.

  Raises:
    InputError: as ``encoder.encode`` does.
  """
  states = encoder.encode(config, params, tokens, mask, **kwargs)
  return of_states(config, params, states, mask, specs, which)


def of_states(
  config: EncoderConfig,
  params: Mapping[str, Any],
  states: Float[Array, 'B T H'],
  mask: Bool[Array, 'B T'],
  specs: VectorSpec | Sequence[VectorSpec],
  which: Int[Array, ' B'] | None = None,
) -> Float[Array, 'B H']:
  """One vector a row of hidden states.

  Args:
    config, params: of the encoder.
    states: its last hidden states.
    mask: True at the tokens that are pooled.
    specs: how, or several ways.
    which: the number of each row's way, where there are several.
  """
  specs = (specs,) if isinstance(specs, VectorSpec) else specs
  names, units = ([*dict.fromkeys(values)] for values in zip(*map(_way, specs), strict=True))
  vectors = poolings.find(names[0]).pool(states, mask)
  if len(names) > 1:
    number = _of_rows([names.index(spec.pooling) for spec in specs], which)
    for other, name in enumerate(names[1:], start=1):
      pooled = poolings.find(name).pool(states, mask)
      vectors = jnp.where(number[:, None] == other, pooled, vectors)
  vectors = projection.project(config, params, vectors)
  if units == [False]:
    return vectors
  if units == [True]:
    return unit(vectors)
  scaled = _of_rows([spec.normalize for spec in specs], which)
  return jnp.where(scaled[:, None], unit(vectors), vectors)


def _way(spec: VectorSpec) -> tuple[str, bool]:
  return spec.pooling, spec.normalize


def _of_rows(values: Sequence[Any], which: Int[Array, ' B'] | None) -> Array:
  assert which is not None
  return jnp.take(jnp.array(values), which)


def unit(x: Float[Array, '... H']) -> Float[Array, '... H']:
  """Vectors scaled to unit length; a zero vector stays zero, with gradient zero rather than NaN."""
  square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
  zero = square == 0
  return jnp.where(zero, 0, x * jax.lax.rsqrt(jnp.where(zero, 1, square)))
