"""Exact inner-product search on all devices.

The devices share each block of the corpus. Each keeps a list of the best k rows for every query,
and the lists are merged at the end. If a list has no room for all rows that tie with its last, ids
decide: such queries are scored again on the host (`dprjax.retrieval.best`).

``search`` reads the corpus block by block. A device has two blocks in memory, one similarity matrix
[queries of a block, rows of a block / devices], and k scores and rows per query; the host has one
more block. Memory does not grow with the corpus. ``ExactIndex`` keeps the blocks on the devices.

A single CPU device uses numpy, which is faster there than XLA (docs/performance.md).
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Shaped

from dprjax.encoding import codes
from dprjax.retrieval import best
from dprjax.retrieval.best import TopK, check_finite

_AXIS = 'corpus'
# Least rows on a device at a time. With fewer, CPUs use kernels that round differently, so that a
# search in parts would give other bits. The limit for numpy is higher than for XLA.
_LEAST_ROWS = 128
_LEAST_ROWS_OF_NUMPY = 4096
_ROWS_OF_NUMPY = 8192  # at a time: their scores fit into the cache of a CPU
_DECODED = 1024  # rows of codes at a time on a CPU; a power of two, like the rows of a device


class Rows(Protocol):
  """Vectors in memory or elsewhere, of which numpy can read slices (`embeddings.ShardRows`)."""

  @property
  def shape(self) -> tuple[int, ...]: ...

  def __len__(self) -> int: ...

  def __getitem__(self, rows: slice, /) -> Any: ...


class _Block(NamedTuple):
  """``used`` rows of the corpus from row ``offset`` on, and padding."""

  offset: int
  used: int
  rows: Any  # [rows, W]


class ExactIndex:
  """A corpus for many searches; its vectors stay on the devices."""

  def __init__(
    self,
    corpus: Float[np.ndarray, 'n H'] | Sequence[Rows],
    *,
    devices: Sequence[jax.Device] | None = None,
    block_rows: int = 32_768,
    keep: bool = True,
    ids_at: best.Ids = best.numbers,
  ):
    """Places a corpus on the devices.

    Args:
      corpus: one array, or several in order.
      devices: used for the search; by default all local devices.
      block_rows: rows of the corpus at a time, on all devices together.
      keep: False reads the corpus for each search, a block at a time.
      ids_at: ids of rows, which order equal scores; row numbers by default.
    """
    shards: Sequence[Any] = [corpus] if isinstance(corpus, np.ndarray) else corpus
    self._ids_at = ids_at
    self._count = sum(len(shard) for shard in shards)
    # Devices decode codes block by block.
    code = getattr(shards[0], 'code', None) if shards else None
    self._shards: Sequence[Rows] = shards if code is None else [shard.stored for shard in shards]
    self._dtype = np.dtype(np.float32) if code is None else codes.stored(code.dtype)
    devices = jax.local_devices() if devices is None else list(devices)
    self._on_host = len(devices) == 1 and devices[0].platform == 'cpu'
    self._mesh = Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))
    self._split = NamedSharding(self._mesh, PartitionSpec(_AXIS))
    everywhere = NamedSharding(self._mesh, PartitionSpec())
    self._ranges = () if code is None else jax.device_put(tuple(code.ranges), everywhere)
    # Powers of two, so that a growing corpus seldom compiles anew.
    device_rows = min(
      _power_of_two(-(-rows // len(devices))) for rows in (max(self._count, 1), block_rows)
    )
    least = _LEAST_ROWS_OF_NUMPY if self._on_host else _LEAST_ROWS
    self._block_rows = max(device_rows, least) * len(devices)
    self._kept = list(self._read()) if keep else None

  def __len__(self) -> int:
    return self._count

  def search(
    self, queries: Float[np.ndarray, 'queries H'], k: int, *, block_queries: int = 512
  ) -> TopK:
    """The ``min(k, n)`` rows with the largest inner products, in float32.

    Args:
      queries: float32 or float16.
    """
    check_finite(queries, 'query', 0)
    k = min(k, self._count)
    if self._on_host:
      return self._search_on_host(np.asarray(queries, np.float32), k, block_queries)
    block_queries = min(block_queries, _power_of_two(len(queries)))
    everywhere = NamedSharding(self._mesh, PartitionSpec())
    parts = [
      jax.device_put(_padded(queries[start : start + block_queries], block_queries), everywhere)
      for start in range(0, len(queries), block_queries)
    ]
    shape = (self._mesh.size, block_queries, k)
    cut = np.zeros(shape[:2], bool)
    empty = np.full(shape, -np.inf, np.float32), np.full(shape, -1, np.int32), cut
    states = [jax.device_put(empty, self._split) for _ in parts]
    for offset, used, rows in self._each_block():
      if self._kept is None:
        # At most one block ahead, or blocks pile up on the devices.
        jax.block_until_ready(states)
      states = [
        _step(self._mesh, part, rows, used, offset, *state, self._ranges)
        for part, state in zip(parts, states, strict=True)
      ]
    merged = [jax.device_get(_merge(*state)) for state in states]
    scores, rows, cut = (
      np.concatenate(arrays)[: len(queries)] for arrays in zip(*merged, strict=True)
    )
    for number, part in enumerate(parts):
      start = number * block_queries
      crowded = np.flatnonzero(cut[start : start + block_queries])
      if len(crowded):
        scores[start + crowded], rows[start + crowded] = self._again(part, crowded, k)
    return best.order(TopK(scores, rows), k, self._ids_at)

  def _again(self, part: Any, crowded: Int[np.ndarray, ' some'], k: int) -> TopK:
    top = best.Best(len(crowded), k, self._ids_at)
    chosen = np.resize(crowded, _power_of_two(len(crowded)))  # few sizes to compile
    for offset, used, rows in self._each_block():
      similar = np.asarray(_similar(self._mesh, part, rows, self._ranges, chosen))
      top.add(similar[: len(crowded), :used], offset)
    return top.ranked()

  def _search_on_host(
    self, queries: Float[np.ndarray, 'queries H'], k: int, block_queries: int
  ) -> TopK:
    parts = [
      queries[start : start + block_queries] for start in range(0, len(queries), block_queries)
    ]
    lists = [best.Best(len(part), k, self._ids_at) for part in parts]
    scores = np.empty(len(parts[0]) * _ROWS_OF_NUMPY, np.float32)
    for offset, used, rows in self._each_block():
      for part, top in zip(parts, lists, strict=True):
        if self._ranges:
          padded = _padded(part, _power_of_two(len(part)))  # few sizes to compile
          similar = np.asarray(_coded_products(padded, rows, self._ranges))
          top.add(similar[: len(part), :used], offset)
          continue
        for start in range(0, used, _ROWS_OF_NUMPY):
          some = rows[start : start + _ROWS_OF_NUMPY]
          # Reuse one array, since fresh memory costs page faults.
          similar = scores[: len(part) * len(some)].reshape(len(part), len(some))
          np.matmul(part, some.T, out=similar)
          top.add(similar[:, : used - start], offset + start)
    ranked = zip(*(top.ranked() for top in lists), strict=True)
    return TopK(*(np.concatenate(arrays) for arrays in ranked))

  def _each_block(self) -> Iterator[_Block]:
    return self._read() if self._kept is None else iter(self._kept)

  def _read(self) -> Iterator[_Block]:
    for block in _blocks(self._shards, self._block_rows, self._dtype):
      if not self._ranges:
        check_finite(block.rows[: block.used], 'document', block.offset)
      if not self._on_host or self._ranges:
        block = block._replace(rows=jax.device_put(block.rows, self._split))
      yield block


def search(
  queries: Float[np.ndarray, 'queries H'],
  corpus: Float[np.ndarray, 'n H'] | Sequence[Rows],
  k: int,
  *,
  block_queries: int = 512,
  **options: Any,
) -> TopK:
  """One search of a corpus that may exceed memory, with the options of `ExactIndex`."""
  return ExactIndex(corpus, keep=False, **options).search(queries, k, block_queries=block_queries)


def search_part(
  queries: Float[np.ndarray, 'queries H'],
  corpus: Sequence[Rows],
  k: int,
  part: int,
  parts: int,
  ids_at: best.Ids = best.numbers,
) -> TopK:
  """Searches part ``part`` of ``parts`` equal parts, on the devices of this process, for `merge`.

  Rows are numbered as in the whole corpus.
  """
  count = sum(len(shard) for shard in corpus)
  start, stop = part * count // parts, (part + 1) * count // parts
  shards, offset = [], 0
  for shard in corpus:
    shards.append(shard[max(start - offset, 0) : max(stop - offset, 0)])
    offset += len(shard)
  shape = len(queries), min(k, count)
  scores, rows = np.full(shape, -np.inf, np.float32), np.full(shape, -1, np.int32)
  if stop > start:
    top = search(queries, shards, min(k, stop - start), ids_at=lambda rows: ids_at(rows + start))
    width = top.rows.shape[1]
    scores[:, :width], rows[:, :width] = top.scores, top.rows + start
  return TopK(scores, rows)


def merge(
  scores: Float[np.ndarray, 'parts queries k'],
  rows: Int[np.ndarray, 'parts queries k'],
  ids_at: best.Ids = best.numbers,
) -> TopK:
  """The best k of all parts: equals ``search`` in the whole corpus."""
  k = scores.shape[-1]
  top = TopK(*(np.moveaxis(array, 0, 1).reshape(array.shape[1], -1) for array in (scores, rows)))
  return best.order(top, k, ids_at)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(5, 6, 7))
def _step(
  mesh: Mesh,
  queries: Float[Array, 'Q H'],
  block: Shaped[Array, 'rows W'],
  used: Int[Array, ''],
  offset: Int[Array, ''],
  scores: Float[Array, 'devices Q k'],
  rows: Int[Array, 'devices Q k'],
  cut: Bool[Array, 'devices Q'],
  ranges: tuple[Float[Array, ' H'], ...],
) -> tuple[Float[Array, 'devices Q k'], Int[Array, 'devices Q k'], Bool[Array, 'devices Q']]:
  """Merges one block into the list of every device.

  The first ``used`` rows of the block are real; row 0 is row ``offset`` of the corpus. ``cut``:
  whether rows that tie with the last in the list were left out. ``ranges``: of codes; empty for
  float32.
  """

  def local(queries, block, used, offset, scores, rows, cut, ranges):
    k = scores.shape[-1]
    similar = _of_block(mesh, queries, block, ranges)
    row = jax.lax.axis_index(_AXIS) * block.shape[0] + jnp.arange(block.shape[0], dtype=jnp.int32)
    similar = jnp.where((row < used)[None, :], similar, -jnp.inf)
    before = scores[0, :, -1]
    candidates = jnp.concatenate([scores[0], similar], axis=1)
    candidate_rows = jnp.concatenate(
      [rows[0], jnp.broadcast_to((row + offset)[None, :], similar.shape)], axis=1
    )
    scores, places = jax.lax.top_k(candidates, k)
    last = scores[:, -1]
    crowded = jnp.count_nonzero(candidates >= last[:, None], axis=1) > k
    cut = (last > -jnp.inf) & (crowded | (cut[0] & (last == before)))
    return scores[None], jnp.take_along_axis(candidate_rows, places, axis=1)[None], cut[None]

  each, whole = PartitionSpec(_AXIS), PartitionSpec()
  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(whole, each, whole, whole, each, each, each, whole),
    out_specs=(each, each, each),
  )(queries, block, used, offset, scores, rows, cut, ranges)


@functools.partial(jax.jit, static_argnums=0)
def _similar(
  mesh: Mesh,
  queries: Float[Array, 'Q H'],
  block: Shaped[Array, 'rows W'],
  ranges: tuple[Float[Array, ' H'], ...],
  chosen: Int[Array, ' some'],
) -> Float[Array, 'some rows']:
  """Scores of the chosen queries in a block, with the products of `_step`."""
  each, whole = PartitionSpec(_AXIS), PartitionSpec()
  return jax.shard_map(
    lambda *arrays: _of_block(mesh, *arrays[:3])[arrays[3]],
    mesh=mesh,
    in_specs=(whole, each, whole, whole),
    out_specs=PartitionSpec(None, _AXIS),
  )(queries, block, ranges, chosen)


def _of_block(
  mesh: Mesh,
  queries: Float[Array, 'Q H'],
  block: Shaped[Array, 'rows W'],
  ranges: tuple[Float[Array, ' H'], ...],
) -> Float[Array, 'Q rows']:
  if not ranges:
    return _products(queries, block)
  rows_at_once = _DECODED if mesh.devices.flat[0].platform == 'cpu' else len(block)
  return _products_of_codes(queries, block, ranges, rows_at_once)


def _products(queries: Float[Array, 'Q H'], rows: Float[Array, 'rows H']) -> Float[Array, 'Q rows']:
  return jnp.einsum('qh,rh->qr', queries, rows, precision=jax.lax.Precision.HIGHEST)


def _products_of_codes(
  queries: Float[Array, 'Q H'],
  block: Shaped[Array, 'rows W'],
  ranges: tuple[Float[Array, ' H'], ...],
  rows_at_once: int,
) -> Float[Array, 'Q rows']:
  # Decoded pieces stay in the CPU cache: six times as fast for a single query.
  pieces = block.reshape(-1, min(rows_at_once, len(block)), block.shape[1])
  similar = jax.lax.map(lambda piece: _products(queries, _decode(piece, *ranges)), pieces)
  return jnp.moveaxis(similar, 0, 1).reshape(len(queries), -1)


_coded_products = jax.jit(functools.partial(_products_of_codes, rows_at_once=_DECODED))


def _decode(
  block: Shaped[Array, 'rows W'], low: Float[Array, ' H'], high: Float[Array, ' H']
) -> Float[Array, 'rows H']:
  """Like ``codes.decode``, on a device."""
  if block.dtype == jnp.uint8:
    places = jnp.arange(7, -1, -1, dtype=jnp.uint8)[None, None, :]
    bits = (block[:, :, None] >> places) & jnp.uint8(1)
    bits = bits.reshape(len(block), -1)[:, : len(low)]
    return jnp.where(bits == 1, high[None, :], low[None, :])
  step = (high - low) / (codes.LEVELS['int8'] - 1)
  return low[None, :] + (block.astype(jnp.float32) + 128.0) * step[None, :]


@jax.jit
def _merge(
  scores: Float[Array, 'devices Q k'],
  rows: Int[Array, 'devices Q k'],
  cut: Bool[Array, 'devices Q'],
) -> tuple[Float[Array, 'Q k'], Int[Array, 'Q k'], Bool[Array, ' Q']]:
  """The best k of all lists, and whether rows that tie with the last were left out."""
  k = scores.shape[-1]
  together = [jnp.moveaxis(array, 0, 1).reshape(array.shape[1], -1) for array in (-scores, rows)]
  negated, rows = jax.lax.sort(together, num_keys=2)
  last = -negated[:, k - 1]
  crowded = jnp.count_nonzero(-negated >= last[:, None], axis=1) > k
  cut = (last > -jnp.inf) & (crowded | (cut & (scores[:, :, -1] == last[None])).any(axis=0))
  return -negated[:, :k], rows[:, :k], cut


def _blocks(shards: Sequence[Rows], rows: int, dtype: np.dtype) -> Iterator[_Block]:
  """Blocks of ``rows`` rows across shards, padded with 0.

  A block inside an array of this dtype is a view; other blocks are new.
  """
  offset = used = 0
  shape = rows, shards[0].shape[1] if shards else 0
  block = np.zeros(shape, dtype)
  for shard in shards:
    start = 0
    while start < len(shard):
      taken = min(rows - used, len(shard) - start)
      if taken == rows and type(shard) is np.ndarray and shard.dtype == dtype:
        yield _Block(offset, rows, shard[start : start + rows])
        offset, start = offset + rows, start + rows
        continue
      block[used : used + taken] = shard[start : start + taken]
      start, used = start + taken, used + taken
      if used == rows:
        yield _Block(offset, used, block)
        # A new array, since devices may still read the last one.
        offset, used, block = offset + rows, 0, np.zeros(shape, dtype)
  if used:
    yield _Block(offset, used, block)


def _padded(array: np.ndarray, rows: int) -> np.ndarray:
  result = np.zeros((rows, array.shape[1]), np.float32)
  result[: len(array)] = array
  return result


def _power_of_two(number: int) -> int:
  return 1 << (number - 1).bit_length()
