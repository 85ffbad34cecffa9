"""Encoders that take an adapter as an argument.

The family (`models.family`) gives the modules: embeddings, layer, and any after the last layer.
Parameters of layers are stacked on a leading axis; kernels are ``[in, out]``. docs/architecture.md
has the shape letters.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dprjax.base.errors import InputError
from dprjax.models.adapter import BARE, Adapter
from dprjax.models.encoder_config import DEFAULT_OPTIONS, EncoderConfig, EncoderOptions
from dprjax.models.layers import Scanned, Shared
from dprjax.models.reach import padding_bias


def stack(
  config: EncoderConfig, num_layers: int, options: EncoderOptions, deterministic: bool
) -> nn.Module:
  """The module of stacked layers; called with hidden states and `inputs`."""
  layer = config.family.layer
  if options.remat:
    # If both were unrolled, the compiler would merge recomputed layers with the first ones.
    layer = nn.remat(layer, prevent_cse=options.unroll != 1)
  scanned = nn.scan(
    layer,
    variable_axes={'params': 0, 'intermediates': 0},
    split_rngs={'params': True, 'dropout': True},
    in_axes=(0, nn.broadcast),
    length=num_layers,
    unroll=min(options.unroll or num_layers, num_layers),
  )
  return scanned(options.apply_dropout(config), options, deterministic)


def inputs(
  config: EncoderConfig, num_layers: int, tokens: Array, mask: Array, adapter: Adapter
) -> tuple[Scanned, Shared]:
  length, shift = tokens.shape[1], adapter.shift_positions()
  known = shift if isinstance(shift, int) else 0
  if length + known > config.max_tokens:
    shifted = f' shifted by {known}' if known else ''
    raise InputError(
      f'{length} tokens{shifted} exceed the {config.max_tokens} positions of the encoder; lower '
      'the maximum length'
    )
  if not isinstance(shift, int):
    shift = jnp.reshape(shift, (-1, 1))
  layered = adapter.layered()
  scanned = Scanned(layered, jnp.arange(num_layers, dtype=jnp.int32))
  return scanned, Shared(
    padding_bias(adapter.seen(mask)),
    config.family.positions(config, tokens, mask, shift),
    adapter.of_layer(jax.tree.map(lambda _: None, layered)),
  )


def embed_tokens(
  config: EncoderConfig,
  params: Mapping[str, Any],
  tokens: Array,
  mask: Array,
  adapter: Adapter | None,
  token_types: Array | None = None,
  options: EncoderOptions = DEFAULT_OPTIONS,
  dropout_key: Array | None = None,
) -> tuple[Any, Scanned, Shared]:
  """The states before the first layer, and the `inputs` of layers."""
  adapter = BARE if adapter is None else adapter
  if options.prompt_dropout and dropout_key is not None:
    key = jax.random.fold_in(dropout_key, 1)
    adapter = adapter.drop_examples(options.prompt_dropout, key, len(tokens))
  adapter = adapter.at(config, tokens)
  scanned, shared = inputs(config, config.num_layers, tokens, mask, adapter)
  if config.family.relative is not None:
    module, length = config.family.relative(config), tokens.shape[1]
    bias: Any = module.apply({'params': params['relative']}, length)
    prefix = shared.bias.shape[3] - length  # prefix keys have no distance
    bias = shared.bias + jnp.pad(bias, ((0, 0), (0, 0), (0, 0), (prefix, 0)))
    shared = shared._replace(bias=bias)
  embeddings = config.family.embeddings(
    options.apply_dropout(config), options.dtype, dropout_key is None
  )
  token_types = jnp.zeros_like(tokens) if token_types is None else token_types
  x = embeddings.apply(
    {'params': params['embeddings']},
    *(tokens, shared.positions, token_types, adapter),
    rngs=_rngs(dropout_key),
  )
  return x, scanned, shared


def _run(
  config: EncoderConfig,
  layers: Mapping[str, Any],
  scanned: Scanned,
  hidden: Array,
  shared: Shared,
  options: EncoderOptions,
  dropout_key: Array | None,
) -> Array:
  count = jax.tree.leaves(layers)[0].shape[0]
  x, _ = stack(config, count, options, dropout_key is None).apply(
    {'params': layers}, hidden.astype(options.dtype), scanned, shared, rngs=_rngs(dropout_key)
  )
  assert isinstance(x, jax.Array)  # the annotation of apply also allows mutable collections
  return x


def encode_layers(
  config: EncoderConfig,
  layers: Mapping[str, Any],
  hidden: Float[Array, 'B T H'],
  mask: Bool[Array, 'B T'],
  *,
  options: EncoderOptions = DEFAULT_OPTIONS,
  dropout_key: Array | None = None,
) -> Float[Array, 'B T H']:
  """Runs hidden states through stacked layers, such as those of a head, without an adapter."""
  count = jax.tree.leaves(layers)[0].shape[0]
  tokens = jnp.full(mask.shape, -1, jnp.int32)  # none of them is padding
  scanned, shared = inputs(config, count, tokens, mask, BARE)
  return _run(config, layers, scanned, hidden, shared, options, dropout_key)


def _rngs(key: Array | None) -> dict[str, Array] | None:
  return None if key is None else {'dropout': key}


def encode(
  config: EncoderConfig,
  params: Mapping[str, Any],
  tokens: Int[Array, 'B T'],
  mask: Bool[Array, 'B T'],
  *,
  adapter: Adapter | None = None,
  token_types: Int[Array, 'B T'] | None = None,
  options: EncoderOptions = DEFAULT_OPTIONS,
  dropout_key: Array | None = None,
) -> Float[Array, 'B T H']:
  """Encodes tokens, with or without an adapter.

  Args:
    params: as ``hub.load_backbone`` gives them, float32 or bfloat16.
    mask: True at real tokens. A row may be all padding.
    adapter: shared or one for each example; from a bank, by `Adapter.choose`.

  Returns:
    The hidden states of the last layer, float32.
  """
  first, second = (None, None) if dropout_key is None else jax.random.split(dropout_key)
  x, scanned, shared = embed_tokens(
    config, params, tokens, mask, adapter, token_types, options, first
  )
  x = _run(config, params['layers'], scanned, x, shared, options, second)
  return _finish(config, params, x, options)


def encode_early_late(
  config: EncoderConfig,
  params: Mapping[str, Any],
  tokens: Int[Array, 'B T'],
  mask: Bool[Array, 'B T'],
  split: int,
  *,
  adapter: Adapter | None = None,
  token_types: Int[Array, 'B T'] | None = None,
  options: EncoderOptions = DEFAULT_OPTIONS,
  dropout_key: Array | None = None,
) -> tuple[Float[Array, 'B T H'], Float[Array, 'B T H']]:
  """The states after ``split`` layers and after all layers (Condenser, Eqs. 6 and 7), float32."""
  keys = (None,) * 3 if dropout_key is None else tuple(jax.random.split(dropout_key, 3))
  x, scanned, shared = embed_tokens(
    config, params, tokens, mask, adapter, token_types, options, keys[0]
  )

  def run(part: slice, x: Array, key: Array | None) -> Array:
    layers, per_layer = jax.tree.map(lambda leaf: leaf[part], (params['layers'], scanned))
    return _run(config, layers, per_layer, x, shared, options, key)

  early = run(slice(split), x, keys[1])
  late = run(slice(split, None), early, keys[2])
  return early.astype(jnp.float32), _finish(config, params, late, options)


def _finish(
  config: EncoderConfig, params: Mapping[str, Any], hidden: Array, options: EncoderOptions
) -> Array:
  if config.family.final is not None:
    module = config.family.final(config, options.dtype)
    hidden = module.apply({'params': params['final']}, hidden)  # type: ignore[assignment]
  return hidden.astype(jnp.float32)


def first_token_attention(
  config: EncoderConfig,
  params: Mapping[str, Any],
  tokens: Int[Array, 'B T'],
  mask: Bool[Array, 'B T'],
  *,
  adapter: Adapter | None = None,
) -> Float[Array, 'L B N S']:
  """Attention weights of the first token over S = P + T, prefix first."""
  x, scanned, shared = embed_tokens(config, params, tokens, mask, adapter)
  _, sown = stack(config, config.num_layers, DEFAULT_OPTIONS, True).apply(
    {'params': params['layers']}, x, scanned, shared, mutable=['intermediates']
  )
  return sown['intermediates']['attention']['first_token'][0]
