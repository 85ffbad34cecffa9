import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dprjax.base import mesh as meshes
from tests.refusals import refused


@pytest.mark.parametrize(
  'sizes', [{'data': 3}, {'data': -1, 'model': -1}, {'data': -1, 'model': 16}]
)
def test_sizes_that_do_not_fit_are_an_error(sizes):
  with refused('config.mesh'):
    meshes.make_mesh(sizes)


def test_a_batch_that_the_mesh_cannot_divide_is_an_error_that_suggests_a_size():
  mesh = meshes.make_mesh({'data': 4, 'fsdp': 2})
  meshes.check_batch(mesh, 32, 4)
  with refused('config.batch_size', '36', '32'):
    meshes.check_batch(mesh, 36, 2)


def test_kernels_are_split_unless_their_size_cannot_be_divided():
  mesh = meshes.make_mesh({'data': 2, 'fsdp': 2, 'model': 2})
  params = {
    'backbone/layers/attention/query/kernel': np.zeros((3, 8, 8)),
    'backbone/layers/mlp/down/kernel': np.zeros((3, 7, 8)),
    'backbone/query/embeddings/word/embedding': np.zeros((5, 8)),
    'prompt/prefix': np.zeros((3, 2, 4, 2, 4)),
  }
  specs = {name: sharding.spec for name, sharding in meshes.param_shardings(mesh, params).items()}
  assert specs == {
    'backbone/layers/attention/query/kernel': P(None, 'fsdp', 'model'),
    'backbone/layers/mlp/down/kernel': P(None, None, 'fsdp'),
    'backbone/query/embeddings/word/embedding': P(None, 'fsdp'),
    'prompt/prefix': P(),
  }


def test_put_batch_splits_rows_and_put_follows_the_sharding():
  mesh = meshes.make_mesh({'data': 2, 'fsdp': 2, 'model': 2})
  rows = np.arange(16).reshape(8, 2)
  placed = meshes.put_batch(mesh, {'x': rows})['x']
  np.testing.assert_array_equal(placed, rows)
  assert {shard.data.shape for shard in placed.addressable_shards} == {(2, 2)}
  whole = meshes.put(rows, meshes.replicated(mesh))
  assert isinstance(whole, jax.Array) and whole.is_fully_replicated


@pytest.mark.parametrize(
  ('processes', 'devices', 'sizes', 'expected'),
  [
    (2, 2, (4, 1, 1), {0: (0, 2), 1: (1, 2)}),
    (4, 1, (2, 2, 1), {0: (0, 4), 1: (1, 4), 2: (2, 4), 3: (3, 4)}),
    (2, 2, (2, 1, 2), {0: (0, 2), 1: (1, 2)}),  # a model on the devices of one process
    # on those of two: both read the same rows
    (4, 1, (1, 2, 2), {0: (0, 2), 1: (0, 2), 2: (1, 2), 3: (1, 2)}),
    (2, 2, (1, 1, 4), {0: (0, 1), 1: (0, 1)}),
    (1, 4, (2, 1, 2), {0: (0, 1)}),
  ],
)
def test_batch_ranks(processes, devices, sizes, expected):
  assert meshes.batch_ranks(np.repeat(np.arange(processes), devices).reshape(sizes)) == expected


def test_a_model_that_ends_within_a_process_is_an_error():
  with refused('config.mesh.model', '3'):
    meshes.batch_ranks(np.repeat(np.arange(3), 2).reshape(2, 1, 3))


def test_a_name_that_no_sharding_rule_covers_is_an_error():
  with refused('topic/bank'):
    meshes.param_shardings(meshes.make_mesh({'data': -1}), {'topic/bank': np.zeros(3)})
