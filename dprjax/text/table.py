"""A table of token rows on disk: a TFDS data set of array_record files, read by row number.

`tfds.builder_from_directory(folder).as_data_source(split)` reads the same files, at 14 to 20
thousand rows a second; a training step needs more. Integers are therefore kept as bytes (TFDS calls
that ``encoding='bytes'``), uncompressed, and read here in batches straight into numpy: 60 to 100
thousand rows a second.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jaxtyping as jt
import numpy as np
import tensorflow_datasets as tfds
from array_record.python import array_record_module
from etils import epath
from tensorflow_datasets.proto import tf_example_pb2, tf_feature_pb2

from dprjax.base import reading

Integers = jt.Int32[np.ndarray, '_']

_NAME = 'dprjax_tokens'
_VERSION = '1.0.0'
_SHARD_BYTES = 1 << 29
# The writer of TFDS compresses: 40 % slower to read, while token ids shrink by only a fifth. Groups
# of one row make random reads cheap.
_WRITER_OPTIONS = 'group_size:1,uncompressed'
_READER_OPTIONS = 'readahead_buffer_size:0,max_parallelism:0'
_READER_BUFFER = 4096


class Lists(NamedTuple):
  """Lists of integers, concatenated in ``flat``, and the length of each."""

  flat: Integers
  counts: Integers

  @property
  def starts(self) -> jt.Int64[np.ndarray, ' rows']:
    return np.cumsum(self.counts) - self.counts

  @property
  def owners(self) -> jt.Int64[np.ndarray, ' _']:
    """The list number of each entry of ``flat``."""
    return np.repeat(np.arange(len(self.counts)), self.counts)

  def take(self, rows: jt.Int[np.ndarray, ' n']) -> 'Lists':
    counts = self.counts[rows]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return Lists(self.flat[np.repeat(self.starts[rows], counts) + within], counts)


class _ShardSize(NamedTuple):
  rows: int
  num_bytes: int


class TableWriter:
  """Writes rows ``{'id': str, name: int32 array, ...}`` of one split into numbered shards.

  A context that closes the files and describes them. The same rows make the same bytes.
  """

  def __init__(self, folder: epath.Path, split: str, columns: Sequence[str]):
    folder.mkdir(parents=True)
    self._folder, self._split, self._columns = folder, split, tuple(columns)
    self._files = _files(folder, split)
    self._sizes: dict[int, _ShardSize] = {}
    self._shard = 0
    self._writer: array_record_module.ArrayRecordWriter | None = None

  def __enter__(self) -> 'TableWriter':
    return self

  def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
    self._close()
    if kind is None:
      self._describe()

  def write(
    self, identifier: str, values: Mapping[str, Integers], shard: int | None = None
  ) -> None:
    """Writes a row into a shard: by default the last one, or a new one if that is full. The rows of
    a shard are written in order.
    """
    if shard is None:
      full = self._shard in self._sizes and self._sizes[self._shard].num_bytes > _SHARD_BYTES
      shard = self._shard + full
    if self._writer is None or shard != self._shard:
      self._close()
      path = self._files.sharded_filepath(shard_index=shard, num_shards=None)
      self._writer = array_record_module.ArrayRecordWriter(str(path), _WRITER_OPTIONS)
      self._shard, self._sizes[shard] = shard, _ShardSize(0, 0)
    feature = {'id': _feature(identifier.encode())} | {
      name: _feature(values[name].tobytes()) for name in self._columns
    }
    # Otherwise the order of a protobuf map would differ between processes.
    row = tf_example_pb2.Example(
      features=tf_feature_pb2.Features(feature=feature)
    ).SerializeToString(deterministic=True)
    self._writer.write(row)
    size = self._sizes[shard]
    self._sizes[shard] = _ShardSize(size.rows + 1, size.num_bytes + len(row))

  def _close(self) -> None:
    if self._writer is not None:
      self._writer.close()
      self._writer = None

  def _describe(self) -> None:
    """Writes what `Table` and TFDS read of the shards."""
    column = tfds.features.Tensor(shape=(None,), dtype=np.int32, encoding='bytes')
    features = {'id': tfds.features.Text()} | dict.fromkeys(self._columns, column)
    info = tfds.core.DatasetInfo(
      builder=tfds.core.DatasetIdentity(
        name=_NAME,
        version=tfds.core.Version(_VERSION),
        data_dir=str(self._folder),
        module_name='',
      ),
      description='Tokenised text of dprjax.',
      features=tfds.features.FeaturesDict(features),
      disable_shuffling=True,
    )
    info.set_file_format('array_record')
    split_info = tfds.core.SplitInfo(
      name=self._split,
      shard_lengths=[self._sizes[shard].rows for shard in range(len(self._sizes))],
      num_bytes=sum(size.num_bytes for size in self._sizes.values()),
      filename_template=self._files,
    )
    info.set_splits(tfds.core.SplitDict([split_info]))
    info.write_to_directory(self._folder)


class Table:
  """Random access to the rows of one split. Several threads may read at the same time."""

  def __init__(self, folder: epath.Path, split: str):
    # Read without TFDS, which would log several lines about its description.
    (described,) = reading.read_json_object(folder / 'dataset_info.json', 'table')['splits']
    lengths = [int(length) for length in described['shardLengths']]
    paths = _files(folder, split)
    self._starts = np.cumsum([0, *lengths])
    self._readers = [
      array_record_module.ArrayRecordReader(
        str(paths.sharded_filepath(shard_index=shard, num_shards=None)),
        _READER_OPTIONS,
        file_reader_buffer_size=_READER_BUFFER,
      )
      for shard in range(len(lengths))
    ]

  def __len__(self) -> int:
    return int(self._starts[-1])

  def read(self, rows: Integers, columns: Sequence[str]) -> list[list[bytes]]:
    """The bytes of these columns, a list for each column, in the order of ``rows``.

    Raises IndexError for a row that does not exist.
    """
    features = [
      tf_example_pb2.Example.FromString(record).features.feature for record in self._raw(rows)
    ]
    return [[feature[name].bytes_list.value[0] for feature in features] for name in columns]

  def ids(self, rows: Integers) -> list[str]:
    return [name.decode() for name in self.read(rows, ('id',))[0]]

  def _raw(self, rows: Integers) -> list[bytes]:
    rows = np.asarray(rows)
    if rows.size == 0:
      return []
    if rows.min() < 0 or rows.max() >= len(self):
      raise IndexError(f'rows {rows.min()} to {rows.max()} of a table of {len(self)}')
    # One call a row takes 5 us; a call with a list first walks the whole index, 1.4 ms for 400,000
    # rows.
    shards = np.searchsorted(self._starts, rows, side='right') - 1
    places = rows - self._starts[shards]
    return [
      self._readers[shard].read(place, place + 1)[0]
      for shard, place in zip(shards.tolist(), places.tolist(), strict=True)
    ]


def integers(value: bytes) -> Integers:
  return np.frombuffer(value, np.int32)


def lists(values: Sequence[bytes]) -> Lists:
  counts = np.array([len(value) // 4 for value in values], np.int32)
  return Lists(integers(b''.join(values)), counts)


def _files(folder: epath.Path, split: str) -> tfds.core.ShardedFileTemplate:
  return tfds.core.ShardedFileTemplate(
    dataset_name=_NAME,
    data_dir=folder,
    split=split,
    filetype_suffix='array_record',
    template='{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_INDEX}',
  )


def _feature(value: bytes) -> tf_feature_pb2.Feature:
  return tf_feature_pb2.Feature(bytes_list=tf_feature_pb2.BytesList(value=[value]))
