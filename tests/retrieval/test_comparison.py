import numpy as np
import pytest

from dprjax.retrieval import comparison


def metrics(values, **more):
  return {
    'mean': {name: float(np.mean(list(part.values()))) for name, part in values.items()},
    'per_query': values,
    'counts': {},
    **more,
  }


WORSE = {
  'nDCG@10': {f'q{i}': 0.2 + 0.001 * (i % 7) for i in range(100)},
  'AP': {f'q{i}': float(i % 2) for i in range(100)},
}
# nDCG@10 is .1 higher for every query; AP is 1 minus that of the other, with the same mean.
BETTER = {
  'nDCG@10': {q: v + 0.1 for q, v in WORSE['nDCG@10'].items()},
  'AP': {q: 1 - v for q, v in WORSE['AP'].items()},
}


def test_bootstrap_known_by_hand():
  systems = {'a': metrics(WORSE), 'b': metrics(BETTER)}
  a, b = comparison.compare(systems, 'nDCG@10').values()
  assert b.difference == pytest.approx((0.1, 0.1, 0.1)) and b.significant
  assert a.difference is None and not a.significant
  a, b = comparison.compare(systems, 'AP').values()
  assert not b.significant and b.difference.mean == 0
  # 100 tosses of a coin: the middle 95 % of the fraction of heads is .40 to .60.
  assert (a.low, a.high) == pytest.approx((0.40, 0.60), abs=0.011)
  # The differences are +1 or -1: twice as wide.
  assert b.difference.high == pytest.approx(0.2, abs=0.021)


def test_data_sets_have_equal_weight():
  assert comparison.difference([np.ones(1), np.zeros(99)]) == pytest.approx((0.5, 0.5, 0.5))
