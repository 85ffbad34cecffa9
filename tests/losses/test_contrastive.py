"""The shared losses against plain numpy, on one device and on eight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dprjax.base import mesh as meshes
from dprjax.losses import contrastive
from tests import reference

ROWS, CANDIDATES, WIDTH = 8, 3, 5


def make_batch(seed=0):
  rng = np.random.default_rng(seed)
  q, p = rng.normal(size=(ROWS, WIDTH)), rng.normal(size=(ROWS, CANDIDATES, WIDTH))
  # Few passages, so that rows share them: positives of others that are relevant, duplicates of
  # one's own positive.
  index = rng.integers(0, 9, size=(ROWS, CANDIDATES)).astype(np.int32)
  relevant = np.full((ROWS, 2), -1, np.int32)
  relevant[:, 0] = index[:, 0]
  relevant[::2, 1] = rng.integers(0, 9, size=ROWS // 2)
  relevant[3] = -1  # a list cut off before the positive itself
  return q, p, index, relevant


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
  ('sizes', 'temperature', 'in_batch', 'at_a_time'),
  [
    ({'data': 8}, 0.1, True, 3),
    ({'data': 1}, 0.1, True, 1),
    ({'data': 1}, 1.0, False, 2),
    ({'data': 8}, 1.0, False, 99),
    ({'data': 4, 'model': 2}, 1.0, True, 99),
  ],
  ids=str,
)
def test_loss_and_gradient_equal_numpy(sizes, temperature, in_batch, at_a_time):
  q, p, index, relevant = make_batch()
  mesh = meshes.make_mesh(sizes, jax.devices()[:1] if sizes == {'data': 1} else None)
  rows = NamedSharding(mesh, P(meshes.BATCH))

  def loss(q, p):
    told = contrastive.info_nce(
      q,
      p,
      jnp.asarray(index),
      jnp.asarray(relevant),
      mesh,
      rows=at_a_time,
      temperature=temperature,
      in_batch=in_batch,
    )
    return jnp.mean(told.loss), (jnp.mean(told.accuracy), jnp.mean(told.negatives))

  placed = [jax.device_put(jnp.asarray(x, jnp.float32), rows) for x in (q, p)]
  (value, (accuracy, seen)), (dq, dp) = jax.jit(
    jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
  )(*placed)

  def plain(q, p):
    return reference.loss(q, p, index, relevant, temperature, in_batch)

  expected = plain(q, p)
  np.testing.assert_allclose([value, accuracy, seen], expected, rtol=1e-5)
  for got, wanted in (
    (dq, reference.numeric_gradient(lambda x: plain(x, p)[0], q)),
    (dp, reference.numeric_gradient(lambda x: plain(q, x)[0], p)),
  ):
    assert np.linalg.norm(got - wanted) <= 1e-5 * np.linalg.norm(wanted)


def test_another_rows_relevant_passage_is_never_a_negative():
  # Query 0's positive is passage 7; passage 4, row 1's positive, is relevant to query 0 as well.
  index = jnp.array([[7, 1], [4, 7]], jnp.int32)
  relevant = jnp.array([[7, 4], [4, -1]], jnp.int32)
  found = contrastive.false_negatives(index, relevant)
  np.testing.assert_array_equal(found, [[True, False, True, True], [False, False, True, False]])


@pytest.mark.slow
def test_memory_grows_with_the_passages_not_with_their_square():
  mesh = meshes.make_mesh({'data': 1}, jax.devices()[:1])

  def scratch(batch, at_a_time):
    def loss(q, p, index):
      return jnp.mean(contrastive.info_nce(q, p, index, index, mesh, rows=at_a_time).loss)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((batch, 16), (batch, 1, 16))]
    index = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
    return (
      jax.jit(jax.grad(loss, argnums=(0, 1)))
      .lower(*shapes, index)
      .compile()
      .memory_analysis()
      .temp_size_in_bytes
    )

  assert scratch(4096, 64) < 2.1 * scratch(2048, 64)
  assert scratch(2048, 2048) > 3.5 * scratch(1024, 1024) and scratch(2048, 2048) > 8 * scratch(
    2048, 64
  )
