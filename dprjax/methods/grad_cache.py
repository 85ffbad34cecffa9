"""Gradient caching (Gao et al. 2021): a batch encoded in chunks, with a loss over all of it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from dprjax.runtime import mesh as meshes


def map_chunks(
  one: Callable[[Any, Array | None], tuple[Any, Any]],
  rows: Any,
  key: Array | None,
  chunks: int,
  mesh: Mesh,
) -> tuple[Any, Any]:
  """``one(rows, key) -> (values a row, sums)`` over a batch in ``chunks`` pieces; the backward pass
  holds the activations of one piece.

  Args:
    one: encodes a piece; whatever it returns second is added up over the pieces.
    rows: arrays with a leading axis of B, a multiple of ``chunks`` times the devices that split the
      batch.
    key: for dropout; each piece gets its own. None stays None.

  Returns:
    The values of all rows in their order, and the sums.
  """
  if chunks == 1:
    return one(rows, key)

  def split(x: Array) -> Array:
    # Row i goes to chunk i mod n: every device keeps its own rows. With the chunks outermost, as
    # reshape(n, -1, ...) has them, all devices would compute every chunk whole.
    x = x.reshape(-1, chunks, *x.shape[1:]).swapaxes(0, 1)  # [n, B / n, ...]
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, meshes.BATCH)))

  def join(x: Array) -> Array:
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])

  keys = None if key is None else jax.random.split(key, chunks)
  values, sums = jax.lax.map(
    lambda piece: jax.checkpoint(one)(*piece), (jax.tree.map(split, rows), keys)
  )
  return jax.tree.map(join, values), jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)
