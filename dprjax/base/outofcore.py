"""Data larger than memory: rows in buckets on disk, ids in a file, and 64-bit keys of ids.

A key hashes the UTF-8 bytes of an id. Ids of up to 8 bytes never collide; longer ones do with
probability n^2 / 2^65: two in a million for the 8.8 million passages of MS MARCO.
"""

import mmap
import pathlib
import tempfile
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Int, Int64, Shaped, UInt8, UInt64

from dprjax.base import files

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2^64 by the golden ratio; its multiples mod 2^64 spread evenly."""

_FIRST_BYTES = np.array([(1 << 8 * size) - 1 for size in range(9)], np.uint64)


class Buckets:
  """Rows of one dtype in a folder, one file a bucket."""

  def __init__(self, folder: pathlib.Path, dtype: np.dtype):
    folder.mkdir(parents=True)
    self._folder, self._dtype = folder, dtype

  def append(self, rows: Shaped[np.ndarray, ' n'], buckets: Int[np.ndarray, ' n']) -> None:
    """Adds rows to their buckets in order. Raises InputError if the disk is full."""
    if (buckets[1:] < buckets[:-1]).any():
      order = np.argsort(buckets, kind='stable')
      rows, buckets = rows[order], buckets[order]
    starts = np.flatnonzero(np.diff(buckets, prepend=-1))
    with files.no_room(self._folder):
      for bucket, part in zip(buckets[starts].tolist(), np.split(rows, starts)[1:], strict=True):
        # Opened each time: there may be more buckets than the limit of open files.
        with self._path(bucket).open('ab') as file:
          file.write(part.tobytes())

  def read(self, bucket: int) -> Shaped[np.ndarray, ' n']:
    """The rows of a bucket, in the order added."""
    path = self._path(bucket)
    return np.fromfile(path, self._dtype) if path.exists() else np.empty(0, self._dtype)

  def pop(self, bucket: int) -> Shaped[np.ndarray, ' n']:
    """Reads a bucket and frees its disk."""
    rows = self.read(bucket)
    self._path(bucket).unlink(missing_ok=True)
    return rows

  def _path(self, bucket: int) -> pathlib.Path:
    return self._folder / f'{bucket:06d}'


class Ids:
  """Ids in a file, addressed by the offsets where they begin."""

  def __init__(self, path: pathlib.Path):
    """Begins an empty file."""
    self._path, self._size = path, 0
    path.touch()

  def append(self, ids: pa.BinaryArray) -> Int64[np.ndarray, ' n']:
    """Adds ids without newlines; returns their offsets."""
    text = pc.binary_join_element_wise(ids, b'', b'\n')
    ends = self._size + np.cumsum(pc.binary_length(text).to_numpy().astype(np.int64))
    places = np.concatenate([[self._size], ends[:-1]])[: len(ids)]
    with files.no_room(self._path), self._path.open('ab') as file:
      file.write(b''.join(text.to_pylist()))
    self._size = int(ends[-1]) if len(ends) else self._size
    return places

  def at(self, places: Int64[np.ndarray, ' n']) -> list[bytes]:
    """The ids at these offsets."""
    if not len(places):
      return []
    with self._path.open('rb') as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as text:
      return [text[place : text.find(b'\n', place)] for place in places.tolist()]


class Copies:
  """Finds repeated digests, among any number of them.

  Up to `IN_MEMORY` digests are in memory, 24 bytes each; more go to a temporary folder.
  """

  IN_MEMORY = 1 << 20
  _PARTS = 256  # each is sorted in memory
  _ROW = np.dtype([('high', '<u8'), ('low', '<u8'), ('place', '<i8')])

  def __init__(self) -> None:
    self._rows: list[np.ndarray] = []
    self._count = 0
    self._folder: tempfile.TemporaryDirectory[str] | None = None
    self._parts: Buckets | None = None

  def add(self, digests: bytes, places: Sequence[int] | Int64[np.ndarray, ' n']) -> None:
    """Adds concatenated digests of 16 bytes, and the place of each."""
    rows = np.empty(len(places), self._ROW)
    rows['high'], rows['low'] = np.frombuffer(digests, '<u8').reshape(-1, 2).T
    rows['place'] = places
    self._count += len(rows)
    if self._parts is None and self._count > self.IN_MEMORY:
      self._folder = tempfile.TemporaryDirectory(prefix='dprjax-')
      self._parts = Buckets(pathlib.Path(self._folder.name, 'digests'), self._ROW)
      for kept in self._rows:
        self._store(kept)
      self._rows = []
    if self._parts is None:
      self._rows.append(rows)
    else:
      self._store(rows)

  def _store(self, rows: Shaped[np.ndarray, ' n']) -> None:
    assert self._parts is not None
    self._parts.append(rows, (rows['high'] % self._PARTS).astype(np.int64))

  def pairs(self) -> Int64[np.ndarray, 'copies 2']:
    """For each repeated digest its first place and the place of the copy, sorted by the copy.

    Frees the memory or the disk.
    """
    if self._parts is None:
      found = [_copies(np.concatenate([np.empty(0, self._ROW), *self._rows]))]
      self._rows = []
    else:
      found = [_copies(self._parts.pop(part)) for part in range(self._PARTS)]
    if self._folder is not None:
      self._folder.cleanup()
    whole = np.concatenate(found)
    return whole[np.argsort(whole[:, 1])]


def _copies(rows: Shaped[np.ndarray, ' n']) -> Int64[np.ndarray, 'copies 2']:
  rows = rows[np.lexsort((rows['place'], rows['low'], rows['high']))]
  same = np.zeros(len(rows), bool)
  same[1:] = (rows['high'][1:] == rows['high'][:-1]) & (rows['low'][1:] == rows['low'][:-1])
  starts = np.flatnonzero(~same)
  firsts = rows['place'][starts[np.cumsum(~same) - 1]] if len(rows) else rows['place']
  return np.stack([firsts[same], rows['place'][same]], axis=1)


def keys_of(ids: Sequence[str]) -> UInt64[np.ndarray, ' n']:
  """Keys of ids."""
  encoded = [id_.encode('utf-8', 'surrogatepass') for id_ in ids]
  ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
  return keys_at(np.frombuffer(b''.join(encoded), np.uint8), ends[:-1], ends[1:])


def keys_at(
  text: UInt8[np.ndarray, 'bytes'], starts: Int[np.ndarray, ' n'], ends: Int[np.ndarray, ' n']
) -> UInt64[np.ndarray, ' n']:
  """Keys of the ids between these offsets of a text."""
  padded = np.concatenate([text, np.zeros(8, np.uint8)])
  # Overlapping eight-byte words, without copies.
  words = np.ndarray((len(padded) - 7,), '<u8', padded.data, strides=(1,))
  starts, left = np.array(starts, np.int64), np.asarray(ends, np.int64) - starts
  keys, rest = np.zeros(len(starts), np.uint64), np.arange(len(starts))
  while len(rest):
    word = words[starts[rest]] & _FIRST_BYTES[np.minimum(left, 8)]
    keys[rest] = mix(keys[rest] * GOLDEN + word)
    longer = left > 8
    rest, left = rest[longer], left[longer] - 8
    starts[rest] += 8
  return keys


def mix(bits: UInt64[np.ndarray, '...']) -> UInt64[np.ndarray, '...']:
  """splitmix64's finalizer, a bijection (Steele et al., 2014)."""
  bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return bits ^ (bits >> np.uint64(31))


def positions(
  values: Shaped[np.ndarray, ' n'], wanted: Shaped[np.ndarray, ' m']
) -> Int64[np.ndarray, ' m']:
  """The first index of each wanted value in ascending ``values``; -1 if absent."""
  if not len(values):
    return np.full(len(wanted), -1, np.int64)
  places = np.minimum(np.searchsorted(values, wanted), len(values) - 1)
  return np.where(values[places] == wanted, places, -1)
