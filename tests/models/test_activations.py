import math

import jax
import numpy as np

from dprjax.models.activations import erf_gelu


def test_gelu_and_its_derivative():
  x = np.linspace(-6, 6, 49).astype(np.float32)
  cdf = np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x])
  pdf = np.exp(-0.5 * x.astype(np.float64) ** 2) / math.sqrt(2 * math.pi)
  np.testing.assert_allclose(erf_gelu(x), x * cdf, atol=1e-6)
  np.testing.assert_allclose(jax.vmap(jax.grad(erf_gelu))(x), cdf + x * pdf, atol=1e-6)
