"""Activations of encoders, by their names in ACT2FN of transformers."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dprjax.base.errors import InputError


@jax.custom_jvp
def erf_gelu(x: Float[Array, '...']) -> Float[Array, '...']:
  """The BERT GELU, x * Phi(x)."""
  return 0.5 * x * (1 + jax.lax.erf(x * 0.5**0.5))


@erf_gelu.defjvp
def _erf_gelu_jvp(primals, tangents):
  # Autodiff would keep several arrays of [B, T, intermediate_size] a layer for the backward pass.
  (x,), (dx,) = primals, tangents
  cdf = 0.5 * (1 + jax.lax.erf(x * 0.5**0.5))
  pdf = (2 * jnp.pi) ** -0.5 * jnp.exp(-0.5 * x * x)
  return x * cdf, dx * (cdf + x * pdf)


def _tanh_gelu(x):
  return nn.gelu(x, approximate=True)


def find(name: str, key: str) -> Callable[[Array], Array]:
  """The activation of this name, the value of a key in config.json."""
  if name not in ACTIVATIONS:
    raise InputError(f'{key} {name!r:.60} is not supported; use one of: {", ".join(ACTIVATIONS)}')
  return ACTIVATIONS[name]


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
  'gelu': erf_gelu,
  'gelu_python': erf_gelu,
  'gelu_new': _tanh_gelu,
  'gelu_fast': _tanh_gelu,
  'gelu_accurate': _tanh_gelu,
  'gelu_pytorch_tanh': _tanh_gelu,
  'gelu_python_tanh': _tanh_gelu,
  'quick_gelu': lambda x: x * nn.sigmoid(1.702 * x),
  'relu': nn.relu,
  'silu': nn.silu,
  'swish': nn.silu,
  'tanh': jnp.tanh,
}
