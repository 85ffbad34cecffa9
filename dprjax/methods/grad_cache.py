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
  encode: Callable[[Any, Array | None], tuple[Any, Any]],
  rows: Any,
  key: Array | None,
  chunks: int,
  mesh: Mesh,
) -> tuple[Any, Any]:
  """Encodes a batch chunk by chunk. The backward pass holds the activations of one chunk.

  Args:
    encode: ``(rows, key) -> (values per row, sums)``.
    rows: arrays with a leading axis of B, a multiple of ``chunks`` times the devices that split the
      batch.
    key: for dropout; each chunk gets its own. None stays None.
    chunks: their number.
    mesh: the devices.

  Returns:
    The values of all rows, in their order, and the sums over all chunks.
  """
  if chunks == 1:
    return encode(rows, key)

  def split(x: Array) -> Array:
    # Row i goes to chunk i mod n, so every device keeps its own rows. With reshape(n, -1, ...), all
    # devices would compute every chunk whole.
    x = x.reshape(-1, chunks, *x.shape[1:]).swapaxes(0, 1)  # [n, B / n, ...]
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, meshes.BATCH)))

  def join(x: Array) -> Array:
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])

  keys = None if key is None else jax.random.split(key, chunks)
  values, sums = jax.lax.map(
    lambda chunk: jax.checkpoint(encode)(*chunk), (jax.tree.map(split, rows), keys)
  )
  return jax.tree.map(join, values), jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)
