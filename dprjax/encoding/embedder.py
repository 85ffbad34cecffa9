"""Turns rows of tokens into vectors on all devices of a mesh."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from dprjax.base import machine, tree
from dprjax.base import mesh as meshes
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.models.encoder_config import Arithmetic, EncoderConfig
from dprjax.text import tokenizing

logger = logging.getLogger('dprjax')

# Padded lengths; each is compiled once.
BUCKETS = (16, 32, 64, 96, 128, 192, 256, 384, 512)
# The most tokens of a step for each CPU core, so that activations stay in caches
# (docs/performance.md).
_CORE_TOKENS = 1024

# Only here, table rows are looked up: no product sums over the split axis.
_TABLE = ((r'backbone/.*embeddings/word/embedding', P(None, ('fsdp', 'model'))),)

EmbedFn = Callable[..., jax.Array]
ProgressFn = Callable[[int], None]


def local_mesh(parts: int = 1) -> Mesh:
  """All local devices, which split each batch; weights are split into ``parts``."""
  devices = jax.local_devices()
  if len(devices) % parts:
    raise _parts_error(parts, devices)
  return meshes.make_mesh({'data': -1, 'fsdp': parts}, devices)


def server_mesh(parts: int = 1) -> Mesh:
  """The first ``parts`` local devices; each computes all batches with its part of every layer."""
  devices = jax.local_devices()
  if not 0 < parts <= len(devices):
    raise _parts_error(parts, devices)
  return meshes.make_mesh({'model': parts}, devices[:parts])


def _parts_error(parts: int, devices: Sequence[jax.Device]) -> InputError:
  return InputError(f'--weight_parts={parts} does not fit {counted(len(devices), "local devices")}')


def weight_dtype(arithmetic: Arithmetic, stored: Any, platform: str) -> Any:
  """The type of encoder parameters on devices: bfloat16 for bfloat16 arithmetic, else as stored.

  On CPUs, float32 arithmetic uses float32 parameters, since casts in every batch would take longer
  than the products of a short text.
  """
  if arithmetic.name == 'bfloat16' or (arithmetic.name == 'float32' and platform == 'cpu'):
    return arithmetic.activations
  return jnp.dtype(stored)


def weight_parts(needed: int, memory: float, devices: int) -> int:
  """The fewest devices whose half memory has room for the weights; else all devices.

  Args:
    needed, memory: bytes of the weights and of one device.
    devices: their number; the result divides it.
  """
  sizes = (size for size in range(1, devices + 1) if devices % size == 0)
  return next((size for size in sizes if needed <= size * memory / 2), devices)


def local_parts(arithmetic: Arithmetic, *params: Any) -> int:
  """`weight_parts` of encoder parameters on the local devices."""
  devices = jax.local_devices()
  platform = devices[0].platform
  needed = sum(
    math.prod(leaf.shape) * weight_dtype(arithmetic, leaf.dtype, platform).itemsize
    for leaf in jax.tree.leaves(params)
  )
  if platform == 'cpu':
    memory = machine.memory_bytes() / len(devices)
  else:
    memory = (devices[0].memory_stats() or {}).get('bytes_limit', math.inf)
  parts = weight_parts(needed, memory, len(devices))
  if parts > 1:
    logger.info('the backbone (%.1f GB) is split over %d devices', needed / 1e9, parts)
  return parts


def place(mesh: Mesh, params: Any) -> Any:
  return meshes.put(params, jax.tree.map(lambda _: meshes.replicated(mesh), params))


def backbone_shardings(
  mesh: Mesh, config: EncoderConfig, named: Mapping[str, Any]
) -> dict[str, NamedSharding]:
  return meshes.param_shardings(mesh, named, (*config.family.sharding, *_TABLE))


def place_backbone(mesh: Mesh, config: EncoderConfig, params: Any, arithmetic: Arithmetic) -> Any:
  """Places encoder parameters, split as in training if the mesh has fsdp or model.

  Args:
    params: arrays, or on disk (`weights.OnDisk`): then memory has the part of one parameter for one
      device at a time, in the type of `weight_dtype`.
  """
  platform = mesh.devices.flat[0].platform
  named = {
    name: leaf.astype(weight_dtype(arithmetic, leaf.dtype, platform))
    for name, leaf in tree.flatten({'backbone': params}).items()
  }
  shardings = backbone_shardings(mesh, config, named)
  return tree.unflatten(meshes.put(named, shardings))['backbone']


def count_from(done: int, progress: ProgressFn | None) -> ProgressFn | None:
  """``progress`` for work after ``done`` rows."""
  return None if progress is None else lambda count: progress(done + count)


def rows_at_once(platform: str, devices: int, batch_size: int, length: int) -> int:
  """The rows of a step: ``batch_size``, or fewer on CPUs to fit caches; equal on all devices."""
  if platform == 'cpu':
    batch_size = min(batch_size, max(_CORE_TOKENS * machine.cores() // length, 1))
  return -(-batch_size // devices) * devices


def check_size(name: str, value: Any, most: float = math.inf, of: str = '') -> None:
  """Raises InputError unless a size is a whole number from 1 to ``most``, that ``of`` a model."""
  whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
  if not whole or not 1 <= value <= most:
    limit = f' to {most}{of and f", of {of}"}' if most < math.inf else ''
    raise InputError(f'{name}: expected a whole number from 1{limit}, not {value!r:.60}')


def padded_lengths(max_length: int) -> list[int]:
  return [length for length in BUCKETS if length < max_length] + [max_length]


class Embedder:
  """Embeds rows of any length: sorted, padded to a few lengths, split over devices.

  Args:
    embed: ``(params, tokens [B, T], mask [B, T], *columns [B]) -> [B, H]``, to be jitted.
    batch_size: the most rows of a step, over all devices; see ``rows_at_once``.
  """

  def __init__(
    self,
    embed: EmbedFn,
    mesh: Mesh,
    batch_size: int,
    max_length: int,
    pad_id: int,
  ):
    check_size('batch_size', batch_size)
    check_size('max_length', max_length)
    platform = mesh.devices.flat[0].platform
    devices = meshes.batch_devices(mesh)
    self._rows = {
      length: rows_at_once(platform, devices, batch_size, length)
      for length in padded_lengths(max_length)
    }
    self._embed = jax.jit(embed, out_shardings=meshes.replicated(mesh))
    self._pad_id = pad_id
    self._sharding = NamedSharding(mesh, P(meshes.BATCH))

  def lower(
    self, params: Any, length: int, columns: Sequence[tuple[Any, ...]] = ()
  ) -> jax.stages.Lowered:
    """The program for rows of a length, from shapes.

    Args:
      params: shapes with shardings.
      columns: ``(dtype, *shape)`` of a row of further arguments.
    """

    def rows(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct((self._rows[length], *shape), dtype, sharding=self._sharding)

    batch = (rows(np.int32, length), rows(np.bool_, length), *(rows(*column) for column in columns))
    return self._embed.lower(params, *batch)

  def __call__(
    self,
    params: Any,
    rows: Sequence[np.ndarray],
    progress: ProgressFn | None = None,
    columns: Sequence[np.ndarray] = (),
  ) -> Float[np.ndarray, 'n H']:
    """The vectors of rows of token ids (one or more), float32, in order.

    Args:
      columns: further arguments of ``embed``, one number for each row.
    """
    vectors: np.ndarray | None = None
    done = 0
    for indices, values in self._ahead(params, rows, columns):
      if vectors is None:
        vectors = np.zeros((len(rows), values.shape[1]), np.float32)
      vectors[indices] = np.asarray(values)
      done += len(indices)
      if progress is not None:
        progress(min(done, len(rows)))
    assert vectors is not None, 'no rows'
    return vectors

  def _ahead(
    self, params: Any, rows: Sequence[np.ndarray], columns: Sequence[np.ndarray]
  ) -> Iterator[tuple[np.ndarray, jax.Array]]:
    # The device computes the next batch while the caller copies this one.
    waiting = None
    lengths = np.array([len(row) for row in rows], np.int32)
    for indices, length in tokenizing.length_buckets(lengths, self._rows):
      batch = (
        *tokenizing.pad_batch([rows[i] for i in indices], length, self._pad_id),
        *(column[indices] for column in columns),
      )
      values = self._embed(params, *meshes.put(batch, (self._sharding,) * len(batch)))
      if waiting is not None:
        yield waiting
      waiting = (indices, values)
    if waiting is not None:
      yield waiting
