"""Scored pairs as the training loop gets them, and the rank correlation of the dev pairs against
one worked out by hand.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dprjax.base import mesh as meshes
from dprjax.base import tree
from dprjax.models import scratch
from dprjax.models.encoder_config import EncoderConfig
from lab import measures, similarity
from tests import gradients, reference
from tests.options import with_options

TRAIN = [
  ('oak elm', 'oak', 5.0),
  ('ash', 'fir yew', 0.5),
  ('pine', 'pine', 4.0),
  ('larch oak elm ash fir yew', 'maple', 1.0),
  ('rowan', 'yew', 2.5),
  ('hazel fir', 'elm', 3.0),
  ('cedar', 'beech oak', 2.0),
]
# Cosines of word counts: 1, 1/2, 1/sqrt(2) and 0.
DEV = [
  ('oak elm', 'elm oak', 4.0),
  ('oak elm', 'oak fir', 5.0),
  ('oak elm', 'oak', 3.0),
  ('ash', 'yew', 0.0),
]
WEIGHTS = {
  'query/weight': jnp.float32(3)
}  # cosines do not change by it, and there is none for passages


@pytest.mark.slow
def test_loss_and_gradient_equal_numpy():
  rows, shape = 16, EncoderConfig('bert', 40, 8, 1, 2, 16, max_positions=12)
  config = with_options(batch_size=rows, backbone__dropout=0.0, grad_cache=2)
  mesh, rng = meshes.make_mesh({'data': 8}), np.random.default_rng(0)
  batch = {'score': rng.random(rows).astype(np.float32)}
  for view in similarity.VIEWS:
    batch[f'{view}_mask'] = np.arange(6) < rng.integers(2, 7, size=(rows, 1))
    tokens = rng.integers(1, 40, size=(rows, 6))
    batch[f'{view}_tokens'] = np.where(batch[f'{view}_mask'], tokens, 0).astype(np.int32)
  model = similarity.build(config, shape, mesh)
  made = tree.flatten({'backbone': scratch.init_params(shape, jax.random.key(0))})
  params = {
    name: np.asarray(leaf) * (25 if name.endswith(('kernel', 'embedding')) else 1)
    for name, leaf in made.items()
  }

  def expected(params):
    backbone = tree.unflatten(params)['backbone']
    vectors = [
      reference.encode(shape, backbone, batch[f'{view}_tokens'], batch[f'{view}_mask'])[:, 0]
      for view in similarity.VIEWS
    ]
    first, second = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in vectors)
    return np.mean((np.sum(first * second, axis=1) - batch['score']) ** 2)

  value, _, gradient = gradients.value_and_gradient(model, params, ('.*',), mesh, batch)
  exact = {name: leaf.astype(np.float64) for name, leaf in params.items()}
  assert value == pytest.approx(expected(exact), rel=1e-5)
  gradients.assert_slope(expected, params, gradient, 1e-4)


def test_values_of_spearman():
  rng = np.random.default_rng(0)
  x = rng.normal(size=300)
  y = np.round(x + rng.normal(size=300), 1)  # with ties
  values = similarity.spearman_values(x, y)
  assert values.mean() == pytest.approx(measures.spearman(x, y), abs=1e-12)


@pytest.fixture
def folder(tmp_path):
  for name, pairs in (('train', TRAIN), ('dev', DEV), ('bad', [('oak', 'elm', 6.0)])):
    (tmp_path / f'{name}.csv').write_text(
      ''.join(f'{first},{second},{score}\n' for first, second, score in pairs)
    )
  return tmp_path


@pytest.fixture
def start(folder, settings, devices, tokenizer, model):
  """``start(option=value)`` -> the data, on the files above."""

  def run(**changes):
    options = {
      'data__dir': str(folder),
      'data__train_split': 'train.csv',
      'batch_size': 3,
      'eval__measure': 'spearman',
      'data__query_max_length': 8,
      'data__query_buckets': (8, 4),
    } | changes
    config = settings(**options)
    return similarity.find_data(config.data, config, folder / 'run', devices).open(tokenizer, model)

  return run


def test_what_the_loop_is_given(start, words_of, batches_of):
  data = start()
  iterator = batches_of(data)
  assert (len(data.batches), data.unit, data.description, data.evaluation) == (
    2,
    'pairs',
    '7 scored pairs',
    None,
  )
  epochs = [[], [], []]
  for number in range(6):
    batch = next(iterator)
    pairs = [TRAIN[row] for row in batch['pair_index']]
    np.testing.assert_allclose(
      batch['score'], [score / 5 for _, _, score in pairs], rtol=1e-6
    )  # 0 to 1
    for i, view in enumerate(('first', 'second')):
      assert [words_of(row) for row in batch[f'{view}_tokens']] == [
        pair[i].split() for pair in pairs
      ]
      lengths = [2 + len(pair[i].split()) for pair in pairs]
      assert batch[f'{view}_mask'].sum(axis=1).tolist() == lengths
    lines = ', '.join(str(TRAIN.index(pair) + 1) for pair in pairs)
    assert data.ids(batch) == f'pairs {lines} of train.csv'
    epochs[number // 2] += batch['pair_index'].tolist()
  # Shuffled anew each time; the one that does not fill an update is left out.
  assert (
    all(len(set(epoch)) == 6 for epoch in epochs) and len({tuple(epoch) for epoch in epochs}) == 3
  )


def test_the_dev_pairs_are_ranked(start, bag):
  data = start(data__dev_split='dev.csv')
  # Ranks of the cosines 4 2 3 1, of the scores 3 4 2 1: rho = 1 - 6 (1 + 4 + 1 + 0) / (4 * 15).
  evaluate = data.evaluation(bag)
  found = evaluate(WEIGHTS)
  assert found.means == {'spearman': pytest.approx(0.4)}
  assert found.values[''].shape == (4,) and found.values[''].mean() == pytest.approx(0.4)
  # Where all vectors are 0 there is no order: worse than any.
  assert evaluate({'query/weight': jnp.float32(0)}).means == {'spearman': -1.0}
