"""The contrastive losses that every retriever here shares, over the whole global batch.

All of it is written for global arrays under ``jax.jit``: queries and passages come sharded over the batch's
mesh axes, the passages are gathered to all devices, and each device scores its own queries against all of
them. So the value and the gradient are those of one device holding everything, on any mesh.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Scores(NamedTuple):
  """Logits of each query against each candidate, with the candidates that do not count at minus infinity."""

  logits: Float[Array, 'B M']
  target: Int[Array, 'B']
  allowed: Bool[Array, 'B M']


def false_negatives(passage_index: Int[Array, 'B C'], relevant: Int[Array, 'B R']) -> Bool[Array, 'B M']:
  """Which of the batch's M = B * C passages are relevant to which query (its own positive included).

  ``relevant`` lists the passages known to be relevant to each query, -1 where unused. A query's own positive
  counts as relevant even where the list was cut off before it.
  """
  flat = passage_index.reshape(-1)  # [M]
  known = jnp.concatenate([relevant, passage_index[:, :1]], axis=1)  # [B, R + 1]

  # One listed passage at a time: [B, M] at once rather than [B, M, R].
  def mark(found: Bool[Array, 'B M'], column: Int[Array, 'B']) -> tuple[Bool[Array, 'B M'], None]:
    return found | ((column[:, None] == flat[None, :]) & (column >= 0)[:, None]), None
  found, _ = jax.lax.scan(mark, jnp.zeros((known.shape[0], flat.shape[0]), bool), known.T)
  return found


def score_batch(
    queries: Float[Array, 'B H'],
    passages: Float[Array, 'B C H'],
    passage_index: Int[Array, 'B C'],
    relevant: Int[Array, 'B R'],
    temperature: float = 1.0,
    in_batch: bool = True,
) -> Scores:
  """Scores every query against the passages of the whole batch (DPTDR Eq. 2; DPR section 3.2).

  Column 0 of ``passages`` is each query's positive, the rest its hard negatives; the others' positives and hard
  negatives are its in-batch (and, over devices, cross-device) negatives. A passage that is relevant to the query
  but is not the positive of its row is taken out: it is never a negative.

  Args:
    in_batch: False leaves each query its own hard negatives only (DPTDR Eq. 3 read literally).
  """
  rows, candidates, _ = passages.shape
  everything = passages.reshape(rows * candidates, -1)  # [M, H]
  # float32 products: a GPU's tf32 default would cost three digits of a raw inner product.
  logits = jnp.einsum('bh,mh->bm', queries, everything, precision=jax.lax.Precision.HIGHEST) / temperature
  target = jnp.arange(rows, dtype=jnp.int32) * candidates  # [B]
  column = jnp.arange(rows * candidates, dtype=jnp.int32)[None, :]
  is_target = column == target[:, None]
  allowed = is_target | ~false_negatives(passage_index, relevant)
  if not in_batch:
    allowed &= column // candidates == jnp.arange(rows, dtype=jnp.int32)[:, None]
  return Scores(jnp.where(allowed, logits, -jnp.inf), target, allowed)


def interleave(first: Float[Array, 'B H'], second: Float[Array, 'B H']) -> Float[Array, 'M H']:
  """Two texts a passage in the order first 0, second 0, first 1, second 1, ..., M = 2 B: a device keeps its own passages' rows."""
  return jnp.stack([first, second], axis=1).reshape(2 * first.shape[0], -1)


def score_siblings(texts: Float[Array, 'M H'], everything: Float[Array, 'M H'], temperature: float = 1.0) -> Scores:
  """Scores M = 2 B texts, two a passage, against one another (DPTDR Eq. 4; coCondenser Eq. 6).

  Each text's target is its sibling, a text is never compared with itself, and the M - 2 others are its negatives.

  Args:
    texts: as ``interleave`` orders them.
    everything: the same, gathered to all devices.
  """
  # As in score_batch: the products in float32.
  logits = jnp.einsum('bh,mh->bm', texts, everything, precision=jax.lax.Precision.HIGHEST) / temperature
  row = jnp.arange(texts.shape[0], dtype=jnp.int32)
  allowed = row[:, None] != row[None, :]
  return Scores(jnp.where(allowed, logits, -jnp.inf), row ^ 1, allowed)


def cross_entropy(scores: Scores) -> Float[Array, 'B']:
  """Negative log-likelihood of each query's positive (DPTDR Eq. 3; DPR Eq. 2)."""
  positive = jnp.take_along_axis(scores.logits, scores.target[:, None], axis=1)[:, 0]
  return jax.nn.logsumexp(scores.logits, axis=1) - positive


def accuracy(scores: Scores) -> Float[Array, 'B']:
  """1 where the positive outscores every negative in the batch, else 0."""
  positive = jnp.take_along_axis(scores.logits, scores.target[:, None], axis=1)
  is_target = jnp.arange(scores.logits.shape[1], dtype=jnp.int32)[None, :] == scores.target[:, None]
  return jnp.all((scores.logits < positive) | is_target, axis=1).astype(jnp.float32)


def negatives_seen(scores: Scores) -> Float[Array, 'B']:
  """How many negatives each query was contrasted with."""
  return jnp.sum(scores.allowed, axis=1, dtype=jnp.int32).astype(jnp.float32) - 1.0
