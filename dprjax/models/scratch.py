"""Encoders with random weights: their shapes and parameters."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dprjax.base.errors import InputError
from dprjax.models import encoder
from dprjax.models import family as families
from dprjax.models.adapter import BARE
from dprjax.models.encoder_config import DEFAULT_OPTIONS, EncoderConfig

# Layers and hidden size (Turc et al., 2019). The head size is 64, the MLP width 4 H.
SIZES = {'tiny': (2, 128), 'mini': (4, 256), 'small': (4, 512), 'base': (12, 768)}


def init_layers(config: EncoderConfig, num_layers: int, key: Array) -> dict[str, Any]:
  """Fresh stacked layers: kernels N(0, ``initializer_range``), biases 0, scales 1."""
  x, tokens = jnp.zeros((1, 1, config.hidden_size), jnp.float32), jnp.zeros((1, 1), jnp.int32)
  stack = encoder.stack(config, num_layers, DEFAULT_OPTIONS, True)
  inputs = encoder.inputs(config, num_layers, tokens, tokens == 0, BARE)
  return jax.jit(stack.init)(key, x, *inputs)['params']


def init_encoder(config: EncoderConfig, key: Array) -> dict[str, Any]:
  """Fresh parameters of an encoder, as ``init_layers``."""
  embeddings_key, layers_key = jax.random.split(key)
  tokens = jnp.zeros((1, 1), jnp.int32)
  family = config.family
  embeddings = jax.jit(family.embeddings(config, jnp.float32, True).init)(
    embeddings_key, tokens, tokens, tokens
  )['params']
  params = {'embeddings': embeddings, 'layers': init_layers(config, config.num_layers, layers_key)}
  if family.relative is not None:
    module = family.relative(config)
    params['relative'] = module.init(jax.random.fold_in(embeddings_key, 1), 1)['params']
  if family.final is not None:
    x = jnp.zeros((1, 1, config.hidden_size), jnp.float32)
    params['final'] = jax.jit(family.final(config, jnp.float32).init)(embeddings_key, x)['params']
  return params


def init_params(config: EncoderConfig, key: Array) -> dict[str, Any]:
  """Numpy parameters, as `init_encoder`."""
  return jax.device_get(init_encoder(config, key))


def shape(
  size: str,
  vocab_size: int,
  *,
  model_type: str = 'bert',
  pad_token_id: int | None = None,
) -> EncoderConfig:
  """The shape of an encoder to train from scratch."""
  if size not in SIZES:
    raise InputError(f'size {size!r} is unknown; use one of: {", ".join(SIZES)}')
  layers, width = SIZES[size]
  if pad_token_id is None:
    pad_token_id = families.find(model_type).pad_token_id
  # The 0.02 of BERT suits a width of 768. Layers of narrower models would add almost nothing.
  config = EncoderConfig(
    model_type,
    vocab_size,
    width,
    layers,
    width // 64,
    4 * width,
    pad_token_id=pad_token_id,
    initializer_range=0.02 * (768 / width) ** 0.5,
  )
  return dataclasses.replace(config, max_positions=512 + config.first_position)
