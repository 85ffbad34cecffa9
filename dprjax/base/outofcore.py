"""What is too large for memory: rows in numbered buckets on disk, and 64-bit keys in place of ids.

A key is a hash of an id's UTF-8 bytes. Ids of up to 8 bytes never share one; longer ones do with a
probability of n^2 / 2^65, two in a million for the 8.8 million passages of MS MARCO.
"""

import pathlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, Shaped, UInt8, UInt64

from dprjax.base import files

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2^64 by the golden ratio: its multiples, mod 2^64, fill the range evenly from the first on."""


class Buckets:
  """Rows of one dtype in a folder, a file a bucket: what arrives in any order is read again bucket
  by bucket.
  """

  def __init__(self, folder: pathlib.Path, dtype: np.dtype):
    folder.mkdir(parents=True)
    self._folder, self._dtype = folder, dtype

  def append(self, rows: Shaped[np.ndarray, 'n'], buckets: Int[np.ndarray, 'n']) -> None:
    """Adds rows, each to its bucket, in their order. Raises InputError where the disk is full."""
    if (buckets[1:] < buckets[:-1]).any():
      order = np.argsort(buckets, kind='stable')
      rows, buckets = rows[order], buckets[order]
    borders = np.flatnonzero(np.diff(buckets, prepend=-1))
    with files.no_room(self._folder):
      for start, stop in zip(
        borders.tolist(), np.append(borders, len(rows))[1:].tolist(), strict=True
      ):
        # Opened anew each time: there may be more buckets than files that a process may hold open.
        with self._path(int(buckets[start])).open('ab') as file:
          file.write(rows[start:stop].tobytes())

  def read(self, bucket: int) -> Shaped[np.ndarray, 'n']:
    """The rows of a bucket in the order in which they came; none where nothing did."""
    path = self._path(bucket)
    return np.fromfile(path, self._dtype) if path.exists() else np.empty(0, self._dtype)

  def drop(self, bucket: int) -> None:
    """Frees the disk of a bucket that is not needed any more."""
    self._path(bucket).unlink(missing_ok=True)

  def _path(self, bucket: int) -> pathlib.Path:
    return self._folder / f'{bucket:06d}'


def keys_of(ids: Sequence[str]) -> UInt64[np.ndarray, 'n']:
  """The key of every id."""
  encoded = [id_.encode('utf-8', 'surrogatepass') for id_ in ids]
  ends = np.cumsum([len(id_) for id_ in encoded], dtype=np.int64)
  starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]]) if encoded else ends
  return keys_at(np.frombuffer(b''.join(encoded), np.uint8), starts, ends)


def keys_at(
  text: UInt8[np.ndarray, 'bytes'], starts: Int[np.ndarray, 'n'], ends: Int[np.ndarray, 'n']
) -> UInt64[np.ndarray, 'n']:
  """The keys of the ids that lie at these places of a text."""
  padded = np.concatenate([text, np.zeros(8, np.uint8)])
  # Eight bytes from any place on, without a copy of the text for each of them.
  words = np.ndarray((len(padded) - 7,), '<u8', padded.data, strides=(1,))
  starts, lengths = np.asarray(starts, np.int64), np.asarray(ends, np.int64) - starts
  keys = np.zeros(len(starts), np.uint64)
  rest, left = np.arange(len(starts)), lengths
  while len(rest):
    used = np.minimum(left, 8).astype(np.uint64)
    # A shift by 64, for an id of no bytes, would be undefined.
    mask = np.where(
      used > 0,
      np.uint64(2**64 - 1) >> (np.uint64(64) - np.uint64(8) * np.maximum(used, np.uint64(1))),
      np.uint64(0),
    )
    word = words[starts[rest]] & mask
    keys[rest] = mix(keys[rest] * GOLDEN + word)
    on = left > 8
    rest, left = rest[on], left[on] - 8
    starts[rest] += 8
  return keys


def mix(bits: UInt64[np.ndarray, '...']) -> UInt64[np.ndarray, '...']:
  """A well-mixed number of each number, one to one: the finalizer of splitmix64 (Steele et al.,
  2014).
  """
  bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return bits ^ (bits >> np.uint64(31))
