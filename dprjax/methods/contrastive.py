"""The contrastive losses that every retriever here shares, over the whole global batch.

All of it is written for global arrays under ``jax.jit``: queries and passages come sharded over the
batch's mesh axes, the passages are gathered to all devices, and each device scores its own queries
against all of them. So the value and the gradient are those of one device holding everything, on
any mesh. A device scores so many of its queries at a time, and scores them again for the gradient:
what it holds grows with the number of passages, not with its square.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from dprjax.methods.grad_cache import map_chunks
from dprjax.runtime import mesh as meshes


class Scores(NamedTuple):
  """Logits of each query against each candidate, with the candidates that do not count at minus
  infinity.
  """

  logits: Float[Array, 'B M']
  target: Int[Array, 'B']
  allowed: Bool[Array, 'B M']


class ContrastiveMetrics(NamedTuple):
  """What is told of each query (or text): its loss, whether its positive came first, and how many
  negatives it had.
  """

  loss: Float[Array, 'B']
  accuracy: Float[Array, 'B']
  negatives: Float[Array, 'B']


def info_nce(
  queries: Float[Array, 'B H'],
  passages: Float[Array, 'B C H'],
  passage_index: Int[Array, 'B C'],
  relevant: Int[Array, 'B R'],
  mesh: Mesh,
  *,
  rows: int,
  temperature: float = 1.0,
  in_batch: bool = True,
) -> ContrastiveMetrics:
  """``info_nce_scores`` over the global batch, at most ``rows`` queries of a device at a time."""
  # The loss needs every passage on every device: the one gather of the step.
  passages = jax.lax.with_sharding_constraint(passages, NamedSharding(mesh, P()))

  def one(
    piece: tuple[Array, Array, Array], _: Array | None
  ) -> tuple[ContrastiveMetrics, tuple[()]]:
    return _metrics(
      info_nce_scores(piece[0], passages, passage_index, piece[1], temperature, in_batch, piece[2])
    ), ()

  pieces = (queries, relevant, jnp.arange(len(queries), dtype=jnp.int32))
  return map_chunks(one, pieces, None, _blocks(len(queries), rows, mesh), mesh)[0]


def nt_xent(
  texts: Float[Array, 'M H'], mesh: Mesh, *, rows: int, temperature: float = 1.0
) -> ContrastiveMetrics:
  """``nt_xent_scores`` over the global batch, at most ``rows`` texts of a device at a time."""
  everything = jax.lax.with_sharding_constraint(texts, NamedSharding(mesh, P()))

  def one(piece: tuple[Array, Array], _: Array | None) -> tuple[ContrastiveMetrics, tuple[()]]:
    return _metrics(nt_xent_scores(piece[0], everything, temperature, piece[1])), ()

  return map_chunks(
    one,
    (texts, jnp.arange(len(texts), dtype=jnp.int32)),
    None,
    _blocks(len(texts), rows, mesh),
    mesh,
  )[0]


def _blocks(total: int, rows: int, mesh: Mesh) -> int:
  """In how many pieces of equal size a device's share is scored, so that none has more than
  ``rows``.
  """
  share = total // meshes.batch_devices(mesh)
  return next(pieces for pieces in range(-(-share // rows), share + 1) if share % pieces == 0)


def _metrics(scores: Scores) -> ContrastiveMetrics:
  return ContrastiveMetrics(cross_entropy(scores), accuracy(scores), negatives_seen(scores))


def false_negatives(
  passage_index: Int[Array, 'B C'], relevant: Int[Array, 'b R'], row: Int[Array, 'b'] | None = None
) -> Bool[Array, 'b M']:
  """Which of the batch's M = B * C passages are relevant to which query (its own positive
  included).

  ``relevant`` lists the passages known to be relevant to each query, -1 where unused. A query's own
  positive counts as relevant even where the list was cut off before it. ``row``: the queries' rows
  in the batch; None: all of them.
  """
  flat = passage_index.reshape(-1)  # [M]
  own = passage_index[:, 0] if row is None else jnp.take(passage_index[:, 0], row)
  known = jnp.concatenate([relevant, own[:, None]], axis=1)  # [b, R + 1]

  # One listed passage at a time: [b, M] at once rather than [b, M, R].
  def mark(found: Bool[Array, 'b M'], column: Int[Array, 'b']) -> tuple[Bool[Array, 'b M'], None]:
    return found | ((column[:, None] == flat[None, :]) & (column >= 0)[:, None]), None

  found, _ = jax.lax.scan(mark, jnp.zeros((known.shape[0], flat.shape[0]), bool), known.T)
  return found


def info_nce_scores(
  queries: Float[Array, 'b H'],
  passages: Float[Array, 'B C H'],
  passage_index: Int[Array, 'B C'],
  relevant: Int[Array, 'b R'],
  temperature: float = 1.0,
  in_batch: bool = True,
  row: Int[Array, 'b'] | None = None,
) -> Scores:
  """Scores every query against the passages of the whole batch (DPTDR Eq. 2; DPR section 3.2).

  Column 0 of ``passages`` is each query's positive, the rest its hard negatives; the others'
  positives and hard negatives are its in-batch (and, over devices, cross-device) negatives. A
  passage that is relevant to the query but is not the positive of its row is taken out: it is never
  a negative.

  Args:
    in_batch: False leaves each query its own hard negatives only (DPTDR Eq. 3 read literally).
    row: the queries' rows in the batch, where they are some of it; None: all of them.
  """
  batch, candidates, _ = passages.shape
  everything = passages.reshape(batch * candidates, -1)  # [M, H]
  row = jnp.arange(batch, dtype=jnp.int32) if row is None else row
  # float32 products: a GPU's tf32 default would cost three digits of a raw inner product.
  logits = (
    jnp.einsum('bh,mh->bm', queries, everything, precision=jax.lax.Precision.HIGHEST) / temperature
  )
  target = row * candidates  # [b]
  column = jnp.arange(batch * candidates, dtype=jnp.int32)[None, :]
  is_target = column == target[:, None]
  allowed = is_target | ~false_negatives(passage_index, relevant, row)
  if not in_batch:
    allowed &= column // candidates == row[:, None]
  return Scores(jnp.where(allowed, logits, -jnp.inf), target, allowed)


def interleave(first: Float[Array, 'B H'], second: Float[Array, 'B H']) -> Float[Array, 'M H']:
  """Two texts a passage in the order first 0, second 0, first 1, second 1, ..., M = 2 B: a device
  keeps its own passages' rows.
  """
  return jnp.stack([first, second], axis=1).reshape(2 * first.shape[0], -1)


def nt_xent_scores(
  texts: Float[Array, 'm H'],
  everything: Float[Array, 'M H'],
  temperature: float = 1.0,
  row: Int[Array, 'm'] | None = None,
) -> Scores:
  """Scores M = 2 B texts, two a passage, against one another (DPTDR Eq. 4; coCondenser Eq. 6).

  Each text's target is its sibling, a text is never compared with itself, and the M - 2 others are
  its negatives.

  Args:
    texts: as ``interleave`` orders them.
    everything: the same, gathered to all devices.
    row: the texts' rows among them, where they are some of them; None: all of them.
  """
  # As in info_nce_scores: the products in float32.
  logits = (
    jnp.einsum('bh,mh->bm', texts, everything, precision=jax.lax.Precision.HIGHEST) / temperature
  )
  row = jnp.arange(texts.shape[0], dtype=jnp.int32) if row is None else row
  allowed = row[:, None] != jnp.arange(everything.shape[0], dtype=jnp.int32)[None, :]
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
