"""ELECTRA (Clark et al., 2020): BERT whose embeddings may be narrower than its layers."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from jax.sharding import PartitionSpec

from dprjax.models.checkpoint_names import Tensor, weights
from dprjax.models.encoder_config import EncoderConfig
from dprjax.models.families import bert, llama


@dataclasses.dataclass(frozen=True)
class Config(EncoderConfig):
  embedding_size: int = 128


class Keys(msgspec.Struct):
  embedding_size: llama.Size = 128


def _read_config(hf_config: Mapping[str, Any]) -> Config:
  shape = bert.read_config(hf_config)
  fields = {field.name: getattr(shape, field.name) for field in dataclasses.fields(shape)}
  return Config(**fields, embedding_size=llama.read_keys(hf_config, Keys).embedding_size)


def _tensors(config: Config) -> Iterator[Tensor]:
  yield from bert.tensors(config)
  wide, narrow = config.hidden_size, config.embedding_size
  if wide != narrow:
    yield from weights('embeddings_project', ('embeddings', 'project'), (wide, narrow))


FAMILY = bert.FAMILY._replace(
  model_type='electra',
  class_name='Electra',
  read_config=_read_config,
  write_config=lambda config: bert.write_config(config) | {'embedding_size': config.embedding_size},
  tensors=_tensors,
  canonical=lambda name: bert.canonical('electra.', name),
  prefix='electra.',
  extras=re.compile(
    r'(generator_\w+|discriminator_predictions|classifier|qa_outputs)\.'
    r'|embeddings\.(position_ids|token_type_ids)$'
  ),
  mlm_tensors=lambda config: bert.mlm_tensors(
    config,
    'generator_predictions.dense',
    'generator_predictions.LayerNorm',
    'generator_lm_head.bias',
  ),
  mlm_copies=lambda config: {'generator_lm_head.weight': 'embeddings.word_embeddings.weight'},
  mlm_act=lambda config: 'gelu',
  classifier_tensors=lambda config, labels: bert.classifier_tensors(
    config, labels, 'classifier.dense', 'classifier.out_proj'
  ),
  classifier_act=lambda config: 'gelu',
  classifier_drops=True,
  sharding=((r'backbone/.*embeddings/project/kernel', PartitionSpec()),),
)
