"""The device mesh and the placement of arrays.

Axes: ``data`` splits the batch, ``fsdp`` batch and weights, ``model`` weights. Rules ``(regular
expression, PartitionSpec)`` place parameters by name.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Int

from dprjax.base import tree
from dprjax.base.counts import counted
from dprjax.base.errors import InputError

AXES = ('data', 'fsdp', 'model')
BATCH = ('data', 'fsdp')

# Column-parallel, then row-parallel (Megatron-LM, section 3); axis 0 stacks the layers.
RULES: tuple[tuple[str, P], ...] = (
  (r'(backbone|head)/.*attention/(query|key|value)/kernel', P(None, 'fsdp', 'model')),
  (r'(backbone|head)/.*attention/(query|key|value)/bias', P(None, 'model')),
  (r'(backbone|head)/.*attention/output/kernel', P(None, 'model', 'fsdp')),
  (r'(backbone|head)/.*mlp/(gate|up)/kernel', P(None, 'fsdp', 'model')),
  (r'(backbone|head)/.*mlp/(gate|up)/bias', P(None, 'model')),
  (r'(backbone|head)/.*mlp/down/kernel', P(None, 'model', 'fsdp')),
  (r'backbone/.*embeddings/word/embedding', P(None, 'fsdp')),
  (r'head/(mlm|classifier)/(dense|output)/kernel', P()),
  (r'backbone/(query/|passage/)?projection/\d+/kernel', P()),
  # Kernels need explicit rules, since an unsplit one takes memory on every device.
  (r'(backbone|head)/.*(?<!/kernel)', P()),
  (r'(prompt|topics|sources)/.*', P()),
)


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
  """A mesh with the axes ``data``, ``fsdp`` and ``model``; size -1 takes all remaining devices."""
  # Ordered by process, so that each process has contiguous rows of a batch.
  devices = sorted(
    jax.devices() if devices is None else devices,
    key=lambda device: (device.process_index, device.id),
  )
  shape = [int(sizes.get(axis, 1)) for axis in AXES]
  if -1 in shape:
    known = math.prod(size for size in shape if size != -1)
    shape[shape.index(-1)] = len(devices) // known
  if math.prod(shape) != len(devices):
    raise InputError(
      f'config.mesh: {" x ".join(map(str, shape))} ({", ".join(AXES)}) does not match '
      f'{len(devices)} devices'
    )
  return jax.make_mesh(tuple(shape), AXES, devices=devices, axis_types=(AxisType.Auto,) * len(AXES))


def batch_devices(mesh: Mesh) -> int:
  return mesh.shape['data'] * mesh.shape['fsdp']


def batch_rank(mesh: Mesh) -> tuple[int, int]:
  """(rank, count): this process reads part ``rank`` of ``count`` equal parts of every batch.

  Processes along 'model' share a rank.
  """
  processes = np.vectorize(lambda device: device.process_index)(mesh.devices)
  return batch_ranks(processes)[jax.process_index()]


def batch_ranks(processes: Int[np.ndarray, 'data fsdp model']) -> dict[int, tuple[int, int]]:
  """``batch_rank`` of each process, given the process of each device."""
  parts = processes.reshape(-1, processes.shape[-1])
  held = {
    int(process): tuple(np.flatnonzero((parts == process).any(axis=1)).tolist())
    for process in np.unique(processes)
  }
  distinct = sorted(set(held.values()))
  if sum(map(len, distinct)) != len(parts) or len(set(map(len, distinct))) != 1:
    raise InputError(
      f'config.mesh.model: {processes.shape[-1]} is neither a divisor nor a multiple of the '
      f'{processes.size // len(held)} devices of a process'
    )
  return {process: (distinct.index(rows), len(distinct)) for process, rows in held.items()}


def check_batch(mesh: Mesh, batch_size: int, chunks: int) -> None:
  """Raises InputError unless all devices get equal rows in every chunk."""
  parts = batch_devices(mesh)
  each = parts * chunks
  if batch_size % each:
    near = max(each, batch_size // each * each)
    raise InputError(
      f'config.batch_size: {counted(batch_size, "queries")} cannot be divided over '
      + counted(parts, 'devices')
      + (f' in {chunks} gradient-cache chunks' if chunks > 1 else '')
      + f'; use a multiple of {each}, for instance {near}'
    )


def param_shardings(
  mesh: Mesh, params: Mapping[str, Any], rules: Sequence[tuple[str, P]] = ()
) -> dict[str, NamedSharding]:
  """Shardings of a flat ``{name: array}`` tree, by ``rules`` and then ``RULES``.

  An axis not divisible by its mesh axis stays whole (an odd vocabulary, three heads).
  """
  specs = tree.first_match((*rules, *RULES), params, 'the sharding rules')
  shardings = {}
  for name, spec in specs.items():
    shape = np.shape(params[name])
    fitted = [
      axis if axis is not None and shape[i] % _parts(mesh, axis) == 0 else None
      for i, axis in enumerate(spec[: len(shape)])
    ]
    shardings[name] = NamedSharding(mesh, P(*fitted))
  return shardings


def _parts(mesh: Mesh, axis: str | tuple[str, ...]) -> int:
  return math.prod(mesh.shape[name] for name in ((axis,) if isinstance(axis, str) else axis))


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, P())


def activations(mesh: Mesh) -> tuple[NamedSharding | None, NamedSharding]:
  """The splits of activations in an encoder, by rows (None without fsdp), and by rows and heads."""
  rows = NamedSharding(mesh, P(BATCH)) if mesh.shape['fsdp'] > 1 else None
  return rows, NamedSharding(mesh, P(BATCH, 'model'))


def put_batch(mesh: Mesh, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
  """Global arrays, split over devices, from the rows of this process."""
  sharding = NamedSharding(mesh, P(BATCH))
  return {
    name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()
  }


def put(values: Any, shardings: Any) -> Any:
  """Places host arrays, complete on every process, as global arrays with these shardings.

  An array may be on disk: it has a shape, and its slices are arrays; then memory has the piece of
  one device at a time. On a pod, ``device_put`` would first compare arrays between all processes.
  """

  def place(value: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(value, jax.Array) or not hasattr(value, 'shape'):
      value = np.asarray(value)
    if isinstance(value, np.ndarray | np.generic) or sharding.is_fully_replicated:
      return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
    pieces = [
      jax.block_until_ready(jax.device_put(value[index], device))
      for device, index in sharding.addressable_devices_indices_map(value.shape).items()
    ]
    return jax.make_array_from_single_device_arrays(value.shape, sharding, pieces)

  return jax.tree.map(place, values, shardings)
