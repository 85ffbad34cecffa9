import numpy as np
import pytest

import pretraining
from lab import statistics


@pytest.mark.slow
def test_influences_on_uniformity_are_those_of_the_jackknife():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(300, 8)) / 4
  values, whole = pretraining.uniformity_values(x), statistics.uniformity(x)
  assert values.mean() == pytest.approx(whole, rel=1e-9)
  without = np.array([statistics.uniformity(np.delete(x, i, axis=0)) for i in range(len(x))])
  np.testing.assert_allclose(values, whole + (len(x) - 1) * (whole - without), atol=0.02)
  assert values.std() > 0.3
