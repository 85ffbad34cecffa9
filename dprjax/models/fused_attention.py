"""Attention over a prompt and the tokens, whose scores never leave the chip, as a Pallas kernel.

For TPUs, where XLA writes the scores ``[B, N, T, S]`` to memory and reads them back, in training
several times. A head's scores are small (512 x 640 float32 are 1.3 MB), so a head is computed in
one piece, without a running softmax. A prompt that all examples share is read as it is, without a
copy for each, and its gradient is added up where it is computed. The backward pass computes the
scores again. The kernels that come with JAX take a prefix only as a copy, and know no dropout.
"""

import functools
import math
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

# Of what a step of the grid holds, on the chips with the least room for it (16 MB).
_STEP_BYTES = 12 << 20
_SCORES = 8  # arrays of a head's scores that the backward pass has at a time
_MOST_HEADS = 8  # in a step: each has its own instructions, which take long to compile
_LANES = 128  # numbers in a row of a register: a shorter last axis is filled up


class _Static(NamedTuple):
  """What a program is compiled for.

  Attributes:
    width: D.
    dropout: the rate; 0: none.
    interpret: run the kernel on any device, slowly.
  """

  width: int
  dropout: float
  interpret: bool


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
  split: NamedSharding | None = None,
  interpret: bool = False,
) -> Float[Array, 'B T H']:
  """Weighted means of values, in the dtype of ``query``; scores and weights are float32.

  Heads lie side by side in H, as dense layers leave them: nothing is transposed.

  Args:
    query, key, value: of the tokens; keys and values may begin with others that the bias masks.
    bias: added to the scores of the tokens; no gradient goes through it.
    prompt: keys (index 0) and values that nothing masks, of all examples or of each.
    num_heads: N.
    dropout: the rate at which weights are left out, where there is a ``dropout_key``.
    dropout_key: of the masks, which are others than those of ``flax.linen.Dropout``.
    split: of several devices, how they split the examples and the heads; None: one device.
    interpret: run the kernel on any device, slowly.
  """
  seeds = None
  if dropout and dropout_key is not None:
    seeds = _seeds(dropout_key, query.shape[0], num_heads)
  rate, width = (dropout if seeds is not None else 0.0), query.shape[2] // num_heads
  run = functools.partial(_attend, _Static(width, rate, interpret))
  arrays = query, key, value, bias[:, 0], prompt, seeds
  if split is None or split.mesh.size == 1:
    return run(*arrays)
  rows, heads = (
    axes if count % math.prod(split.mesh.shape[axis] for axis in _names(axes)) == 0 else None
    for axes, count in zip(split.spec, (query.shape[0], num_heads), strict=True)
  )
  texts = P(rows, None, heads)
  own = prompt is not None and prompt.ndim == 4
  of_prompt = P(rows, None, None, heads) if own else P(None, None, heads)
  return jax.shard_map(
    run,
    mesh=split.mesh,
    in_specs=(texts, texts, texts, P(rows), of_prompt, P(rows, heads)),
    out_specs=texts,
    check_vma=False,
  )(*arrays)


def _names(axes: Any) -> tuple[str, ...]:
  return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def _seeds(key: Array, batch: int, heads: int) -> Int32[Array, 'B N 1 1']:
  """A seed for each head of each example, whichever device computes it."""
  bits = jax.random.bits(key, (batch, heads, 1, 1), jnp.uint32)
  return jax.lax.bitcast_convert_type(bits, jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
  static: _Static,
  query: Float[Array, 'B T H'],
  key: Float[Array, 'B S H'],
  value: Float[Array, 'B S H'],
  bias: Float[Array, 'B 1 S'],
  prompt: Float[Array, '*B 2 P H'] | None,
  seeds: Int32[Array, 'B N 1 1'] | None,
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
  query, key, value, bias, prompt, seeds = arrays
  call = _Call.of(static, *arrays)
  shapes = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in (query, key, value)]
  outs = [call.block(one) for one in (query, key, value)]
  if prompt is not None:
    # The examples are the inner axis of the grid: the block of a prompt that they share stays where
    # it is and is added to.
    dtype = prompt.dtype if _prompts(prompt) == 'own' else jnp.float32
    shapes.append(jax.ShapeDtypeStruct(prompt.shape, dtype))
    outs.append(call.prompt_block(prompt))
  made = pl.pallas_call(
    functools.partial(_backward, static, _prompts(prompt)),
    grid=call.grid,
    in_specs=[*call.blocks, call.block(gradient)],
    out_specs=outs,
    out_shape=shapes,
    interpret=static.interpret,
    compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'arbitrary')),
    cost_estimate=call.cost(5, gradient, *shapes),
  )(*call.arrays, gradient)
  by_prompt = made[3].astype(prompt.dtype) if prompt is not None else None
  no_seeds = None if seeds is None else np.zeros(seeds.shape, jax.dtypes.float0)
  return *made[:3], jnp.zeros_like(bias), by_prompt, no_seeds


_attend.defvjp(_attend_fwd, _attend_bwd)


def _prompts(prompt: Array | None) -> str:
  """Whose the prompt is: 'shared', each example's 'own', or '': there is none."""
  return '' if prompt is None else 'own' if prompt.ndim == 4 else 'shared'


class _Call(NamedTuple):
  """What both kernels take.

  Attributes:
    arrays: queries, keys, values, biases, and a prompt and seeds where there are some.
    blocks: the parts of them that a step of the grid holds.
    grid: groups of heads, and examples.
    width: that of a group, in numbers.
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
    seeds: Array | None,
  ) -> Self:
    """Of arrays that lie on one device."""
    batch, length, size = query.shape
    tokens, vectors = key.shape[1], 0 if prompt is None else prompt.shape[-2]
    heads = size // static.width
    # A head's blocks, twice: the next ones are fetched while these are computed with.
    one = 2 * (3 * length + 4 * tokens + 4 * vectors) * static.width * query.dtype.itemsize
    room = _STEP_BYTES - 4 * _SCORES * length * (tokens + vectors)
    # A block's last axis is whole, or fills registers.
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
    if static.dropout:
      assert seeds is not None
      call.arrays.append(seeds)
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
    """For the compiler, of a kernel with so many products as large as the scores'."""
    moved = sum(one.size * one.dtype.itemsize for one in (*self.arrays, *written))
    return pl.CostEstimate(
      flops=products * self.flops, bytes_accessed=moved, transcendentals=self.flops // 2
    )


class _Part(NamedTuple):
  """Keys and values of the prompt or of the tokens, and what attends to them.

  Attributes:
    keys, values: ``[S, D]``.
    scores: ``[T, S]``; then their exponentials.
    kept: which weights are not left out; None: all.
  """

  keys: Array
  values: Array
  scores: Array
  kept: Array | None


def _product(x: Array, y: Array, axes: tuple[int, int]) -> Array:
  """Over one axis of each, added up in float32."""
  return jax.lax.dot_general(
    x, y, (((axes[0],), (axes[1],)), ((), ())), preferred_element_type=jnp.float32
  )


def _heads(ref: Any, index: Any, width: int) -> list[Array]:
  """The heads ``[T, D]`` that lie side by side in a block."""
  whole = ref[index]
  return [whole[:, at : at + width] for at in range(0, whole.shape[1], width)]


def _sides(prompts: str) -> list[Any]:
  """Where keys and values are in a block of a prompt."""
  return [(0, 0), (0, 1)] if prompts == 'own' else [0, 1]


def _given(static: _Static, prompts: str, refs: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
  """Of each head what `_parts` takes."""
  query, key, value, bias, *more = refs
  read = [_heads(ref, 0, static.width) for ref in (query, key, value)]
  sides = [_heads(more[0], side, static.width) for side in _sides(prompts)] if prompts else []
  for head in range(len(read[0])):
    pairs = [(read[1][head], read[2][head], bias[0])]
    if sides:
      pairs.insert(0, (sides[0][head], sides[1][head], None))
    seed = more[-1][0, head] if static.dropout else None  # [1, 1]
    yield head, read[0][head], pairs, seed


def _parts(
  static: _Static, query: Array, pairs: Sequence[tuple[Array, Array, Any]], seed: Array | None
) -> tuple[list[_Part], Array]:
  """What a head's queries ``[T, D]`` attend to, and the sums of the exponentials ``[T, 1]``."""
  parts, before = [], 0
  for keys, values, bias in pairs:
    scores = _product(query, keys, (1, 1)) * static.width**-0.5
    scores = scores if bias is None else scores + bias
    kept = None if seed is None else _kept(static.dropout, seed, scores.shape, before)
    parts.append(_Part(keys, values, scores, kept))
    before += keys.shape[0]
  highest = functools.reduce(
    jnp.maximum, (jnp.max(part.scores, axis=1, keepdims=True) for part in parts)
  )
  parts = [part._replace(scores=jnp.exp(part.scores - highest)) for part in parts]
  sums = (jnp.sum(part.scores, axis=1, keepdims=True) for part in parts)
  return parts, functools.reduce(jnp.add, sums)


def _forward(static: _Static, prompts: str, *refs: Any) -> None:
  """Writes the weighted means of some heads of an example."""
  *given, out_ref = refs
  made = []
  for _, query, pairs, seed in _given(static, prompts, given):
    parts, total = _parts(static, query, pairs, seed)
    means = sum(
      _product(_drop(static, part, part.scores).astype(part.values.dtype), part.values, (1, 0))
      for part in parts
    )
    made.append((means / total).astype(out_ref.dtype))
  out_ref[0] = jnp.concatenate(made, axis=1)


def _backward(static: _Static, prompts: str, *refs: Any) -> None:
  """Writes the gradients of some heads of an example, and adds up those of a shared prompt."""
  outs = 3 + bool(prompts)
  given, gradient_ref, out_refs = refs[: -outs - 1], refs[-outs - 1], refs[-outs:]
  gradients = _heads(gradient_ref, 0, static.width)
  dtype = gradient_ref.dtype
  by_text: list[list[Array]] = [[], [], []]  # queries, keys, values
  by_prompt: list[list[Array]] = [[], []]
  for head, query, pairs, seed in _given(static, prompts, given):
    parts, total = _parts(static, query, pairs, seed)
    gradient = gradients[head]
    weights = [part.scores / total for part in parts]
    by_weight = [_drop(static, part, _product(gradient, part.values, (1, 1))) for part in parts]
    mean = sum(
      jnp.sum(weight * by, axis=1, keepdims=True)
      for weight, by in zip(weights, by_weight, strict=True)
    )
    by_query = jnp.zeros(query.shape, jnp.float32)
    # The prompt first where there is one, the tokens last.
    into = [by_prompt, by_text[1:]][-len(parts) :]
    for part, weight, by, (keys, values) in zip(parts, weights, by_weight, into, strict=True):
      by_score = (weight * (by - mean) * static.width**-0.5).astype(dtype)
      by_query += _product(by_score, part.keys, (1, 0))
      keys.append(_product(by_score, query, (0, 0)))
      values.append(_product(_drop(static, part, weight).astype(dtype), gradient, (0, 0)))
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


def _drop(static: _Static, part: _Part, values: Array) -> Array:
  """Dropout on weights, or on their gradients."""
  if part.kept is None:
    return values
  return jnp.where(part.kept, values / (1 - static.dropout), 0.0)


def _kept(rate: float, seed: Int32[Array, '1 1'], shape: tuple[int, ...], before: int) -> Array:
  """Which of a head's weights stay: bits of the place, mixed with the seed (MurmurHash3's fmix32).

  Args:
    rate: of those that do not.
    seed: of the head.
    shape: queries and keys.
    before: keys that stand before these.
  """
  row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
  bits = seed + (row * 8192 + column + before) * np.int32(-1640531527)  # the golden ratio
  for shift, factor in ((16, np.int32(-2048144789)), (13, np.int32(-1028477387)), (16, None)):
    bits = bits ^ jax.lax.shift_right_logical(bits, jnp.full(shape, shift, jnp.int32))
    bits = bits if factor is None else bits * factor
  return jax.lax.shift_right_logical(bits, jnp.full(shape, 8, jnp.int32)) >= round(rate * 2**24)
