"""The losses of Topic-DPR (Eqs. 3 to 6), over documents of the whole global batch."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from dprjax.losses import contrastive
from dprjax.losses.grad_cache import map_chunks

_NONE = -1e30  # a masked logit; the gradient of all -inf is NaN


def document_losses(
  queries: Float[Array, 'N H'],
  passages: Float[Array, 'N H'],
  categories: Int[Array, 'N G'],
  passage_index: Int[Array, 'N 1'],
  relevant: Int[Array, 'N R'],
  mesh: Mesh,
  *,
  rows: int = 1024,
  temperature: float,
) -> tuple[Float[Array, ' N'], Float[Array, ' N'], Float[Array, ' N']]:
  """The query-passage and query-query losses of each document, over the global batch.

  The passage of the document itself is a positive of weight 1. Each positive is compared only with
  negatives (Eqs. 3 and 4). Passages relevant to a query, such as those of an equal title, are never
  its negatives.

  Args:
    queries, passages: of unit length.
    rows: documents that a device scores at a time.

  Returns:
    qp (Eq. 4), qq (Eq. 3; 0 without another positive), and whether the own passage ranks first.
  """
  # The loss needs all vectors on every device.
  everything = [
    jax.lax.with_sharding_constraint(array, NamedSharding(mesh, P()))
    for array in (queries, passages, categories, passage_index)
  ]

  def score(
    block: tuple[Array, Array, Array, Array], _: Array | None
  ) -> tuple[tuple[Array, Array, Array], tuple[()]]:
    own_queries, own_categories, own_relevant, row = block
    all_queries, all_passages, all_categories, index = everything
    itself = row[:, None] == jnp.arange(len(all_queries), dtype=jnp.int32)[None, :]
    weights = jnp.where(itself, 1.0, jaccard(own_categories, all_categories))
    negative = (weights == 0) & ~contrastive.false_negatives(index, own_relevant, row)
    logits = contrastive.inner_products(own_queries, all_passages) / temperature
    qp = weighted_loss(logits, weights, weights > 0, negative)
    among = contrastive.inner_products(own_queries, all_queries) / temperature
    qq = weighted_loss(among, weights, (weights > 0) & ~itself, negative)
    target = jnp.take_along_axis(logits, row[:, None], axis=1)
    first = jnp.all((logits < target) | itself, axis=1).astype(jnp.float32)
    return (qp, qq, first), ()

  arrays = (queries, categories, relevant, jnp.arange(len(queries), dtype=jnp.int32))
  blocks = contrastive.row_blocks(len(queries), rows, mesh)
  return map_chunks(score, arrays, None, blocks, mesh)[0]


def jaccard(categories: Int[Array, 'b G'], others: Int[Array, 'N G']) -> Float[Array, 'b N']:
  """Jaccard similarity of sets of numbers, -1 unused (Eq. 6 as intended); 0 for empty sets."""

  def count(shared: Float[Array, 'b N'], column: Int[Array, ' b']) -> tuple[Array, None]:
    equal = (column[:, None, None] == others[None]) & (column >= 0)[:, None, None]
    return shared + jnp.any(equal, axis=2).astype(jnp.float32), None

  # A scan over columns takes [b, N, G] of memory rather than [b, N, G, G].
  shared, _ = jax.lax.scan(
    count, jnp.zeros((len(categories), len(others)), jnp.float32), categories.T
  )
  sizes = [jnp.sum(array >= 0, axis=1).astype(jnp.float32) for array in (categories, others)]
  union = sizes[0][:, None] + sizes[1][None, :] - shared
  return shared / jnp.maximum(union, 1.0)


def weighted_loss(
  logits: Float[Array, 'b N'], weights: Float[Array, 'b N'], positive: Array, negative: Array
) -> Float[Array, ' b']:
  """-1/m sum_z w_z log(e^l_z / (e^l_z + sum_j e^l_j)): z the m positives, j the negatives."""
  against = jax.nn.logsumexp(jnp.where(negative, logits, _NONE), axis=1)[:, None]
  each = jnp.where(positive, weights * jax.nn.softplus(against - logits), 0.0)
  count = jnp.sum(positive, axis=1).astype(jnp.float32)
  return jnp.sum(each, axis=1) / jnp.maximum(count, 1.0)


def topic_topic_loss(
  vectors: Float[Array, 'n K H'], mesh: Mesh, *, margin: float
) -> Float[Array, '']:
  """Hinge loss: passages are closer under the same prompt than under different ones (Eq. 5); mean
  over topics.
  """
  count, topics, _ = vectors.shape
  everything = jax.lax.with_sharding_constraint(vectors, NamedSharding(mesh, P()))

  # One topic at a time: [n, K n] of memory rather than [K n, K n].
  @jax.checkpoint
  def score(topic: Int[Array, '']) -> Float[Array, '']:
    of_topic = jnp.take(vectors, topic, axis=1)  # [n, H]
    products = contrastive.inner_products(of_topic, everything.reshape(count * topics, -1))
    products = products.reshape(count, count, topics)  # s(p_i^k, p_j^z)
    within = jnp.take(products, topic, axis=2)[:, :, None]
    hinge = jax.nn.relu(margin - within + products)
    others = (jnp.arange(topics, dtype=jnp.int32) != topic)[None, None, :]
    return jnp.sum(jnp.where(others, hinge, 0.0)) / ((topics - 1) * count**2)

  return jnp.mean(jax.lax.map(score, jnp.arange(topics, dtype=jnp.int32)))
