"""Finds flags that make an update fit into memory."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import ml_collections

from dprjax.planning.compiling import Program

Attempt = Callable[[Sequence[str]], Program]
"""Compiles the update with additional config flags."""


class Fit(NamedTuple):
  """Flags that make an update fit, with its program and chunks; () and None if there are none."""

  flags: tuple[str, ...]
  program: Program | None
  chunks: int = 0

  @property
  def moved(self) -> float:
    """Bytes to and from memory."""
    return float(self.program.answer['xla']['bytes']) if self.program else float('inf')


def fit(config: ml_collections.ConfigDict, devices: int, program: Program, attempt: Attempt) -> Fit:
  """The smallest ``grad_cache`` that makes an update fit.

  Compares it with fewer chunks under ``backbone.remat``, and takes the one that moves fewer bytes,
  since each chunk reads the weights again. If neither fits, splits weights over more devices
  (``mesh.fsdp``). More chunks never need more memory, so bisection finds the smallest number.
  """
  held = sum(program.answer.get('held', {}).values())
  model = config.mesh.model if config.mesh.model > 0 else 1
  first = config.mesh.fsdp if config.mesh.fsdp > 0 else 1
  sizes = chunks(config, devices // model)
  for fsdp in _doublings(first, devices // model):
    # The least memory: weights and optimiser state.
    if held * first / fsdp > program.has:
      continue
    mesh = () if fsdp == first else (f'--config.mesh.fsdp={fsdp}', '--config.mesh.data=-1')
    # Skip sizes already tried.
    new = sizes if mesh else [size for size in sizes if size > config.grad_cache]
    if (best := _fewest(config, new, sizes, mesh, attempt)) is not None:
      return best
  return Fit((), None)


def chunks(config: ml_collections.ConfigDict, parts: int) -> list[int]:
  """Numbers of chunks that ``parts`` devices can share, ascending, from the configured one on."""
  first, rows = config.grad_cache, config.batch_size // parts
  return [size for size in range(first, rows + 1) if config.batch_size % (parts * size) == 0]


def _fewest(
  config: ml_collections.ConfigDict,
  plain: Sequence[int],
  again: Sequence[int],
  more: Sequence[str],
  attempt: Attempt,
) -> Fit | None:
  """The fit that moves the fewest bytes: the fewest chunks, or even fewer with remat.

  ``plain`` and ``again`` are the numbers of chunks without and with remat.
  """
  best = None
  remat = ('--config.backbone.remat=true',)
  ways = [(again, remat)] if config.backbone.remat else [(plain, ()), (again, remat)]
  for sizes, flags in ways:
    fewer = [size for size in sizes if best is None or size < best.chunks]
    found = _smallest(fewer, (*more, *flags), attempt)
    both = [one for one in (best, found) if one is not None]
    best = min(both, key=lambda one: one.moved, default=None)
  return best


def _doublings(first: int, most: int) -> Iterator[int]:
  size = first
  while size <= most and most % size == 0:
    yield size
    size *= 2


def _smallest(sizes: Sequence[int], more: Sequence[str], attempt: Attempt) -> Fit | None:
  """The fit with the fewest of these chunks; None if even the most do not fit."""
  best: Fit | None = None
  low, high = 0, len(sizes) - 1
  middle = high
  while low <= high:
    flags = (f'--config.grad_cache={sizes[middle]}', *more)
    program = attempt(flags)
    if program.fits:
      best, high = Fit(flags, program, sizes[middle]), middle - 1
    elif best is None:
      return None  # with the most chunks
    else:
      low = middle + 1
    middle = (low + high) // 2
  return best
