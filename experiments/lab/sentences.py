"""Examples of a few sentences each, encoded as queries; shared by such methods."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
import jax
import jaxtyping as jt
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from dprjax.base import mesh, tree
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.encoding.embedder import Embedder
from dprjax.losses.grad_cache import map_chunks
from dprjax.losses.types import Batch, Params
from dprjax.models.encoder_config import EncoderConfig
from dprjax.text.batches import longest_bucket, process_rows, shuffle_rows, smallest_bucket
from dprjax.text.tokenizing import Tokenizer, pad_batch
from dprjax.training import dual_encoder
from dprjax.training.dual_encoder import DualEncoder
from dprjax.training.method import BatchShapes, Model


class Examples:
  """Examples of V sentences each.

  Attributes:
    tokens: of all sentences, one after another.
    lengths: how many tokens each sentence has.
  """

  def __init__(self, tokens: jt.Int32[np.ndarray, ' _'], lengths: jt.Int32[np.ndarray, 'n V']):
    self.tokens, self.lengths = tokens, lengths
    self._starts = (np.cumsum(lengths, dtype=np.int64) - lengths.ravel()).reshape(lengths.shape)

  @classmethod
  def encode(
    cls, tokenizer: Tokenizer, sentences: Sequence[str], views: int, max_length: int
  ) -> 'Examples':
    """Tokenises the sentences of all examples, ``views`` of them each."""
    rows = tokenizer.encode(list(sentences), max_length)[0] if sentences else []
    return cls(
      np.concatenate([*rows, np.empty(0, np.int32)]),
      np.array([len(row) for row in rows], np.int32).reshape(-1, views),
    )

  def __len__(self) -> int:
    return len(self.lengths)

  def row(self, example: int, view: int) -> jt.Int32[np.ndarray, ' _']:
    """The tokens of one sentence."""
    start = self._starts[example, view]
    return self.tokens[start : start + self.lengths[example, view]]

  def view(self, view: int) -> list[jt.Int32[np.ndarray, ' _']]:
    """The tokens of one sentence of each example."""
    return [self.row(example, view) for example in range(len(self))]


def check_lengths(
  section: ConfigDict, config: ConfigDict, model: EncoderConfig
) -> tuple[int, list[int]]:
  """The longest sentence and the padded lengths.

  Raises:
    InputError: the encoder has fewer positions, or no padded length is long enough.
  """
  length, buckets = section.query_max_length, sorted(section.query_buckets)
  dual_encoder.check_length(config, model, 'config.data.query_max_length', length)
  if not buckets or buckets[-1] < length:
    raise InputError(
      f'config.data.query_buckets: none of {buckets} holds config.data.query_max_length={length} '
      'tokens'
    )
  return length, buckets


def batch_shapes(
  views: Sequence[str],
  columns: Mapping[str, Any],
  config: ConfigDict,
  model: EncoderConfig,
) -> BatchShapes:
  """The longest batch that ``make_batches`` makes; see ``Method.shapes``.

  Args:
    views: the sentences of an example.
    columns: the types of the further keys of a batch.
    config, model: as of the method.
  """
  length, buckets = check_lengths(config.data, config, model)
  size = config.batch_size
  longest = longest_bucket(length, buckets, 'config.data.query_buckets')
  arrays = {name: jax.ShapeDtypeStruct((size,), dtype) for name, dtype in columns.items()}
  for view in views:
    arrays[f'{view}_tokens'] = jax.ShapeDtypeStruct((size, longest), np.int32)
    arrays[f'{view}_mask'] = jax.ShapeDtypeStruct((size, longest), np.bool_)
  programs = sum(bucket <= longest for bucket in buckets) ** len(views)
  texts = {'examples': size, 'sentences': size * len(views)}
  return BatchShapes(arrays, ((size, longest),) * len(views), texts, programs, length)


def check_update(config: ConfigDict, count: int, unit: str) -> int:
  """The examples of an update. Raises InputError where there are not as many."""
  update = config.batch_size
  if count < update:
    raise InputError(
      f'config.batch_size: an update of {counted(update, unit)} is more than the {count:,} '
      'there are; lower config.batch_size'
    )
  return update


def make_batches(
  examples: Examples,
  views: Sequence[str],
  columns: Mapping[str, np.ndarray],
  config: ConfigDict,
  devices: Mesh,
  *,
  unit: str,
  buckets: Sequence[int],
  pad_id: int,
) -> grain.MapDataset:
  """The batch rows of this process: ``VIEW_tokens`` and ``VIEW_mask`` of each view.

  Args:
    examples: the training examples.
    views: the names of their sentences.
    columns: further arrays of a batch, by their names there, with a row for each example.
    config, devices: as of ``Method.data``.
    unit: the word for examples, in the plural.
    buckets: the padded lengths.
    pad_id: the padding token.

  Raises:
    InputError: there are too few examples for an update, or the processes cannot share it.
  """
  update = check_update(config, len(examples), unit)
  own = process_rows(update, *mesh.batch_rank(devices))
  rows_of = shuffle_rows(np.arange(len(examples), dtype=np.int32), update, [config.seed])

  def make_batch(step: int, _: Any = None) -> dict[str, np.ndarray]:
    _, chosen = rows_of(step)
    batch = {name: column[chosen[own]] for name, column in columns.items()}
    for number, view in enumerate(views):
      # The bucket is that of the whole global batch, so that all processes agree.
      width = smallest_bucket(examples.lengths[chosen, number], buckets)
      rows = [examples.row(row, number) for row in chosen[own]]
      batch[f'{view}_tokens'], batch[f'{view}_mask'] = pad_batch(rows, width, pad_id)
    return batch

  return grain.MapDataset.range(len(examples) // update).map_with_index(make_batch)


def encode_views(
  encoders: DualEncoder,
  views: Sequence[str],
  config: ConfigDict,
  model: EncoderConfig,
  devices: Mesh,
  finish: Callable[[Float[Array, 'B H']], Float[Array, 'B H']] = lambda vectors: vectors,
) -> Callable[[Params, Batch, Array | None], list[Float[Array, 'B H']]]:
  """``(params, batch, key or None) -> vectors`` of each view, in the chunks of the gradient cache.

  ``finish`` is applied to the vectors of a chunk.
  """
  chunks = config.grad_cache

  def run(params: Params, batch: Batch, key: Array | None) -> list[Float[Array, 'B H']]:
    whole = encoders.adapters(params)['query']

    def encode_view(view: str, key: Array | None) -> Float[Array, 'B H']:
      adapter = dual_encoder.batch_dropout(config, whole, key)

      def encode(rows: tuple[Array, Array], key: Array | None) -> tuple[Array, tuple[()]]:
        return finish(encoders.encode(params, {'query': adapter}, 'query', *rows, key)), ()

      rows = batch[f'{view}_tokens'], batch[f'{view}_mask']
      return map_chunks(encode, rows, key, chunks, devices)[0]

    keys = (None,) * len(views) if key is None else tuple(jax.random.split(key, len(views)))
    return [encode_view(view, key) for view, key in zip(views, keys, strict=True)]

  return run


def make_embedder(
  config: ConfigDict, devices: Mesh, model: Model, length: int, pad_id: int
) -> Embedder:
  """Embeds sentences in evaluations, under the flat tree of parameters."""

  def embed(params: Any, *batch: Array) -> Array:
    return model.embed(tree.unflatten(params), 'query', *batch)

  return Embedder(embed, devices, config.eval.batch_size, length, pad_id)
