"""Smaller vectors: codes of 8 bits or 1 bit a number, and shortened vectors.

``int8`` codes divide the range of a dimension in a sample into 256 levels. ``binary`` codes mean
two values, at the mean distance below and above the mean. Queries stay floats and are scored
against the decoded values.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Shaped

from dprjax.base.errors import InputError

LEVELS = {'int8': 256, 'binary': 2}


class Ranges(NamedTuple):
  """The values of the first and the last code in every dimension."""

  low: Float32[np.ndarray, ' H']
  high: Float32[np.ndarray, ' H']


class Code(NamedTuple):
  """The decoding of stored numbers: a key of ``LEVELS``, and the ranges."""

  dtype: str
  ranges: Ranges


def check_finite(values: Float[np.ndarray, ' *s'], name: Callable[[int], str]) -> None:
  """Raises InputError for NaN or infinity, with the ``name`` of its row."""
  bad = np.flatnonzero(~np.isfinite(values).all(axis=tuple(range(1, values.ndim))))
  if bad.size:
    raise InputError(
      f'{name(int(bad[0]))} is not finite ({bad.size} of {len(values)} rows): a damaged model, or '
      'a dtype that overflows'
    )


def stored(dtype: str) -> np.dtype:
  return np.dtype('uint8' if dtype == 'binary' else dtype)


def width(dimension: int, dtype: str) -> int:
  """Columns of stored arrays; ``binary`` packs eight bits into one."""
  return -(-dimension // 8) if dtype == 'binary' else dimension


def calibrate(sample: Float[np.ndarray, 'n H'], dtype: str) -> Ranges:
  values = np.asarray(sample, np.float32)
  if dtype == 'binary':
    # These values minimize the squared error on each side of the mean.
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
  """Cuts vectors to their first numbers; ``normalize`` scales them back to unit length."""
  if dimension == vectors.shape[1]:
    return vectors
  short = np.asarray(vectors[:, :dimension], np.float32)
  norms = np.linalg.norm(short, axis=1, keepdims=True)
  scaled = np.broadcast_to(np.asarray(normalize), len(short))[:, None] & (norms > 0)
  return short / np.where(scaled, norms, np.float32(1))
