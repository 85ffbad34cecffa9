"""Encoders with random weights: their shapes and parameters."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array

from dprjax.base.errors import InputError
from dprjax.models import family as families
from dprjax.models.encoder import init_encoder
from dprjax.models.encoder_config import EncoderConfig

# Layers and hidden size (Turc et al., 2019). The head size is 64, the MLP width 4 H.
SIZES = {'tiny': (2, 128), 'mini': (4, 256), 'small': (4, 512), 'base': (12, 768)}


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
