"""A batch in pieces: the same values and gradient, a key for each piece, and the memory of one
piece.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import hlo
from dprjax.base import mesh as meshes
from dprjax.losses.grad_cache import map_chunks
from dprjax.models import dropout

KEY = jax.random.key(7)


@pytest.fixture(scope='module', params=[1, 8])
def mesh(request):
  return meshes.make_mesh({'data': request.param}, jax.devices()[: request.param])


def test_values_sums_and_gradient_are_those_of_one_piece(mesh):
  x = np.random.default_rng(0).normal(size=(48, 4)).astype(np.float32)
  batch = meshes.put_batch(mesh, {'x': x})

  def loss(weight, chunks):
    values, total = map_chunks(
      lambda rows, key: (jnp.tanh(rows['x'] @ weight), jnp.sum(rows['x'] ** 3)),
      batch,
      None,
      chunks,
      mesh,
    )
    return jnp.sum(values * values[::-1]), (values, total)

  run = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
  weight = jnp.asarray(np.random.default_rng(1).normal(size=(4, 3)), jnp.float32)
  for chunks in (1, 6):
    gradient, (values, total) = run(weight, chunks)
    expected = np.tanh(x @ np.asarray(weight))
    np.testing.assert_allclose(values, expected, atol=1e-6)
    np.testing.assert_allclose(total, np.sum(x.astype(np.float64) ** 3), rtol=1e-4)
    # d/dW of sum_i t_i t_{n-i}: each row meets its mirror twice.
    np.testing.assert_allclose(
      gradient, 2 * x.T @ (expected[::-1] * (1 - expected**2)), rtol=1e-4, atol=1e-4
    )


@pytest.mark.slow
def test_dropout_leaves_out_the_same_on_any_mesh():
  """Dropout of each row, and of values that rows share."""
  x = np.ones((48, 5), np.float32)

  def one(rows, key):
    shared = dropout.drop(jnp.ones((3, 5), jnp.float32), 0.5, jax.random.fold_in(key, 1))
    return dropout.drop(rows, 0.5, key, rows=True) + 10 * jnp.sum(shared, axis=0)[None], ()

  def run(devices):
    mesh = meshes.make_mesh({'data': devices}, jax.devices()[:devices])

    def loss(x):
      values, _ = map_chunks(one, x, KEY, 3, mesh)
      return jnp.sum(values**2), values

    # The gradient takes the same masks.
    return jax.jit(jax.grad(loss, has_aux=True))(meshes.put_batch(mesh, {'x': x})['x'])

  found = [run(devices) for devices in (1, 8)]
  first = found[0][1] % 10
  assert 0.3 < np.mean(first == 0) < 0.7 and len(np.unique(first, axis=0)) > 16
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), *found)


@pytest.mark.slow
@pytest.mark.parametrize('sizes', [{'data': 8}, {'data': 4, 'fsdp': 2}, {'data': 2, 'fsdp': 4}])
def test_gradients_are_summed_over_the_axis_data_once(sizes):
  """Not once a piece: those of a large encoder on many chips would take longer than the rest."""
  mesh = meshes.make_mesh(sizes)
  layers, width, rows, pieces = 3, 16, 96, 6
  rng = np.random.default_rng(0)
  weights = rng.normal(size=(layers, width, width)).astype(np.float32)
  x = rng.normal(size=(rows, width)).astype(np.float32)

  def loss(weights, x, chunks):
    def encode(rows, _):
      y, _ = jax.lax.scan(lambda y, layer: (jnp.tanh(y @ layer), None), rows, weights)
      return y, ()

    return jnp.sum(map_chunks(encode, x, None, chunks, mesh)[0] ** 3)

  whole = meshes.replicated(mesh)
  run = jax.jit(jax.grad(loss), static_argnums=2, out_shardings=whole)
  placed = jax.device_put(weights, whole), meshes.put_batch(mesh, {'x': x})['x']
  program = run.lower(*placed, pieces).compile()
  np.testing.assert_allclose(program(*placed), run(*placed, 1), rtol=0, atol=1e-4)
  (sums,) = hlo.HloProgram(program.as_text()).cost().collectives
  size = layers * width**2 * 4
  # Those of each piece and layer over `fsdp`, which splits weights, and of all over `data`; with
  # more than two parts of `fsdp` those of each piece are over both.
  fsdp = sizes.get('fsdp', 1)
  each, once = pieces if fsdp > 1 else 0, fsdp <= 2
  assert sums[:3] == ('all-reduce', each * layers + once, (each + once) * size)


@pytest.mark.slow
def test_memory_is_that_of_one_piece():
  """Sixteen times the batch in sixteen times the pieces: what is kept for the backward pass does
  not grow, nor are weights kept a piece.
  """
  mesh = meshes.make_mesh({'data': 1}, jax.devices()[:1])
  width, piece = 512, 64

  def temporary(rows, chunks):
    def loss(weight, x):
      def one(rows, key):
        for _ in range(6):
          rows = jnp.tanh(rows @ weight)
        return rows[:, :4], ()

      return jnp.sum(map_chunks(one, x, None, chunks, mesh)[0] ** 2)

    shapes = [
      jax.ShapeDtypeStruct((width, width), jnp.float32),
      jax.ShapeDtypeStruct((rows, width), jnp.float32),
    ]
    return jax.jit(jax.grad(loss)).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

  rows = (
    16 * piece * width * 4
  )  # bytes of the whole batch, which is cut and put into the pieces' order: a copy
  small, large, whole = temporary(2 * piece, 2), temporary(16 * piece, 16), temporary(16 * piece, 1)
  assert large < 1.5 * small + rows
  assert whole > 4 * rows
