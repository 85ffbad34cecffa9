"""Smaller vectors: codes of 8 bits or 1 bit a number, and vectors cut to their first numbers.

``int8`` codes count 256 steps from the least of a dimension to its greatest number in a sample.
``binary`` codes stand for two values, at the mean distance below and above the mean. Queries stay
floats; they are scored against the values that codes stand for.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Shaped

LEVELS = {'int8': 256, 'binary': 2}


class Ranges(NamedTuple):
  """What the first and the last code of every dimension stand for."""

  low: Float32[np.ndarray, ' H']
  high: Float32[np.ndarray, ' H']


class Code(NamedTuple):
  """How stored numbers are read: a key of ``LEVELS``, and the ranges."""

  dtype: str
  ranges: Ranges


def stored(dtype: str) -> np.dtype:
  """The dtype of stored arrays."""
  return np.dtype('uint8' if dtype == 'binary' else dtype)


def width(dimension: int, dtype: str) -> int:
  """Columns of stored arrays; ``binary`` packs eight bits into one."""
  return -(-dimension // 8) if dtype == 'binary' else dimension


def calibrate(sample: Float[np.ndarray, 'n H'], dtype: str) -> Ranges:
  """Measures the ranges of codes on a sample."""
  values = np.asarray(sample, np.float32)
  if dtype == 'binary':
    # These two values have the least squared error on the two sides of the mean.
    mean = values.mean(axis=0, dtype=np.float64)
    spread = np.abs(values - mean).mean(axis=0)
    return Ranges((mean - spread).astype(np.float32), (mean + spread).astype(np.float32))
  return Ranges(values.min(axis=0), values.max(axis=0))


def encode(vectors: Float[np.ndarray, 'n H'], code: Code) -> Shaped[np.ndarray, 'n W']:
  """Codes of vectors; numbers outside the ranges are clipped."""
  low, high = code.ranges
  if code.dtype == 'binary':
    return np.packbits(vectors > (low + high) / 2, axis=1)
  # A constant dimension has one code.
  step = np.where(high > low, (high - low) / (LEVELS['int8'] - 1), 1).astype(np.float32)
  return np.clip(np.rint((vectors - low) / step) - 128, -128, 127).astype(np.int8)


def decode(codes: Shaped[np.ndarray, 'n W'], code: Code) -> Float32[np.ndarray, 'n H']:
  """The values that codes stand for."""
  low, high = code.ranges
  if code.dtype == 'binary':
    return np.where(np.unpackbits(codes, axis=1, count=len(low)) == 1, high, low)
  step = (high - low) / np.float32(LEVELS['int8'] - 1)
  return low + (codes.astype(np.float32) + np.float32(128)) * step


def cut(
  vectors: Float[np.ndarray, 'n H'],
  dimension: int,
  normalize: bool | Sequence[bool] | Bool[np.ndarray, ' n'],
) -> Float[np.ndarray, 'n d']:
  """Cuts vectors to their first numbers; ``normalize`` scales them to unit length again."""
  if dimension == vectors.shape[1]:
    return vectors
  short = np.asarray(vectors[:, :dimension], np.float32)
  norms = np.linalg.norm(short, axis=1, keepdims=True)
  scaled = np.broadcast_to(np.asarray(normalize), len(short))[:, None] & (norms > 0)
  return short / np.where(scaled, norms, np.float32(1))
