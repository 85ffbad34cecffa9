import jax
import numpy as np
import pytest

from dprjax.base import tree
from dprjax.models.encoder_config import EncoderConfig
from dprjax.papers.nir_prompt import learned_tokens

WIDTH = 24


def config(width=WIDTH):
  return EncoderConfig('bert', 50, width, 1, 1, 40)


def init(width, length, seed=0):
  """Fresh parameters of one encoder."""
  return learned_tokens.init_prompt_encoders(
    config(width), {'P1': jax.random.key(seed)}, {'P1': length}
  )['P1']


def from_torch(state):
  """Parameters of Embedding, nn.LSTM and the MLP of PyTorch in our layout."""
  half = state['lstm.weight_hh_l0'].shape[1]
  params = {'embedding': state['embedding.weight']}
  for layer in range(learned_tokens.LSTM_LAYERS):
    for way, suffix in (('forward', ''), ('backward', '_reverse')):
      ours = params.setdefault(f'{way}_{layer}', {'cell': {}})['cell']
      for number, gate in enumerate('ifgo'):  # the order of rows in PyTorch
        rows = slice(number * half, (number + 1) * half)
        of = {
          name: state[f'lstm.{name}_l{layer}{suffix}'][rows]
          for name in ('weight_ih', 'weight_hh', 'bias_ih', 'bias_hh')
        }
        ours[f'i{gate}'] = {'kernel': of['weight_ih'].T}
        ours[f'h{gate}'] = {'kernel': of['weight_hh'].T, 'bias': of['bias_ih'] + of['bias_hh']}
  for ours, theirs in (('hidden', 'mlp.0'), ('output', 'mlp.2')):
    params[ours] = {'kernel': state[f'{theirs}.weight'].T, 'bias': state[f'{theirs}.bias']}
  return params


def stored(arrays, start):
  return {
    name.removeprefix(start): value.astype(np.float32)
    for name, value in arrays.items()
    if name.startswith(start)
  }


@pytest.mark.slow
def test_vectors_equal_pytorch(golden):
  arrays = golden('prompt_templates')
  names = ['qa/P1', 'qa/P2', 'dialogue/P1', 'dialogue/P2']
  params = {name: from_torch(stored(arrays, f'weights/{name}/')) for name in names}
  fresh = init(WIDTH, len(params['qa/P2']['embedding']))
  assert jax.tree.map(np.shape, fresh) == jax.tree.map(np.shape, params['qa/P2'])
  vectors = jax.jit(learned_tokens.encode_prompts)(params)
  for name in names:
    np.testing.assert_allclose(vectors[name], arrays[f'vectors/{name}'], rtol=0, atol=2e-5)


@pytest.mark.slow
def test_parameters_start_as_in_pytorch():
  width = 64
  params = init(width, 300, seed=1)
  flat = tree.flatten(params)
  # Embedding(P, H), 2 layers x 2 ways x 4 gates of (H + H/2 + 1) x H/2, and two Linears. PyTorch
  # has a second bias, which is added to the first.
  assert tree.count(params) == 300 * width + 16 * (width + width // 2 + 1) * width // 2 + 2 * (
    width * width + width
  )
  assert abs(flat['embedding'].std() - 1) < 0.02
  for name, leaf in flat.items():
    if name == 'embedding':
      continue
    fan = width // 2 if '/cell/' in name else width
    summed = '/cell/' in name and name.endswith('bias')
    bound, std = (2, (2 / 3) ** 0.5) if summed else (1, (1 / 3) ** 0.5)
    assert abs(leaf).max() <= bound * fan**-0.5
    assert abs(leaf.std() * fan**0.5 / std - 1) < 0.25, name
  # No two are alike.
  assert not np.array_equal(flat['forward_0/cell/hi/kernel'], flat['backward_0/cell/hi/kernel'])
