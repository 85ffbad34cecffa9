"""Runs `programs` for a job in a process, with a time limit, and finds flags that make it fit."""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ml_collections

from dprjax.base.errors import InputError
from dprjax.planning import targets
from dprjax.planning.programs import CompileJob

COMMAND = ('-m', 'dprjax.planning.programs')


@dataclasses.dataclass(frozen=True)
class Program:
  """A compiled program or its failure; ``answer`` is from `programs`, partial on failure."""

  job: CompileJob
  answer: Mapping[str, Any]

  @property
  def target(self) -> targets.Target:
    return targets.parse(self.job.target)

  @property
  def failure(self) -> str:
    """The reason why there is no program, or ''."""
    return str(self.answer.get('failed', {}).get('why', ''))

  @property
  def needs(self) -> float:
    """Bytes needed on a device; NaN if unknown."""
    if 'memory' in self.answer:
      memory = self.answer['memory']
      return float(memory['argument'] + memory['temp'] + memory['output'] - memory['alias'])
    return float(self.answer['failed'].get('needs', float('nan')))

  @property
  def has(self) -> float:
    """Bytes available to programs on a device."""
    return float(self.answer.get('failed', {}).get('has', self.target.memory))

  @property
  def fits(self) -> bool | None:
    """Whether it fits into the memory of a device; None if unknown."""
    if 'memory' in self.answer:
      return self.needs <= self.has
    return False if self.answer['failed'].get('memory') else None


def compile_program(job: CompileJob, limit: float, text: bool = False) -> Program:
  """Compiles in a process, which ends after at most ``limit`` seconds.

  Args:
    text: whether the answer has the program, as XLA prints it.
  """
  target = targets.parse(job.target)
  targets.check_installed(target)
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, 'answer.json')
    output = pathlib.Path(folder, 'said')
    with output.open('wb') as log:
      process = subprocess.Popen(
        [sys.executable, *COMMAND, str(path)],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        env=targets.environment(target),
        start_new_session=True,
        bufsize=0,
      )
      assert process.stdin is not None
      try:
        with contextlib.suppress(BrokenPipeError):  # it has already ended
          process.stdin.write(json.dumps([dataclasses.asdict(job), text]).encode() + b'\n')
        process.wait(limit)
      except subprocess.TimeoutExpired:
        return Program(job, {'failed': {'why': f'no program after {limit:g} s', 'memory': False}})
      finally:
        with contextlib.suppress(ProcessLookupError):
          if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()  # ends the process, so not before
    try:
      answer = json.loads(path.read_text())
    except (OSError, ValueError):
      return Program(job, {'failed': {'why': _crash(process.returncode, output), 'memory': False}})
  if 'input_error' in answer:
    raise InputError(answer['input_error'])
  return Program(job, answer)


def _crash(status: int, output: pathlib.Path) -> str:
  how = f'status {status}'
  if status < 0:
    with contextlib.suppress(ValueError):
      how = signal.Signals(-status).name
  lines = [
    line.strip()
    for line in output.read_text(errors='replace').splitlines()
    if line.strip() and not line.startswith(('***', '@', 'PC:', ' ', '\t'))
  ]
  telling = [line for line in lines if 'Check failed' in line or line.startswith('F')] or lines
  return f'the compiler ended with {how}' + (f': {telling[-1]:.200}' if telling else '')


Attempt = Callable[[Sequence[str]], Program]
"""Compiles the update with additional config flags."""

_REMAT = ('--config.backbone.remat=true',)


class Fit(NamedTuple):
  """Flags that make an update fit, with its program; () and None if there are none."""

  flags: tuple[str, ...]
  program: Program | None


def fit(config: ml_collections.ConfigDict, devices: int, program: Program, attempt: Attempt) -> Fit:
  """The smallest ``grad_cache`` that makes an update fit.

  If none fits, the smallest with ``backbone.remat``; then with weights split over more devices
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
    plain = sizes if mesh else [size for size in sizes if size > config.grad_cache]
    ways = [_REMAT] if config.backbone.remat else [(), _REMAT]
    for remat in ways:
      if (smallest := _smallest(sizes if remat else plain, (*mesh, *remat), attempt)) is not None:
        return smallest
  return Fit((), None)


def chunks(config: ml_collections.ConfigDict, parts: int) -> list[int]:
  """Numbers of chunks that ``parts`` devices can share, ascending, from the configured one on."""
  first, rows = config.grad_cache, config.batch_size // parts
  return [size for size in range(first, rows + 1) if config.batch_size % (parts * size) == 0]


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
      best, high = Fit(flags, program), middle - 1
    elif best is None:
      return None  # with the most chunks
    else:
      low = middle + 1
    middle = (low + high) // 2
  return best
