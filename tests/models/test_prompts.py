import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dprjax.models import prompts
from dprjax.models.encoder_config import EncoderConfig
from tests.refusals import refused

CONFIG = EncoderConfig('bert', 50, 12, 3, 2, 24, max_positions=24)  # L 3, N 2, D 6, H 12
KEY = jax.random.key(3)
SHAPE = (3, 2, 5, 2, 6)


def mlp_reference(params):
  """Embedding -> Linear -> Tanh -> Linear in float64; every value is put where it belongs, one by
  one.
  """
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  hidden = np.tanh(params['embedding'] @ params['hidden']['kernel'] + params['hidden']['bias'])
  flat = hidden @ params['output']['kernel'] + params['output']['bias']
  prefix = np.zeros(SHAPE)
  for layer, side, position, head, value in np.ndindex(*SHAPE):
    # Layer by layer, the keys of a layer and then its values, head by head.
    prefix[layer, side, position, head, value] = flat[
      position, (layer * 2 + side) * 12 + head * 6 + value
    ]
  return prefix


def test_without_reparametrisation_the_parameter_is_the_prefix():
  params = prompts.init_prompt(CONFIG, KEY, 5)
  assert (
    list(params) == ['prefix']
    and params['prefix'].shape == SHAPE
    and params['prefix'].dtype == jnp.float32
  )
  expanded = prompts.expand_prompt(CONFIG, params)
  assert expanded['query'] is expanded['passage'] is params['prefix']


def test_initial_values_have_the_deviation_that_was_asked_for():
  values = prompts.init_prompt(CONFIG, KEY, 2000, std=0.3)['prefix']
  assert abs(float(jnp.std(values)) - 0.3) < 0.005 and abs(float(jnp.mean(values))) < 0.005


def test_mlp_equals_numpy():
  params = prompts.init_prompt(CONFIG, KEY, 5, reparam='mlp', hidden=7, std=0.5)
  assert {
    name: leaf.shape
    for name, leaf in (('embedding', params['embedding']), *params['hidden'].items())
  } == {'embedding': (5, 12), 'kernel': (12, 7), 'bias': (7,)}
  assert params['output']['kernel'].shape == (7, 3 * 2 * 12)
  prefix = prompts.expand_prompt(CONFIG, params)['query']
  assert prefix.shape == SHAPE
  np.testing.assert_allclose(prefix, mlp_reference(params), rtol=0, atol=1e-6)


def common_share(prefix):
  """The share of a prefix's variance that is common to all its vectors (of a layer and side)."""
  prefix = np.asarray(prefix, np.float64)
  return np.mean(np.mean(prefix, axis=2) ** 2) / np.mean(prefix**2)


def test_mlp_starts_as_the_released_code_does_in_effect():
  config = EncoderConfig('bert', 50, 128, 2, 2, 256, max_positions=24)
  params = prompts.init_prompt(config, KEY, 32, reparam='mlp', hidden=512, std=0.02)
  for values in (params['embedding'], params['hidden']['kernel'], params['output']['kernel']):
    assert abs(float(jnp.std(values)) / 0.02 - 1) < 0.03
    # Normal, not uniform: 0.3 % lie beyond three deviations.
    assert float(jnp.max(jnp.abs(values))) > 0.06
  for layer in ('hidden', 'output'):
    assert not params[layer]['bias'].any()
  # Vectors that have nothing in common: the mean of 32 has 1/32 of the variance.
  assert abs(common_share(prompts.expand_prefix(config, params)) - 1 / 32) < 0.01
  # PyTorch's Linear would give them its biases in common.
  draw = np.random.default_rng(0)
  for layer, rows in (('hidden', 128), ('output', 512)):
    bound = rows**-0.5
    params[layer] = {
      name: jnp.asarray(draw.uniform(-bound, bound, leaf.shape), jnp.float32)
      for name, leaf in params[layer].items()
    }
  assert common_share(prompts.expand_prefix(config, params)) > 0.9


@pytest.mark.parametrize('reparam', ['none', 'mlp'])
def test_untied_prompts_start_apart(reparam):
  params = prompts.init_prompt(CONFIG, KEY, 5, tied=False, reparam=reparam, hidden=7)
  assert set(params) == {'query', 'passage'} and not prompts.is_tied(params)
  expanded = prompts.expand_prompt(CONFIG, params)
  assert expanded['query'].shape == expanded['passage'].shape == SHAPE
  assert not np.isclose(expanded['query'], expanded['passage']).mean() > 0.01
  for kind in ('query', 'passage'):
    np.testing.assert_array_equal(expanded[kind], prompts.expand_prefix(CONFIG, params[kind]))


def test_no_prompt_expands_to_none():
  assert prompts.expand_prompt(CONFIG, None) == {'query': None, 'passage': None}


def test_an_unknown_reparametrisation_is_named():
  with refused('config.prompt.reparam', 'lstm'):
    prompts.init_prompt(CONFIG, KEY, 5, reparam='lstm')
