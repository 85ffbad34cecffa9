import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dprjax.base import machine
from dprjax.inference import embedder
from dprjax.runtime import mesh
from tests.refusals import refused


@pytest.mark.parametrize(
  ('gigabytes', 'devices', 'parts'),
  [(8, 8, 1), (9, 8, 2), (16.1, 8, 4), (99, 8, 8), (17, 6, 3), (9, 1, 1)],
)
def test_weights_are_split_where_they_take_over_half_of_a_device(gigabytes, devices, parts):
  assert embedder.weight_parts(int(gigabytes * 2**30), 16 * 2**30, devices) == parts


def test_meshes_of_weights_in_parts():
  assert dict(embedder.local_mesh(4).shape) == {'data': 2, 'fsdp': 4, 'model': 1}
  assert dict(embedder.server_mesh(3).shape) == {'data': 1, 'fsdp': 1, 'model': 3}
  with refused('weight_parts', '3', '8'):
    embedder.local_mesh(3)
  with refused('weight_parts', '9', '8'):
    embedder.server_mesh(9)


def test_rows_of_a_length_come_in_steps_of_one_shape(monkeypatch):
  monkeypatch.setattr(machine, 'cores', lambda: 1)
  monkeypatch.setattr(embedder, '_CORE_TOKENS', 64)
  shapes = set()

  def embed(params, tokens, mask):
    shapes.add(tokens.shape)
    return params + jnp.where(mask, tokens, 0).sum(1, keepdims=True).astype(np.float32)

  devices = mesh.make_mesh({'data': 1}, jax.devices()[:1])
  run = embedder.Embedder(embed, devices, 16, 32, pad_id=0)
  rng = np.random.default_rng(0)
  rows = [rng.integers(1, 99, length).astype(np.int32) for length in rng.integers(1, 33, 50)]
  seen = []
  vectors = run(jnp.float32(1), rows, seen.append)
  np.testing.assert_array_equal(vectors[:, 0], [1 + row.sum() for row in rows])
  assert shapes == {(4, 16), (2, 32)}
  assert seen[-1] == 50 and seen == sorted(seen)
