"""Masks of attention, and attention over long texts in blocks of queries."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Added to the scores of masked keys. Finite, so that rows of padding do not give NaN.
MASKED = -1e9

# Attention over more than LONG tokens takes BLOCK queries at a time.
LONG = 1024
BLOCK = 256


def queries_at_once(length: int) -> int:
  return min(length, BLOCK) if length > LONG else length


def padding_bias(seen: Bool[Array, 'B S']) -> Float[Array, 'B 1 1 S']:
  """Masks keys that no token may see."""
  return jnp.where(seen, 0.0, MASKED)[:, None, None, :]


class Reach(NamedTuple):
  """The tokens visible to a token in a layer. The prompt is always visible.

  Attributes:
    window: in a windowed layer, how many earlier tokens are visible, and as many later ones unless
      ``causal``; 0: no layer has a window.
  """

  causal: bool = False
  window: int = 0
  windowed: bool | Bool[Array, ''] = True

  @property
  def limited(self) -> bool:
    return self.causal or self.window > 0

  def bias(self, place: Int[Array, ' t'], key: Int[Array, ' S']) -> Float[Array, '1 1 t S']:
    """Masks distance.

    Args:
      key: the places of keys; those of the prompt are below 0.
    """
    distance = key[None, :] - place[:, None]
    near = jnp.full(distance.shape, True)
    if self.window:
      near = (jnp.abs(distance) <= self.window) | jnp.logical_not(self.windowed)
    if self.causal:
      near &= distance <= 0
    return jnp.where(near | (key < 0)[None], 0.0, MASKED)[None, None]


ALL = Reach()


def attend_in_blocks(
  mix: Callable[..., Array],
  query: Float[Array, 'B N T D'],
  key: Float[Array, 'B K S D'],
  value: Float[Array, 'B K S D'],
  bias: Float[Array, '_ _ _ S'],
  reach: Reach,
) -> Float[Array, 'B N T D']:
  """Attention with the scores of one block of queries in memory, also in the backward pass.

  In a windowed layer a block scores the prompt, its own tokens, and the tokens visible to its first
  and last token. In other layers it scores all keys.

  Args:
    mix: ``(query, key, value, bias, number) -> [B, N, t, D]``, attention of block ``number``.
  """
  length = query.shape[2]
  prompt = key.shape[2] - length
  count = -(-length // BLOCK)
  rest = count * BLOCK - length
  before, after = reach.window, 0 if reach.causal else reach.window
  offsets = jnp.arange(BLOCK, dtype=jnp.int32)

  def pad(y: Array, axis: int, sides: tuple[int, int], fill: float = 0.0) -> Array:
    widths = [(0, 0)] * y.ndim
    widths[axis] = sides
    return jnp.pad(y, widths, constant_values=fill)

  def blocks(y: Array) -> Array:
    y = pad(y, 2, (0, rest))
    return jnp.moveaxis(y.reshape(*y.shape[:2], count, BLOCK, y.shape[3]), 2, 0)

  def see_all(number, query, bias):
    places = jnp.arange(-prompt, length, dtype=jnp.int32)
    if reach.limited:
      bias = bias + reach.bias(number * BLOCK + offsets, places)
    return mix(query, key, value, bias, number)

  def see_window(number, query, bias):
    start = number * BLOCK
    width = before + BLOCK + after

    def near(y, axis, fill=0.0):
      first, tokens = jnp.split(y, [prompt], axis)
      tokens = pad(tokens, axis, (before, rest + after), fill)
      tokens = jax.lax.dynamic_slice_in_dim(tokens, start, width, axis)
      return jnp.concatenate([first, tokens], axis)

    # The bias masks places before the first token.
    places = start - before + jnp.arange(width, dtype=jnp.int32)
    places = jnp.concatenate([jnp.arange(-prompt, 0, dtype=jnp.int32), places])
    bias = near(bias, 3, MASKED) + reach.bias(start + offsets, places)
    return mix(query, near(key, 2), near(value, 2), bias, number)

  def block(inputs: tuple[Any, ...]) -> Array:
    if not reach.window or before + BLOCK + after >= length:
      return see_all(*inputs)
    if isinstance(reach.windowed, bool):
      return (see_window if reach.windowed else see_all)(*inputs)
    return jax.lax.cond(reach.windowed, see_window, see_all, *inputs)

  rows = blocks(bias) if bias.shape[2] > 1 else jnp.broadcast_to(bias, (count, *bias.shape))
  inputs = jnp.arange(count, dtype=jnp.int32), blocks(query), rows
  mixed = jax.lax.map(jax.checkpoint(block, prevent_cse=False), inputs)
  mixed = jnp.moveaxis(mixed, 0, 2).reshape(*query.shape[:2], count * BLOCK, query.shape[3])
  return mixed[:, :, :length]
