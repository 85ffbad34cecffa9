import pytest

from benchmarks import roofline
from dprjax.planning import backbones

LARGE = backbones.named('roberta-large')


@pytest.mark.parametrize(
  ('method', 'prompt', 'gigaflops'), [('encode', 128, 80.5), ('DPT', 128, 164.3), ('FT', 0, 236.8)]
)
def test_the_formula_is_that_of_the_page(method, prompt, gigaflops):
  """docs/performance.md, a sequence of 128 tokens."""
  cost = roofline.cost(LARGE, method, [(1, 128)], prompt)
  assert cost.flops == pytest.approx(gigaflops * 1e9, rel=1e-3)
