"""BERT (Devlin et al., 2019), and the parts that its descendants share.

Tensors have their names in ``BertModel``. The heads are those of ``BertForMaskedLM`` and
``BertForSequenceClassification``; the pooler is the first half of the latter.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

import jax.numpy as jnp
import msgspec
from jaxtyping import Array

from dprjax.base.reading import convert
from dprjax.models import layers
from dprjax.models.checkpoint_names import Tensor, stack, weights
from dprjax.models.encoder_config import EncoderConfig
from dprjax.models.family import Family, find, only

# Keys of config.json and our names, in the order of writing.
KEYS = {
  'vocab_size': 'vocab_size',
  'hidden_size': 'hidden_size',
  'num_hidden_layers': 'num_layers',
  'num_attention_heads': 'num_heads',
  'intermediate_size': 'intermediate_size',
  'max_position_embeddings': 'max_positions',
  'type_vocab_size': 'type_vocab_size',
  'layer_norm_eps': 'layer_norm_eps',
  'hidden_act': 'hidden_act',
  'pad_token_id': 'pad_token_id',
  'hidden_dropout_prob': 'hidden_dropout',
  'attention_probs_dropout_prob': 'attention_dropout',
  'initializer_range': 'initializer_range',
}
_FROM_0 = ('pad_token_id', 'type_vocab_size')
_LARGEST = {'initializer_range': 1000}  # others: 1
_FIELDS: dict[str, Any] = {field.name: field for field in dataclasses.fields(EncoderConfig)}


def read_config(hf_config: Mapping[str, Any]) -> EncoderConfig:
  model_type = hf_config['model_type']
  only(hf_config, position_embedding_type='absolute', is_decoder=False, add_cross_attention=False)
  values: dict[str, Any] = {
    key: field.default
    for key, name in KEYS.items()
    if (field := _FIELDS[name]).default is not dataclasses.MISSING and name != 'max_positions'
  }
  values['pad_token_id'] = find(model_type).pad_token_id
  values |= {key: value for key, value in hf_config.items() if value is not None}
  for key, name in KEYS.items():
    convert(values.get(key), key, _types(key)[_FIELDS[name].type])
  layers.check_activation(values['hidden_act'], 'hidden_act')
  return EncoderConfig(
    model_type, **{name: _FIELDS[name].type(values[key]) for key, name in KEYS.items()}
  )


def _types(key: str) -> dict[type, Any]:
  """The types that a key may have. Sizes are compared with the tensors later."""
  least = 0 if key in _FROM_0 else 1
  return {
    int: Annotated[int, msgspec.Meta(ge=least, lt=2**31)],
    float: Annotated[float, msgspec.Meta(ge=0, le=_LARGEST.get(key, 1))],
    str: str,
  }


def write_config(config: EncoderConfig) -> dict[str, Any]:
  return {key: getattr(config, field) for key, field in KEYS.items()} | {
    'position_embedding_type': 'absolute'
  }


def _positions(config: EncoderConfig, tokens: Array, mask: Array, shift: int | Array) -> Array:
  count = jnp.arange(mask.shape[1], dtype=jnp.int32)
  if isinstance(shift, int):
    return jnp.broadcast_to(count + shift, mask.shape)
  positions = count[None, :] + shift
  # Padding in a long batch may lie outside the table, which would give NaN.
  return jnp.where(mask, positions, jnp.minimum(positions, config.max_positions - 1))


def tensors(config: EncoderConfig) -> Iterator[Tensor]:
  width = config.embedding_size
  for name, ours, rows in (
    ('word_embeddings', 'word', config.vocab_size),
    ('position_embeddings', 'position', config.max_positions),
    ('token_type_embeddings', 'token_type', config.type_vocab_size),
  ):
    if rows:
      yield Tensor(f'embeddings.{name}.weight', (rows, width), ('embeddings', ours, 'embedding'))
  yield from weights('embeddings.LayerNorm', ('embeddings', 'norm'), (width,))
  for tensor in layer_tensors(config, config.num_layers):
    yield tensor._replace(name=f'encoder.{tensor.name}', path=('layers', *tensor.path))


def layer_tensors(config: EncoderConfig, num_layers: int) -> Iterator[Tensor]:
  """A stack of layers, of the encoder or the Condenser head: ``layer.0.output.dense.bias``, ..."""
  width, inner = config.hidden_size, config.intermediate_size
  return stack(
    num_layers,
    'layer',
    *(
      weights(f'attention.self.{name}', ('attention', name), (width, width))
      for name in ('query', 'key', 'value')
    ),
    weights('attention.output.dense', ('attention', 'output'), (width, width)),
    weights('attention.output.LayerNorm', ('attention', 'norm'), (width,)),
    weights('intermediate.dense', ('mlp', 'up'), (inner, width)),
    weights('output.dense', ('mlp', 'down'), (width, inner)),
    weights('output.LayerNorm', ('mlp', 'norm'), (width,)),
  )


def renamed(tensors: Iterable[Tensor], parts: Mapping[str, str]) -> Iterator[Tensor]:
  """Tensors under other names: each part of a name that is a key becomes its value."""
  for tensor in tensors:
    name = f'.{tensor.name}'
    for old, new in parts.items():
      name = name.replace(f'.{old}.', f'.{new}.')
    yield tensor._replace(name=name[1:])


def mlm_tensors(config: EncoderConfig, dense: str, norm: str, bias: str) -> Iterator[Tensor]:
  width = config.embedding_size
  yield from weights(dense, ('dense',), (width, config.hidden_size))
  yield from weights(norm, ('norm',), (width,))
  yield Tensor(bias, (config.vocab_size,), ('bias',))


def classifier_tensors(
  config: EncoderConfig, labels: int, dense: str, output: str
) -> Iterator[Tensor]:
  width = config.hidden_size
  yield from weights(dense, ('dense',), (width, width))
  yield from weights(output, ('output',), (labels, width))


def canonical(prefix: str, name: str) -> str:
  """The name of a tensor without a prefix. Old files call LayerNorm parameters gamma and beta."""
  name = name.removeprefix(prefix)
  return re.sub(
    r'LayerNorm\.beta$', 'LayerNorm.bias', re.sub(r'LayerNorm\.gamma$', 'LayerNorm.weight', name)
  )


_PREDICTIONS = 'cls.predictions'

FAMILY = Family(
  model_type='bert',
  class_name='Bert',
  read_config=read_config,
  write_config=write_config,
  embeddings=layers.Embeddings,
  layer=layers.Layer,
  positions=_positions,
  first_position=lambda config: 0,
  tensors=tensors,
  layer_tensors=layer_tensors,
  canonical=lambda name: canonical('bert.', name),
  prefix='bert.',
  # Old versions of transformers stored the two buffers.
  extras=re.compile(
    r'(pooler|cls|lm_head|classifier|qa_outputs)\.|embeddings\.(position_ids|token_type_ids)$'
  ),
  mlm_tensors=lambda config: mlm_tensors(
    config,
    f'{_PREDICTIONS}.transform.dense',
    f'{_PREDICTIONS}.transform.LayerNorm',
    f'{_PREDICTIONS}.bias',
  ),
  mlm_copies=lambda config: {
    f'{_PREDICTIONS}.decoder.weight': 'embeddings.word_embeddings.weight',
    f'{_PREDICTIONS}.decoder.bias': f'{_PREDICTIONS}.bias',
  },
  mlm_act=lambda config: config.hidden_act,
  classifier_tensors=lambda config, labels: classifier_tensors(
    config, labels, 'pooler.dense', 'classifier'
  ),
)
