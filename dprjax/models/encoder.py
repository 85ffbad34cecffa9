"""Encoders whose deep prompt is an argument.

Their family (`models.family`) gives the modules: the embeddings, a layer, and whatever comes behind
the last one. The layers' parameters are stacked on a leading layer axis; kernels are ``[in, out]``.
A prompt gives each layer key and value vectors that every token attends to (prefix tuning, DPTDR
section 3.1). It has no positions and does not change from layer to layer. It is no parameter of a
module, so that a gradient with respect to the prompt alone computes no gradient of a weight.
docs/architecture.md has the shape letters.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dprjax.base.errors import InputError
from dprjax.models.encoder_config import DEFAULT_OPTIONS, EncoderConfig, EncoderOptions
from dprjax.models.layers import Scanned, Shared, look_up


class PromptBank(NamedTuple):
  """Prompts that may differ in length, for examples that each choose one.

  Attributes:
    prefixes: their key/value vectors, padded with finite numbers to the longest.
    lengths: prompt k has the first ``lengths[k]`` of them; 0: none, the plain encoder.
  """

  prefixes: Float[Array, 'K L 2 P N D']
  lengths: Int[Array, ' K']


class LayeredBank(NamedTuple):
  """A ``PromptBank`` with the layers' axis first, as they use it, and each prompt's own shift.

  Attributes:
    prefixes: key/value vectors, padded with finite numbers to the longest.
    lengths: prompt k has the first ``lengths[k]`` of them.
    shifts: the position of the first token under prompt k, in place of ``shift_positions``.
  """

  prefixes: Float[Array, 'L K 2 P N D']
  lengths: Int[Array, ' K']
  shifts: Int[Array, ' K']


def _stack(
  config: EncoderConfig, num_layers: int, options: EncoderOptions, deterministic: bool
) -> nn.Module:
  """A scan of the family's layer over parameters stacked on a leading axis."""
  layer = config.family.layer
  if options.remat:
    # The compiler would merge the recomputed layers with the first ones where both are unrolled.
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


def init_layers(config: EncoderConfig, num_layers: int, key: Array) -> dict[str, Any]:
  """Fresh stacked layers: kernels N(0, ``initializer_range``), biases 0, LayerNorm's scale 1."""
  x, bias = jnp.zeros((1, 1, config.hidden_size), jnp.float32), jnp.zeros((1, 1, 1, 1), jnp.float32)
  scanned = Scanned(number=jnp.arange(num_layers, dtype=jnp.int32))
  shared = Shared(bias, positions=jnp.zeros((1, 1), jnp.int32))
  stack = _stack(config, num_layers, DEFAULT_OPTIONS, True)
  return jax.jit(stack.init)(key, x, scanned, shared)['params']


def init_encoder(config: EncoderConfig, key: Array) -> dict[str, Any]:
  """Fresh parameters of an encoder, see ``init_layers``."""
  embeddings_key, layers_key = jax.random.split(key)
  tokens = jnp.zeros((1, 1), jnp.int32)
  family = config.family
  embeddings = jax.jit(family.embeddings(config, jnp.float32, True).init)(
    embeddings_key, tokens, tokens, tokens
  )['params']
  params = {'embeddings': embeddings, 'layers': init_layers(config, config.num_layers, layers_key)}
  if family.final is not None:
    x = jnp.zeros((1, 1, config.hidden_size), jnp.float32)
    params['final'] = jax.jit(family.final(config, jnp.float32).init)(embeddings_key, x)['params']
  return params


def _place(
  config: EncoderConfig,
  tokens: Array,
  mask: Array,
  prompt: Array | PromptBank | LayeredBank | None,
  prompt_ids: Array | None,
  shift_positions: bool,
) -> tuple[Array | None, Array, Array]:
  """The prompt with the layers' axis first, the keys that are not masked, and the positions.

  Raises what ``encode`` raises. The mask is [B, T], or [B, P + T] for a bank's prompts.
  """
  batch, length = tokens.shape
  shift: int | Array = 0
  seen = mask
  if isinstance(prompt, PromptBank | LayeredBank):
    if prompt_ids is None:
      raise InputError('a PromptBank needs prompt_ids, the number of the prompt of each example')
    axis = int(isinstance(prompt, LayeredBank))  # of the prompts
    shape = list(prompt.prefixes.shape)
    _check_prompt_shape(config, [shape.pop(axis), *shape], prompt_ids, batch)
    # Before the axes are moved: moving those of a whole bank costs memory and time.
    lengths = jnp.take(prompt.lengths, prompt_ids, axis=0)[:, None]  # [B, 1]
    if isinstance(prompt, LayeredBank):
      shift = jnp.take(prompt.shifts, prompt_ids, axis=0)[:, None]
    elif shift_positions:
      shift = lengths
    prompt = jnp.take(prompt.prefixes, prompt_ids, axis=axis)
    used = jnp.arange(prompt.shape[-3], dtype=jnp.int32)[None, :] < lengths
    seen = jnp.concatenate([used, mask], axis=1)
    if not axis:
      prompt = jnp.moveaxis(prompt, 0, 1)  # [L, B, 2, P, N, D]
  elif prompt is not None:
    if prompt_ids is not None:
      raise InputError('prompt_ids choose from a PromptBank; the prompt is an array')
    _check_prompt_shape(config, prompt.shape, None, batch)
    shift = prompt.shape[-3] if shift_positions else 0
    if prompt.ndim == 6:
      prompt = jnp.moveaxis(prompt, 0, 1)
  if prompt is not None and prompt.shape[-3] == 0:
    prompt = None
  known = shift if isinstance(shift, int) else 0
  if length + known > config.max_tokens:
    shifted = f' shifted by a prompt of {known}' if known else ''
    raise InputError(
      f'{length} tokens{shifted} exceed the {config.max_tokens} positions of this encoder; lower '
      'the maximum length'
    )
  return prompt, seen, config.family.positions(config, tokens, mask, shift)


def _check_prompt_shape(
  config: EncoderConfig, axes: Sequence[int], prompt_ids: Array | None, batch: int
) -> None:
  """Raises InputError for a prompt of another shape than ``encode`` takes."""
  shape = tuple(axes)
  core = shape[-5:]
  fits = (
    len(core) == 5
    and core[:2] == (config.num_layers, 2)
    and core[3:] == (config.num_kv_heads, config.head_dim)
  )
  wanted = f'[{config.num_layers}, 2, P, {config.num_kv_heads}, {config.head_dim}]'
  if not fits or len(shape) > 6:
    raise InputError(
      f'prompt has shape {list(shape)}; this encoder takes {wanted}, or that with a leading axis '
      'for examples or prompts'
    )
  if prompt_ids is not None and (len(shape) != 6 or prompt_ids.shape != (batch,)):
    raise InputError(
      f'prompt_ids {list(prompt_ids.shape)} choose from a bank [K, ...] for {batch} examples; the '
      f'prompt is {list(shape)}'
    )
  if prompt_ids is None and len(shape) == 6 and shape[0] != batch:
    raise InputError(
      f'prompt holds {shape[0]} prompts for {batch} examples: pass a PromptBank and prompt_ids to '
      'choose'
    )


def _run(
  config: EncoderConfig,
  params: Mapping[str, Any],
  tokens: Array,
  mask: Array,
  cuts: tuple[int, ...],
  *,
  prompt: Array | PromptBank | LayeredBank | None = None,
  prompt_ids: Array | None = None,
  token_types: Array | None = None,
  vectors: Array | None = None,
  fixed_layers: int = 0,
  shift_positions: bool = False,
  options: EncoderOptions = DEFAULT_OPTIONS,
  dropout_key: Array | None = None,
) -> list[Float[Array, 'B T H']]:
  """The hidden states after each number of layers in ``cuts`` (rising)."""
  if not 0 <= fixed_layers <= config.num_layers:
    raise InputError(
      f'fixed_layers {fixed_layers}: this encoder has {config.num_layers} layers; use 0 to '
      f'{config.num_layers}'
    )
  prefix, seen, positions = _place(config, tokens, mask, prompt, prompt_ids, shift_positions)
  if token_types is None:
    token_types = jnp.zeros_like(tokens)
  keys: list[Array | None] = [None] * (1 + len(cuts))
  if dropout_key is not None:
    keys = list(jax.random.split(dropout_key, 1 + len(cuts)))
  family = config.family
  embeddings = family.embeddings(options.apply_dropout(config), options.dtype, dropout_key is None)
  x: Any = embeddings.apply(
    {'params': params['embeddings']}, tokens, positions, token_types, vectors, rngs=_rngs(keys[0])
  )
  scanned = Scanned(prefix, number=jnp.arange(config.num_layers, dtype=jnp.int32))
  shared = Shared(family.bias(config, seen, tokens.shape[1]), positions=positions)
  if vectors is not None and fixed_layers:
    places = (tokens >= config.vocab_size)[:, :, None]
    rows = look_up(config, tokens, vectors).astype(options.dtype)
    shared = shared._replace(fixed=(places, rows))
    is_fixed = jnp.arange(config.num_layers, dtype=jnp.int32) < fixed_layers
    scanned = scanned._replace(is_fixed=is_fixed)
  states = []
  for start, stop, key in zip((0, *cuts), cuts, keys[1:], strict=False):
    stacked = params['layers'], scanned
    if (start, stop) != (0, config.num_layers):
      stacked = jax.tree.map(lambda leaf, start=start, stop=stop: leaf[start:stop], stacked)
    x = _run_layers(config, *stacked, x, shared, options, key)
    states.append(x)
  if family.final is not None and cuts[-1] == config.num_layers:
    final = family.final(config, options.dtype)
    states[-1] = final.apply({'params': params['final']}, states[-1])
  return states


def _run_layers(
  config: EncoderConfig,
  layers: Mapping[str, Any],
  scanned: Scanned,
  hidden: Array,
  shared: Shared,
  options: EncoderOptions,
  dropout_key: Array | None,
) -> Array:
  count = jax.tree.leaves(layers)[0].shape[0]
  x, _ = _stack(config, count, options, dropout_key is None).apply(
    {'params': layers}, hidden.astype(options.dtype), scanned, shared, rngs=_rngs(dropout_key)
  )
  assert isinstance(x, jax.Array)  # apply's annotation also allows for mutable collections
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
  """Hidden states through stacked layers without a prompt, those of a head for instance."""
  count = jax.tree.leaves(layers)[0].shape[0]
  scanned = Scanned(number=jnp.arange(count, dtype=jnp.int32))
  tokens = jnp.full(mask.shape, -1, jnp.int32)  # none of them is padding
  shared = Shared(
    config.family.bias(config, mask, hidden.shape[1]),
    positions=config.family.positions(config, tokens, mask, 0),
  )
  return _run_layers(config, layers, scanned, hidden, shared, options, dropout_key)


def _rngs(key: Array | None) -> dict[str, Array] | None:
  return None if key is None else {'dropout': key}


def encode(
  config: EncoderConfig,
  params: Mapping[str, Any],
  tokens: Int[Array, 'B T'],
  mask: Bool[Array, 'B T'],
  *,
  prompt: Float[Array, '*B L 2 P N D'] | PromptBank | LayeredBank | None = None,
  prompt_ids: Int[Array, ' B'] | None = None,
  token_types: Int[Array, 'B T'] | None = None,
  vectors: Float[Array, 'E H'] | None = None,
  fixed_layers: int = 0,
  shift_positions: bool = False,
  options: EncoderOptions = DEFAULT_OPTIONS,
  dropout_key: Array | None = None,
) -> Float[Array, 'B T H']:
  """Encodes tokens under an optional deep prompt.

  Args:
    config: the encoder's shape.
    params: ``embeddings`` and ``layers`` as ``hub.load_backbone`` gives them, float32 or bfloat16.
    tokens: token ids.
    mask: True at real tokens. A row may be padding alone.
    prompt: shared by all examples ``[L, 2, P, N, D]``, one for each ``[B, L, 2, P, N, D]``, or a
      bank that ``prompt_ids`` choose from. Index 0 of the axis of two holds keys, 1 values. None
      or P = 0: the plain encoder.
    prompt_ids: the bank's prompt for each example; an id out of range gives NaN.
    token_types: segment ids, default 0.
    vectors: token ids from the vocabulary's size on are rows of this table, in place of a word's
      embedding; an id beyond it gives NaN.
    fixed_layers: the first layers whose inputs hold the unchanged rows at these tokens, without
      position embedding, LayerNorm or dropout. From the next layer on these tokens change. 0: they
      are ordinary inputs of the embedding layer.
    shift_positions: an example's positions start behind its prompt, as transformers does with
      ``past_key_values``.
    options: how to compute.
    dropout_key: given, dropout is active.

  Returns:
    The last layer's hidden states, float32.

  Raises:
    InputError: at trace time, where the prompt's shape is not this encoder's, or the tokens (and
      the shift, unless it is a bank's) exceed its positions. A token that a bank's shift moves
      beyond them gives NaN.
  """
  (hidden,) = _run(
    config,
    params,
    tokens,
    mask,
    (config.num_layers,),
    prompt=prompt,
    prompt_ids=prompt_ids,
    token_types=token_types,
    vectors=vectors,
    fixed_layers=fixed_layers,
    shift_positions=shift_positions,
    options=options,
    dropout_key=dropout_key,
  )
  return hidden.astype(jnp.float32)


def encode_early_late(
  config: EncoderConfig,
  params: Mapping[str, Any],
  tokens: Int[Array, 'B T'],
  mask: Bool[Array, 'B T'],
  split: int,
  **kwargs: Any,
) -> tuple[Float[Array, 'B T H'], Float[Array, 'B T H']]:
  """The states after ``split`` layers and after all (Condenser, Eqs. 6 and 7), float32.

  Args:
    split: early layers, 1 to L - 1.
    kwargs: as for ``encode``.

  Raises:
    InputError: ``split`` leaves no early or no late layer; and as ``encode`` does.
  """
  if not 0 < split < config.num_layers:
    raise InputError(
      f'a split after {split} layers leaves no early or no late layer of {config.num_layers}; use '
      f'1 to {config.num_layers - 1}'
    )
  early, late = _run(config, params, tokens, mask, (split, config.num_layers), **kwargs)
  return early.astype(jnp.float32), late.astype(jnp.float32)


def first_token_attention(
  config: EncoderConfig,
  params: Mapping[str, Any],
  tokens: Int[Array, 'B T'],
  mask: Bool[Array, 'B T'],
  *,
  prompt: Array | None = None,
  shift_positions: bool = False,
) -> Float[Array, 'L B N S']:
  """The first token's attention weights over S = P + T, the prompt's vectors first.

  Args:
    config, params, tokens, mask, shift_positions: as for ``encode``.
    prompt: shared, or one for each example, as for ``encode``.

  Raises:
    InputError: as ``encode`` does.
  """
  prompt, seen, positions = _place(config, tokens, mask, prompt, None, shift_positions)
  family = config.family
  x = family.embeddings(config, jnp.float32, True).apply(
    {'params': params['embeddings']}, tokens, positions, jnp.zeros_like(tokens)
  )
  _, kept = _stack(config, config.num_layers, DEFAULT_OPTIONS, True).apply(
    {'params': params['layers']},
    x,
    Scanned(prompt, number=jnp.arange(config.num_layers, dtype=jnp.int32)),
    Shared(family.bias(config, seen, tokens.shape[1]), positions=positions),
    mutable=['intermediates'],
  )
  return kept['intermediates']['attention']['first_token'][0]
