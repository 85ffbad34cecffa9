"""Hashes of ids and texts: 64-bit keys, digests that find copies, and draws by a seed.

A key hashes the UTF-8 bytes of an id. Ids of up to 8 bytes never collide; longer ones do with
probability n^2 / 2^65: two in a million for the 8.8 million passages of MS MARCO.
"""

import array
import hashlib
import unicodedata
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, Int64, Shaped, UInt8, UInt64

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 by the golden ratio
_FIRST_BYTES = np.array([(1 << 8 * size) - 1 for size in range(9)], np.uint64)


class Copies:
  """Finds repeated digests; 24 bytes of memory each, and 60 in `pairs`."""

  def __init__(self) -> None:
    self._digests, self._places = bytearray(), array.array('q')

  def add(self, digests: bytes, places: Sequence[int]) -> None:
    """Adds concatenated digests of 16 bytes, and the place of each, ascending."""
    self._digests += digests
    self._places.extend(places)

  def pairs(self) -> Int64[np.ndarray, 'copies 2']:
    """For each repeated digest its first place and the place of the copy, sorted by the copy."""
    digests = np.frombuffer(self._digests, '<u8').reshape(-1, 2)
    places = np.frombuffer(self._places, np.int64)
    order = np.lexsort(digests.T)
    same = np.ones(len(order), bool)
    same[:1] = False
    for half in digests.T:
      ordered = half[order]
      same[1:] &= ordered[1:] == ordered[:-1]
    first = np.where(same, 0, np.arange(len(order)))
    np.maximum.accumulate(first, out=first)
    pairs = np.stack([places[order[first[same]]], places[order[same]]], axis=1)
    return pairs[np.argsort(pairs[:, 1])]


def sameness(text: str) -> bytes:
  """The words of a text. Case, Unicode form and white space make no difference."""
  normal = ' '.join(unicodedata.normalize('NFKC', text).casefold().split())
  return normal.encode('utf-8', 'surrogatepass')


def keys_of(ids: Sequence[str]) -> UInt64[np.ndarray, ' n']:
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
    keys[rest] = mix(keys[rest] * _GOLDEN + word)
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


def draw(id_: str, seed: int, choice: str) -> bytes:
  """32 random bytes that depend only on the id, the seed and the name of the choice.

  Choices are independent; '' is the split of ``dprjax.papers``.
  """
  return hashlib.sha256(f'{choice}{seed}:{id_}'.encode()).digest()


def fraction(id_: str, seed: int, choice: str) -> float:
  """`draw` as a number in [0, 1)."""
  return int.from_bytes(draw(id_, seed, choice)[:7]) / 2**56
