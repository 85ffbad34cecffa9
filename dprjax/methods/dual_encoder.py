"""The encoder of queries and passages with their prompts, shared by the methods that train it."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int
from ml_collections import ConfigDict

from dprjax.base.errors import InputError
from dprjax.formats import vector_spec
from dprjax.formats.texts import KINDS
from dprjax.formats.vector_spec import VectorSpec
from dprjax.methods.method import Params, Parts, Product
from dprjax.models import dropout, hub, prompts
from dprjax.models import pooling as poolings
from dprjax.models.embed import embed_text
from dprjax.models.encoder_config import EncoderConfig, EncoderOptions
from dprjax.models.head_specs import Head
from dprjax.runtime import mesh, tree

logger = logging.getLogger('dprjax')

OPTIONS = ('prompt.length', 'prompt.tied', 'backbone.two_encoders', 'matryoshka')


class DualEncoder(NamedTuple):
  """A dual encoder.

  Attributes:
    init: as of a ``Model``.
    encode: ``(params, prefix, kind, tokens, mask, key or None) -> [B, H]`` under an expanded
      prompt, after ``batch_dropout``. Without a key there is no dropout.
    embed: as of a ``Model``.
  """

  init: Callable[[Parts, Array], dict[str, Any]]
  encode: Callable[
    [Params, Array | None, str, Int[Array, 'B T'], Bool[Array, 'B T'], Array | None],
    Float[Array, 'B H'],
  ]
  embed: Callable[[Params, str, Int[Array, 'B T'], Bool[Array, 'B T']], Float[Array, 'B H']]


def build(config: ConfigDict, model: EncoderConfig, devices: Mesh | None = None) -> DualEncoder:
  """The dual encoder that ``config`` describes, for a backbone of the shape ``model``.

  On a mesh that splits weights as the batch, it needs ``devices``, the mesh, to be fast.

  Raises:
    InputError: a knob has a value it cannot have.
  """
  if config.prompt.dropout_scope not in ('example', 'batch'):
    raise InputError(
      "config.prompt.dropout_scope: expected 'example' or 'batch', not "
      f'{config.prompt.dropout_scope!r}'
    )
  check_pooling(config)
  splits = () if devices is None else mesh.activations(devices)
  options = EncoderOptions.from_config(config.backbone, *splits)
  two = config.backbone.two_encoders
  spec = vector_spec.of_config(config)

  def init(parts: Parts, key: Array) -> dict[str, Any]:
    backbone = dict.fromkeys(KINDS, parts.encoder) if two else parts.encoder
    params = {'backbone': backbone} | init_prompt(config, model, parts, key)
    if config.prompt.sides == 'query':
      names = list(tree.flatten(params))
      if trains(tree.trainable_names(config.trainable, names), 'backbone'):
        raise InputError(
          'config.trainable: names parameters of the backbone, and the passages of '
          "config.prompt.sides='query' are encoded once; train the prompt alone"
        )
    if config.prompt.anchor and (
      not config.prompt.length
      or trains(tree.trainable_names(config.trainable, list(tree.flatten(params))), 'backbone')
    ):
      raise InputError(
        f'config.prompt.anchor: {config.prompt.anchor} holds a prompt near the frozen encoder; '
        'train a prompt (config.prompt.length, config.trainable) and not the backbone, or set 0'
      )
    return params

  def encode(
    params: Params, prefix: Array | None, kind: str, tokens: Array, mask: Array, key: Array | None
  ) -> Float[Array, 'B H']:
    dropout_key, drawn = None, options
    if key is not None:
      dropout_key, _ = jax.random.split(key)
      drawn = example_dropout(config, prefix, options)
    return embed_text(
      model,
      params['backbone'][kind] if two else params['backbone'],
      tokens,
      mask,
      spec,
      prompt=prefix,
      shift_positions=config.prompt.shift_positions,
      options=drawn,
      dropout_key=dropout_key,
    )

  def embed(params: Params, kind: str, tokens: Array, mask: Array) -> Float[Array, 'B H']:
    prefix = prompts.expand_prompt(model, params.get('prompt'))[kind]
    return encode(params, prefix, kind, tokens, mask, None)

  return DualEncoder(init, encode, embed)


def check_pooling(config: ConfigDict) -> None:
  """Raises InputError for a pooling that only templates have."""
  if config.pooling == 'mask':
    raise InputError(
      f"config.pooling: 'mask' is for templates, which {config.method} has none of; use 'cls' or "
      "'mean'"
    )
  poolings.find(config.pooling, 'config.pooling')


def init_prompt(
  config: ConfigDict, model: EncoderConfig, parts: Parts, key: Array
) -> dict[str, Any]:
  """The ``prompt`` subtree, random or from ``config.prompt.init_from``; empty where P = 0.

  Raises:
    InputError: the file's prompt does not fit ``config.prompt``.
  """
  knobs = config.prompt
  if not knobs.length:
    return {}
  params = prompts.init_prompt(
    model,
    key,
    knobs.length,
    tied=knobs.tied,
    sides=knobs.sides,
    reparam=knobs.reparam,
    hidden=knobs.reparam_hidden,
    std=knobs.init_std,
  )
  if parts.prompt is None:
    return {'prompt': params}
  sides = {kind: {'prefix': parts.prompt.prefix(kind)} for kind in KINDS}
  start: dict[str, Any] = sides['query'] if knobs.tied else sides
  if knobs.sides == 'query':
    start = {'query': sides['query']}
  elif parts.prompt.query_only and not knobs.tied:
    raise InputError(
      f'config.prompt.init_from: {knobs.init_from} is for queries alone; set config.prompt.tied, '
      "or config.prompt.sides='query'"
    )
  shapes, wanted = (
    {name: leaf.shape for name, leaf in tree.flatten({'prompt': some}).items()}
    for some in (start, params)
  )
  for name, shape in wanted.items():
    if shapes.get(name) != shape:
      raise InputError(
        f'config.prompt.init_from: {knobs.init_from} does not fit {name} {list(shape)}; set '
        "config.prompt.length to the file's, and config.prompt.reparam='none'"
      )
  return {'prompt': start}


def batch_dropout(config: ConfigDict, prefix: Array | None, key: Array | None) -> Array | None:
  """An expanded prompt under one mask for the whole batch, if ``dropout_scope`` says so.

  A loss calls this once, before it cuts the batch into chunks, with the key that it encodes with.
  """
  rate = config.prompt.dropout
  if prefix is None or key is None or not rate or config.prompt.dropout_scope != 'batch':
    return prefix
  return dropout.drop(prefix, rate, jax.random.split(key)[1])


def example_dropout(
  config: ConfigDict, prefix: Array | None, options: EncoderOptions
) -> EncoderOptions:
  """Options with which the encoder draws a mask of the prompt for each example."""
  if prefix is None or config.prompt.dropout_scope != 'example':
    return options
  return options._replace(prompt_dropout=config.prompt.dropout)


def without_prompt(params: Mapping[str, Array]) -> dict[str, Array]:
  """``Model.baseline``: parameters by flat names, of the encoder as it is without a prompt."""
  return {name: leaf for name, leaf in params.items() if not trains([name], 'prompt')}


def export(
  config: ConfigDict, _: epath.Path, backbone: hub.Backbone, trained: Mapping[str, np.ndarray]
) -> Product:
  """The encoders that were trained, with their sentence-transformers settings, and the prompt."""
  spec = vector_spec.of_config(config)
  encoders = {}
  if trains(trained, 'backbone'):
    for kind in KINDS if config.backbone.two_encoders else ('',):
      params = encoder_params(backbone, trained, kind)
      encoders[kind] = {'params': params, 'spec': spec.only(kind) if kind else spec}
    short = min(KINDS, key=spec.max_length)
    together = '' in encoders and not trains(trained, 'prompt')
    if together and spec.max_length(short) < spec.longest:
      logger.warning(
        '%s were scored with at most %d tokens, and the folder has one length, %d; for the same '
        'vectors: dprjax encode --kind=%s --max_length=%d',
        {'query': 'queries', 'passage': 'passages'}[short],
        spec.max_length(short),
        spec.longest,
        short,
        spec.max_length(short),
      )
  return Product(encoders, *export_prompt(config, backbone, trained, spec))


def export_prompt(
  config: ConfigDict,
  backbone: hub.Backbone,
  trained: Mapping[str, np.ndarray],
  spec: VectorSpec,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """A trained prompt as key/value vectors, whatever it was trained as, and its meta.

  Args:
    config, backbone, trained: as for ``export``.
    spec: how texts become vectors.
  """
  if not trains(trained, 'prompt'):
    return {}, {}
  subtree = {name: leaf for name, leaf in trained.items() if name.startswith('prompt/')}
  expanded = prompts.expand_prompt(backbone.config, tree.unflatten(subtree)['prompt'])
  arrays = {kind: np.asarray(prefix) for kind, prefix in expanded.items() if prefix is not None}
  meta = meta_of(config, spec, 'prefix')
  if config.prompt.sides == 'query':
    return {'query/prefix': arrays['query']}, meta | {'sides': 'query'}
  if config.prompt.tied:
    return {'prefix': arrays['query']}, meta
  return {f'{kind}/prefix': array for kind, array in arrays.items()}, meta


def meta_of(config: ConfigDict, spec: VectorSpec, kind: str) -> dict[str, Any]:
  """What the meta of a trained prompt of this kind says of its vectors."""
  return {
    'kind': kind,
    **spec.to_meta(),
    'temperature': float(config.temperature),
    'shift_positions': bool(config.prompt.shift_positions),
    **({'matryoshka': list(config.matryoshka)} if config.matryoshka else {}),
  }


def export_heads(
  backbone: hub.Backbone,
  trained: Mapping[str, np.ndarray],
  settings: Mapping[str, Mapping[str, int]],
) -> dict[str, Head]:
  """The backbone's heads, with the trained parameters in place of theirs, and the trained heads.

  Args:
    backbone, trained: as for ``export``.
    settings: of heads that may be new.
  """
  stored = tree.flatten({'head': {name: head.params for name, head in backbone.heads.items()}})
  own = {name: leaf for name, leaf in trained.items() if name.startswith('head/')}
  params = tree.unflatten(stored | own).get('head', {})
  fixed = {name: head.settings for name, head in backbone.heads.items()}
  return {name: Head(head, {**settings, **fixed}.get(name, {})) for name, head in params.items()}


def check_length(config: ConfigDict, model: EncoderConfig, knob: str, length: int) -> None:
  """Raises InputError where the encoder has fewer positions than texts of ``length`` tokens need.

  ``knob`` set the length. A prompt that shifts positions takes some of them.
  """
  longest = model.max_tokens - (config.prompt.length if config.prompt.shift_positions else 0)
  if length > longest:
    raise InputError(f'{knob}: {length} exceeds the {longest} positions of {config.backbone.path}')


def trains(trained: Iterable[str], subtree: str) -> bool:
  """Whether any of these names of trained parameters is in a top-level subtree."""
  return any(name.startswith(f'{subtree}/') for name in trained)


def encoder_params(
  backbone: hub.Backbone, trained: Mapping[str, np.ndarray], kind: str = ''
) -> dict[str, Any]:
  """An encoder's parameters: the trained ones, and the backbone's in place of the others."""
  prefix = f'backbone/{kind}/' if kind else 'backbone/'
  own = {
    name.removeprefix(prefix): leaf for name, leaf in trained.items() if name.startswith(prefix)
  }
  return tree.unflatten(tree.flatten(backbone.params) | own)
