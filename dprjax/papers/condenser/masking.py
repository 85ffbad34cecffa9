"""Masks tokens for masked language modelling (Devlin et al., 2019, section 3.1 and its code).

Masks are drawn on the device from one key, row by row, so they do not depend on the mesh.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


class Masked(NamedTuple):
  """Tokens, some of them masked.

  Attributes:
    tokens: the encoder input.
    positions: of the masked tokens, rising; 0 if a row has fewer than M.
    targets: the original tokens at ``positions``.
    weights: 1, or 0 beyond the masked tokens of a row.
  """

  tokens: Int[Array, 'B T']
  positions: Int[Array, 'B M']
  targets: Int[Array, 'B M']
  weights: Float[Array, 'B M']


def most_masked(length: int, rate: float = 0.15) -> int:
  """M, the most masked tokens in a row of ``length`` tokens, two of them special."""
  return max(1, round(rate * (length - 2)))


def mask_tokens(
  key: Array,
  tokens: Int[Array, 'B T'],
  words: Int[Array, 'B T'],
  *,
  rate: float = 0.15,
  mask_id: int,
  replacements: Int[Array, ' R'],
) -> Masked:
  """Masks whole words: 80 % of their tokens become the mask token, 10 % a random one, 10 % stay.

  The budget of a row is ``rate`` times its maskable tokens, rounded, from 1 to M. Words are taken
  in random order; a word that exceeds the remaining budget is skipped, and a shorter word may still
  fit.

  Args:
    words: the word number of each token; -1 at special tokens and padding, which are never masked.
      Neighbouring words have different numbers.
    rate: the fraction of maskable tokens to mask; static.
    replacements: the ids of random tokens: all but the special ones.

  Returns:
    M is ``most_masked``. A row where no word fits has weights 0.
  """
  length = tokens.shape[1]
  most = most_masked(length, rate)
  order_key, kind_key, token_key = jax.random.split(key, 3)
  # Counted in Python, so that float32 rounding of rate * n never lifts the budget above M.
  budgets = jnp.asarray(
    np.array([min(most, max(1, round(rate * count))) for count in range(length + 1)], np.int32)
  )
  budget = budgets[jnp.sum(words >= 0, axis=1, dtype=jnp.int32)]
  hidden = choose_words(
    jax.random.uniform(order_key, tokens.shape, jnp.float32), words, budget, most
  )

  kind = jax.random.uniform(kind_key, tokens.shape, jnp.float32)
  drawn = jax.random.randint(token_key, tokens.shape, 0, replacements.shape[0], jnp.int32)
  chance = jnp.take(jnp.asarray(replacements, tokens.dtype), drawn, axis=0)
  shown = jnp.where(
    kind < 0.8, jnp.asarray(mask_id, tokens.dtype), jnp.where(kind < 0.9, chance, tokens)
  )
  # A stable sort: masked tokens first, in order.
  positions = jnp.argsort(~hidden, axis=1, stable=True)[:, :most].astype(jnp.int32)
  masked = jnp.take_along_axis(hidden, positions, axis=1)
  positions = jnp.where(masked, positions, 0)
  return Masked(
    jnp.where(hidden, shown, tokens),
    positions,
    jnp.take_along_axis(tokens, positions, axis=1),
    masked.astype(jnp.float32),
  )


def choose_words(
  order: Float[Array, 'B T'], words: Int[Array, 'B T'], budget: Int[Array, ' B'], most: int
) -> Bool[Array, 'B T']:
  """Marks the tokens of words that fit into the budget of a row, greedily by ``order``.

  Args:
    order: the rank of each word, at its first token; the lowest comes first.
    budget: of each row, at most ``most`` tokens.
    most: the number of steps, since a word has at least one token.
  """
  places = jax.lax.broadcasted_iota(jnp.int32, words.shape, 1)
  # No word has number -2, so the first token starts a word.
  before = jnp.pad(words[:, :-1], ((0, 0), (1, 0)), constant_values=-2)
  starts = words != before
  first = jax.lax.cummax(jnp.where(starts, places, 0), axis=1)  # first token of the word
  following = jax.lax.cummin(jnp.where(starts, places, words.shape[1]), axis=1, reverse=True)
  # Valid only at first tokens.
  size = jnp.pad(following[:, 1:], ((0, 0), (0, 1)), constant_values=words.shape[1]) - places

  def step(_: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
    taken, left = state
    # A skipped word stays skipped, since the budget only falls.
    fits = starts & (words >= 0) & ~taken & (size <= left[:, None])
    chosen = jnp.argmin(jnp.where(fits, order, jnp.inf), axis=1)
    now = fits & (places == chosen[:, None].astype(jnp.int32))
    return taken | now, left - jnp.sum(jnp.where(now, size, 0), axis=1)

  taken, _ = jax.lax.fori_loop(0, most, step, (jnp.zeros(words.shape, bool), budget))
  return jnp.take_along_axis(taken, first, axis=1)
