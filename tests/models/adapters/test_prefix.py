import jax
import numpy as np
import pytest

from dprjax.models.encoder_config import EncoderConfig
from dprjax.training import dual_encoder
from dprjax.training.method import Parts
from tests.options import with_options

CONFIG = EncoderConfig('bert', 50, 12, 3, 2, 24, max_positions=24)  # L 3, N 2, D 6, H 12
KEY = jax.random.key(3)
SHAPE = (3, 2, 5, 2, 6)


def init(model, length, **options):
  """Fresh parameters, and the function that expands them."""
  options = {f'prompt__{name}': value for name, value in options.items()}
  config = with_options(prompt__length=length, **options)
  params = dual_encoder.init_adapter(config, model, Parts({}), KEY)
  return params, lambda params: dual_encoder.expand(config, model, params)


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


@pytest.mark.slow
def test_mlp_equals_numpy():
  whole, expand = init(CONFIG, 5, reparam='mlp', init_std=0.2)
  params = whole['prompt']
  assert {
    name: leaf.shape
    for name, leaf in (('embedding', params['embedding']), *params['hidden'].items())
  } == {'embedding': (5, 12), 'kernel': (12, 512), 'bias': (512,)}
  assert params['output']['kernel'].shape == (512, 3 * 2 * 12)
  found = expand(whole)['query'].vectors
  assert found.shape == SHAPE
  np.testing.assert_allclose(found, mlp_reference(params), rtol=0, atol=5e-6)


@pytest.mark.slow
def test_untied_prompts_start_apart():
  params, expand = init(CONFIG, 5, tied=False, reparam='mlp')
  assert set(params['prompt']) == {'query', 'passage'}
  query, passage = (expand(params)[side].vectors for side in ('query', 'passage'))
  assert query.shape == passage.shape == SHAPE
  assert not np.isclose(query, passage).mean() > 0.01


def test_without_parameters_there_is_no_prefix():
  params, expand = init(CONFIG, 0)
  assert params == {} and expand(params) == {'query': None, 'passage': None}
