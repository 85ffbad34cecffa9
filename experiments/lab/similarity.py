"""Sentence similarity: regression of human scores on the cosine of two sentence vectors.

Source: Reimers and Gurevych 2019, section 3; Condenser section 4.2. Sentences are encoded as
queries. The recipe is `configs/stsb.py` beside this file.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from etils import epath
from jax.sharding import Mesh
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.losses.types import Batch, Loss, Params
from dprjax.models.embed import unit
from dprjax.models.encoder_config import EncoderConfig
from dprjax.text.tokenizing import Tokenizer
from dprjax.training import dual_encoder
from dprjax.training.method import (
  BatchShapes,
  DataSource,
  Evaluate,
  Method,
  Model,
  Scores,
  TrainingData,
)
from lab import measures, sentences, sts
from lab.sts import Pair

VIEWS = ('first', 'second')


def build(
  config: ConfigDict, model: EncoderConfig, devices: Mesh, _: Tokenizer | None = None
) -> Model:
  """The mean squared difference of cosine and score (0 to 1).

  Raises:
    InputError: a option has a value it cannot have.
  """
  encoders = dual_encoder.build(config, model, devices)
  encode = sentences.encode_views(encoders, VIEWS, config, model, devices, finish=unit)

  def loss(params: Params, batch: Batch, key: Array | None) -> Loss:
    first, second = encode(params, batch, key)
    cosine = jnp.einsum('bh,bh->b', first, second, precision=jax.lax.Precision.HIGHEST)
    error = cosine - batch['score']
    value = jnp.mean(jnp.square(error))
    return value, {'loss': value, 'error': jnp.mean(jnp.abs(error))}

  shown = {'error': 'mean error'}
  return Model(encoders.init, loss, encoders.embed, shown, dual_encoder.without_adapter)


def find_data(
  section: ConfigDict,
  config: ConfigDict,
  workdir: epath.Path,
  devices: Mesh,
) -> DataSource:
  """The files ``train_split`` and, if any, ``dev_split`` in the folder ``config.data.dir``.

  Raises:
    InputError: a file is missing or has a row that is not a scored pair, there are too few pairs
      for an update, or the measure is not 'spearman'.
  """
  del workdir  # a few thousand pairs are kept in memory
  folder = epath.Path(section.dir)
  pairs = sts.read_pairs(folder / section.train_split)
  dev = sts.read_pairs(folder / section.dev_split) if section.dev_split else None
  if dev and config.eval.measure != 'spearman':
    raise InputError(
      f"config.eval.measure: scored pairs are measured by 'spearman', not {config.eval.measure!r}"
    )
  sentences.check_update(config, len(pairs), 'pairs')
  return DataSource(
    lambda: (text for pair in pairs for text in pair[:2]),
    functools.partial(_open, section, config, devices, pairs, dev),
    {
      role: folder / name
      for role, name in (('pairs', section.train_split), ('dev pairs', section.dev_split))
      if name
    },
  )


def _open(
  section: ConfigDict,
  config: ConfigDict,
  devices: Mesh,
  pairs: list[Pair],
  dev: list[Pair] | None,
  tokenizer: Tokenizer,
  model: EncoderConfig,
) -> TrainingData:
  length, buckets = sentences.check_lengths(section, config, model)
  batches = sentences.make_batches(
    _encode(pairs, tokenizer, length),
    VIEWS,
    {
      'pair_index': np.arange(len(pairs), dtype=np.int32),
      'score': np.array([pair.score / sts.TOP_SCORE for pair in pairs], np.float32),
    },
    config,
    devices,
    unit='pairs',
    buckets=buckets,
    pad_id=tokenizer.pad_id,
  )

  def ids(batch: Mapping[str, np.ndarray]) -> str:
    return (
      f'pairs {", ".join(str(row + 1) for row in batch["pair_index"][:8])} of {section.train_split}'
    )

  return TrainingData(
    batches=batches,
    unit='pairs',
    description=counted(len(pairs), 'scored pairs'),
    ids=ids,
    evaluation=functools.partial(_evaluation, config, devices, dev, tokenizer, length)
    if dev
    else None,
  )


def _encode(pairs: list[Pair], tokenizer: Tokenizer, length: int) -> sentences.Examples:
  texts = [text for pair in pairs for text in pair[:2]]
  return sentences.Examples.encode(tokenizer, texts, len(VIEWS), length)


def _evaluation(
  config: ConfigDict,
  devices: Mesh,
  pairs: list[Pair],
  tokenizer: Tokenizer,
  length: int,
  model: Model,
) -> Evaluate:
  """``spearman``: the rank correlation of cosines and scores of the dev pairs."""
  examples = _encode(pairs, tokenizer, length)
  rows = [examples.view(number) for number in range(len(VIEWS))]
  scores = np.array([pair.score for pair in pairs])

  embedder = sentences.make_embedder(config, devices, model, length, tokenizer.pad_id)

  def evaluate(params: Mapping[str, Array]) -> Scores:
    first, second = (embedder(params, texts) for texts in rows)
    cosines = measures.cosine(first, second)
    correlation = measures.spearman(cosines, scores)
    if np.isnan(correlation):
      # Undefined where all cosines are equal; any number is better than that.
      return Scores({'spearman': -1.0}, {'': np.full(len(scores), -1.0)})
    values = spearman_values(cosines, scores)
    return Scores({'spearman': correlation}, {'': values})

  return evaluate


def spearman_values(
  x: Float[np.ndarray, ' n'], y: Float[np.ndarray, ' n']
) -> Float[np.ndarray, ' n']:
  """Spearman correlation plus the influence of each pair on it; their mean is the correlation.

  The correlation is no mean over pairs, but near the sample it is linear in the weights of pairs.
  So a bootstrap of these values gives its interval (infinitesimal jackknife, Efron 1982; with the
  ranks of the whole sample). Both must vary.
  """
  zx, zy = (
    (ranks - ranks.mean()) / ranks.std() for ranks in (scipy.stats.rankdata(v) for v in (x, y))
  )
  correlation = float(np.mean(zx * zy))
  return correlation + zx * zy - correlation * (zx**2 + zy**2) / 2


def shapes(config: ConfigDict, model: EncoderConfig, _: Tokenizer) -> BatchShapes:
  """See ``Method.shapes``."""
  return sentences.batch_shapes(VIEWS, {'pair_index': np.int32, 'score': np.float32}, config, model)


METHOD = Method(
  build, find_data, dual_encoder.export, options={build: dual_encoder.OPTIONS}, shapes=shapes
)
