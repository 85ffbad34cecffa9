"""Finds what an update needs to fit into memory: chunks, then remat, then sharded weights."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import ml_collections

from dprjax.planning.compiling import Program

Attempt = Callable[[Sequence[str]], Program]
"""Flags of the config, beside those that are given -> the update with them."""


class Fit(NamedTuple):
  """Flags with which an update fits, and that update; () and None where none was found."""

  flags: tuple[str, ...]
  program: Program | None


def fit(config: ml_collections.ConfigDict, devices: int, program: Program, attempt: Attempt) -> Fit:
  """The smallest ``grad_cache`` with which an update fits.

  Where none is large enough, layers are computed again in the backward pass (``backbone.remat``);
  where that does not suffice, weights are split over more and more devices (``mesh.fsdp``), each
  time with the smallest ``grad_cache``. More chunks never need more memory, so the smallest number
  is found by halving.

  Args:
    config: the experiment, whose update does not fit.
    devices: their number.
    program: that update.
    attempt: compiles another.
  """
  held = sum(program.answer.get('held', {}).values())
  model = config.mesh.model if config.mesh.model > 0 else 1
  first = config.mesh.fsdp if config.mesh.fsdp > 0 else 1
  sizes = chunks(config, devices // model)
  for fsdp in _doublings(first, devices // model):
    # The weights and their optimiser's state alone, at best.
    if held * first / fsdp > program.has:
      continue
    mesh = () if fsdp == first else (f'--config.mesh.fsdp={fsdp}', '--config.mesh.data=-1')
    for remat in dict.fromkeys((config.backbone.remat, True)):
      more = (*mesh, *(['--config.backbone.remat=true'] if remat else []))
      # What was given was tried before.
      new = sizes if more else [size for size in sizes if size > config.grad_cache]
      if (found := _smallest(new, more, attempt)) is not None:
        return found
  return Fit((), None)


def chunks(config: ml_collections.ConfigDict, parts: int) -> list[int]:
  """The numbers of chunks, from the given one on, that ``parts`` devices can share; ascending."""
  rows = config.batch_size // parts
  return [
    size for size in range(config.grad_cache, rows + 1) if config.batch_size % (parts * size) == 0
  ]


def _doublings(first: int, most: int) -> Iterator[int]:
  """``first``, and its doubles that divide ``most``."""
  size = first
  while size <= most and most % size == 0:
    yield size
    size *= 2


def _smallest(sizes: Sequence[int], more: Sequence[str], attempt: Attempt) -> Fit | None:
  """The fit with the fewest of these chunks; None where the most do not suffice."""
  best: Fit | None = None
  low, high = 0, len(sizes) - 1
  middle = high
  while low <= high:
    flags = (f'--config.grad_cache={sizes[middle]}', *more)
    program = attempt(flags)
    if program.fits:
      best, high = Fit(flags, program), middle - 1
    elif best is None:
      return None  # with the most chunks
    else:
      low = middle + 1
    middle = (low + high) // 2
  return best
