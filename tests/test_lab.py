"""The methods of experiments/lab, against numpy."""

import importlib

import jax
import numpy as np
import pytest

from dprjax.base import mesh as meshes
from dprjax.base import tree
from dprjax.losses import contrastive
from tests import gradients, reference
from tests.training import test_dpr as shared
from tests.training import test_query_only as queries


@pytest.fixture
def build():
  """``build(name, devices, **options)``: the config, the method, its parameters and the loss."""

  def run(name, devices, **options):
    config = queries.make_config(negatives=0, corpus_negatives=-1, **options)
    mesh = gradients.make_mesh({'data': devices})
    method = importlib.import_module(f'lab.{name}').build(config, shared.MODEL, mesh)

    def loss(params, batch):
      params = meshes.put(params, meshes.param_shardings(mesh, params, method.sharding))
      rows = np.arange(queries.TOTAL, dtype=np.int32)
      whole = {'corpus/vectors': queries.CORPUS, 'corpus/rows': rows}
      corpus = {name: meshes.put(x, meshes.replicated(mesh)) for name, x in whole.items()}
      return jax.jit(lambda params, batch: method.loss(tree.unflatten(params), batch, None))(
        params | corpus, meshes.put_batch(mesh, batch)
      )

    return config, shared.make_params(method), loss

  return run


@pytest.fixture
def batch():
  vectors = np.random.default_rng(2).normal(size=(queries.ROWS, queries.WIDTH))
  return queries.make_batch(1, 0) | {contrastive.FROZEN: vectors.astype(np.float32)}


@pytest.mark.slow
def test_negatives_above_the_positive_are_left_out(build, batch):
  config, params, loss = build('margin', 8, **queries.SCORES)
  frozen = batch[contrastive.FROZEN] @ queries.CORPUS.T
  above = [
    np.flatnonzero(scores > scores[positive])
    for scores, positive in zip(frozen, batch['passage_index'][:, 0], strict=True)
  ]
  assert 0 < sum(map(len, above)) < frozen.size / 1.5
  known = np.full((queries.ROWS, queries.TOTAL), -1, np.int32)
  for row, rows in zip(known, above, strict=True):
    row[: len(rows)] = rows
  relevant = np.concatenate([batch['relevant'], known], axis=1)
  want, _, negatives = queries.expected(config, params, batch | {'relevant': relevant})
  value, metrics = loss(params, batch)
  assert float(value) == pytest.approx(want, rel=1e-5)
  assert float(metrics['negatives']) == pytest.approx(negatives)


@pytest.mark.slow
def test_a_learnt_temperature_is_that_of_the_loss_and_of_the_trust_region(build, batch):
  config, params, loss = build('learnt_temperature', 1, **queries.SCORES)
  assert params.pop('head/log_scale') == 0
  scale = np.float32(0.3)
  colder = queries.make_config(
    negatives=0,
    corpus_negatives=-1,
    **queries.SCORES | {'temperature': float(config.temperature / np.exp(scale))},
  )
  want, _, _ = queries.expected(colder, params, batch)
  value, metrics = loss(params | {'head/log_scale': scale}, batch)
  assert float(value) == pytest.approx(want, rel=1e-5)
  assert float(metrics['temperature']) == pytest.approx(colder.temperature)


@pytest.mark.slow
def test_a_linear_map_is_of_the_query_alone(build, batch):
  config, params, loss = build('linear_map', 8, prompt__regularization=0.0, normalize=True)
  start = params['head/map/kernel']  # `make_params` makes all larger
  np.testing.assert_array_equal(start / start[0, 0], np.eye(queries.WIDTH))
  kernel = np.random.default_rng(3).normal(size=(queries.WIDTH,) * 2).astype(np.float32)
  backbone = tree.unflatten({name: np.asarray(leaf, np.float64) for name, leaf in params.items()})[
    'backbone'
  ]
  mask = batch['query_mask']
  hidden = reference.encode(shared.MODEL, backbone, batch['query_tokens'], mask, None)
  q = reference.pool(hidden, mask, config.pooling, True) @ kernel
  want, _, _ = reference.loss(
    q / np.linalg.norm(q, axis=1, keepdims=True),
    batch['passage_vectors'].astype(np.float64),
    batch['passage_index'],
    batch['relevant'],
    config.temperature,
    False,
    (queries.CORPUS.astype(np.float64), range(queries.TOTAL)),
  )
  value, _ = loss(params | {'head/map/kernel': kernel}, batch)
  assert float(value) == pytest.approx(want, rel=1e-5)
