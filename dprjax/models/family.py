"""A family of backbones is one value, a `Family`.

    model_type 'xlm-roberta'    XLM_ROBERTA in dprjax/models/families/roberta.py
    DPRJAX_EXTENSIONS=lab.rms   FAMILY in a module of your own (`base.extensions`)

config.json names it in ``model_type``. Encoder, checkpoints and sharding rules use only this value.
A new family often replaces fields of another:
``FAMILY = bert.FAMILY._replace(model_type='rms-bert', layer=Layer)``.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array

from dprjax.base import extensions
from dprjax.base.errors import InputError
from dprjax.models.checkpoint_names import Tensor
from dprjax.models.pooling import Dense

_FAMILIES = 'dprjax.models.families'
# Module and value of each family of the package.
_PLACES = {
  name: f'{_FAMILIES}.{place}'
  for name, place in {
    'bert': 'bert.FAMILY',
    'camembert': 'roberta.CAMEMBERT',
    'distilbert': 'distilbert.FAMILY',
    'electra': 'electra.FAMILY',
    'eurobert': 'llama.EUROBERT',
    'gemma3_text': 'gemma3.FAMILY',
    'gte': 'gte.FAMILY',
    'llama': 'llama.FAMILY',
    'mistral': 'llama.MISTRAL',
    'modernbert': 'modernbert.FAMILY',
    'mpnet': 'mpnet.FAMILY',
    'new': 'gte.NEW',
    'nomic_bert': 'nomic_bert.FAMILY',
    'qwen2': 'llama.QWEN2',
    'qwen3': 'llama.QWEN3',
    'roberta': 'roberta.FAMILY',
    't5': 't5.FAMILY',
    'xlm-roberta': 'roberta.XLM_ROBERTA',
  }.items()
}

# The shape of an encoder: an `EncoderConfig`, or another `Shape` with its properties.
Config = Any


@dataclasses.dataclass(frozen=True)
class Shape:
  """The base of all shapes, frozen dataclasses with a ``model_type``.

  Attributes:
    causal: tokens do not see later ones, so the state of the first token does not describe a text.
  """

  projection: tuple[Dense, ...] = dataclasses.field(default=(), kw_only=True)

  causal = False

  @property
  def family(self) -> 'Family':
    return find(self.model_type)  # type: ignore[attr-defined]  # a field of the subclass

  @property
  def window(self) -> int | None:
    """How many tokens, itself included, a token sees back in the narrowest layer; None: all."""
    return None

  @property
  def embedding_size(self) -> int:
    return self.hidden_size  # type: ignore[attr-defined]

  @property
  def vector_size(self) -> int:
    return self.projection[-1].outputs if self.projection else self.hidden_size  # type: ignore[attr-defined]


class Family(NamedTuple):
  """A family of backbones.

  The parameters of an encoder are ``embeddings`` (with ``word/embedding`` [V, H]), ``layers``,
  stacked on a leading axis, and in some families ``relative`` and ``final``.

  Attributes:
    model_type: its name in config.json.
    class_name: the prefix of class names in transformers, ``Bert`` of ``BertModel``.
    read_config: ``(config.json) -> Config``. Raises InputError for an unsupported value.
    write_config: ``Config -> keys of config.json``.
    embeddings: the module of the first hidden states, as ``layers.Embeddings``.
    layer: the module of one layer, as ``layers.Layer``, for ``nn.scan``.
    positions: ``(config, tokens, mask, shift) -> [B, T]``; ``shift`` is a number or ``[B, 1]``.
    first_position: ``config ->`` the row of the first token in a table of positions.
    tensors: ``config -> tensors`` of the checkpoint of an encoder.
    layer_tensors: ``(config, L) -> tensors`` of a stack of layers.
    canonical: maps a stored name, without the prefix of larger models, to one of ``tensors``.
    prefix: of the encoder names in classes with a head, ``bert.``.
    extras: matches names that larger models add.
    mlm_tensors: ``config -> tensors`` of the masked-LM head; None: no such head.
    mlm_copies: ``config -> {copy: original}``, for tensors that some files store twice.
    mlm_act: ``config -> activation`` of the masked-LM head.
    classifier_tensors: ``(config, labels) -> tensors`` of the classification head; None: no such
      head.
    classifier_act: ``config -> activation`` of its first layer.
    classifier_pooling: ``config -> pooling`` before it.
    classifier_drops: whether dropout also comes before its first layer.
    relative: ``config -> module`` of a bias by distance, ``T -> [1, N, T, T]``.
    final: ``(config, dtype) -> module`` after the last layer, such as a norm.
    sharding: ``(regular expression, PartitionSpec)`` of parameter names that ``mesh.RULES`` lacks.
    turn_keys: ``(config, keys [L P N D], places) -> keys`` of texts moved by this many positions;
      None: positions are not rotary.
    prompted_by: how a prompt enters the class of transformers: 'cache', as past keys and values;
      'attention', by our attention function; '': not supported.
    modules: by the names of `adapter.projections`, the linear modules of a layer in transformers;
      None: those of the checkpoint.
  """

  model_type: str
  class_name: str
  read_config: Callable[[Mapping[str, Any]], Config]
  write_config: Callable[[Config], dict[str, Any]]
  embeddings: type[nn.Module]
  layer: type[nn.Module]
  positions: Callable[[Config, Array, Array, int | Array], Array]
  first_position: Callable[[Config], int]
  tensors: Callable[[Config], Iterable[Tensor]]
  layer_tensors: Callable[[Config, int], Iterable[Tensor]]
  canonical: Callable[[str], str]
  prefix: str
  extras: re.Pattern[str]
  mlm_tensors: Callable[[Config], Iterable[Tensor]] | None = None
  mlm_copies: Callable[[Config], Mapping[str, str]] = lambda config: {}
  mlm_act: Callable[[Config], str] = lambda config: config.hidden_act
  classifier_tensors: Callable[[Config, int], Iterable[Tensor]] | None = None
  classifier_act: Callable[[Config], str] = lambda config: 'tanh'
  classifier_pooling: Callable[[Config], str] = lambda config: 'cls'
  classifier_drops: bool = False
  relative: Callable[[Config], nn.Module] | None = None
  final: Callable[[Config, Any], nn.Module] | None = None
  sharding: tuple[tuple[str, PartitionSpec], ...] = ()
  turn_keys: Callable[[Config, np.ndarray, int], np.ndarray] | None = None
  prompted_by: str = 'cache'
  modules: Mapping[str, str] | None = None
  pad_token_id: int = 0


def only(hf_config: Mapping[str, Any], **supported: Any) -> None:
  """Raises InputError for a key of config.json with another value than the supported one."""
  for key, value in supported.items():
    if hf_config.get(key) not in (None, value):
      raise InputError(f'{key} {hf_config[key]!r:.60} is not supported, only {value!r}')


def find(model_type: Any) -> Family:
  family = extensions.find('FAMILY', 'model_type', str(model_type), _PLACES)
  if family is None:
    raise InputError(
      f'model_type {model_type!r} is not supported; use one of: {", ".join(every())}'
    )
  return family


def every() -> dict[str, Family]:
  """All families by name, those of the package first."""
  return {family.model_type: family for family in extensions.values('FAMILY', _PLACES)}
