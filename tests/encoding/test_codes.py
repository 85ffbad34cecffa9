"""Codes of vectors, and vectors that are cut."""

import numpy as np
import pytest

from dprjax.encoding import codes

RNG = np.random.default_rng(0)
# Dimensions of other means and sizes, as of a sentence encoder; 13 are no whole number of bytes.
VECTORS = (RNG.standard_normal((200, 13)) * np.linspace(0.1, 3, 13) + 2).astype(np.float32)


def test_eight_bits_are_half_a_step_away():
  code = codes.Code('int8', codes.calibrate(VECTORS[:100], 'int8'))
  low, high = code.ranges
  np.testing.assert_array_equal(low, VECTORS[:100].min(axis=0))
  stored = codes.encode(VECTORS, code)
  assert stored.dtype == codes.stored('int8') == np.int8
  assert stored.shape == (200, codes.width(13, 'int8')) == (200, 13)
  assert stored[:100].min() == -128 and stored[:100].max() == 127
  error = np.abs(codes.decode(stored, code) - np.clip(VECTORS, low, high))
  assert (error <= (high - low) / 255 * 0.5001).all()
  assert codes.decode(stored, code).dtype == np.float32


def test_one_bit_is_the_side_of_the_mean():
  code = codes.Code('binary', codes.calibrate(VECTORS, 'binary'))
  stored = codes.encode(VECTORS, code)
  assert stored.dtype == codes.stored('binary') == np.uint8
  assert stored.shape == (200, codes.width(13, 'binary')) == (200, 2)
  mean = VECTORS.mean(axis=0, dtype=np.float64)
  spread = np.abs(VECTORS - mean).mean(axis=0)
  expected = mean + spread * np.sign(VECTORS - mean)
  np.testing.assert_allclose(codes.decode(stored, code), expected, rtol=1e-5)


def test_cut_vectors_have_unit_length_where_whole_ones_have():
  vectors = VECTORS / np.linalg.norm(VECTORS, axis=1, keepdims=True)
  vectors[1] = 0
  assert codes.cut(vectors, 13, True) is vectors
  short = codes.cut(vectors, 4, True)
  assert not short[1].any()
  expected = VECTORS[2, :4] / np.linalg.norm(VECTORS[2, :4])
  np.testing.assert_allclose(short[2], expected, rtol=1e-6)
  np.testing.assert_array_equal(codes.cut(vectors, 4, False), vectors[:, :4])
  both = codes.cut(vectors[2:4], 4, [False, True])
  np.testing.assert_array_equal(both, [vectors[2, :4], short[3]])


@pytest.mark.parametrize('dtype', codes.LEVELS)
def test_a_dimension_that_is_always_the_same(dtype):
  vectors = np.full((3, 2), 0.25, np.float32)
  code = codes.Code(dtype, codes.calibrate(vectors, dtype))
  np.testing.assert_array_equal(codes.decode(codes.encode(vectors, code), code), vectors)
