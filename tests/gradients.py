"""The gradient of a method on a mesh, and slopes of its loss in plain numpy."""

import jax
import numpy as np
import pytest

from dprjax.base import mesh as meshes
from dprjax.base import tree


def make_mesh(sizes):
  """A mesh of one device for ``{'data': 1}``, else of all."""
  return meshes.make_mesh(sizes, jax.devices()[:1] if sizes == {'data': 1} else None)


def value_and_gradient(method, params, trainable, mesh, batch, key=None, constants=None):
  """The loss of a method, its metrics, and the gradient of trained parameters, by flat names.

  ``trainable`` are patterns of names; ``constants`` are whole on every device.
  """
  names = tree.trainable_names(trainable, list(params))
  placed = meshes.put(params, meshes.param_shardings(mesh, params))
  placed |= {name: meshes.put(x, meshes.replicated(mesh)) for name, x in (constants or {}).items()}

  def loss(trained, frozen, batch):
    return method.loss(tree.unflatten({**frozen, **trained}), batch, key)

  (value, metrics), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(
    {name: x for name, x in placed.items() if name in names},
    {name: x for name, x in placed.items() if name not in names},
    meshes.put_batch(mesh, batch),
  )
  gradient = {name: np.asarray(leaf, np.float64) for name, leaf in gradient.items()}
  return float(value), {name: float(x) for name, x in metrics.items()}, gradient


def assert_slope(loss, params, gradient, rel=1e-5, eps=1e-6):
  """The gradient against central differences of ``loss(params)`` in float64.

  Along the gradient itself, and along a random direction, which one wrong in any place fails.
  """
  norm = np.sqrt(sum(np.sum(leaf**2) for leaf in gradient.values()))
  assert norm > 1e-4 and np.isfinite(norm)
  rng = np.random.default_rng(0)
  along = {name: leaf / norm for name, leaf in gradient.items()}
  across = {name: rng.normal(size=x.shape) / np.sqrt(x.size) for name, x in gradient.items()}
  for direction in (along, across):

    def at(t, direction=direction):
      return loss(
        {name: np.float64(x) + t * direction.get(name, 0.0) for name, x in params.items()}
      )

    slope = (at(eps) - at(-eps)) / (2 * eps)
    found = sum(np.sum(gradient[name] * leaf) for name, leaf in direction.items())
    assert found == pytest.approx(slope, abs=rel * norm)
