import jax.numpy as jnp
import numpy as np
import pytest

from dprjax.base import extensions
from dprjax.models import embed, pooling
from tests.refusals import refused
from tests.toys import spread


def expected(name, states):
  """By the definitions in the documentation of sentence-transformers, for states of one text."""
  places = np.arange(1, len(states) + 1)[:, None]
  return {
    'cls': states[0],
    'mean': states.mean(axis=0),
    'max': states.max(axis=0),
    'mean_sqrt_len_tokens': states.sum(axis=0) / np.sqrt(len(states)),
    'weightedmean': (states * places).sum(axis=0) / places.sum(),
    'lasttoken': states[-1],
  }[name]


@pytest.mark.parametrize(
  'name', ['cls', 'mean', 'max', 'mean_sqrt_len_tokens', 'weightedmean', 'lasttoken']
)
def test_poolings_equal_their_definitions(name):
  states = np.random.default_rng(0).standard_normal((3, 5, 4)).astype(np.float32)
  lengths = [5, 2, 1]
  mask = np.arange(5)[None] < np.array(lengths)[:, None]
  found = pooling.find(name).pool(jnp.asarray(states), jnp.asarray(mask))
  wanted = [expected(name, rows[:length]) for rows, length in zip(states, lengths, strict=True)]
  np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
  assert [*pooling.every()] == [
    *('cls', 'mean', 'max', 'mean_sqrt_len_tokens', 'weightedmean', 'lasttoken')
  ]


def test_the_last_token_is_found_behind_padding_on_the_left():
  states = jnp.arange(8, dtype=jnp.float32).reshape(1, 4, 2)
  mask = jnp.array([[False, False, True, True]])
  np.testing.assert_array_equal(pooling.find('lasttoken').pool(states, mask), [[6, 7]])


@pytest.mark.slow
def test_a_row_of_padding_stays_finite():
  states, mask = jnp.ones((2, 3, 4)), jnp.zeros((2, 3), bool)
  for name in pooling.every():
    assert np.isfinite(embed.unit(pooling.find(name).pool(states, mask))).all(), name


def test_a_pooling_of_ones_own(monkeypatch):
  with refused('--pooling'):
    pooling.find('spread', '--pooling')
  monkeypatch.setenv(extensions.VARIABLE, 'tests.toys.spread')
  assert pooling.find('spread') is spread.POOLING
