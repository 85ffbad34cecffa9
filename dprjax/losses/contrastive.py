"""Contrastive losses over the whole global batch.

The functions take global arrays under ``jax.jit``. Queries and passages are sharded over the
mesh axes of the batch. Passages are gathered to all devices, and each device scores its own queries
against all of them, so value and gradient are the same on any mesh. A device scores ``rows``
queries at a time and recomputes the scores for the gradient, so memory grows linearly with the
passages.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int
from ml_collections import ConfigDict

from dprjax.base import mesh as meshes
from dprjax.base.errors import InputError
from dprjax.losses.grad_cache import map_chunks
from dprjax.losses.types import Batch, Params

FROZEN = 'frozen_query_vectors'  # key of a batch, for the regularization
VECTORS, ROWS = 'corpus/vectors', 'corpus/rows'  # names of constant parameters


class ScoreMatrix(NamedTuple):
  """Logits of each query against each candidate; -inf where not ``allowed``."""

  logits: Float[Array, 'B M']
  target: Int[Array, ' B']
  allowed: Bool[Array, 'B M']


class Corpus(NamedTuple):
  """Extra negatives for every query, disjoint from the batch.

  Attributes:
    rows: row numbers of the passages in the cache.
  """

  vectors: Float[Array, 'S H']
  rows: Int[Array, ' S']


def corpus(params: Params, batch: Batch) -> Corpus | None:
  """The corpus negatives: a sample in the batch, or the whole corpus in the parameters."""
  if 'corpus_vectors' in batch:
    return Corpus(batch['corpus_vectors'], batch['corpus_index'])
  whole = params.get('corpus')
  return None if whole is None else Corpus(whole['vectors'], whole['rows'])


class ContrastiveMetrics(NamedTuple):
  """For each query: the loss, whether its positive ranks first, the number of negatives, and the
  divergence from the teacher, if there is one.
  """

  loss: Float[Array, ' B']
  accuracy: Float[Array, ' B']
  negatives: Float[Array, ' B']
  divergence: Float[Array, ' B'] | None = None


def info_nce(
  queries: Float[Array, 'B H'],
  passages: Float[Array, 'B C H'],
  passage_index: Int[Array, 'B C'],
  relevant: Int[Array, 'B R'],
  mesh: Mesh,
  *,
  rows: int = 1024,
  temperature: float = 1.0,
  in_batch: bool = True,
  corpus: Corpus | None = None,
  teacher: tuple[Float[Array, 'B H'], Float[Array, 'B C H']] | None = None,
  query_index: Int[Array, ' B'] | None = None,
) -> ContrastiveMetrics:
  """``info_nce_scores`` over the global batch, at most ``rows`` queries of a device at a time.

  ``teacher`` has other vectors of the same queries and passages; ``divergence`` compares the
  scores.
  """
  # The loss needs every passage on every device: the only gather of the step.
  passages, passage_index, corpus, query_index = jax.lax.with_sharding_constraint(
    (passages, passage_index, corpus, query_index), NamedSharding(mesh, P())
  )
  if teacher is not None:
    theirs = jax.lax.with_sharding_constraint(teacher[1], NamedSharding(mesh, P()))

  def score(block: tuple[Array, ...], _: Array | None) -> tuple[ContrastiveMetrics, tuple[()]]:
    queries, relevant, row, *bare = block

    def scores(queries: Array, passages: Array) -> ScoreMatrix:
      return info_nce_scores(
        queries, passages, passage_index, relevant, temperature, in_batch, row, corpus, query_index
      )

    student = scores(queries, passages)
    metrics = metrics_of(student)
    if bare:
      metrics = metrics._replace(divergence=divergence(scores(bare[0], theirs), student))
    return metrics, ()

  arrays: tuple[Array, ...] = queries, relevant, jnp.arange(len(queries), dtype=jnp.int32)
  if teacher is not None:
    arrays += (teacher[0],)
  return map_chunks(score, arrays, None, row_blocks(len(queries), rows, mesh), mesh)[0]


def row_blocks(total: int, rows: int, mesh: Mesh) -> int:
  """The smallest number of equal blocks of at most ``rows`` queries on a device."""
  per_device = total // meshes.batch_devices(mesh)
  fewest = -(-per_device // rows)
  return next(n for n in range(fewest, per_device + 1) if per_device % n == 0)


def metrics_of(scores: ScoreMatrix) -> ContrastiveMetrics:
  return ContrastiveMetrics(cross_entropy(scores), accuracy(scores), negatives_seen(scores))


def check_negatives(config: ConfigDict) -> None:
  """Raises InputError if no query of an update has a negative, since the loss would be 0."""
  if not (config.negatives or config.corpus_negatives):
    check_update(config, config.in_batch)


def check_update(config: ConfigDict, in_batch: bool = True) -> None:
  """Raises InputError if an update without hard negatives has no in-batch ones."""
  if not in_batch or config.batch_size == 1:
    raise InputError(
      'config.batch_size, config.in_batch: no text of an update has a negative; use 2 or more in '
      'an update, or config.negatives=1'
    )


def false_negatives(
  passage_index: Int[Array, 'B C'], relevant: Int[Array, 'b R'], row: Int[Array, ' b'] | None = None
) -> Bool[Array, 'b M']:
  """Whether each of the M = B * C passages in the batch is relevant to each query.

  Args:
    passage_index: rows of the passages in the cache.
    relevant: passages relevant to each query, -1 where unused. The positive of a query counts even
      if the list was cut before it.
    row: rows of the queries in the batch; None: all.
  """
  return _among(passage_index.reshape(-1), _known(passage_index, relevant, row))


def _known(
  passage_index: Int[Array, 'B C'], relevant: Int[Array, 'b R'], row: Int[Array, ' b'] | None
) -> Int[Array, 'b _']:
  """The passages relevant to each query, including its positive."""
  positive = passage_index[:, 0] if row is None else jnp.take(passage_index[:, 0], row)
  return jnp.concatenate([relevant, positive[:, None]], axis=1)


def _among(index: Int[Array, ' M'], known: Int[Array, 'b _']) -> Bool[Array, 'b M']:
  """Whether each of these passages is relevant to each query."""

  # A scan over columns takes [b, M] of memory rather than [b, M, R].
  def mark(marked: Bool[Array, 'b M'], column: Int[Array, ' b']) -> tuple[Bool[Array, 'b M'], None]:
    return marked | ((column[:, None] == index[None, :]) & (column >= 0)[:, None]), None

  return jax.lax.scan(mark, jnp.zeros((known.shape[0], index.shape[0]), bool), known.T)[0]


def info_nce_scores(
  queries: Float[Array, 'b H'],
  passages: Float[Array, 'B C H'],
  passage_index: Int[Array, 'B C'],
  relevant: Int[Array, 'b R'],
  temperature: float = 1.0,
  in_batch: bool = True,
  row: Int[Array, ' b'] | None = None,
  corpus: Corpus | None = None,
  query_index: Int[Array, ' B'] | None = None,
) -> ScoreMatrix:
  """Scores every query against the passages of the whole batch (DPTDR Eq. 2; DPR section 3.2).

  Column 0 of ``passages`` is the positive of each query; the other columns are its hard negatives.
  Passages of other rows, also on other devices, are in-batch negatives unless relevant to the
  query.

  Args:
    in_batch: False leaves each query only its own hard negatives (DPTDR Eq. 3 taken literally).
    row: rows of the queries in the batch; None: all.
    corpus: more negatives for every query, except passages relevant to it.
    query_index: numbers of the queries in the batch; queries with the same number share positives.
  """
  batch, candidates, _ = passages.shape
  everything = passages.reshape(batch * candidates, -1)  # [M, H]
  row = jnp.arange(batch, dtype=jnp.int32) if row is None else row
  logits = inner_products(queries, everything) / temperature
  target = row * candidates  # [b]
  column = jnp.arange(batch * candidates, dtype=jnp.int32)[None, :]
  is_target = column == target[:, None]
  allowed = is_target | ~false_negatives(passage_index, relevant, row)
  if query_index is not None:
    same = jnp.take(query_index, row)[:, None] == jnp.repeat(query_index, candidates)[None, :]
    allowed &= is_target | ~(same & (column % candidates == 0))
  if not in_batch:
    allowed &= column // candidates == row[:, None]
  if corpus is not None:
    more = inner_products(queries, corpus.vectors) / temperature  # [b, S]
    relevant_too = _among(corpus.rows, _known(passage_index, relevant, row))
    logits = jnp.concatenate([logits, more], axis=1)
    allowed = jnp.concatenate([allowed, ~relevant_too], axis=1)
  return ScoreMatrix(jnp.where(allowed, logits, -jnp.inf), target, allowed)


def inner_products(
  queries: Float[Array, 'b H'], passages: Float[Array, 'M H']
) -> Float[Array, 'b M']:
  """Inner products in float32, even for bfloat16 vectors. Rounded scores would tie, and the tf32
  default of GPUs would cost three digits.
  """
  return jnp.einsum(
    'bh,mh->bm',
    queries,
    passages,
    precision=jax.lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )


def cross_entropy(scores: ScoreMatrix) -> Float[Array, ' B']:
  """Negative log-likelihood of the positive of each query (DPTDR Eq. 3; DPR Eq. 2)."""
  positive = jnp.take_along_axis(scores.logits, scores.target[:, None], axis=1)[:, 0]
  return jax.nn.logsumexp(scores.logits, axis=1) - positive


def divergence(teacher: ScoreMatrix, student: ScoreMatrix) -> Float[Array, ' B']:
  """KL(teacher || student) of the softmax of each query, in nats. Both allow the same candidates.
  The teacher gets no gradient.
  """
  allowed = student.allowed
  teacher_log = jax.nn.log_softmax(jax.lax.stop_gradient(teacher.logits), axis=1)
  student_log = jax.nn.log_softmax(student.logits, axis=1)
  # -inf - -inf and its gradient would be NaN.
  gap = jnp.where(allowed, teacher_log, 0.0) - jnp.where(allowed, student_log, 0.0)
  return jnp.sum(jnp.exp(teacher_log) * gap, axis=1)


def accuracy(scores: ScoreMatrix) -> Float[Array, ' B']:
  """1 where the positive outscores every negative in the batch, else 0."""
  positive = jnp.take_along_axis(scores.logits, scores.target[:, None], axis=1)
  is_target = jnp.arange(scores.logits.shape[1], dtype=jnp.int32)[None, :] == scores.target[:, None]
  return jnp.all((scores.logits < positive) | is_target, axis=1).astype(jnp.float32)


def negatives_seen(scores: ScoreMatrix) -> Float[Array, ' B']:
  """The number of negatives of each query."""
  return jnp.sum(scores.allowed, axis=1, dtype=jnp.int32).astype(jnp.float32) - 1.0
