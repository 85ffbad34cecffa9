"""MPNet (Song et al., 2020): BERT layers with the positions of RoBERTa and relative positions."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dprjax.models.checkpoint_names import Tensor
from dprjax.models.encoder_config import EncoderConfig
from dprjax.models.families import bert, roberta, t5
from dprjax.models.family import only

_NAMES = {
  'attention.self.query': 'attention.attn.q',
  'attention.self.key': 'attention.attn.k',
  'attention.self.value': 'attention.attn.v',
  'attention.output.dense': 'attention.attn.o',
  'attention.output.LayerNorm': 'attention.LayerNorm',
}
_BUCKETS = 32


def _read_config(hf_config: Mapping[str, Any]) -> EncoderConfig:
  # transformers uses 32 buckets of distances and positions from 2, and ignores config.json.
  only(hf_config, relative_attention_num_buckets=_BUCKETS, pad_token_id=1)
  return bert.read_config(dict(hf_config) | {'type_vocab_size': 0})


def _write_config(config: EncoderConfig) -> dict[str, Any]:
  written = bert.write_config(config) | {'relative_attention_num_buckets': _BUCKETS}
  return {key: value for key, value in written.items() if key != 'type_vocab_size'}


def _layer_tensors(config: EncoderConfig, num_layers: int) -> Iterator[Tensor]:
  return bert.renamed(bert.layer_tensors(config, num_layers), _NAMES)


def _tensors(config: EncoderConfig) -> Iterator[Tensor]:
  yield from bert.renamed(bert.tensors(config), _NAMES)
  yield Tensor(
    'encoder.relative_attention_bias.weight',
    (_BUCKETS, config.num_heads),
    ('relative', 'buckets', 'embedding'),
  )


FAMILY = roberta.FAMILY._replace(
  model_type='mpnet',
  class_name='MPNet',
  read_config=_read_config,
  write_config=_write_config,
  tensors=_tensors,
  layer_tensors=_layer_tensors,
  canonical=lambda name: bert.canonical('mpnet.', name),
  prefix='mpnet.',
  extras=re.compile(r'(pooler|lm_head|classifier|qa_outputs)\.|embeddings\.position_ids$'),
  relative=lambda config: t5.RelativeBias(config, _BUCKETS),
  prompted_by='',
)
