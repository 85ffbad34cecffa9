"""Attention over a prompt and tokens, as a Pallas kernel that keeps scores on the chip.

For TPUs: XLA would write the scores ``[B, N, T, S]`` to memory, several times in training. Scores
of one head are small (512 x 640 float32: 1.3 MB), so the kernel computes a head in one piece,
without a running softmax. It reads a shared prompt without copies and sums its gradient in place.
The backward pass recomputes scores. The kernels of JAX need a copy of a prefix for each example and
have no dropout.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int32

from dprjax.models import dropout as masks
from dprjax.models import splits

# Memory of a grid step; the smallest chips have 16 MB.
_STEP_BYTES = 12 << 20
_SCORES = 8  # score arrays in memory at a time in the backward pass
_MOST_HEADS = 8  # in a grid step: more take longer to compile
_LANES = 128  # of a register; shorter last axes are padded


class _Static(NamedTuple):
  """The static arguments of a compiled program.

  Attributes:
    interpret: run on any device, slowly.
    dropout: the rate on weights.
    prompt_dropout: the rate on a shared prompt, with a mask for each example.
  """

  width: int
  interpret: bool
  dropout: float
  prompt_dropout: float


def attend(
  query: Float[Array, 'B T H'],
  key: Float[Array, 'B S H'],
  value: Float[Array, 'B S H'],
  bias: Float[Array, 'B 1 1 S'],
  prompt: Float[Array, '*B 2 P H'] | None = None,
  *,
  num_heads: int,
  dropout: float = 0.0,
  dropout_key: Array | None = None,
  prompt_dropout: float = 0.0,
  prompt_key: Array | None = None,
  split: NamedSharding | None = None,
  interpret: bool = False,
) -> Float[Array, 'B T H']:
  """Weighted means of values, in the dtype of ``query``; scores and weights are float32.

  Heads lie side by side in H, as in the output of dense layers.

  Args:
    query, key, value: of the tokens; keys and values may begin with a prompt, masked by the bias.
    bias: added to the scores of the tokens; it gets no gradient.
    prompt: unmasked keys (index 0) and values, shared or one for each example.
    dropout: the rate on weights, if there is a ``dropout_key``.
    prompt_dropout: the rate on a shared prompt, if there is a ``prompt_key``. Each example has its
      own mask, but no copy of the prompt.
    split: how devices split examples and heads; None: one device.
    interpret: run on any device, slowly.
  """
  if prompt is None or prompt.ndim == 4:
    prompt_dropout = 0.0
  # A seed for each head of each example, on any device.
  places = query.shape[0], num_heads, 1, 1
  seeds = [
    masks.row_seeds(of, places) if rate and of is not None else None
    for rate, of in ((dropout, dropout_key), (prompt_dropout, prompt_key))
  ]
  rates = (
    rate if of is not None else 0.0
    for rate, of in zip((dropout, prompt_dropout), seeds, strict=True)
  )
  run = functools.partial(_attend, _Static(query.shape[2] // num_heads, interpret, *rates))
  arrays = query, key, value, bias[:, 0], prompt, *seeds
  if split is None or split.mesh.size == 1:
    return run(*arrays)
  split = splits.inside(split)
  rows, heads = (
    None if count % splits.parts(split, axis) else split.spec[axis]
    for axis, count in enumerate((query.shape[0], num_heads))
  )
  texts = P(rows, None, heads)
  per_example = prompt is not None and prompt.ndim == 4
  of_prompt = P(rows, None, None, heads) if per_example else P(None, None, heads)
  return jax.shard_map(
    run,
    mesh=split.mesh,
    in_specs=(texts, texts, texts, P(rows), of_prompt, P(rows, heads), P(rows, heads)),
    out_specs=texts,
    check_vma=False,
  )(*arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
  static: _Static,
  query: Float[Array, 'B T H'],
  key: Float[Array, 'B S H'],
  value: Float[Array, 'B S H'],
  bias: Float[Array, 'B 1 S'],
  prompt: Float[Array, '*B 2 P H'] | None,
  *seeds: Int32[Array, 'B N 1 1'] | None,
) -> Float[Array, 'B T H']:
  call = _Call.of(static, query, key, value, bias, prompt, seeds)
  return pl.pallas_call(
    functools.partial(_forward, static, _prompts(prompt)),
    grid=call.grid,
    in_specs=call.blocks,
    out_specs=call.block(query),
    out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
    interpret=static.interpret,
    compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'parallel')),
    cost_estimate=call.cost(2, query),
  )(*call.arrays)


def _attend_fwd(static, *arrays):
  return _attend(static, *arrays), arrays


def _attend_bwd(static, arrays, gradient):
  query, key, value, bias, prompt, *seeds = arrays
  call = _Call.of(static, query, key, value, bias, prompt, seeds)
  shapes = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in (query, key, value)]
  outs = [call.block(one) for one in (query, key, value)]
  if prompt is not None:
    # Examples are the inner axis of the grid, so the block of a shared prompt stays in place.
    dtype = prompt.dtype if _prompts(prompt) == 'own' else jnp.float32
    shapes.append(jax.ShapeDtypeStruct(prompt.shape, dtype))
    outs.append(call.prompt_block(prompt))
  gradients = pl.pallas_call(
    functools.partial(_backward, static, _prompts(prompt)),
    grid=call.grid,
    in_specs=[*call.blocks, call.block(gradient)],
    out_specs=outs,
    out_shape=shapes,
    interpret=static.interpret,
    compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'arbitrary')),
    cost_estimate=call.cost(5, gradient, *shapes),
  )(*call.arrays, gradient)
  by_prompt = gradients[3].astype(prompt.dtype) if prompt is not None else None
  by_seed = (None if one is None else np.zeros(one.shape, jax.dtypes.float0) for one in seeds)
  return *gradients[:3], jnp.zeros_like(bias), by_prompt, *by_seed


_attend.defvjp(_attend_fwd, _attend_bwd)


def _prompts(prompt: Array | None) -> str:
  """'shared', 'own' (a prompt for each example), or '' for none."""
  return '' if prompt is None else 'own' if prompt.ndim == 4 else 'shared'


class _Call(NamedTuple):
  """The inputs of both kernels.

  Attributes:
    arrays: queries, keys, values, biases, and any prompt and seeds.
    blocks: their parts in a step of the grid.
    grid: groups of heads, and examples.
    width: numbers of a group.
    flops: of the scores.
  """

  arrays: list[Array]
  blocks: list[pl.BlockSpec]
  grid: tuple[int, int]
  width: int
  flops: int

  @classmethod
  def of(
    cls,
    static: _Static,
    query: Array,
    key: Array,
    value: Array,
    bias: Array,
    prompt: Array | None,
    seeds: Sequence[Array | None],
  ) -> Self:
    """From arrays on one device."""
    batch, length, size = query.shape
    tokens, vectors = key.shape[1], 0 if prompt is None else prompt.shape[-2]
    heads = size // static.width
    # The blocks of a head, twice: the next ones are prefetched.
    one = 2 * (3 * length + 4 * tokens + 4 * vectors) * static.width * query.dtype.itemsize
    room = _STEP_BYTES - 4 * _SCORES * length * (tokens + vectors)
    # The last axis of a block is whole, or fills registers.
    fit = [n for n in range(1, heads + 1) if heads % n == 0 and n * static.width % _LANES == 0]
    small = [n for n in fit if n * one <= room and n <= _MOST_HEADS]
    together = max(small, default=min(fit, default=heads))
    flops = 2 * batch * length * (tokens + vectors) * size
    call = cls(
      [query, key, value, bias], [], (heads // together, batch), together * static.width, flops
    )
    call.blocks.extend(
      (*map(call.block, (query, key, value)), pl.BlockSpec((1, 1, tokens), lambda n, b: (b, 0, 0)))
    )
    if prompt is not None:
      call.arrays.append(prompt)
      call.blocks.append(call.prompt_block(prompt))
    for seed in seeds:
      if seed is not None:
        call.arrays.append(seed)
        call.blocks.append(pl.BlockSpec((1, together, 1, 1), lambda n, b: (b, n, 0, 0)))
    return call

  def block(self, array: Any) -> pl.BlockSpec:
    """A group of heads of an example."""
    return pl.BlockSpec((1, array.shape[1], self.width), lambda n, b: (b, 0, n))

  def prompt_block(self, prompt: Any) -> pl.BlockSpec:
    """The same heads of the prompt."""
    block = 2, prompt.shape[-2], self.width
    if _prompts(prompt) == 'own':
      return pl.BlockSpec((1, *block), lambda n, b: (b, 0, 0, n))
    return pl.BlockSpec(block, lambda n, b: (0, 0, n))

  def cost(self, products: int, *written: Any) -> pl.CostEstimate:
    """A hint for the compiler: ``products`` is the number of products as large as the scores."""
    moved = sum(one.size * one.dtype.itemsize for one in (*self.arrays, *written))
    return pl.CostEstimate(
      flops=products * self.flops, bytes_accessed=moved, transcendentals=self.flops // 2
    )


class _Part(NamedTuple):
  """Keys and values of the prompt or the tokens, and their scores.

  Attributes:
    keys, values: ``[S, D]``.
    bias: ``[1, S]``, added to the scores.
    masks: dropout masks of keys and values.
    scores: ``[T, S]``; later their exponentials.
    weights_kept: the dropout mask of weights.
  """

  keys: Array
  values: Array
  bias: Array | None = None
  masks: tuple[Array, Array] | None = None
  scores: Any = None
  weights_kept: Array | None = None


def _product(x: Array, y: Array, axes: tuple[int, int]) -> Array:
  """A product over one axis of each, summed in float32."""
  return jax.lax.dot_general(
    x, y, (((axes[0],), (axes[1],)), ((), ())), preferred_element_type=jnp.float32
  )


def _heads(ref: Any, index: Any, width: int) -> list[Array]:
  """The heads ``[T, D]`` side by side in a block."""
  whole = ref[index]
  return [whole[:, at : at + width] for at in range(0, whole.shape[1], width)]


def _sides(prompts: str) -> list[Any]:
  """The indices of keys and values in a block of a prompt."""
  return [(0, 0), (0, 1)] if prompts == 'own' else [0, 1]


def _given(static: _Static, prompts: str, refs: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
  """Yields number, queries, parts and seed of each head."""
  query, key, value, bias, *more = refs
  read = [_heads(ref, 0, static.width) for ref in (query, key, value)]
  sides = [_heads(more[0], side, static.width) for side in _sides(prompts)] if prompts else []
  for head in range(len(read[0])):
    parts = [_Part(read[1][head], read[2][head], bias[0])]
    if sides:
      prompt = _Part(sides[0][head], sides[1][head])
      if static.prompt_dropout:
        prompt = _drop_prompt(static, prompt, more[-1][0, head])
      parts.insert(0, prompt)
    seed = more[bool(prompts)][0, head] if static.dropout else None  # [1, 1]
    yield head, read[0][head], parts, seed


def _drop_prompt(static: _Static, part: _Part, seed: Int32[Array, '1 1']) -> _Part:
  """A head of a prompt with the dropout of an example."""
  rate, shape = static.prompt_dropout, part.keys.shape
  # Places of the values follow those of the keys.
  pair = _kept(rate, seed, shape, 0), _kept(rate, seed, shape, shape[1])
  keys, values = (
    _drop(rate, mask, one) for mask, one in zip(pair, (part.keys, part.values), strict=True)
  )
  return part._replace(keys=keys, values=values, masks=pair)


def _parts(
  static: _Static, query: Array, whole: Sequence[_Part], seed: Array | None
) -> tuple[list[_Part], Array]:
  """The parts with their exponentials, and the sums of these, ``[T, 1]``."""
  parts, before = [], 0
  for part in whole:
    scores = _product(query, part.keys, (1, 1)) * static.width**-0.5
    scores = scores if part.bias is None else scores + part.bias
    mask = None if seed is None else _kept(static.dropout, seed, scores.shape, before)
    parts.append(part._replace(scores=scores, weights_kept=mask))
    before += part.keys.shape[0]
  highest = functools.reduce(
    jnp.maximum, (jnp.max(part.scores, axis=1, keepdims=True) for part in parts)
  )
  parts = [part._replace(scores=jnp.exp(part.scores - highest)) for part in parts]
  sums = (jnp.sum(part.scores, axis=1, keepdims=True) for part in parts)
  return parts, functools.reduce(jnp.add, sums)


def _forward(static: _Static, prompts: str, *refs: Any) -> None:
  """Writes the weighted means of some heads of an example."""
  *input_refs, out_ref = refs
  heads = []
  for _, query, whole, seed in _given(static, prompts, input_refs):
    parts, total = _parts(static, query, whole, seed)
    means = sum(
      _product(
        _drop(static.dropout, part.weights_kept, part.scores).astype(part.values.dtype),
        part.values,
        (1, 0),
      )
      for part in parts
    )
    heads.append((means / total).astype(out_ref.dtype))
  out_ref[0] = jnp.concatenate(heads, axis=1)


def _backward(static: _Static, prompts: str, *refs: Any) -> None:
  """Writes the gradients of some heads of an example, and sums those of a shared prompt."""
  outs = 3 + bool(prompts)
  input_refs, gradient_ref, out_refs = refs[: -outs - 1], refs[-outs - 1], refs[-outs:]
  gradients = _heads(gradient_ref, 0, static.width)
  dtype = gradient_ref.dtype
  by_text: list[list[Array]] = [[], [], []]  # queries, keys, values
  by_prompt: list[list[Array]] = [[], []]
  for head, query, whole, seed in _given(static, prompts, input_refs):
    parts, total = _parts(static, query, whole, seed)
    gradient = gradients[head]
    weights = [part.scores / total for part in parts]
    by_weight = [
      _drop(static.dropout, part.weights_kept, _product(gradient, part.values, (1, 1)))
      for part in parts
    ]
    mean = sum(
      jnp.sum(weight * by, axis=1, keepdims=True)
      for weight, by in zip(weights, by_weight, strict=True)
    )
    by_query = jnp.zeros(query.shape, jnp.float32)
    # The prompt, if any, comes first.
    into = [by_prompt, by_text[1:]][-len(parts) :]
    for part, weight, by, (keys, values) in zip(parts, weights, by_weight, into, strict=True):
      by_score = (weight * (by - mean) * static.width**-0.5).astype(dtype)
      by_query += _product(by_score, part.keys, (1, 0))
      dropped = _drop(static.dropout, part.weights_kept, weight).astype(dtype)
      by_pair = _product(by_score, query, (0, 0)), _product(dropped, gradient, (0, 0))
      for some, one, mask in zip((keys, values), by_pair, part.masks or (None, None), strict=True):
        some.append(_drop(static.prompt_dropout, mask, one))
    by_text[0].append(by_query)
  for ref, heads in zip(out_refs, by_text, strict=False):
    ref[0] = jnp.concatenate([one.astype(dtype) for one in heads], axis=1)
  if not prompts:
    return
  ref = out_refs[3]
  if prompts == 'shared':

    @pl.when(pl.program_id(1) == 0)
    def _():
      ref[...] = jnp.zeros_like(ref)

  for side, heads in zip(_sides(prompts), by_prompt, strict=True):
    whole = jnp.concatenate(heads, axis=1)
    ref[side] = whole + ref[side] if prompts == 'shared' else whole.astype(ref.dtype)


def _drop(rate: float, mask: Array | None, values: Array) -> Array:
  """Applies dropout to numbers or their gradients."""
  return values if mask is None else jnp.where(mask, values / (1 - rate), jnp.zeros_like(values))


def _kept(rate: float, seed: Int32[Array, '1 1'], shape: tuple[int, ...], before: int) -> Array:
  """The dropout mask of a head.

  Args:
    shape: rows, and at most 8,192 columns.
    before: columns that precede these.
  """
  row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
  return masks.stays(rate, seed, row * 8192 + column + before)
