"""Measures of vectors."""

import numpy as np
import scipy.special
from jaxtyping import Float

_BLOCK = 1024  # rows of a block of distances; bounds the memory


def unit(x: Float[np.ndarray, 'n H']) -> Float[np.ndarray, 'n H']:
  """Scales vectors to length 1, in float64; zero vectors stay zero."""
  x = np.asarray(x, np.float64)
  length = np.linalg.norm(x, axis=1, keepdims=True)
  return np.divide(x, length, out=np.zeros_like(x), where=length > 0)


def alignment(x: Float[np.ndarray, 'n H'], y: Float[np.ndarray, 'n H'], alpha: float = 2) -> float:
  """E ||x - y||^alpha over positive pairs; 0 is best (Wang & Isola 2020, section 4.1).

  ``x`` and ``y`` are the two sides: unit vectors, or raw ones as in DPTDR Table 8.
  """
  return float(np.mean(np.linalg.norm(np.asarray(x, np.float64) - y, axis=1) ** alpha))


def uniformity(x: Float[np.ndarray, 'n H'], t: float = 2) -> float:
  """log E exp(-t ||x - y||^2) over pairs of vectors: how evenly they fill the sphere.

  Lower is better; 0 if all vectors are equal. Wang & Isola 2020, section 4.1; each pair of rows
  counts once, as in the code of their Figure 5 (``torch.pdist``). Sums in log space, since all
  kernel values of raw vectors may be 0 in floating point.

  Args:
    x: at least two unit vectors, or raw ones as in DPTDR Table 8.

  Raises:
    ValueError: fewer than two vectors.
  """
  n = len(x)
  if n < 2:
    raise ValueError(f'uniformity needs two vectors, not {n}')
  blocks = [np.asarray(x[start : start + _BLOCK], np.float64) for start in range(0, n, _BLOCK)]
  total = -np.inf
  for i, rows in enumerate(blocks):
    for j, others in enumerate(blocks[i:], start=i):
      square = (
        np.sum(rows**2, axis=1)[:, None]
        + np.sum(others**2, axis=1)[None, :]
        - 2 * (rows @ others.T)
      )
      exponent = -t * square.clip(0)
      if i == j:
        exponent = exponent[np.triu_indices(len(rows), 1)]
      if exponent.size:  # the last block may have one row
        total = np.logaddexp(total, scipy.special.logsumexp(exponent))
  return float(total - np.log(n * (n - 1) / 2))


def uniformity_values(x: Float[np.ndarray, 'n H'], t: float = 2) -> Float[np.ndarray, ' n']:
  """``uniformity`` plus the influence of each vector on it; their mean is uniformity.

  A bootstrap of these values gives its interval, as of ``similarity.spearman_values``: a vector
  takes part in n - 1 of the pairs (Hajek projection of a U-statistic, by its logarithm). Holds
  n x n numbers.
  """
  x = np.asarray(x, np.float64)
  square = np.sum(x**2, axis=1)
  exponent = -t * (square[:, None] + square[None, :] - 2 * (x @ x.T)).clip(0)
  np.fill_diagonal(exponent, -np.inf)
  own = scipy.special.logsumexp(exponent, axis=1) - np.log(len(x) - 1)
  value = scipy.special.logsumexp(own) - np.log(len(x))
  return value + 2 * (np.exp(own - value) - 1)
