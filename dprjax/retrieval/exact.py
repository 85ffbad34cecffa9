"""Exact inner-product search on all devices: the oracle, and the fall-back where there is no ScaNN.

The corpus goes over the devices a block at a time. Every device keeps, for every query, the best k
of the rows that it has seen; at the end the devices' lists are merged. Memory on a device: two
blocks, one matrix of similarities [queries of a block, rows of a block / devices], and k scores and
rows a query; on the host, one block more and what a shard of the corpus itself keeps. Nothing grows
with the corpus; benchmarks/exact_search.py measures that.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from dprjax.base.errors import InputError

_AXIS = 'corpus'
# On a device at a time. CPUs have other kernels for very few rows, which round otherwise: a search
# in parts would not find the same bits.
_LEAST_ROWS = 128


class TopK(NamedTuple):
  """The best k rows of the corpus for each query, best first; equal scores by row, ascending.

  Where an index found fewer than k, the rest has row -1 and score -inf.
  """

  scores: Float[np.ndarray, 'queries k']
  rows: Int[np.ndarray, 'queries k']


class Rows(Protocol):
  """Vectors in memory or elsewhere: an array, or `dprjax.retrieval.embeddings.Rows`.

  What a slice is of them, numpy can read.
  """

  @property
  def shape(self) -> tuple[int, ...]: ...

  def __len__(self) -> int: ...

  def __getitem__(self, rows: slice, /) -> Any: ...


def search(
  queries: Float[np.ndarray, 'queries H'],
  corpus: Float[np.ndarray, 'n H'] | Sequence[Rows],
  k: int,
  *,
  devices: Sequence[jax.Device] | None = None,
  block_rows: int = 32_768,
  block_queries: int = 512,
) -> TopK:
  """The ``min(k, n)`` rows of the corpus with the largest inner product, in float32.

  Args:
    queries: float32 or float16.
    corpus: one array or several that follow one another; those that are on disk are read a block at
      a time.
    k: how many rows.
    devices: to search on; this process's by default.
    block_rows: rows of the corpus on all devices together at a time.
    block_queries: queries multiplied with them at a time.

  Raises:
    InputError: an empty side, vectors of different length, or NaN or infinity among them.
  """
  shards: Sequence[Rows] = [corpus] if isinstance(corpus, np.ndarray) else corpus
  count = sum(len(shard) for shard in shards)
  if not count or not len(queries) or k < 1:
    raise InputError(f'nothing to search: {len(queries)} queries, {count} documents, k = {k}')
  if any(shard.shape[1] != queries.shape[1] for shard in shards):
    raise InputError(
      f'queries have {queries.shape[1]} dimensions, the corpus '
      f'{sorted({shard.shape[1] for shard in shards})}'
    )
  check_finite(queries, 'query', 0)
  devices = jax.local_devices() if devices is None else list(devices)
  mesh = Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))
  everywhere, split = (
    NamedSharding(mesh, PartitionSpec()),
    NamedSharding(mesh, PartitionSpec(_AXIS)),
  )
  k = min(k, count)
  # Shapes are rounded up to powers of two, so that a growing corpus does not compile anew each
  # time.
  device_rows = max(
    min(_power_of_two(-(-count // len(devices))), _power_of_two(-(-block_rows // len(devices)))),
    _LEAST_ROWS,
  )
  block_queries = min(block_queries, _power_of_two(len(queries)))

  parts = [
    _padded(queries[start : start + block_queries], block_queries)
    for start in range(0, len(queries), block_queries)
  ]
  placed = [jax.device_put(part, everywhere) for part in parts]
  empty = (
    np.full((len(devices), block_queries, k), -np.inf, np.float32),
    np.full((len(devices), block_queries, k), -1, np.int32),
  )
  best = [jax.device_put(empty, split) for _ in parts]
  for offset, used, block in _blocks(shards, device_rows * len(devices), queries.shape[1]):
    check_finite(block, 'document', offset)
    rows = jax.device_put(block, split)
    # Not more than one block ahead of the devices, or the blocks pile up on them.
    jax.block_until_ready(best)
    best = [
      _step(mesh, query, rows, used, offset, *state)
      for query, state in zip(placed, best, strict=True)
    ]
  merged = [jax.device_get(_merge(*state)) for state in best]
  scores, found = (np.concatenate(arrays)[: len(queries)] for arrays in zip(*merged, strict=True))
  return TopK(scores, found)


def search_part(
  queries: Float[np.ndarray, 'queries H'], corpus: Sequence[Rows], k: int, part: int, parts: int
) -> TopK:
  """``search`` in the i-th of so many equal parts of the corpus, on this process's devices; rows
  are those of the whole.

  ``merge`` puts the parts' results together.

  Raises:
    InputError: as ``search``.
  """
  count = sum(len(shard) for shard in corpus)
  start, stop = part * count // parts, (part + 1) * count // parts
  mine, offset = [], 0
  for shard in corpus:
    mine.append(shard[max(start - offset, 0) : max(stop - offset, 0)])
    offset += len(shard)
  k = min(k, count)
  scores, rows = (
    np.full((len(queries), k), -np.inf, np.float32),
    np.full((len(queries), k), -1, np.int32),
  )
  if stop > start:
    found = search(queries, mine, min(k, stop - start))
    scores[:, : found.scores.shape[1]], rows[:, : found.rows.shape[1]] = (
      found.scores,
      found.rows + start,
    )
  return TopK(scores, rows)


def merge(
  scores: Float[np.ndarray, 'parts queries k'], rows: Int[np.ndarray, 'parts queries k']
) -> TopK:
  """The best k of all parts: what ``search`` finds in the whole."""
  return TopK(*jax.device_get(_merge(scores, rows)))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(5, 6))
def _step(
  mesh: Mesh,
  queries: Float[Array, 'Q H'],
  block: Float[Array, 'rows H'],
  used: Int[Array, ''],
  offset: Int[Array, ''],
  scores: Float[Array, 'devices Q k'],
  rows: Int[Array, 'devices Q k'],
) -> tuple[Float[Array, 'devices Q k'], Int[Array, 'devices Q k']]:
  """Takes one block into every device's list.

  ``used`` rows of the block are real, and row 0 is the corpus's row ``offset``.
  """

  def local(queries, block, used, offset, scores, rows):
    k = scores.shape[-1]
    similar = jnp.einsum('qh,rh->qr', queries, block, precision=jax.lax.Precision.HIGHEST)
    row = jax.lax.axis_index(_AXIS) * block.shape[0] + jnp.arange(block.shape[0], dtype=jnp.int32)
    similar = jnp.where((row < used)[None, :], similar, -jnp.inf)
    # The list comes first: of equal scores top_k takes the first, and the list's rows are the
    # earlier ones.
    candidates = jnp.concatenate([scores[0], similar], axis=1)
    candidate_rows = jnp.concatenate(
      [rows[0], jnp.broadcast_to((row + offset)[None, :], similar.shape)], axis=1
    )
    scores, places = jax.lax.top_k(candidates, k)
    return scores[None], jnp.take_along_axis(candidate_rows, places, axis=1)[None]

  each, whole = PartitionSpec(_AXIS), PartitionSpec()
  return jax.shard_map(
    local, mesh=mesh, in_specs=(whole, each, whole, whole, each, each), out_specs=(each, each)
  )(queries, block, used, offset, scores, rows)


@jax.jit
def _merge(
  scores: Float[Array, 'devices Q k'], rows: Int[Array, 'devices Q k']
) -> tuple[Float[Array, 'Q k'], Int[Array, 'Q k']]:
  """The best k of all devices' lists, by falling score, then row: the same on any number of
  devices.
  """
  k = scores.shape[-1]
  together = [jnp.moveaxis(array, 0, 1).reshape(array.shape[1], -1) for array in (-scores, rows)]
  negated, rows = jax.lax.sort(together, num_keys=2)
  return -negated[:, :k], rows[:, :k]


def _blocks(
  shards: Sequence[Rows], rows: int, dimension: int
) -> Iterator[tuple[int, int, Float[np.ndarray, 'rows H']]]:
  """Yields (number of the first row, how many are used, a new float32 array of ``rows`` rows),
  across the shards' ends; the rest is 0.
  """
  offset = used = 0
  block = np.zeros((rows, dimension), np.float32)
  for shard in shards:
    start = 0
    while start < len(shard):
      taken = min(rows - used, len(shard) - start)
      block[used : used + taken] = shard[start : start + taken]
      start, used = start + taken, used + taken
      if used == rows:
        yield offset, used, block
        # Another array: the devices may still be reading this one.
        offset, used, block = offset + rows, 0, np.zeros((rows, dimension), np.float32)
  if used:
    yield offset, used, block


def _padded(array: np.ndarray, rows: int) -> np.ndarray:
  result = np.zeros((rows, array.shape[1]), np.float32)
  result[: len(array)] = array
  return result


def _power_of_two(number: int) -> int:
  return 1 << (number - 1).bit_length()


def check_finite(vectors: Float[np.ndarray, 'rows H'], what: str, offset: int) -> None:
  """Raises InputError for NaN or infinity (NaN would come first in every ranking).

  ``offset`` is the first row's number.
  """
  bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
  if bad.size:
    raise InputError(
      f'the vector of {what} {offset + bad[0]} (counted from 0) is not finite: encode again'
    )
