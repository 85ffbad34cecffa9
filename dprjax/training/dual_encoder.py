"""The encoder of queries and passages with prompts, shared by several methods."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int
from ml_collections import ConfigDict, FrozenConfigDict

from dprjax.base import tree
from dprjax.base.errors import InputError
from dprjax.losses.grad_cache import embed_chunked
from dprjax.losses.types import Batch, Params
from dprjax.models import adapter as adapters
from dprjax.models import encoder_config, hub
from dprjax.models import pooling as poolings
from dprjax.models.adapter import Adapter
from dprjax.models.embed import embed_text
from dprjax.models.encoder_config import EncoderConfig, EncoderOptions
from dprjax.text import vector_spec
from dprjax.text.vector_spec import SIDES, VectorSpec
from dprjax.training import config as configs
from dprjax.training import method as methods
from dprjax.training.method import Parts, Product
from dprjax.training.options import AUTO

if TYPE_CHECKING:
  from dprjax.models.head_specs import Head

# Of `build`.
OPTIONS = (
  'grad_cache',
  'prompt.kind',
  'prompt.length',
  'prompt.tied',
  'prompt.init_text',
  'backbone.two_encoders',
)


# Of the encoder, where `AUTO` is what `dprjax.encode` uses without a prompt.
SETTINGS = (
  'pooling',
  'normalize',
  *(f'data.{side}_{name}' for name in ('prefix', 'max_length') for side in SIDES),
)
_LONGEST = 8192  # of data.query_max_length

Adapters = Mapping[str, Adapter | None]
"""By side; None: the base encoder."""
BARE: Adapters = dict.fromkeys(SIDES)


class Vectors(NamedTuple):
  """Queries and the C candidates of each query in a batch; candidate 0 is the positive."""

  query: Float[Array, 'B H']
  passage: Float[Array, 'B C H']


class DualEncoder(NamedTuple):
  """The functions of a dual encoder; ``init`` and ``embed`` as in ``Model``.

  Attributes:
    encode: ``(params, adapters, side, tokens, mask, key or None) -> [B, H]``.
    vectors: see `embed_batch`.
  """

  init: Callable[[Parts, Array], dict[str, Any]]
  adapters: Callable[[Params], Adapters]
  encode: Callable[
    [Params, Adapters, str, Int[Array, 'B T'], Bool[Array, 'B T'], Array | None],
    Float[Array, 'B H'],
  ]
  vectors: Callable[[Params, Batch, Array | None], Vectors]
  embed: Callable[[Params, str, Int[Array, 'B T'], Bool[Array, 'B T']], Float[Array, 'B H']]


def build(config: ConfigDict, model: EncoderConfig, devices: Mesh) -> DualEncoder:
  check_pooling(config, model)
  options = encoder_options(config, devices)
  two = config.backbone.two_encoders
  spec = vector_spec.of_config(config)

  def init(parts: Parts, key: Array) -> dict[str, Any]:
    backbone = dict.fromkeys(SIDES, parts.encoder) if two else parts.encoder
    params = {'backbone': backbone} | init_adapter(config, model, parts, key)
    if config.prompt.sides == 'query' or config.prompt.regularization:
      trained = tree.trainable_names(config.trainable, list(tree.flatten(params)))
      if trains(trained, 'backbone'):
        raise InputError(
          "config.trainable: config.prompt.sides='query' and config.prompt.regularization need a "
          'frozen backbone; train the prompt only'
        )
    return params

  def adapters(params: Params) -> Adapters:
    return expand(config, model, params)

  def encode(
    params: Params, adapters: Adapters, side: str, tokens: Array, mask: Array, key: Array | None
  ) -> Float[Array, 'B H']:
    dropout_key, drawn = None, options
    if key is not None:
      dropout_key, _ = jax.random.split(key)
      drawn = example_dropout(config, adapters[side], options)
    return embed_text(
      model,
      params['backbone'][side] if two else params['backbone'],
      tokens,
      mask,
      spec,
      adapter=adapters[side],
      options=drawn,
      dropout_key=dropout_key,
    )

  def vectors(params: Params, batch: Batch, key: Array | None) -> Vectors:
    keys = side_keys(key)
    dropped = {
      side: batch_dropout(config, adapter, keys[side]) for side, adapter in adapters(params).items()
    }
    return embed_batch(config, devices, functools.partial(encode, params, dropped), batch, key)

  def embed(params: Params, side: str, tokens: Array, mask: Array) -> Float[Array, 'B H']:
    return encode(params, adapters(params), side, tokens, mask, None)

  return DualEncoder(init, adapters, encode, vectors, embed)


def encoder_options(config: ConfigDict, devices: Mesh) -> EncoderOptions:
  """Options of the encoder by ``config.backbone``, with activations split over the devices."""
  backbone = config.backbone
  options = EncoderOptions.of(encoder_config.arithmetic(backbone.dtype), devices)
  platform = encoder_config.platform_of(options.heads)
  if backbone.attention == 'fused' and platform not in ('tpu', 'cpu'):
    raise InputError(
      f"config.backbone.attention: 'fused' is for TPUs (and, slowly, processors), not for a "
      f"{platform}; use 'auto' or 'plain'"
    )
  return options._replace(
    remat=backbone.remat,
    unroll=backbone.unroll,
    dropout=backbone.dropout if backbone.dropout >= 0 else None,
    attention=options.attention if backbone.attention == 'auto' else backbone.attention,
  )


def embed_batch(
  config: ConfigDict,
  devices: Mesh,
  encode: Callable[..., Float[Array, 'n H']],
  batch: Batch,
  key: Array | None,
  columns: Sequence[str] = (),
) -> Vectors:
  """Encodes the queries and passages of a batch, in chunks. Vectors that it holds are taken.

  Args:
    encode: ``(side, tokens [n, T], mask [n, T], *numbers [n], key) -> vectors``.
    columns: keys of these numbers in the batch, one for each row.
  """
  keys, vectors_of = side_keys(key), {}
  for side in SIDES:
    if f'{side}_vectors' in batch:
      vectors_of[side] = batch[f'{side}_vectors']
      continue
    tokens, mask = (batch[f'{side}_{name}'] for name in ('tokens', 'mask'))
    if side == 'query':
      tokens, mask = tokens[:, None], mask[:, None]
    numbers = (jnp.broadcast_to(batch[name][:, None], tokens.shape[:2]) for name in columns)
    embedded = embed_chunked(
      functools.partial(encode, side),
      (tokens, mask, *numbers),
      keys[side],
      config.grad_cache,
      devices,
    )
    vectors_of[side] = embedded[:, 0] if side == 'query' else embedded
  return Vectors(**vectors_of)


def side_keys(key: Array | None) -> dict[str, Array | None]:
  """Dropout keys of queries and passages."""
  keys = (None, None) if key is None else tuple(jax.random.split(key))
  return dict(zip(SIDES, keys, strict=True))


def check_pooling(config: ConfigDict, model: EncoderConfig) -> None:
  """Raises InputError for an unknown pooling, or one of a state that sees no text."""
  if config.pooling == 'cls' and model.causal:
    raise InputError(
      "config.pooling: 'cls' is the state of the first token, which sees no other token in a "
      f"{model.model_type} backbone; use 'lasttoken' or 'mean'"
    )
  poolings.find(config.pooling, 'config.pooling')


def _training(config: ConfigDict) -> adapters.AdapterTraining:
  kind = adapters.find(config.prompt.kind, 'config.prompt.kind')
  if kind.training is None:
    raise InputError(f'config.prompt.kind: {config.method} cannot train {kind.name}, {kind.text}')
  return kind.training


def init_adapter(
  config: ConfigDict, model: EncoderConfig, parts: Parts, key: Array
) -> dict[str, Any]:
  """The parameters of the adapter, random or from ``parts.prompt``; empty without a prompt.

  One adapter if tied, else ``{'query': ..., 'passage': ...}``; with
  ``config.prompt.sides='query'``, ``{'query': ...}``.
  """
  settings, init = config.prompt, _training(config).init
  if not settings.length:
    return {}
  if settings.sides == 'query':
    params = {'query': init(config, model, key)}
  elif settings.tied:
    params = init(config, model, key)
  else:
    keys = {side: jax.random.fold_in(key, i) for i, side in enumerate(SIDES)}
    params = {side: init(config, model, key) for side, key in keys.items()}
  if parts.prompt is None:
    return {adapters.SUBTREE: params}
  start: dict[str, Any] = {side: parts.prompt.of_side(side) for side in SIDES if side in params}
  start = start or parts.prompt.of_side('query')
  shapes, wanted = (
    {name: leaf.shape for name, leaf in tree.flatten({adapters.SUBTREE: some}).items()}
    for some in (start, params)
  )
  adapter, meta = expand(config, model, {adapters.SUBTREE: params})['query'], parts.prompt.meta
  fields = {'kind': settings.kind} | _training(config).export(config, adapter)[1]
  pairs = {name: (meta.get(name, value), value) for name, value in fields.items()}
  pairs |= {name: (shapes.get(name), shape) for name, shape in wanted.items()}
  option = 'init_from' if settings.init_from else 'init_text'
  for name, (stored, value) in pairs.items():
    if stored != value:
      raise InputError(
        f'config.prompt.{option}: {name} of {settings[option]} is {stored!r:.80}, but the options '
        f'give {value!r:.80}; set those of its training, such as config.prompt.length; a prompt '
        "for queries only needs config.prompt.tied or config.prompt.sides='query'"
      )
  return {adapters.SUBTREE: start}


def expand(config: ConfigDict, model: EncoderConfig, params: Params) -> Adapters:
  """The adapters by side, the same if tied; None: the base encoder."""
  if adapters.SUBTREE not in params:
    return BARE
  expand_one, trained = _training(config).expand, params[adapters.SUBTREE]
  if not set(SIDES) & set(trained):
    return dict.fromkeys(SIDES, expand_one(config, model, trained))
  return {
    side: expand_one(config, model, trained[side]) if side in trained else None for side in SIDES
  }


def batch_dropout(config: ConfigDict, adapter: Adapter | None, key: Array | None) -> Adapter | None:
  """The adapter under one dropout mask for the whole batch, if ``dropout_scope='batch'``.

  ``key`` is the one used for encoding the chunks.
  """
  rate = config.prompt.dropout
  if adapter is None or key is None or not rate or config.prompt.dropout_scope != 'batch':
    return adapter
  return adapter.drop(rate, jax.random.split(key)[1])


def example_dropout(
  config: ConfigDict, adapter: Adapter | None, options: EncoderOptions
) -> EncoderOptions:
  """Options for a prompt mask for each example, with this scope."""
  if adapter is None or config.prompt.dropout_scope != 'example':
    return options
  return options._replace(prompt_dropout=config.prompt.dropout)


def bare(params: Params) -> Params:
  return {name: some for name, some in params.items() if name != adapters.SUBTREE}


def without_adapter(params: Mapping[str, Any]) -> dict[str, Any]:
  """``Model.baseline``: flat parameters of the encoder without the adapter."""
  return {name: leaf for name, leaf in params.items() if not trains([name], adapters.SUBTREE)}


def export(
  config: ConfigDict, _: epath.Path, backbone: hub.Backbone, trained: Mapping[str, np.ndarray]
) -> Product:
  spec = vector_spec.of_config(config)
  encoders = {}
  if trains(trained, 'backbone'):
    for side in SIDES if config.backbone.two_encoders else ('',):
      params = encoder_params(backbone, trained, side)
      encoders[side] = {'params': params, 'spec': spec.only(side) if side else spec}
  return Product(encoders, *export_prompt(config, backbone, trained, spec))


def export_prompt(
  config: ConfigDict, backbone: hub.Backbone, trained: Mapping[str, np.ndarray], spec: VectorSpec
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """Arrays and meta of a prompt file; empty if no adapter was trained."""
  if not trains(trained, adapters.SUBTREE):
    return {}, {}
  export = _training(config).export
  expanded = expand(config, backbone.config, tree.unflatten(trained))
  exported = {side: export(config, one) for side, one in expanded.items() if one is not None}
  meta = meta_of(config, spec, config.prompt.kind) | exported['query'][1]
  if config.prompt.sides == 'query':
    meta |= {'sides': 'query'}
  elif config.prompt.tied:
    return jax.device_get(exported['query'][0]), meta
  arrays = {
    f'{side}/{name}': array
    for side, (adapter, _) in exported.items()
    for name, array in adapter.items()
  }
  return jax.device_get(arrays), meta


def meta_of(config: ConfigDict, spec: VectorSpec, kind: str) -> dict[str, Any]:
  return {'kind': kind, **spec.to_meta(), 'temperature': float(config.temperature)}


def export_heads(
  backbone: hub.Backbone,
  trained: Mapping[str, np.ndarray],
  settings: Mapping[str, Mapping[str, int]],
) -> dict[str, 'Head']:
  """The heads of the backbone and trained ones; ``settings`` are for heads that may be new."""
  from dprjax.models.head_specs import Head  # only after a training

  stored = tree.flatten({'head': {name: head.params for name, head in backbone.heads.items()}})
  trained_heads = {name: leaf for name, leaf in trained.items() if name.startswith('head/')}
  params = tree.unflatten(stored | trained_heads).get('head', {})
  fixed = {name: head.settings for name, head in backbone.heads.items()}
  return {name: Head(head, {**settings, **fixed}.get(name, {})) for name, head in params.items()}


def check_length(config: ConfigDict, model: EncoderConfig, option: str, length: int) -> None:
  """Raises InputError if ``length`` tokens, set by ``option``, exceed the encoder positions."""
  longest = model.max_tokens - config.prompt.length * config.prompt.shift_positions
  if length > longest:
    raise InputError(
      f'{option}: {length} exceeds the {longest} positions of {config.backbone.path}'
    )


def check_fresh(config: ConfigDict, params: Params, fresh: Iterable[str]) -> None:
  """Raises InputError if one of ``fresh``, parameters with random values, is not trained."""
  trained = tree.trainable_names(config.trainable, list(tree.flatten(params)))
  if still := [name for name in fresh if name not in trained]:
    top = still[0].partition('/')[0]
    raise InputError(
      f"config.trainable: {still[0]} is random, so it must be trained; add '{top}/.*'"
    )


def trains(trained: Iterable[str], subtree: str) -> bool:
  """Whether a trained parameter is in this top-level subtree."""
  return any(name.startswith(f'{subtree}/') for name in trained)


def encoder_params(
  backbone: hub.Backbone, trained: Mapping[str, np.ndarray], side: str = ''
) -> dict[str, Any]:
  """The parameters of an encoder: trained ones replace those of the backbone."""
  prefix = f'backbone/{side}/' if side else 'backbone/'
  trained_params = {
    name.removeprefix(prefix): leaf for name, leaf in trained.items() if name.startswith(prefix)
  }
  return tree.unflatten(tree.flatten(backbone.params) | trained_params)


def load_settings(path: str, reserved: int) -> VectorSpec:
  """The settings of a backbone, with ``reserved`` positions for a prompt."""
  return VectorSpec() if path.startswith('scratch:') else hub.load_spec(path, reserved)


def resolve_settings(
  config: ConfigDict,
  begun: Mapping[str, Any],
  load: Callable[[str, int], VectorSpec] = load_settings,
) -> tuple[FrozenConfigDict, str]:
  """The experiment without ``'auto'``, and a log line with the values, or ''.

  In this order: the value in ``begun``, the options of a run that goes on; the value that the
  method requires; and that of the backbone folder.
  """
  names = [name for name in SETTINGS if configs.option(config, name) == AUTO]
  if not names:
    return FrozenConfigDict(config), ''
  reserved = config.prompt.length * config.prompt.shift_positions
  spec = load(config.backbone.path, reserved).at_most(_LONGEST)
  requires = methods.load(config.method).requires
  changes = {}
  for name in names:
    value = getattr(spec, name.removeprefix('data.'))
    changes[name] = begun.get(name, requires.get(name, value))
  line = ', '.join(f'config.{name}={changes[name]!r}' for name in names if name not in requires)
  for side in SIDES:
    buckets, length = config.data[f'{side}_buckets'], changes.get(f'data.{side}_max_length', 0)
    if length > max(buckets):
      longer = (n for n in (1024, 2048, 4096, length) if max(buckets) < n <= length)
      changes[f'data.{side}_buckets'] = (*buckets, *dict.fromkeys(longer))
  return configs.replace(config, changes), f"from 'auto': {line}" if line else ''
