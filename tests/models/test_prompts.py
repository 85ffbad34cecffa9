import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dprjax.base.errors import InputError
from dprjax.models import prompts
from dprjax.models.encoder import EncoderConfig

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


def test_mlp_starts_as_a_linear_layer_of_pytorch():
  params = prompts.init_prompt(CONFIG, KEY, 5, reparam='mlp', hidden=400)
  for layer, rows in (('hidden', 12), ('output', 400)):
    for values in params[layer].values():
      # Uniform in +-1 / sqrt(rows): its largest value lies just under the bound, its deviation at
      # the bound / sqrt(3).
      assert 0.8 * rows**-0.5 < float(jnp.max(jnp.abs(values))) <= rows**-0.5
    assert abs(float(jnp.std(params[layer]['kernel'])) * (3 * rows) ** 0.5 - 1) < 0.03


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
  with pytest.raises(
    InputError, match=r"config\.prompt\.reparam: expected one of none, mlp, not 'lstm'"
  ):
    prompts.init_prompt(CONFIG, KEY, 5, reparam='lstm')


def test_dropout_keeps_the_mean_and_scales_what_is_left():
  prefix = jnp.ones((3, 2, 50, 2, 6))
  dropped = prompts.drop(prefix, KEY, 0.25)
  assert dropped.shape == prefix.shape
  np.testing.assert_array_equal(np.unique(dropped), np.array([0, 4 / 3], np.float32))
  assert abs(float(jnp.mean(dropped)) - 1) < 0.05
  assert abs(float(jnp.mean(dropped == 0)) - 0.25) < 0.03


def test_dropout_with_a_mask_an_example():
  prefix = jax.random.normal(KEY, SHAPE)
  dropped = prompts.drop(prefix, KEY, 0.5, examples=4)
  assert dropped.shape == (4, *SHAPE)
  kept = np.asarray(dropped != 0)
  assert not any((kept[i] == kept[j]).all() for i in range(4) for j in range(i))
  for row, mask in zip(dropped, kept, strict=True):
    np.testing.assert_allclose(np.asarray(row)[mask], 2 * np.asarray(prefix)[mask], rtol=1e-6)


def test_dropout_repeats_with_its_key():
  prefix = jnp.ones(SHAPE)
  np.testing.assert_array_equal(prompts.drop(prefix, KEY, 0.5), prompts.drop(prefix, KEY, 0.5))
  assert (prompts.drop(prefix, KEY, 0.5) != prompts.drop(prefix, jax.random.key(4), 0.5)).any()
