"""Pairs of sentences with scores, and the dev pairs' rank correlation while a model is trained on
them.
"""

import functools
from collections.abc import Callable
from typing import Any

import grain
import jax
import ml_collections
import numpy as np
from etils import epath
from jax.sharding import Mesh

from dprjax.analysis import statistics as analysis
from dprjax.base.errors import InputError
from dprjax.data import similarity
from dprjax.data.batches import open_batches
from dprjax.data.similarity import Pair
from dprjax.data.text import Tokenizer, pad_batch
from dprjax.inference.embedder import Embedder
from dprjax.methods.feed import Batch, Feed, Text
from dprjax.methods.method import System
from dprjax.models.encoder import EncoderConfig
from dprjax.runtime import mesh, tree

VIEWS = ('first', 'second')


def find(config: ml_collections.FrozenConfigDict, workdir: epath.Path, devices: Mesh) -> Text:
  """The files ``config.data.train_split`` and, if any, ``config.data.dev_split`` in the folder
  ``config.data.dir``.

  Raises:
    InputError: they are not there, or hold a row that is no scored pair; too few for an update;
      another measure than Spearman's.
  """
  del workdir  # a few thousand pairs are held in memory
  folder = epath.Path(config.data.dir)
  pairs = similarity.read_pairs(folder / config.data.train_split)
  dev = similarity.read_pairs(folder / config.data.dev_split) if config.data.dev_split else None
  if dev and config.eval.measure != 'spearman':
    raise InputError(
      f"config.eval.measure: scored pairs are measured by 'spearman', not {config.eval.measure!r}"
    )
  if len(pairs) < config.batch_size * config.accumulate:
    raise InputError(
      f'config.batch_size: an update of {config.batch_size * config.accumulate} pairs is more than '
      f'the {len(pairs)} there are'
    )
  return Text(
    lambda: (text for pair in pairs for text in pair[:2]),
    functools.partial(_open, config, devices, pairs, dev),
  )


def _open(
  config: ml_collections.FrozenConfigDict,
  devices: Mesh,
  pairs: list[Pair],
  dev: list[Pair] | None,
  tokenizer: Tokenizer,
  model: EncoderConfig,
) -> Feed:
  length, buckets = config.data.query_max_length, sorted(config.data.query_buckets)
  if length > model.max_tokens:
    raise InputError(
      f'config.data.query_max_length: {length} exceeds the {model.max_tokens} positions of '
      f'{config.backbone.path}'
    )
  if not buckets or buckets[-1] < length:
    raise InputError(
      f'config.data.query_buckets: none of {buckets} holds config.data.query_max_length={length} '
      'tokens'
    )
  rows = {
    view: tokenizer.encode([getattr(pair, view) for pair in pairs], length)[0] for view in VIEWS
  }
  scores = np.array([pair.score / similarity.TOP_SCORE for pair in pairs], np.float32)
  update = config.batch_size * config.accumulate
  steps = len(pairs) // update
  share, shares = mesh.batch_rank(devices)
  mine = slice(share * update // shares, (share + 1) * update // shares)

  @functools.lru_cache(maxsize=2)
  def shuffled(epoch: int) -> np.ndarray:
    return np.random.default_rng([config.seed, epoch]).permutation(len(pairs)).astype(np.int32)

  def batch(step: int, _: Any = None) -> dict[str, np.ndarray]:
    epoch, place = divmod(step, steps)
    chosen = shuffled(epoch)[place * update : (place + 1) * update]
    out = {'pair_index': chosen[mine], 'score': scores[chosen[mine]]}
    for view in VIEWS:
      # The bucket is that of the whole global batch, so that all processes agree.
      bucket = next(size for size in buckets if size >= max(len(rows[view][row]) for row in chosen))
      out[f'{view}_tokens'], out[f'{view}_mask'] = pad_batch(
        [rows[view][row] for row in chosen[mine]], bucket, tokenizer.pad_id
      )
    return out

  def shape(batch: Batch) -> str:
    return (
      ' and '.join(f'sentences of {batch[f"{view}_tokens"].shape[1]}' for view in VIEWS) + ' tokens'
    )

  dataset: grain.MapDataset[dict[str, np.ndarray]] = grain.MapDataset.range(steps).map_with_index(
    batch
  )
  return Feed(
    loader=open_batches(dataset, config.data.threads),
    epoch=len(dataset),
    unit='pairs',
    said=f'{len(pairs)} scored pairs',
    shape=shape,
    ids=lambda batch: (
      f'pairs {", ".join(str(row + 1) for row in batch["pair_index"][:8])} of '
      f'{config.data.train_split}'
    ),
    evaluation=functools.partial(_evaluation, config, devices, dev, tokenizer) if dev else None,
  )


def _evaluation(
  config: ml_collections.FrozenConfigDict,
  devices: Mesh,
  pairs: list[Pair],
  tokenizer: Tokenizer,
  system: System,
) -> Callable[[dict[str, jax.Array]], dict[str, float]]:
  """``{name: array} -> {'spearman': rank correlation of cosines and scores}`` on the dev pairs."""
  length = config.data.query_max_length
  rows = [tokenizer.encode([getattr(pair, view) for pair in pairs], length)[0] for view in VIEWS]
  scores = np.array([pair.score for pair in pairs])

  def embed(params: dict[str, jax.Array], *batch: jax.Array) -> jax.Array:
    return system.embed(tree.unflatten(params), 'query', *batch)

  embedder = Embedder(embed, devices, config.eval.batch_size, length, tokenizer.pad_id)

  def evaluate(params: dict[str, jax.Array]) -> dict[str, float]:
    first, second = (embedder(params, some) for some in rows)
    correlation = analysis.spearman(analysis.cosine(first, second), scores)
    # Undefined where all cosines are the same: no gain, so that any number is better than it.
    return {'spearman': -1.0 if np.isnan(correlation) else correlation}

  return evaluate
