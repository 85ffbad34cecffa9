"""DistilBERT (Sanh et al., 2019): BERT layers without token types, under other names."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dprjax.models.checkpoint_names import Tensor
from dprjax.models.encoder_config import EncoderConfig
from dprjax.models.families import bert

_KEYS = {
  'dim': 'hidden_size',
  'n_layers': 'num_hidden_layers',
  'n_heads': 'num_attention_heads',
  'hidden_dim': 'intermediate_size',
  'activation': 'hidden_act',
  'dropout': 'hidden_dropout_prob',
  'attention_dropout': 'attention_probs_dropout_prob',
}
_NAMES = {
  'attention.self.query': 'attention.q_lin',
  'attention.self.key': 'attention.k_lin',
  'attention.self.value': 'attention.v_lin',
  'attention.output.dense': 'attention.out_lin',
  'attention.output.LayerNorm': 'sa_layer_norm',
  'intermediate.dense': 'ffn.lin1',
  'output.dense': 'ffn.lin2',
  'output.LayerNorm': 'output_layer_norm',
}


def _read_config(hf_config: Mapping[str, Any]) -> EncoderConfig:
  renamed = {_KEYS.get(key, key): value for key, value in hf_config.items()}
  return bert.read_config(renamed | {'type_vocab_size': 0})


def _write_config(config: EncoderConfig) -> dict[str, Any]:
  names = {theirs: ours for ours, theirs in _KEYS.items()}
  written = bert.write_config(config)
  for key in ('type_vocab_size', 'layer_norm_eps', 'position_embedding_type'):
    del written[key]
  return {names.get(key, key): value for key, value in written.items()}


def _layer_tensors(config: EncoderConfig, num_layers: int) -> Iterator[Tensor]:
  return bert.renamed(bert.layer_tensors(config, num_layers), _NAMES)


def _tensors(config: EncoderConfig) -> Iterator[Tensor]:
  return bert.renamed(bert.tensors(config), _NAMES | {'encoder.layer': 'transformer.layer'})


FAMILY = bert.FAMILY._replace(
  model_type='distilbert',
  class_name='DistilBert',
  read_config=_read_config,
  write_config=_write_config,
  tensors=_tensors,
  layer_tensors=_layer_tensors,
  canonical=lambda name: bert.canonical('distilbert.', name),
  prefix='distilbert.',
  extras=re.compile(
    r'(vocab_\w+|pre_classifier|classifier|qa_outputs)\.|embeddings\.position_ids$'
  ),
  mlm_tensors=lambda config: bert.mlm_tensors(
    config, 'vocab_transform', 'vocab_layer_norm', 'vocab_projector.bias'
  ),
  mlm_copies=lambda config: {'vocab_projector.weight': 'embeddings.word_embeddings.weight'},
  classifier_tensors=lambda config, labels: bert.classifier_tensors(
    config, labels, 'pre_classifier', 'classifier'
  ),
  classifier_act=lambda config: 'relu',
  prompted_by='attention',
)
