"""Dual-encoder retrieval: deep prompt tuning (DPTDR section 3.1) and full fine-tuning (DPR).

The two differ only in ``config.trainable`` and in the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from etils import epath
from jax.sharding import Mesh
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from dprjax.losses import contrastive, distillation
from dprjax.losses.grad_cache import map_chunks
from dprjax.losses.types import Batch, Loss, Params
from dprjax.models.encoder_config import EncoderConfig
from dprjax.text.vector_spec import SIDES
from dprjax.training import dual_encoder
from dprjax.training.method import BatchShapes, DataSource, Method, Model

if TYPE_CHECKING:
  from dprjax.text.tokenizing import Tokenizer


def build(
  config: ConfigDict, model: EncoderConfig, devices: Mesh, _: Tokenizer | None = None
) -> Model:
  """InfoNCE over the global batch."""
  contrastive.check_negatives(config)
  contrastive.check_lengths(config.matryoshka, model.vector_size)
  encoders = dual_encoder.build(config, model, devices)

  def loss(params: Params, batch: Batch, key: Array | None) -> Loss:
    keys = side_keys(key)
    adapters = {
      side: dual_encoder.batch_dropout(config, adapter, keys[side])
      for side, adapter in encoders.adapters(params).items()
    }

    def encode(side: str, rows: Sequence[Array], key: Array | None) -> Float[Array, 'n H']:
      tokens, mask = rows
      return encoders.encode(params, adapters[side], side, tokens, mask, key)

    def frozen(side: str, rows: Sequence[Array], _: Array | None) -> Float[Array, 'n H']:
      tokens, mask = rows
      return encoders.encode(params, None, side, tokens, mask, None)

    return contrast(
      config,
      devices,
      encode,
      batch,
      key,
      corpus=contrastive.corpus(params, batch),
      frozen=frozen if config.prompt.regularization else None,
    )

  shown = {'accuracy': 'in-batch accuracy'} | distillation.shown(config)
  if config.prompt.regularization:
    shown['regularization'] = 'divergence from frozen'
  return Model(encoders.init, loss, encoders.embed, shown, dual_encoder.without_adapter)


Encode = Callable[[str, Sequence[Array], Array | None], Float[Array, 'n H']]


def contrast(
  config: ConfigDict,
  devices: Mesh,
  encode: Encode,
  batch: Batch,
  key: Array | None,
  columns: Sequence[str] = (),
  corpus: contrastive.Corpus | None = None,
  frozen: Encode | None = None,
) -> Loss:
  """InfoNCE over the global batch, encoded in chunks, and its metrics.

  Args:
    encode: ``(side, (tokens [n, T], mask [n, T], *columns [n]), key) -> vectors``.
    batch: queries, and passages as tokens or as vectors of the base encoder.
    key: for dropout, or None.
    columns: keys of per-row numbers in the batch, passed to ``encode``.
    frozen: ``encode`` of the frozen encoder, for ``config.prompt.regularization``.
  """
  chunks = config.grad_cache * config.accumulate

  def embed_chunked(
    encode: Encode, side: str, tokens: Array, mask: Array, key: Array | None
  ) -> Float[Array, 'B C H']:
    candidates, length = tokens.shape[1:]

    def encode_rows(rows: tuple[Array, ...], key: Array | None) -> tuple[Array, tuple[()]]:
      texts = [array.reshape(-1, length) for array in rows[:2]]
      numbers = [jnp.repeat(array, candidates) for array in rows[2:]]
      vectors = encode(side, (*texts, *numbers), key)
      return vectors.reshape(-1, candidates, vectors.shape[-1]), ()

    rows = (tokens, mask, *(batch[name] for name in columns))
    return map_chunks(encode_rows, rows, key, chunks, devices)[0]

  tokens, mask = (batch[f'query_{name}'][:, None] for name in ('tokens', 'mask'))
  texts = {'query': (tokens, mask)}
  if 'passage_vectors' not in batch:
    texts['passage'] = batch['passage_tokens'], batch['passage_mask']
  keys = side_keys(key)
  made = {side: embed_chunked(encode, side, *rows, keys[side]) for side, rows in texts.items()}
  q = made['query'][:, 0]
  p = made['passage'] if 'passage' in made else batch['passage_vectors']

  bare = {}
  if frozen is not None:
    if contrastive.FROZEN in batch:
      bare['query'] = batch[contrastive.FROZEN][:, None]
    # A second forward pass, without dropout and gradient.
    bare |= {
      side: embed_chunked(frozen, side, *rows, None)
      for side, rows in texts.items()
      if side not in bare
    }
  held = frozen is not None and config.prompt.regularization_on == 'scores'

  def score(
    q: Array, p: Array, *more: Array
  ) -> tuple[dict[str, Array], contrastive.ContrastiveMetrics]:
    metrics = contrastive.info_nce(
      q,
      p,
      batch['passage_index'],
      batch['relevant'],
      devices,
      rows=config.loss_rows,
      temperature=config.temperature,
      # The corpus includes the passages of the batch.
      in_batch=config.in_batch and config.corpus_negatives >= 0,
      corpus=None if corpus is None else corpus._replace(vectors=more[-1]),
      teacher=(more[0], more[1]) if held else None,
    )
    scores = distillation.dot(q, p) / config.temperature
    losses = distillation.add(config, 'info_nce', jnp.mean(metrics.loss), scores, batch)
    if metrics.divergence is not None:
      losses |= {'regularization': jnp.mean(metrics.divergence)}
    return losses, metrics

  vectors: tuple[Array, ...] = q, p
  if held:
    vectors += (bare['query'][:, 0], bare.get('passage', p))
  if corpus is not None:
    vectors += (corpus.vectors,)
  losses, metrics = contrastive.over_lengths(config.matryoshka, config.normalize, score, *vectors)
  if frozen is not None:
    if not held:
      distances = [squared_distance(made[side], bare[side]) for side in texts]
      losses |= {'regularization': jnp.mean(jnp.stack(distances))}
    losses |= {'loss': losses['loss'] + config.prompt.regularization * losses['regularization']}
  return losses['loss'], negative_shares(batch) | losses | {
    'accuracy': jnp.mean(metrics.accuracy),
    'negatives': jnp.mean(metrics.negatives),
  }


def side_keys(key: Array | None) -> dict[str, Array | None]:
  """Dropout keys of queries and passages for one step."""
  keys = (None, None) if key is None else tuple(jax.random.split(key))
  return dict(zip(SIDES, keys, strict=True))


def squared_distance(
  vectors: Float[Array, 'B C H'], frozen: Float[Array, 'B C H']
) -> Float[Array, '']:
  """Mean squared distance from the vectors of the frozen encoder."""
  apart = vectors.astype(jnp.float32) - jax.lax.stop_gradient(frozen).astype(jnp.float32)
  return jnp.mean(jnp.sum(jnp.square(apart), axis=-1))


def negative_shares(batch: Batch) -> dict[str, Float[Array, '']]:
  """Shares of hard negatives by source, and of queries that lack a source; empty without a mix."""
  if 'negative_source' not in batch:
    return {}
  from dprjax.text import batches

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
  # Imported here, so that the loss does not import modules that read files.
  from dprjax.training import query_only, retrieval_data

  query_only.check_corpus_negatives(config, devices)
  return retrieval_data.find_splits(section, config, workdir, devices).texts()


def shapes(config: ConfigDict, model: EncoderConfig, tokenizer: Tokenizer) -> BatchShapes:
  from dprjax.training import retrieval_data

  return retrieval_data.batch_shapes(config, model, tokenizer)


METHOD = Method(
  build,
  find_data,
  dual_encoder.export,
  options=(
    *dual_encoder.OPTIONS,
    'distillation.loss',
    'prompt.sides',
    'prompt.regularization',
    'data.folds',
    'eval.choose',
  ),
  shapes=shapes,
)
