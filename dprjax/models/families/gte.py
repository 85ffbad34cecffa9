"""GTE (Zhang et al., 2024) and Arctic-Embed M 2: BERT with rotary positions and a gated MLP.

A LayerNorm follows each half of a layer. Queries, keys and values are one tensor in a checkpoint,
and so are the two products of the MLP.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from jaxtyping import Array

from dprjax.models import layers
from dprjax.models.checkpoint_names import Tensor, stack, weights
from dprjax.models.families import bert, llama
from dprjax.models.family import only


@dataclasses.dataclass(frozen=True)
class Config(llama.Config):
  """The shape of a GTE encoder; ``type_vocab_size`` 0: no token types."""

  type_vocab_size: int = 1
  pad_token_id: int = 0


class Embeddings(layers.Embeddings):
  """Word and token type embeddings, summed and normalised in float32."""

  def combine(self, x: Array, positions: Array, token_types: Array) -> Array:
    config = self.config
    if config.type_vocab_size:
      x += layers.Embed(config, config.type_vocab_size, name='token_type')(token_types)
    return layers.LayerNorm(config.layer_norm_eps, name='norm')(x)


class Layer(llama.Layer):
  def enter(self, x: Array, name: str, number: Array) -> Array:
    return x

  def leave(self, x: Array, y: Array, name: str) -> Array:
    norm = layers.LayerNorm(self.config.layer_norm_eps, self.options.dtype, name=name)
    return norm(self.add(x, y)).astype(self.options.dtype)


class Keys(llama.Keys):
  hidden_act: str = 'gelu'
  layer_norm_eps: float = 1e-12
  hidden_dropout_prob: float = 0.1
  attention_probs_dropout_prob: float = 0.0
  type_vocab_size: Annotated[int, msgspec.Meta(ge=0, lt=1000)] = 1
  pad_token_id: int = 0
  position_embedding_type: Literal['rope'] = 'rope'
  layer_norm_type: Literal['layer_norm'] = 'layer_norm'


def read(keys: Keys, model_type: str, **traits: Any) -> Config:
  keys.rms_norm_eps, keys.is_causal = keys.layer_norm_eps, False
  keys.attention_dropout = keys.attention_probs_dropout_prob
  return llama.read_config(
    keys,
    model_type,
    Config,
    hidden_dropout=keys.hidden_dropout_prob,
    type_vocab_size=keys.type_vocab_size,
    pad_token_id=keys.pad_token_id,
    **traits,
  )


def _read_config(hf_config: Mapping[str, Any], **defaults: Any) -> Config:
  """The shape in a config.json; ``defaults`` replace missing keys."""
  keys = llama.read_keys(hf_config, Keys, **defaults)
  only(hf_config, logn_attention_scale=False, logn_attention_clip1=False, pack_qkv=True)
  return read(keys, hf_config['model_type'], qkv_bias=True, output_bias=True, down_bias=True)


def write(config: Config) -> dict[str, Any]:
  """The keys that describe a shape: those of BERT, and of rotary positions."""
  scaling = config.rope.written()
  names = {'max_positions': 'max_tokens'}
  return {key: getattr(config, names.get(name, name)) for key, name in bert.KEYS.items()} | {
    'rope_theta': config.rope.theta,
    # The remote code calls the kind 'type'.
    'rope_scaling': scaling and {'type': config.rope.kind, **scaling},
  }


def tensors(config: Config, norm: str, layers: Iterator[Tensor]) -> Iterator[Tensor]:
  for name, ours, rows in (
    ('word_embeddings', 'word', config.vocab_size),
    ('token_type_embeddings', 'token_type', config.type_vocab_size),
  ):
    if rows:
      yield Tensor(
        f'embeddings.{name}.weight', (rows, config.hidden_size), ('embeddings', ours, 'embedding')
      )
  yield from weights(norm, ('embeddings', 'norm'), (config.hidden_size,))
  for tensor in layers:
    yield tensor._replace(name=f'encoder.{tensor.name}', path=('layers', *tensor.path))


def _layer_tensors(config: Config, num_layers: int) -> Iterator[Tensor]:
  width, inner = config.hidden_size, config.intermediate_size
  qkv = 'query', 'key', 'value'
  return stack(
    num_layers,
    'layer',
    weights('attention.qkv_proj', ('attention', qkv[0]), (3 * width, width), parts=qkv),
    weights('attention.o_proj', ('attention', 'output'), (width, width)),
    weights('mlp.up_gate_proj', ('mlp', 'up'), (2 * inner, width), False, ('up', 'gate')),
    weights('mlp.down_proj', ('mlp', 'down'), (width, inner)),
    weights('attn_ln', ('after_attention',), (width,)),
    weights('mlp_ln', ('after_mlp',), (width,)),
  )


MODULES = {
  'attention/query': 'self_attn.q_proj',
  'attention/key': 'self_attn.k_proj',
  'attention/value': 'self_attn.v_proj',
  'attention/output': 'self_attn.o_proj',
  'mlp/up': 'mlp.up_proj',
  'mlp/gate': 'mlp.gate_proj',
  'mlp/down': 'mlp.down_proj',
}

FAMILY = llama.FAMILY._replace(
  model_type='gte',
  class_name='Gte',
  read_config=lambda hf_config: _read_config(hf_config, rope_theta=160000.0, pad_token_id=1),
  write_config=write,
  embeddings=Embeddings,
  layer=Layer,
  final=None,
  tensors=lambda config: tensors(
    config, 'embeddings.LayerNorm', _layer_tensors(config, config.num_layers)
  ),
  layer_tensors=_layer_tensors,
  canonical=lambda name: re.sub(r'^(gte|new)\.', '', name),
  prefix='gte.',
  extras=re.compile(r'(pooler|lm_head|classifier|qa_outputs)\.'),
  mlm_tensors=lambda config: bert.mlm_tensors(
    config, 'lm_head.dense', 'lm_head.norm', 'lm_head.decoder.bias'
  ),
  mlm_copies=lambda config: {'lm_head.decoder.weight': 'embeddings.word_embeddings.weight'},
  mlm_act=lambda config: 'gelu',
  classifier_tensors=lambda config, labels: bert.classifier_tensors(
    config, labels, 'pooler.dense', 'classifier'
  ),
  pad_token_id=1,
  prompted_by='attention',
  modules=MODULES,
)

# GTE under its name on the hub, where its code is remote.
NEW = FAMILY._replace(
  model_type='new',
  class_name='New',
  read_config=_read_config,
  prefix='new.',
  pad_token_id=0,
  prompted_by='',
  modules=None,
)
