"""Shapes of backbones, without their weights."""

import tempfile

import ml_collections
from etils import epath

from dprjax.base.errors import InputError
from dprjax.models import family as families
from dprjax.models import hub, sentence
from dprjax.models.encoder_config import EncoderConfig
from dprjax.text import tokenizing, vocabularies
from dprjax.text.vector_spec import VectorSpec
from dprjax.training import encoder_settings
from dprjax.training.train import VOCABULARIES

SHAPES: dict[str, EncoderConfig] = {
  name: shape for family in families.every().values() for name, shape in family.shapes().items()
}


def shape_of(config: ml_collections.ConfigDict) -> EncoderConfig:
  """The shape of ``config.backbone.path``: a name in ``SHAPES``, scratch:SIZE, or a config.json."""
  path = config.backbone.path
  if path.startswith('scratch:'):
    _, model_type = VOCABULARIES[config.backbone.vocabulary]
    return hub.scratch_config(
      path.removeprefix('scratch:'), config.backbone.vocab_size, model_type=model_type
    )
  if path in SHAPES:
    return SHAPES[path]
  folder = _folder(path)
  if (folder / 'config.json').exists() or (folder / 'modules.json').exists():
    return hub.read_shape(folder)
  raise InputError(
    f'config.backbone.path: {path!r:.80} is neither a folder with a config.json nor one of '
    f'{", ".join(name for name in SHAPES if ":" not in name)}'
  )


def spec_of(config: ml_collections.ConfigDict, path: str, reserved: int) -> VectorSpec:
  """How the backbone embeds texts, as `encoder_settings.load`."""
  if path.startswith('scratch:'):
    return encoder_settings.load(path, reserved)
  shape = shape_of(config)
  return sentence.read_folder(_folder(path), shape).at_most(shape.max_tokens - reserved)


def _folder(path: str) -> epath.Path:
  folder = epath.Path(hub.package_path(path))
  return folder.parent if folder.is_file() and folder.name == 'config.json' else folder


def tokenizer() -> tokenizing.Tokenizer:
  """A small tokenizer, since programs depend only on its special tokens and a few words."""
  with tempfile.TemporaryDirectory() as folder:
    return vocabularies.train_wordpiece(['yes no relevant irrelevant true false'], 100, folder)
