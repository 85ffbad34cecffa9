"""ModernBERT (Warner et al., 2024): Ettin, GTE-ModernBERT, Granite R2 and mmBERT.

A LayerNorm before each half of a layer except the first, rotary positions, and a gated MLP. Most
layers have a window, with rotary settings of their own. Queries, keys and values are one tensor in
a checkpoint, and so are the two products of the MLP.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array

from dprjax.models import layers, rotary
from dprjax.models.checkpoint_names import Tensor, stack, weights
from dprjax.models.families import llama
from dprjax.models.family import Family, only


@dataclasses.dataclass(frozen=True)
class Config(llama.Config):
  """The shape of a ModernBERT encoder.

  Attributes:
    pad_token_id: written to config.json, where PyTorch expects an id in the vocabulary.
  """

  norm_bias: bool = False
  decoder_bias: bool = True
  classifier_bias: bool = False
  classifier_act: str = 'gelu'
  classifier_pooling: str = 'cls'
  pad_token_id: int = 50283


def _norm(config: Config, dtype: Any, name: str | None = None) -> layers.LayerNorm:
  return layers.LayerNorm(config.layer_norm_eps, dtype, config.norm_bias, name=name)


class Embeddings(layers.Embeddings):
  """Word embeddings, normalised in float32."""

  def combine(self, x: Array, positions: Array, token_types: Array) -> Array:
    return _norm(self.config, jnp.float32, 'norm')(x)


class Layer(llama.Layer):
  config: Config

  def norm(self, x: Array, name: str) -> Array:
    return _norm(self.config, self.options.dtype, name)(x).astype(self.options.dtype)

  def enter(self, x: Array, name: str, number: Array) -> Array:
    y = self.norm(x, name)
    # The embeddings are already normalised.
    return jnp.where(number == 0, x, y) if name == 'before_attention' else y


class Keys(llama.Keys):
  norm_eps: float = 1e-5
  norm_bias: bool = False
  hidden_activation: str = 'gelu'
  mlp_dropout: float = 0.0
  local_attention: llama.Size = 128
  global_attn_every_n_layers: llama.Size = 3
  global_rope_theta: float = 160000.0
  local_rope_theta: float = 10000.0
  decoder_bias: bool = True
  classifier_bias: bool = False
  classifier_activation: str = 'gelu'
  classifier_pooling: Literal['cls', 'mean'] = 'cls'
  pad_token_id: int = 50283


def _read_config(hf_config: Mapping[str, Any]) -> Config:
  only(hf_config, tie_word_embeddings=True)
  keys = llama.read_keys(hf_config, Keys)
  keys.rms_norm_eps, keys.is_causal = keys.norm_eps, False
  keys.sliding_window = keys.local_attention // 2
  windows = llama.read_windows(keys, lambda layer: layer % keys.global_attn_every_n_layers > 0)

  def rope(kind, theta):
    settings = keys.rope_parameters.get(kind) or keys.rope_scaling
    return rotary.read(settings, theta, keys.max_position_embeddings)

  near = rope('sliding_attention', keys.local_rope_theta)
  return llama.read_config(
    keys,
    'modernbert',
    Config,
    rope=rope('full_attention', keys.global_rope_theta),
    window_rope=near if windows else None,
    hidden_act=keys.hidden_activation,
    hidden_dropout=keys.mlp_dropout,
    **windows,
    norm_bias=keys.norm_bias,
    decoder_bias=keys.decoder_bias,
    classifier_bias=keys.classifier_bias,
    classifier_act=keys.classifier_activation,
    classifier_pooling=keys.classifier_pooling,
    pad_token_id=keys.pad_token_id,
  )


def _write_config(config: Config) -> dict[str, Any]:
  local = config.window_rope or config.rope
  return {
    'vocab_size': config.vocab_size,
    'hidden_size': config.hidden_size,
    'num_hidden_layers': config.num_layers,
    'num_attention_heads': config.num_heads,
    'intermediate_size': config.intermediate_size,
    'max_position_embeddings': config.max_tokens,
    'hidden_activation': config.hidden_act,
    'norm_eps': config.layer_norm_eps,
    'norm_bias': config.norm_bias,
    'attention_bias': config.qkv_bias,
    'mlp_bias': config.mlp_bias,
    'mlp_dropout': config.hidden_dropout,
    'attention_dropout': config.attention_dropout,
    'initializer_range': config.initializer_range,
    'pad_token_id': config.pad_token_id,
    'layer_types': llama.written_window(config)['layer_types'],
    'local_attention': 2 * config.reach if config.windowed else 128,
    'decoder_bias': config.decoder_bias,
    'classifier_bias': config.classifier_bias,
    'classifier_activation': config.classifier_act,
    'classifier_pooling': config.classifier_pooling,
    'rope_parameters': {
      kind: {'rope_type': 'default', 'rope_theta': rope.theta} | (rope.written() or {})
      for kind, rope in (('full_attention', config.rope), ('sliding_attention', local))
    },
  }


def _tensors(config: Config) -> Iterator[Tensor]:
  width = config.hidden_size
  yield Tensor(
    'embeddings.tok_embeddings.weight',
    (config.vocab_size, width),
    ('embeddings', 'word', 'embedding'),
  )
  yield from weights('embeddings.norm', ('embeddings', 'norm'), (width,), config.norm_bias)
  yield from weights('final_norm', ('final',), (width,), config.norm_bias)
  for tensor in _layer_tensors(config, config.num_layers):
    yield tensor._replace(path=('layers', *tensor.path))


def _layer_tensors(config: Config, num_layers: int) -> Iterator[Tensor]:
  width, inner = config.hidden_size, config.intermediate_size
  qkv = 'query', 'key', 'value'
  tensors = stack(
    num_layers,
    'layers',
    weights('attn.Wqkv', ('attention', qkv[0]), (3 * width, width), config.qkv_bias, qkv),
    weights('attn.Wo', ('attention', 'output'), (width, width), config.output_bias),
    weights('mlp.Wi', ('mlp', 'gate'), (2 * inner, width), config.mlp_bias, ('gate', 'up')),
    weights('mlp.Wo', ('mlp', 'down'), (width, inner), config.mlp_bias),
    weights('attn_norm', ('before_attention',), (width,), config.norm_bias),
    weights('mlp_norm', ('before_mlp',), (width,), config.norm_bias),
  )
  # The embeddings are normalised before the first layer.
  return (one for one in tensors if one.layer or one.path[0] != 'before_attention')


def _dense_tensors(config: Config) -> Iterator[Tensor]:
  width = config.hidden_size
  yield from weights('head.dense', ('dense',), (width, width), config.classifier_bias)
  yield from weights('head.norm', ('norm',), (width,), config.norm_bias)


def _mlm_tensors(config: Config) -> Iterator[Tensor]:
  yield from _dense_tensors(config)
  if config.decoder_bias:
    yield Tensor('decoder.bias', (config.vocab_size,), ('bias',))


def _classifier_tensors(config: Config, labels: int) -> Iterator[Tensor]:
  yield from _dense_tensors(config)
  yield from weights('classifier', ('output',), (labels, config.hidden_size))


FAMILY: Family = llama.FAMILY._replace(
  model_type='modernbert',
  class_name='ModernBert',
  read_config=_read_config,
  write_config=_write_config,
  embeddings=Embeddings,
  layer=Layer,
  final=_norm,
  tensors=_tensors,
  layer_tensors=_layer_tensors,
  extras=re.compile(r'(head|decoder|classifier)\.|(.*\.)?rotary_emb\.'),
  mlm_tensors=_mlm_tensors,
  mlm_copies=lambda config: {'decoder.weight': 'embeddings.tok_embeddings.weight'},
  mlm_act=lambda config: config.classifier_act,
  classifier_tensors=_classifier_tensors,
  classifier_act=lambda config: config.classifier_act,
  classifier_pooling=lambda config: config.classifier_pooling,
  pad_token_id=50283,
  prompted_by='attention',
)
