"""Random choices that follow from an id."""

import numpy as np
import pytest

from dprjax.base import draws

IDS = [f'2101.{i:05d}' for i in range(5_000)]


@pytest.mark.slow
def test_choices_by_one_seed_are_independent():
  for seed in (0, 1, 42):
    split = np.array([draws.fraction(id_, seed, '') for id_ in IDS])
    for choice in ('hold_out', 'max_queries', 'fold', 'topics', 'random topics', 'random words'):
      other = np.array([draws.fraction(id_, seed, choice) for id_ in IDS])
      # Four standard deviations of a correlation of independent numbers.
      assert abs(np.corrcoef(split, other)[0, 1]) < 4 / len(IDS) ** 0.5
