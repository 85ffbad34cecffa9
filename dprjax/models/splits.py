"""How activations are split over devices, where the compiler is told."""

import contextlib
import contextvars
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int


class Part(NamedTuple):
  """One part of a batch's rows.

  Attributes:
    axis: of the mesh, that splits the rows.
    number: of the part, from 0.
    parts: how many there are.
  """

  axis: str
  number: Int[Array, ''] | int
  parts: int


_WHOLE = Part('', 0, 1)
_part: contextvars.ContextVar[Part] = contextvars.ContextVar('part', default=_WHOLE)


@contextlib.contextmanager
def part_of(axis: str, number: Int[Array, ''] | int, parts: int) -> Iterator[None]:
  """While a function is traced for the rows of one part of a mesh axis, by ``jax.vmap`` with this
  ``spmd_axis_name``: what it splits inside is split over the other axes, and what it leaves out by
  dropout is what it would leave out of all rows.
  """
  token = _part.set(Part(axis, number, parts))
  try:
    yield
  finally:
    _part.reset(token)


def part() -> Part:
  """The part of the rows that is being traced; of all rows, the only one."""
  return _part.get()


def inside(split: NamedSharding) -> NamedSharding:
  """A split of arrays, without the axis that `part_of` names."""
  spec = (tuple(name for name in names(axes) if name != part().axis) for axes in split.spec)
  return NamedSharding(split.mesh, P(*(axes or None for axes in spec)))


def names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
  """The axes of a mesh that an axis of an array is split over."""
  return () if axes is None else (axes,) if isinstance(axes, str) else axes


def parts(split: NamedSharding, axis: int) -> int:
  """How many parts an axis of an array has."""
  return math.prod(split.mesh.shape[name] for name in names(split.spec[axis]))


def split_rows(x: Float[Array, 'B ...'], rows: NamedSharding | None) -> Float[Array, 'B ...']:
  """``x`` split by its first axis, where that can be divided so.

  Without it the compiler takes over the split of weights for activations, which are then reduced
  over the devices in every layer.
  """
  if rows is None:
    return x
  rows = inside(rows)
  return x if x.shape[0] % parts(rows, 0) else jax.lax.with_sharding_constraint(x, rows)
