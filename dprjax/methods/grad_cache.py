"""Gradient caching (Gao et al. 2021): a batch encoded in chunks, with a loss over all of it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from dprjax.models import splits


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
    key: for dropout; each chunk gets its own, on each part of the axis 'data'. None stays None.
    chunks: their number.
    mesh: the devices.

  Returns:
    The values of all rows, in their order, and the sums over all chunks.
  """
  if chunks == 1:
    return encode(rows, key)
  parts = mesh.shape['data']

  def split(x: Array) -> Array:
    # Row i goes to chunk i mod n, so every device keeps its own rows. With reshape(n, -1, ...), all
    # devices would compute every chunk whole.
    x = x.reshape(-1, chunks, *x.shape[1:]).swapaxes(0, 1)  # [n, B / n, ...]
    x = x.reshape(chunks, parts, -1, *x.shape[2:])
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, 'data', 'fsdp')))

  def join(x: Array) -> Array:
    x = x.reshape(chunks, -1, *x.shape[3:])
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])

  rows = jax.tree.map(split, rows)
  keys = None if key is None else jax.random.split(key, (chunks, parts))
  # What the gradient goes to has a copy on each part of the axis 'data', which adds up its own
  # gradient over the chunks. These are summed over the devices once, not once a chunk.
  with splits.part_of('data'):
    encode, shared = jax.closure_convert(encode, *jax.tree.map(lambda x: x[0, 0], (rows, keys)))
  copies = [_copy(x, parts, mesh) for x in shared]

  def one(chunk: tuple[Any, Any]) -> tuple[Any, Any]:
    run = jax.vmap(jax.checkpoint(encode), spmd_axis_name='data')
    return run(*chunk, *copies)

  values, sums = jax.lax.map(one, (rows, keys))
  return jax.tree.map(join, values), jax.tree.map(lambda x: jnp.sum(x, axis=(0, 1)), sums)


def _copy(x: Array, parts: int, mesh: Mesh) -> Array:
  """A copy of an array for each part of the axis 'data'."""
  rest = (P.UNCONSTRAINED,) * x.ndim
  copies = jnp.broadcast_to(x, (parts, *x.shape))
  return jax.lax.with_sharding_constraint(copies, NamedSharding(mesh, P('data', *rest)))
