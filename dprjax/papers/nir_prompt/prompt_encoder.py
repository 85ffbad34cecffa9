"""Prompt encoders: the learned vectors of a template slot (NIR-Prompt section 3.3.2, Eq. 2).

Embedding(P, H) -> a bidirectional LSTM of two layers (H/2 each way) -> Linear -> ReLU -> Linear.
Every slot has its own encoder.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dprjax.models.encoder_config import EncoderConfig

LSTM_LAYERS = 2


class PromptEncoder(nn.Module):
  """The encoder of one slot, with the initial values of PyTorch."""

  length: int
  width: int

  @nn.compact
  def __call__(self) -> Float[Array, 'P H']:
    half = self.width // 2
    x: Any = self.param('embedding', nn.initializers.normal(1.0), (self.length, self.width))[None]
    for layer in range(LSTM_LAYERS):
      forward, backward = (
        nn.RNN(_cell(half), name=f'{way}_{layer}') for way in ('forward', 'backward')
      )
      x = nn.Bidirectional(forward, backward)(x)  # type: ignore[arg-type]
    x = nn.relu(_linear(self.width, 'hidden')(x))
    return _linear(self.width, 'output')(x)[0]


def init_prompt_encoders(
  config: EncoderConfig, keys: Mapping[str, Array], lengths: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
  made: dict[str, dict[str, Any]] = {}
  for length in sorted(set(lengths.values())):
    names = [name for name in lengths if lengths[name] == length]
    init = jax.jit(jax.vmap(PromptEncoder(length, config.hidden_size).init))
    several = jax.device_get(init(jnp.stack([keys[name] for name in names]))['params'])
    made |= {
      name: jax.tree.map(lambda leaf, place=place: leaf[place], several)
      for place, name in enumerate(names)
    }
  return made


def encode_prompts(
  several: Mapping[str, Mapping[str, Any]],
) -> dict[str, Float[Array, 'P H']]:
  """The vectors of several encoders, by name.

  Encoders of equal length run as one: an LSTM is four loops, and compiling them for each encoder
  would dominate the start.
  """
  vectors: dict[str, Array] = {}
  for length in sorted({params['embedding'].shape[0] for params in several.values()}):
    names = [name for name, params in several.items() if params['embedding'].shape[0] == length]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(several[name] for name in names))
    encoder = PromptEncoder(*stacked['embedding'].shape[1:])
    rows: Any = jax.vmap(lambda params, encoder=encoder: encoder.apply({'params': params}))(stacked)
    vectors |= {name: rows[place] for place, name in enumerate(names)}
  return vectors


def _cell(width: int) -> nn.OptimizedLSTMCell:
  init = _uniform(width)
  # PyTorch adds two biases.
  return nn.OptimizedLSTMCell(
    width,
    kernel_init=init,
    recurrent_kernel_init=init,
    bias_init=_uniform(width, terms=2),
    parent=None,
  )


def _linear(width: int, name: str) -> nn.Dense:
  return nn.Dense(width, kernel_init=_uniform(width), bias_init=_uniform(width), name=name)


def _uniform(width: int, terms: int = 1) -> nn.initializers.Initializer:
  """U(-1/sqrt(width), 1/sqrt(width)) as in PyTorch, or the sum of ``terms`` of these."""

  def init(key: Array, shape: Any, dtype: Any = jnp.float32, out_sharding: Any = None) -> Array:
    del out_sharding
    drawn = jax.random.uniform(key, (terms, *shape), dtype, -1.0, 1.0)
    return jnp.sum(drawn, axis=0) * width**-0.5

  return init
