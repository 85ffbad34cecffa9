"""GTE (Zhang et al., 2024) and Arctic-Embed M 2: BERT with rotary positions and a gated MLP.

A LayerNorm follows each half of a layer. Queries, keys and values are one tensor in a checkpoint,
and so are the two products of the MLP.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from jaxtyping import Array

from dprjax.models import layers
from dprjax.models.checkpoint_names import Tensor
from dprjax.models.families import bert, llama
from dprjax.models.family import only
from dprjax.models.rotary import Rope


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
  """One layer, for ``nn.scan``."""

  def enter(self, x: Array, name: str, number: Array) -> Array:
    return x

  def leave(self, x: Array, y: Array, name: str) -> Array:
    norm = layers.LayerNorm(self.config.layer_norm_eps, self.options.dtype, name=name)
    return norm(self.add(x, y)).astype(self.options.dtype)


class Keys(llama.Keys):
  """The keys read from config.json, mostly those of BERT."""

  hidden_act: str = 'gelu'
  layer_norm_eps: float = 1e-12
  hidden_dropout_prob: float = 0.1
  attention_probs_dropout_prob: float = 0.0
  type_vocab_size: Annotated[int, msgspec.Meta(ge=0, lt=1000)] = 1
  pad_token_id: int = 0
  position_embedding_type: Literal['rope'] = 'rope'
  layer_norm_type: Literal['layer_norm'] = 'layer_norm'


def read(keys: Keys, model_type: str, **traits: Any) -> Config:
  """The shape in a config.json, as `llama.read_config`."""
  keys.rms_norm_eps, keys.is_causal = keys.layer_norm_eps, False
  keys.attention_dropout = keys.attention_probs_dropout_prob
  shape = llama.read_config(keys, model_type, hidden_dropout=keys.hidden_dropout_prob, **traits)
  return Config(
    **{field.name: getattr(shape, field.name) for field in dataclasses.fields(shape)},
    type_vocab_size=keys.type_vocab_size,
    pad_token_id=keys.pad_token_id,
  )


def read_config(hf_config: Mapping[str, Any], **defaults: Any) -> Config:
  """The shape in a config.json; ``defaults`` replace missing keys."""
  keys = llama.read_keys(hf_config, Keys, **defaults)
  only(hf_config, logn_attention_scale=False, logn_attention_clip1=False, pack_qkv=True)
  return read(keys, hf_config['model_type'], qkv_bias=True, output_bias=True, down_bias=True)


def write(config: Config) -> dict[str, Any]:
  """The keys that describe a shape: those of BERT, and of rotary positions."""
  scaling = config.rope.written()
  return {
    'vocab_size': config.vocab_size,
    'hidden_size': config.hidden_size,
    'num_hidden_layers': config.num_layers,
    'num_attention_heads': config.num_heads,
    'intermediate_size': config.intermediate_size,
    'max_position_embeddings': config.max_tokens,
    'type_vocab_size': config.type_vocab_size,
    'layer_norm_eps': config.layer_norm_eps,
    'hidden_act': config.hidden_act,
    'pad_token_id': config.pad_token_id,
    'hidden_dropout_prob': config.hidden_dropout,
    'attention_probs_dropout_prob': config.attention_dropout,
    'initializer_range': config.initializer_range,
    'rope_theta': config.rope.theta,
    # The remote code calls the kind 'type'.
    'rope_scaling': scaling and {'type': config.rope.kind, **scaling},
  }


def tensors(config: Config, norm: str, layers: Iterator[Tensor]) -> Iterator[Tensor]:
  """Every tensor of the encoder."""
  for name, ours, rows in (
    ('word_embeddings', 'word', config.vocab_size),
    ('token_type_embeddings', 'token_type', config.type_vocab_size),
  ):
    if rows:
      yield Tensor(
        f'embeddings.{name}.weight', (rows, config.hidden_size), ('embeddings', ours, 'embedding')
      )
  for kind, ours in (('weight', 'scale'), ('bias', 'bias')):
    yield Tensor(f'{norm}.{kind}', (config.hidden_size,), ('embeddings', 'norm', ours))
  for tensor in layers:
    yield tensor._replace(name=f'encoder.{tensor.name}', path=('layers', *tensor.path))


def stack(
  config: Config, num_layers: int, start: str, dense: Iterable[tuple], norms: tuple[str, str]
) -> Iterator[Tensor]:
  """A stack of layers.

  Args:
    start: precedes the number of a layer.
    dense: for each dense layer: its name, its half of the layer, its parts in our tree, the shape
      of its weight, and whether it has a bias.
    norms: the names of the norms after the attention and after the MLP.
  """
  for layer in range(num_layers):
    for name, half, parts, shape, bias in dense:
      name = f'{start}.{layer}.{name}'
      yield Tensor(f'{name}.weight', shape, (half, parts[0], 'kernel'), layer, num_layers, parts)
      if bias:
        yield Tensor(f'{name}.bias', shape[:1], (half, parts[0], 'bias'), layer, num_layers, parts)
    for name, path in zip(norms, ('after_attention', 'after_mlp'), strict=True):
      for kind, ours in (('weight', 'scale'), ('bias', 'bias')):
        shape = (config.hidden_size,)
        yield Tensor(f'{start}.{layer}.{name}.{kind}', shape, (path, ours), layer, num_layers)


def _layer_tensors(config: Config, num_layers: int) -> Iterator[Tensor]:
  width, inner = config.hidden_size, config.intermediate_size
  dense = (
    ('attention.qkv_proj', 'attention', ('query', 'key', 'value'), (3 * width, width), True),
    ('attention.o_proj', 'attention', ('output',), (width, width), True),
    ('mlp.up_gate_proj', 'mlp', ('up', 'gate'), (2 * inner, width), False),
    ('mlp.down_proj', 'mlp', ('down',), (width, inner), True),
  )
  return stack(config, num_layers, 'layer', dense, ('attn_ln', 'mlp_ln'))


def _shapes() -> dict[str, Config]:
  rest: dict[str, Any] = {
    'causal': False,
    'hidden_act': 'gelu',
    'layer_norm_eps': 1e-12,
    'hidden_dropout': 0.1,
    'qkv_bias': True,
    'output_bias': True,
    'down_bias': True,
  }
  size = 768, 12, 12, 12, 64, 3072, 8192
  return {
    'gte-multilingual-base': Config(
      'gte', 250048, *size, Rope(20000.0, 'ntk', (('factor', 8.0),)), pad_token_id=1, **rest
    ),
    'snowflake-arctic-embed-m-v2.0': Config(
      'gte', 250048, *size, Rope(160000.0), pad_token_id=1, **rest
    ),
  }


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
  read_config=lambda hf_config: read_config(hf_config, rope_theta=160000.0, pad_token_id=1),
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
  shapes=_shapes,
)
