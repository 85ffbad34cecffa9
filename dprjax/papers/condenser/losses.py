"""Losses of pretraining: masked LM, of the encoder and of the Condenser head; NT-Xent.

Masks (Devlin et al., 2019, section 3.1 and its code) are drawn on the device from one key, row by
row, so they do not depend on the mesh.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from dprjax.losses import contrastive
from dprjax.losses.contrastive import ContrastiveMetrics, ScoreMatrix
from dprjax.losses.grad_cache import map_chunks
from dprjax.models import encoder, heads
from dprjax.models.encoder_config import EncoderConfig


class Masked(NamedTuple):
  """Tokens, some of them masked.

  ``positions`` of masked tokens rise; beyond them ``positions`` and ``weights`` are 0.
  """

  tokens: Int[Array, 'B T']
  positions: Int[Array, 'B M']
  targets: Int[Array, 'B M']
  weights: Float[Array, 'B M']


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
    replacements: the ids of random tokens: all but the special ones.
  """
  length = tokens.shape[1]
  most = max(1, round(rate * (length - 2)))  # M; two tokens are special
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
    most: the largest budget in tokens, so the number of steps.
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


def mlm_loss(
  config: EncoderConfig,
  head: Mapping[str, Any],
  embedding: Float[Array, 'V E'],
  hidden: Float[Array, 'B T H'],
  positions: Int[Array, 'B M'],
  targets: Int[Array, 'B M'],
  weights: Float[Array, 'B M'],
  dtype: Any = jnp.float32,
) -> tuple[Float[Array, ''], Float[Array, '']]:
  """The masked-LM loss (Condenser, Eqs. 3, 9 and 10) and the number of correct predictions.

  Both are weighted sums, so that chunks of a batch can be added. The largest array is [B, M, V], a
  seventh of [B, T, V].
  """
  gathered = jnp.take_along_axis(hidden, positions[:, :, None], axis=1)  # [B, M, H]
  logits = heads.mlm_logits(config, head, embedding, gathered, dtype)
  target = jnp.take_along_axis(logits, targets[:, :, None], axis=2)[:, :, 0]
  entropy = jax.nn.logsumexp(logits, axis=2) - target
  right = (jnp.argmax(logits, axis=2) == targets).astype(jnp.float32)
  return jnp.sum(entropy * weights), jnp.sum(right * weights)


def condenser_states(
  config: EncoderConfig,
  layers: Mapping[str, Any],
  late: Float[Array, 'B T H'],
  early: Float[Array, 'B T H'],
  mask: Bool[Array, 'B T'],
  **kwargs: Any,
) -> Float[Array, 'B T H']:
  """Applies the Condenser head to the late first and the other early tokens (Eq. 8), float32."""
  skipped = jnp.concatenate([late[:, :1], early[:, 1:]], axis=1)
  return encoder.encode_layers(config, layers, skipped, mask, **kwargs).astype(jnp.float32)


def nt_xent(
  texts: Float[Array, 'M H'],
  mesh: Mesh,
  *,
  rows: int = 1024,
  temperature: float,
  keys: Int[Array, ' M'] | None = None,
) -> ContrastiveMetrics:
  """``nt_xent_scores`` over the global batch, at most ``rows`` texts of a device at a time."""
  everything, keys = jax.lax.with_sharding_constraint((texts, keys), NamedSharding(mesh, P()))

  def score(block: tuple[Array, Array], _: Array | None) -> tuple[ContrastiveMetrics, tuple[()]]:
    scores = nt_xent_scores(block[0], everything, temperature, block[1], keys)
    return contrastive.metrics_of(scores), ()

  arrays = (texts, jnp.arange(len(texts), dtype=jnp.int32))
  return map_chunks(score, arrays, None, contrastive.row_blocks(len(texts), rows, mesh), mesh)[0]


def nt_xent_scores(
  texts: Float[Array, 'm H'],
  everything: Float[Array, 'M H'],
  temperature: float = 1.0,
  row: Int[Array, ' m'] | None = None,
  keys: Int[Array, ' M'] | None = None,
) -> ScoreMatrix:
  """Scores M = 2 B texts, two of each passage, with one another (DPTDR Eq. 4; coCondenser Eq. 6).

  The target of each text is its sibling; the other M - 2 texts are its negatives.

  Args:
    texts: siblings side by side, so that each device keeps the rows of its passages.
    keys: ``text_keys`` of all texts. Equal texts, and siblings of equal texts, are not negatives.
  """
  logits = contrastive.inner_products(texts, everything) / temperature
  row = jnp.arange(texts.shape[0], dtype=jnp.int32) if row is None else row
  column = jnp.arange(everything.shape[0], dtype=jnp.int32)
  allowed = row[:, None] != column[None, :]
  if keys is not None:
    key, sibling = (jnp.take(keys, place)[:, None] for place in (row, row ^ 1))
    theirs = jnp.take(keys, column ^ 1)[None, :]
    equal = (key == keys[None, :]) | (sibling == keys[None, :]) | (key == theirs)
    allowed &= (column[None, :] == (row ^ 1)[:, None]) | ~equal
  return ScoreMatrix(jnp.where(allowed, logits, -jnp.inf), row ^ 1, allowed)


def text_keys(tokens: Int[Array, 'B T'], mask: Bool[Array, 'B T']) -> Int[Array, ' B']:
  """A 31-bit hash of the tokens of each text."""
  places = jnp.arange(tokens.shape[1], dtype=jnp.uint32)[None, :]
  bits = jnp.asarray(tokens, jnp.uint32) * np.uint32(2654435761) + places * np.uint32(2246822519)
  for shift, factor in ((16, 2246822507), (13, 3266489909)):  # fmix32 of MurmurHash3
    bits = (bits ^ (bits >> np.uint32(shift))) * np.uint32(factor)
  bits = bits ^ (bits >> np.uint32(16))
  sums = jnp.sum(jnp.where(mask, bits, np.uint32(0)), axis=1, dtype=jnp.uint32)
  return (sums >> np.uint32(1)).astype(jnp.int32)
