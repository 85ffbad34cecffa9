"""Losses of pretraining: masked LM, of the encoder and of the Condenser head; NT-Xent."""

from collections.abc import Mapping
from typing import Any

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


def mlm_loss(
  config: EncoderConfig,
  head: Mapping[str, Any],
  embedding: Float[Array, 'V E'],
  hidden: Float[Array, 'B T H'],
  positions: Int[Array, 'B M'],
  targets: Int[Array, 'B M'],
  weights: Float[Array, 'B M'],
  dtype: Any = jnp.float32,
) -> tuple[Float[Array, ''], Float[Array, ''], Float[Array, '']]:
  """The masked-LM loss (Condenser, Eqs. 3, 9 and 10) as sums, so that chunks of a batch can be
  added.

  States at ``positions`` are gathered first, so the largest array is [B, M, V], a seventh of [B, T,
  V].

  Args:
    hidden: the last states of the encoder or of the Condenser head.
    positions: of masked tokens, from ``masking``.
    targets: the original tokens at ``positions``.
    weights: 1 for a masked token, 0 for padding.

  Returns:
    The weighted sums of cross-entropies, of ones, and of correct predictions.
  """
  gathered = jnp.take_along_axis(hidden, positions[:, :, None], axis=1)  # [B, M, H]
  logits = heads.mlm_logits(config, head, embedding, gathered, dtype)
  target = jnp.take_along_axis(logits, targets[:, :, None], axis=2)[:, :, 0]
  entropy = jax.nn.logsumexp(logits, axis=2) - target
  right = (jnp.argmax(logits, axis=2) == targets).astype(jnp.float32)
  return jnp.sum(entropy * weights), jnp.sum(weights), jnp.sum(right * weights)


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


def interleave(first: Float[Array, 'B H'], second: Float[Array, 'B H']) -> Float[Array, 'M H']:
  """The texts in the order first 0, second 0, first 1, second 1, ...; M = 2 B.

  Each device keeps the rows of its passages.
  """
  return jnp.stack([first, second], axis=1).reshape(2 * first.shape[0], -1)


def nt_xent(
  texts: Float[Array, 'M H'],
  mesh: Mesh,
  *,
  rows: int = 1024,
  temperature: float = 1.0,
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
    texts: in the order of ``interleave``.
    everything: all texts, gathered to all devices.
    row: rows of ``texts`` in ``everything``; None: all.
    keys: ``text_keys`` of all texts. Equal texts, and siblings of equal texts, are not negatives.
  """
  logits = contrastive.inner_products(texts, everything) / temperature
  row = jnp.arange(texts.shape[0], dtype=jnp.int32) if row is None else row
  column = jnp.arange(everything.shape[0], dtype=jnp.int32)
  allowed = row[:, None] != column[None, :]
  if keys is not None:
    own, sibling = (jnp.take(keys, place)[:, None] for place in (row, row ^ 1))
    theirs = jnp.take(keys, column ^ 1)[None, :]
    equal = (own == keys[None, :]) | (sibling == keys[None, :]) | (own == theirs)
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
