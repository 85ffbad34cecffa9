import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dprjax.base import mesh as meshes
from dprjax.models import encoder, heads, hub
from dprjax.papers.condenser import losses
from tests import reference

VALUE, WORD = 'encoder.layer.0.attention.self.value.weight', 'embeddings.word_embeddings.weight'
HEAD_QUERY = 'layer.1.attention.self.query.weight'


def gathered(labels):
  """Labels of PyTorch (-100: none) as positions, targets and weights, with one unused place."""
  places = [np.flatnonzero(row >= 0) for row in labels]
  most = 1 + max(map(len, places))
  positions = np.array([np.pad(row, (0, most - len(row))) for row in places], np.int32)
  weights = np.arange(most)[None] < np.array([len(row) for row in places])[:, None]
  return (
    positions,
    np.where(weights, np.take_along_axis(labels, positions, axis=1), 0),
    weights.astype(np.float32),
  )


@pytest.mark.slow
@pytest.mark.parametrize('model_type', ['bert', 'roberta'])
def test_mlm_and_condenser_equal_transformers(model_type, golden, write_heads):
  arrays = golden(f'heads_{model_type}')
  backbone = hub.load_backbone(write_heads(model_type), ('mlm', 'condenser'))
  config, tokens, mask = backbone.config, arrays['tokens'], arrays['mask']
  masked = gathered(arrays['labels'])
  assert masked[2].sum() == 5

  @jax.jit
  @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
  def run(params, layers):
    early, late = encoder.encode_early_late(
      config,
      params,
      tokens,
      mask,
      backbone.heads['condenser'].settings['split'],
      token_types=arrays['token_types'],
    )
    states = losses.condenser_states(config, layers, late, early, mask)
    embedding = params['embeddings']['word']['embedding']
    values = [
      total / masked[2].sum()
      for total, _ in (
        losses.mlm_loss(config, backbone.heads['mlm'].params, embedding, x, *masked)
        for x in (late, states)
      )
    ]
    # Condenser Eq. 11
    return values[0] + values[1], (
      values,
      states,
      heads.mlm_logits(config, backbone.heads['mlm'].params, embedding, late),
    )

  (_, (values, states, logits)), (gradient, head_gradient) = run(
    backbone.params, backbone.heads['condenser'].params
  )
  np.testing.assert_allclose(values, [arrays['mlm/loss'], arrays['condenser/loss']], rtol=2e-5)
  np.testing.assert_allclose(logits[mask], arrays['mlm/logits'][mask], rtol=2e-5, atol=2e-5)
  np.testing.assert_allclose(states[mask], arrays['condenser/states'][mask], rtol=2e-5, atol=2e-5)
  for name, ours, cases in (
    (VALUE, gradient['layers']['attention']['value']['kernel'][0].T, ('mlm', 'condenser')),
    (WORD, gradient['embeddings']['word']['embedding'], ('mlm', 'condenser')),
    (HEAD_QUERY, head_gradient['attention']['query']['kernel'][1].T, ('condenser',)),
  ):
    theirs = sum(arrays[f'{case}/gradient/{name}'] for case in cases)
    assert np.abs(theirs).max() > 1e-3, name
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5, err_msg=name)


@pytest.fixture
def masked(small):
  config, params = small
  rng = np.random.default_rng(1)
  hidden = rng.normal(size=(8, 7, config.hidden_size)).astype(np.float32)
  positions, targets = (
    rng.integers(0, 7, (8, 3)).astype(np.int32),
    rng.integers(0, config.vocab_size, (8, 3)).astype(np.int32),
  )
  return params['embeddings']['word']['embedding'] * 20, (
    hidden,
    positions,
    targets,
    (rng.random((8, 3)) < 0.7).astype(np.float32),
  )


def test_nothing_is_as_large_as_all_tokens_times_the_vocabulary(small, masked):
  config, (embedding, arrays) = small[0], masked

  def loss(head, embedding, hidden):
    return losses.mlm_loss(config, head, embedding, hidden, *arrays[1:])[0]

  program = (
    jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    .lower(heads.init_mlm_head(config, jax.random.key(0)), embedding, arrays[0])
    .as_text()
  )
  sizes = [
    math.prod(map(int, shape.split('x')[:-1]))
    for shape in re.findall(r'tensor<((?:\d+x)+)', program)
  ]
  assert 8 * 3 * config.vocab_size in sizes and max(sizes) < 8 * 7 * config.vocab_size


@pytest.mark.slow
def test_every_device_gathers_masked_tokens_from_its_own_rows(small, masked):
  config, (embedding, arrays) = small[0], masked
  mesh = meshes.make_mesh({'data': 8})
  placed = [jax.device_put(array, NamedSharding(mesh, P(meshes.BATCH))) for array in arrays]
  head, whole = jax.device_put(
    (heads.init_mlm_head(config, jax.random.key(0)), embedding), NamedSharding(mesh, P())
  )

  def loss(hidden, head, embedding):
    return losses.mlm_loss(config, head, embedding, hidden, *placed[1:])[0]

  run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
  assert 'all-gather' not in run.lower(placed[0], head, whole).compile().as_text()


@pytest.mark.slow
@pytest.mark.parametrize(('devices', 'rows'), [(1, 2), (8, 1)])
def test_siblings_some_rows_at_a_time_equal_numpy(devices, rows):
  texts = np.random.default_rng(0).normal(size=(16, 5))
  mesh = meshes.make_mesh({'data': devices}, jax.devices()[:devices])

  def plain(texts):
    return reference.sibling_loss(texts[::2], texts[1::2], 0.5)[0]

  def loss(texts):
    return jnp.mean(losses.nt_xent(texts, mesh, rows=rows, temperature=0.5).loss)

  placed = jax.device_put(texts.astype(np.float32), NamedSharding(mesh, P(meshes.BATCH)))
  value, gradient = jax.jit(jax.value_and_grad(loss))(placed)
  assert value == pytest.approx(plain(texts), rel=1e-5)
  wanted = reference.numeric_gradient(plain, texts)
  assert np.linalg.norm(gradient - wanted) <= 1e-5 * np.linalg.norm(wanted)


@pytest.mark.slow
def test_equal_texts_are_no_negatives_of_one_another():
  rng = np.random.default_rng(0)
  texts = rng.normal(size=(8, 4)).astype(np.float32)  # siblings: 0 1, 2 3, 4 5, 6 7
  keys = jnp.array([1, 2, 3, 1, 5, 2, 7, 7])
  allowed = np.asarray(losses.nt_xent_scores(texts, texts, keys=keys).allowed)
  left_out = {
    # itself; its equal (3); the equal of its sibling (5); one with an equal sibling (2)
    0: {0, 3, 5, 2},
    1: {1, 5, 3, 4},  # equal to 5; 3 equals its sibling 0; the sibling of 4, 5, equals it
    2: {2, 0},  # 0 equals its sibling 3
    3: {3, 0, 1},
    4: {4, 1},
    5: {5, 1, 0},
    6: {6},  # its sibling says the same, and stays its target
    7: {7},
  }
  for row, expected in left_out.items():
    assert set(np.flatnonzero(~allowed[row]).tolist()) == expected, row
  plain = np.asarray(losses.nt_xent_scores(texts, texts).allowed)
  np.testing.assert_array_equal(plain, ~np.eye(8, dtype=bool))
