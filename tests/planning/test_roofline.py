import pytest

from dprjax.planning import backbones, roofline, targets

LARGE = backbones.SHAPES['roberta-large']


@pytest.mark.parametrize(
  ('method', 'prompt', 'gigaflops'), [('encode', 128, 80.5), ('DPT', 128, 164.3), ('FT', 0, 236.8)]
)
def test_the_formula_is_that_of_the_page(method, prompt, gigaflops):
  """docs/performance.md, a sequence of 128 tokens."""
  cost = roofline.cost(LARGE, method, [(1, 128)], prompt)
  assert cost.flops == pytest.approx(gigaflops * 1e9, rel=1e-3)


def test_devices_share_the_products_and_read_all_weights():
  one, eight = (
    roofline.formula(LARGE, 'DPT', [(64, 32), (64, 128)], 128, 'bfloat16', n) for n in (1, 8)
  )
  weights = 2 * 2 * 2 * 24 * 12 * 1024**2  # two calls, two passes, two bytes
  assert eight.flops == pytest.approx(one.flops / 8)
  assert eight.bytes - weights == pytest.approx((one.bytes - weights) / 8)


def test_a_program_is_bound_by_what_takes_longest():
  most = roofline.limits(targets.parse('v5e:2x4'), 'bfloat16')
  assert most == (197e12, 819e9, 100e9)
  for flops, moved, sent, what, seconds in (
    (197e12, 1e9, 1e9, 'products', 1.0),
    (197e12, 3 * 819e9, 1e9, 'memory', 3.0),
    (0, 0, 2e11, 'links', 2.0),
  ):
    bound = roofline.bound(most, flops, moved, sent)
    assert (bound.what, bound.seconds) == (what, pytest.approx(seconds))
  assert roofline.limits(targets.parse('h100:1'), 'float32').flops == 494.7e12


@pytest.mark.slow
def test_the_limits_of_this_machine_are_measured():
  most = roofline.measure_limits(2, 'float32')
  assert 1e8 < most.flops < 1e14
  assert 1e7 < most.bandwidth < 1e13
