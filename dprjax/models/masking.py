"""Masked language modelling's input: which words are hidden, and by what (Devlin et al., 2019,
section 3.1 and its code).

Everything is drawn on the device from one key. JAX's random numbers do not depend on how an array
is sharded (threefry is partitionable by default), and rows do not look at each other, so the same
key gives the same masks on any mesh.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


class Masked(NamedTuple):
  """Tokens with some hidden, and what they were.

  Attributes:
    tokens: what the encoder is given.
    positions: of the hidden tokens, rising; 0 where a row has fewer than M.
    targets: the tokens that stood there.
    weights: 1, and 0 where a row has fewer than M.
  """

  tokens: Int[Array, 'B T']
  positions: Int[Array, 'B M']
  targets: Int[Array, 'B M']
  weights: Float[Array, 'B M']


def most_masked(length: int, rate: float = 0.15) -> int:
  """M, the most tokens that a row of ``length`` tokens can have masked; two of them are special."""
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
  """Hides whole words: 80 % of their tokens behind the mask token, 10 % behind a random one, 10 %
  as they were.

  A row's budget is ``rate`` times its maskable tokens, rounded, at least 1 and at most M. Words
  come in random order; one that would exceed what is left of the budget is passed over, and a
  shorter one may still fit.

  Args:
    key: for all that is random here.
    tokens: token ids.
    words: the word that each token belongs to, -1 at special tokens and padding, which are never
      masked. A word's tokens stand side by side, and words side by side have different numbers.
    rate: the share of maskable tokens to hide; static.
    mask_id: the mask token.
    replacements: the ids that a random token is drawn from: all but the special ones.

  Returns:
    M is static, see ``most_masked``. A row without maskable tokens, or whose every word exceeds its
    budget, has weight 0 throughout.
  """
  length = tokens.shape[1]
  most = most_masked(length, rate)
  order_key, kind_key, token_key = jax.random.split(key, 3)
  # Counted in Python, so that the budget never exceeds M by float32's rounding of rate * n.
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
  # A stable sort: the hidden ones first, in the order in which they stand.
  positions = jnp.argsort(~hidden, axis=1, stable=True)[:, :most].astype(jnp.int32)
  found = jnp.take_along_axis(hidden, positions, axis=1)
  positions = jnp.where(found, positions, 0)
  return Masked(
    jnp.where(hidden, shown, tokens),
    positions,
    jnp.take_along_axis(tokens, positions, axis=1),
    found.astype(jnp.float32),
  )


def choose_words(
  order: Float[Array, 'B T'], words: Int[Array, 'B T'], budget: Int[Array, ' B'], most: int
) -> Bool[Array, 'B T']:
  """True at the tokens of the words that a row's budget takes, greedily by ``order``.

  Args:
    order: where each word comes in its row, read at the word's first token; the lowest first.
    words: as for ``mask_tokens``.
    budget: how many tokens a row may take, at most ``most``.
    most: how many steps there are, as a word has at least one token.
  """
  places = jax.lax.broadcasted_iota(jnp.int32, words.shape, 1)
  before = jnp.pad(
    words[:, :-1], ((0, 0), (1, 0)), constant_values=-2
  )  # -2: no word's, so that the first token starts one
  starts = words != before
  first = jax.lax.cummax(
    jnp.where(starts, places, 0), axis=1
  )  # the place of the word's first token
  following = jax.lax.cummin(jnp.where(starts, places, words.shape[1]), axis=1, reverse=True)
  size = (
    jnp.pad(following[:, 1:], ((0, 0), (0, 1)), constant_values=words.shape[1]) - places
  )  # right at first tokens

  def step(_: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
    taken, left = state
    # What has been passed over stays so, as the budget only falls: the first word that fits is the
    # next one to take.
    fits = starts & (words >= 0) & ~taken & (size <= left[:, None])
    next_one = jnp.argmin(jnp.where(fits, order, jnp.inf), axis=1)
    now = fits & (places == next_one[:, None].astype(jnp.int32))
    return taken | now, left - jnp.sum(jnp.where(now, size, 0), axis=1)

  taken, _ = jax.lax.fori_loop(0, most, step, (jnp.zeros(words.shape, bool), budget))
  return jnp.take_along_axis(taken, first, axis=1)
