import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dprjax.models.layers import ACTIVATIONS, erf_gelu


def test_gelu_and_its_derivative():
  x = np.linspace(-6, 6, 49).astype(np.float32)
  cdf = np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x])
  pdf = np.exp(-0.5 * x.astype(np.float64) ** 2) / math.sqrt(2 * math.pi)
  np.testing.assert_allclose(erf_gelu(x), x * cdf, atol=1e-6)
  np.testing.assert_allclose(jax.vmap(jax.grad(erf_gelu))(x), cdf + x * pdf, atol=1e-6)


def test_activations_at_known_points():
  at_one = {name: float(function(jnp.float32(1))) for name, function in ACTIVATIONS.items()}
  # 0.5 (1 + erf(1/sqrt 2)); 0.5 (1 + tanh(sqrt(2/pi) 1.044715)); 1 / (1 + e^-1.702); 1 / (1 +
  # e^-1).
  expected = {
    'gelu': 0.8413447,
    'gelu_new': 0.8411920,
    'quick_gelu': 0.8457958,
    'relu': 1.0,
    'silu': 0.7310586,
    'tanh': 0.7615942,
  }
  for name, value in expected.items():
    assert at_one[name] == pytest.approx(value, abs=1e-6), name
  assert float(ACTIVATIONS['relu'](jnp.float32(-1))) == 0
