"""The encoder of T5 (Raffel et al., 2020): GTR, Sentence-T5.

An RMSNorm before each half of a layer, a score bias by distance in place of positions, scores that
are not divided by the root of the head size, and no other biases. There are no heads.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import msgspec
import numpy as np
from jaxtyping import Array, Float, Int

from dprjax.base.errors import InputError
from dprjax.models import layers, rotary
from dprjax.models.checkpoint_names import Tensor, stack, weights
from dprjax.models.encoder_config import EncoderConfig
from dprjax.models.families import llama


@dataclasses.dataclass(frozen=True)
class Config(llama.Config):
  """The shape of a T5 encoder."""

  buckets: int = 32
  far: int = 128


class RelativeBias(nn.Module):
  """A score bias by distance: a number for each head and bucket, the same in all layers."""

  config: EncoderConfig
  count: int = 32
  far: int = 128

  @nn.compact
  def __call__(self, length: int) -> Float[Array, '1 N T T']:
    table = layers.Embed(self.config, self.count, self.config.num_heads, name='buckets')
    return jnp.moveaxis(table(jnp.asarray(_buckets(length, self.count, self.far))), 2, 0)[None]


def _buckets(length: int, count: int, far: int) -> Int[np.ndarray, 'T T']:
  """The bucket of the distance between each query and key, on both sides.

  Half of the buckets of a side have one distance each; the others grow logarithmically up to
  ``far``.
  """
  place = np.arange(length, dtype=np.int32)
  distance = place[None, :] - place[:, None]
  side, exact = count // 2, count // 4
  size = np.abs(distance)
  # In float32, as in PyTorch: a logarithm may lie on the border of two buckets.
  share = np.log(np.maximum(size, 1).astype(np.float32) / np.float32(exact))
  share = share / np.float32(math.log(far / exact)) * np.float32(side - exact)
  large = np.minimum(exact + share.astype(np.int32), side - 1)
  return (distance > 0) * side + np.where(size < exact, size, large)


_TRAITS: dict[str, Any] = {'rope': rotary.NONE, 'causal': False, 'score_scale': 1}


class Keys(msgspec.Struct):
  vocab_size: llama.Size
  d_model: llama.Size
  d_kv: llama.Size
  d_ff: llama.Size
  num_layers: llama.Size
  num_heads: llama.Size
  n_positions: llama.Size = 512
  feed_forward_proj: str = 'relu'
  relative_attention_num_buckets: llama.Size = 32
  relative_attention_max_distance: llama.Size = 128
  layer_norm_epsilon: float = 1e-6
  dropout_rate: float = 0.1


def _read_config(hf_config: Mapping[str, Any]) -> Config:
  keys = llama.read_keys(hf_config, Keys)
  act = keys.feed_forward_proj.removeprefix('gated-')
  gated = act != keys.feed_forward_proj
  if gated and act == 'gelu':
    act = 'gelu_new'  # as in transformers
  layers.check_activation(act, 'feed_forward_proj')
  buckets, far = keys.relative_attention_num_buckets, keys.relative_attention_max_distance
  if buckets % 4 or far <= buckets // 4:
    raise InputError(
      f'relative_attention_num_buckets {buckets} and relative_attention_max_distance {far} are not '
      'supported; use a multiple of 4, and a distance above a quarter of the buckets'
    )
  return Config(
    't5',
    keys.vocab_size,
    keys.d_model,
    keys.num_layers,
    keys.num_heads,
    keys.num_heads,
    keys.d_kv,
    keys.d_ff,
    keys.n_positions,
    layer_norm_eps=keys.layer_norm_epsilon,
    hidden_act=act,
    hidden_dropout=keys.dropout_rate,
    attention_dropout=keys.dropout_rate,
    gated=gated,
    buckets=buckets,
    far=far,
    **_TRAITS,
  )


def _write_config(config: Config) -> dict[str, Any]:
  # A gated gelu in transformers is gelu_new.
  act = 'gelu' if config.gated and config.hidden_act == 'gelu_new' else config.hidden_act
  return {
    'vocab_size': config.vocab_size,
    'd_model': config.hidden_size,
    'd_kv': config.head_dim,
    'd_ff': config.intermediate_size,
    'num_layers': config.num_layers,
    'num_heads': config.num_heads,
    'n_positions': config.max_tokens,
    'relative_attention_num_buckets': config.buckets,
    'relative_attention_max_distance': config.far,
    'dropout_rate': config.hidden_dropout,
    'layer_norm_epsilon': config.layer_norm_eps,
    'feed_forward_proj': f'{"gated-" if config.gated else ""}{act}',
  }


def _tensors(config: Config) -> Iterator[Tensor]:
  width = config.hidden_size
  yield Tensor('shared.weight', (config.vocab_size, width), ('embeddings', 'word', 'embedding'))
  yield Tensor('encoder.final_layer_norm.weight', (width,), ('final', 'scale'))
  yield Tensor(
    'encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight',
    (config.buckets, config.num_heads),
    ('relative', 'buckets', 'embedding'),
  )
  for tensor in _layer_tensors(config, config.num_layers):
    yield tensor._replace(name=f'encoder.{tensor.name}', path=('layers', *tensor.path))


def _layer_tensors(config: Config, num_layers: int) -> Iterator[Tensor]:
  width, inner = config.hidden_size, config.intermediate_size
  wide = config.num_heads * config.head_dim
  up = {'wi_0': 'gate', 'wi_1': 'up'} if config.gated else {'wi': 'up'}
  return stack(
    num_layers,
    'block',
    *(
      weights(f'layer.0.SelfAttention.{name[0]}', ('attention', name), (wide, width), False)
      for name in ('query', 'key', 'value')
    ),
    weights('layer.0.SelfAttention.o', ('attention', 'output'), (width, wide), False),
    *(
      weights(f'layer.1.DenseReluDense.{name}', ('mlp', ours), (inner, width), False)
      for name, ours in up.items()
    ),
    weights('layer.1.DenseReluDense.wo', ('mlp', 'down'), (width, inner), False),
    weights('layer.0.layer_norm', ('before_attention',), (width,), False),
    weights('layer.1.layer_norm', ('before_mlp',), (width,), False),
  )


FAMILY = llama.FAMILY._replace(
  model_type='t5',
  class_name='T5Encoder',
  read_config=_read_config,
  write_config=_write_config,
  tensors=_tensors,
  layer_tensors=_layer_tensors,
  relative=lambda config: RelativeBias(config, config.buckets, config.far),
  canonical=lambda name: name,
  turn_keys=None,
  prefix='',
  extras=re.compile(r'encoder\.embed_tokens\.weight$|(decoder|lm_head|classification_head)\.'),
  prompted_by='attention',
)
