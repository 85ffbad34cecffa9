"""Gradient caching (Gao et al. 2021): a loss over a whole batch, encoded in chunks."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from dprjax.base import mesh as meshes
from dprjax.models import splits


def embed_chunked(
  encode: Callable[..., Float[Array, 'n H']],
  texts: Sequence[Array],
  key: Array | None,
  chunks: int,
  mesh: Mesh,
) -> Float[Array, 'B C H']:
  """Vectors of C texts in each row of a batch, chunk by chunk as in ``map_chunks``.

  Args:
    encode: ``(tokens [n, T], mask [n, T], *numbers [n, ...], key) -> vectors``.
    texts: the arrays that ``encode`` takes, each [B, C, ...].
  """

  def encode_rows(rows: Sequence[Array], key: Array | None) -> tuple[Array, tuple[()]]:
    vectors = encode(*(array.reshape(-1, *array.shape[2:]) for array in rows), key)
    return vectors.reshape(*rows[0].shape[:2], vectors.shape[-1]), ()

  return map_chunks(encode_rows, tuple(texts), key, chunks, mesh)[0]


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
    rows: arrays with a leading axis B, a multiple of ``chunks`` times the devices that split it.
    key: for dropout; each chunk gets its own. None stays None.

  Returns:
    The values of all rows, in order, and the sums over all chunks.
  """
  if chunks == 1:
    return encode(rows, key)
  parts = _parts(mesh)

  def split(x: Array) -> Array:
    # Row i goes to chunk i mod n, so every device keeps its rows. With reshape(n, -1, ...) each
    # device would compute all of every chunk.
    x = x.reshape(-1, chunks, *x.shape[1:]).swapaxes(0, 1)  # [n, B / n, ...]
    x = x.reshape(chunks, parts, -1, *x.shape[2:])
    axes = meshes.BATCH if parts > 1 else (None, meshes.BATCH)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, *axes)))

  def join(x: Array) -> Array:
    x = x.reshape(chunks, -1, *x.shape[3:])
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])

  rows = jax.tree.map(split, rows)
  keys = None if key is None else jax.random.split(key, chunks)
  run = _by_parts(encode, jax.tree.map(lambda x: x[0], (rows, keys)), mesh)
  values, sums = jax.lax.map(run, (rows, keys))
  return jax.tree.map(join, values), jax.tree.map(lambda x: jnp.sum(x, axis=(0, 1)), sums)


def _parts(mesh: Mesh) -> int:
  """The number of copies of the differentiated parameters.

  With split weights the gradient of each chunk is summed over the axis 'fsdp' immediately. With
  copies the compiler reduces the whole gradient and keeps a part of the sum; with more than two
  parts this sends more than a scatter and a reduction over 'data'.
  """
  return mesh.shape['data'] if mesh.shape['fsdp'] <= 2 else 1


def _by_parts(
  encode: Callable[[Any, Array | None], tuple[Any, Any]], chunk: tuple[Any, Any], mesh: Mesh
) -> Callable[[tuple[Any, Any]], tuple[Any, Any]]:
  """``encode`` on each part of the axis 'data', for chunks that are split into these parts.

  Each part has a copy of the differentiated parameters and accumulates its gradient over the
  chunks. The sum over devices is then taken once; otherwise the compiler takes one for each chunk.
  """

  parts, rows = _parts(mesh), jax.tree.map(lambda x: x[0], chunk[0])
  if parts == 1:  # a copy would cost memory

    def only(chunk: tuple[Any, Any]) -> tuple[Any, Any]:
      values = jax.checkpoint(encode)(jax.tree.map(lambda x: x[0], chunk[0]), chunk[1])
      return jax.tree.map(lambda x: x[None], values)

    return only

  def one(rows: Any, key: Array | None, number: Array) -> tuple[Any, Any]:
    with splits.part_of('data', number, parts):
      return encode(rows, key)

  converted, shared = jax.closure_convert(one, rows, chunk[1], jnp.zeros((), jnp.int32))

  def copy(x: Array) -> Array:
    rest = (P.UNCONSTRAINED,) * x.ndim
    copies = jnp.broadcast_to(x, (parts, *x.shape))
    return jax.lax.with_sharding_constraint(copies, NamedSharding(mesh, P('data', *rest)))

  copies = [copy(x) for x in shared]
  axes = (0, None, 0, *(0 for _ in copies))
  run = jax.vmap(jax.checkpoint(converted), axes, spmd_axis_name='data')
  return lambda chunk: run(*chunk, jnp.arange(parts, dtype=jnp.int32), *copies)
