"""A family of backbones is one value, `FAMILY`, in one module.

    model_type 'xlm-roberta'    dprjax/models/families/xlm_roberta.py
    DPRJAX_EXTENSIONS=lab.rms   a module of your own (`base.extensions`)

config.json names it in ``model_type``. Encoder, checkpoints and sharding rules use only this value.
A new family often replaces fields of another:
``FAMILY = bert.FAMILY._replace(model_type='rms-bert', layer=Layer)``.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
from jax.sharding import PartitionSpec
from jaxtyping import Array

from dprjax.base import extensions
from dprjax.base.errors import InputError
from dprjax.models.checkpoint_names import Tensor
from dprjax.models.projection import Dense

_PACKAGE = 'dprjax.models.families'

# The shape of an encoder: an `EncoderConfig`, or another `Shape` that has its properties.
Config = Any


@dataclasses.dataclass(frozen=True)
class Shape:
  """What the shapes of all families have, which are frozen dataclasses with a ``model_type``.

  Attributes:
    projection: the dense layers behind the pooling.
    causal: a token sees no later tokens, so that the first one's state says nothing of a text.
  """

  projection: tuple[Dense, ...] = dataclasses.field(default=(), kw_only=True)

  causal = False

  @property
  def family(self) -> 'Family':
    return find(self.model_type)  # type: ignore[attr-defined]  # of the subclass

  @property
  def embedding_size(self) -> int:
    """The width of the tables of embeddings."""
    return self.hidden_size  # type: ignore[attr-defined]

  @property
  def vector_size(self) -> int:
    """The numbers of a text's vector."""
    return self.projection[-1].outputs if self.projection else self.hidden_size  # type: ignore[attr-defined]


class Family(NamedTuple):
  """A family of backbones.

  The parameters of an encoder are ``embeddings`` (with ``word/embedding`` [V, H]), ``layers``, each
  leaf with the layers' axis first, and ``relative`` and ``final`` where there are such modules.

  Attributes:
    model_type: its name in config.json.
    class_name: the start of the names of its classes in transformers, ``Bert`` of ``BertModel``.
    read_config: ``(config.json) -> Config``. Raises InputError for a value that it cannot have.
    write_config: ``Config -> keys of config.json``.
    embeddings: the module of the first hidden states, as ``layers.Embeddings``.
    layer: the module of one layer, as ``layers.Layer``; ``nn.scan`` stacks it.
    positions: ``(config, tokens, mask, shift) -> [B, T]``, each token's position. ``shift`` is a
      number or ``[B, 1]``.
    first_position: ``config ->`` the first token's row of a table of positions.
    tensors: ``config -> tensors`` of an encoder's checkpoint, and their places in our tree.
    layer_tensors: ``(config, L) -> tensors`` of a stack of layers.
    canonical: the name of a stored tensor, without what larger models put before it -> its name
      among ``tensors``.
    prefix: what classes with a head put before the encoder's names, ``bert.``.
    extras: matches the names of what larger models add to the encoder.
    bias: ``(config, seen, T) -> [B or 1, 1, 1 or T, S]``, added to the scores of S keys, which are
      those of the prompt and the T tokens; ``seen`` [B, S] is False at keys that no token may see.
      For a causal or windowed mask.
    mlm_tensors: ``config -> tensors`` of the masked-LM head; None: there is no such head.
    mlm_copies: ``config -> names`` of its tensors that some files store twice, each with the name
      that it copies.
    mlm_act: ``config -> activation`` of the masked-LM head.
    classifier_tensors: ``(config, labels) -> tensors`` of the sequence-classification head; None:
      there is no such head.
    classifier_act: ``config -> activation`` of that head's first layer.
    classifier_pooling: ``config -> pooling`` that head has.
    classifier_drops: whether dropout comes before the first layer of that head, too.
    relative: the module of what is added to the scores of tokens by their distance, ``(config)``,
      whose call is ``T -> [1, N, T, T]``; None: nothing.
    final: the module behind the last layer, ``(config, dtype)``, such as a norm; None: nothing.
    sharding: ``(regular expression, PartitionSpec)`` of parameter names that ``mesh.RULES`` lacks.
    prompted_by: how a prompt enters transformers' class: 'cache', as past keys and values;
      'attention', by an attention function of one's own; '': not at all.
    pad_token_id: where config.json has none.
    shapes: ``() -> {name: Config}``, those of well-known models, for plans without their files.
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
  bias: Callable[[Config, Array, int], Array]
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
  prompted_by: str = 'cache'
  pad_token_id: int = 0
  shapes: Callable[[], Mapping[str, Config]] = dict


def find(model_type: Any) -> Family:
  """The family that config.json names.

  Raises:
    InputError: there is no such family; the message lists them.
  """
  families = every()
  if not isinstance(model_type, str) or model_type not in families:
    raise InputError(
      f'model_type {model_type!r} is not supported; use one of: {", ".join(families)}'
    )
  return families[model_type]


def every() -> dict[str, Family]:
  """All families by name, those of the package first."""
  return {family.model_type: family for family in extensions.values('FAMILY', _PACKAGE)}
