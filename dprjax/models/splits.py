"""Splits of activations over devices."""

import contextlib
import contextvars
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int


class BatchPart(NamedTuple):
  """One part of the rows of a batch."""

  axis: str
  number: Int[Array, ''] | int
  parts: int


_WHOLE = BatchPart('', 0, 1)
_part: contextvars.ContextVar[BatchPart] = contextvars.ContextVar('part', default=_WHOLE)


@contextlib.contextmanager
def part_of(axis: str, number: Int[Array, ''] | int, parts: int) -> Iterator[None]:
  """Inside the block, functions are traced for the rows of one part of a mesh axis.

  ``jax.vmap`` has this ``spmd_axis_name``. Splits inside use the other axes, and dropout draws the
  same masks as for all rows.
  """
  token = _part.set(BatchPart(axis, number, parts))
  try:
    yield
  finally:
    _part.reset(token)


def part() -> BatchPart:
  return _part.get()


def inside(split: NamedSharding) -> NamedSharding:
  """A split without the axis of `part_of`."""
  spec = (tuple(name for name in names(axes) if name != part().axis) for axes in split.spec)
  return NamedSharding(split.mesh, P(*(axes or None for axes in spec)))


def names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
  return () if axes is None else (axes,) if isinstance(axes, str) else axes


def parts(split: NamedSharding, axis: int) -> int:
  return math.prod(split.mesh.shape[name] for name in names(split.spec[axis]))


def split_rows(x: Float[Array, 'B ...'], rows: NamedSharding | None) -> Float[Array, 'B ...']:
  """Splits ``x`` by its first axis, if divisible.

  Otherwise the compiler splits activations like weights and reduces them over the devices in every
  layer.
  """
  if rows is None:
    return x
  rows = inside(rows)
  return x if x.shape[0] % parts(rows, 0) else jax.lax.with_sharding_constraint(x, rows)
