"""Dual-encoder retrieval: deep prompt tuning (DPTDR section 3.1) and full fine-tuning (DPR).

The two differ only in ``config.trainable`` and in the prompt.
"""

import jax
import jax.numpy as jnp
from etils import epath
from jax.sharding import Mesh
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from dprjax.losses import contrastive, distillation
from dprjax.losses.contrastive import FROZEN
from dprjax.losses.types import Batch, Loss, Params
from dprjax.models.encoder_config import EncoderConfig
from dprjax.text import batches
from dprjax.text.tokenizing import Tokenizer
from dprjax.training import dual_encoder, retrieval_data
from dprjax.training.dual_encoder import Vectors
from dprjax.training.method import DataSource, Method, Model


def build(
  config: ConfigDict, model: EncoderConfig, devices: Mesh, _: Tokenizer | None = None
) -> Model:
  """InfoNCE over the global batch."""
  contrastive.check_negatives(config)
  encoders = dual_encoder.build(config, model, devices)

  def loss(params: Params, batch: Batch, key: Array | None) -> Loss:
    vectors = encoders.vectors(params, batch, key)
    frozen = None
    if config.prompt.regularization:
      # The encoder without the prompt and without dropout; a batch may hold its query vectors.
      known = {'query_vectors': batch[FROZEN]} if FROZEN in batch else {}
      frozen = encoders.vectors(dual_encoder.bare(params), {**batch, **known}, None)
    corpus = contrastive.corpus(params, batch)
    return contrast(config, devices, batch, vectors, corpus, frozen)

  shown = {'accuracy': 'in-batch accuracy'} | distillation.shown(config)
  if config.prompt.regularization:
    shown['regularization'] = 'divergence from frozen'
  return Model(encoders.init, loss, encoders.embed, shown, dual_encoder.without_adapter)


def contrast(
  config: ConfigDict,
  devices: Mesh,
  batch: Batch,
  vectors: Vectors,
  corpus: contrastive.Corpus | None = None,
  frozen: Vectors | None = None,
) -> Loss:
  """InfoNCE over the global batch (DPTDR Eq. 3), with the terms that the config adds.

  ``frozen`` are vectors of the frozen encoder, for ``config.prompt.regularization``.
  """
  settings = config.prompt
  by_scores = frozen is not None and settings.regularization_on == 'scores'
  metrics = contrastive.info_nce(
    *vectors,
    batch['passage_index'],
    batch['relevant'],
    devices,
    temperature=config.temperature,
    # The corpus includes the passages of the batch.
    in_batch=config.in_batch and config.corpus_negatives >= 0,
    corpus=corpus,
    teacher=frozen if by_scores else None,
  )
  scores = distillation.dot(*vectors) / config.temperature
  losses = distillation.add(config, 'info_nce', jnp.mean(metrics.loss), scores, batch)
  if frozen is not None:
    if metrics.divergence is not None:
      losses |= {'regularization': jnp.mean(metrics.divergence)}
    else:
      distances = [squared_distance(vectors.query, frozen.query)]
      if 'passage_vectors' not in batch:  # else they are those of the frozen encoder
        distances.append(squared_distance(vectors.passage, frozen.passage))
      losses |= {'regularization': jnp.mean(jnp.stack(distances))}
    losses |= {'loss': losses['loss'] + settings.regularization * losses['regularization']}
  return losses['loss'], negative_shares(batch) | losses | {
    'accuracy': jnp.mean(metrics.accuracy),
    'negatives': jnp.mean(metrics.negatives),
  }


def squared_distance(
  vectors: Float[Array, '... H'], frozen: Float[Array, '... H']
) -> Float[Array, '']:
  apart = vectors.astype(jnp.float32) - jax.lax.stop_gradient(frozen).astype(jnp.float32)
  return jnp.mean(jnp.sum(jnp.square(apart), axis=-1))


def negative_shares(batch: Batch) -> dict[str, Float[Array, '']]:
  """Shares of hard negatives by source, and of queries that lack a source."""
  if 'negative_source' not in batch:
    return {}
  sources = batch['negative_source']

  def fraction(where: Array) -> Float[Array, '']:
    return jnp.mean(where.astype(jnp.float32))

  fractions = {
    f'negatives/{name}': fraction(sources == number)
    for number, name in enumerate(batches.NEGATIVE_SOURCES)
  }
  short = jnp.any(sources >= batches.STAND_INS, axis=1)
  return fractions | {'negatives/queries_short_of_a_source': fraction(short)}


def find_data(
  section: ConfigDict, config: ConfigDict, workdir: epath.Path, devices: Mesh
) -> DataSource:
  """Queries and passages of a data set."""
  if config.corpus_negatives:
    from dprjax.training import query_only  # imports the folders of embeddings

    query_only.check_corpus_negatives(config, devices)
  return retrieval_data.find_splits(section, config, workdir, devices).texts()


OPTIONS = (*dual_encoder.OPTIONS, 'distillation.loss', 'prompt.sides', 'prompt.regularization')
METHOD = Method(
  build,
  find_data,
  dual_encoder.export,
  options={build: OPTIONS, find_data: ('data.folds', 'eval.choose')},
  shapes=retrieval_data.batch_shapes,
)
