"""RoBERTa (Liu et al., 2019): BERT layers, with positions counted from the padding id + 1."""

import jax.numpy as jnp
from jaxtyping import Array

from dprjax.models.encoder_config import EncoderConfig
from dprjax.models.families import bert


def _positions(config: EncoderConfig, tokens: Array, mask: Array, shift: int | Array) -> Array:
  # As in transformers, a padding token inside a text is not counted either.
  real = (mask & (tokens != config.pad_token_id)).astype(jnp.int32)
  return (jnp.cumsum(real, axis=1) + shift) * real + config.pad_token_id


FAMILY = bert.FAMILY._replace(
  model_type='roberta',
  class_name='Roberta',
  pad_token_id=1,
  positions=_positions,
  # Earlier rows of the table are reserved.
  first_position=lambda config: config.pad_token_id + 1,
  canonical=lambda name: bert.canonical('roberta.', name),
  prefix='roberta.',
  mlm_tensors=lambda config: bert.mlm_tensors(
    config, 'lm_head.dense', 'lm_head.layer_norm', 'lm_head.bias'
  ),
  mlm_copies=lambda config: {
    'lm_head.decoder.weight': 'embeddings.word_embeddings.weight',
    'lm_head.decoder.bias': 'lm_head.bias',
  },
  mlm_act=lambda config: 'gelu',
  classifier_tensors=lambda config, labels: bert.classifier_tensors(
    config, labels, 'classifier.dense', 'classifier.out_proj'
  ),
  classifier_drops=True,
)

# CamemBERT (Martin et al., 2020): a French vocabulary.
CAMEMBERT = FAMILY._replace(
  model_type='camembert',
  class_name='Camembert',
)

# XLM-R (Conneau et al., 2020): a vocabulary of a hundred languages.
XLM_ROBERTA = FAMILY._replace(
  model_type='xlm-roberta',
  class_name='XLMRoberta',
)
