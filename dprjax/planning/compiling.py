"""Runs `programs` for a job in a process, with a time limit."""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

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


def compile_program(job: CompileJob, limit: float) -> Program:
  """Compiles in a process, which ends after at most ``limit`` seconds."""
  target = targets.parse(job.target)
  targets.check_installed(target)
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, 'answer.json')
    said = pathlib.Path(folder, 'said')
    with said.open('wb') as log:
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
          process.stdin.write(json.dumps(dataclasses.asdict(job)).encode() + b'\n')
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
      return Program(job, {'failed': {'why': _crash(process.returncode, said), 'memory': False}})
  if 'input_error' in answer:
    raise InputError(answer['input_error'])
  return Program(job, answer)


def _crash(status: int, said: pathlib.Path) -> str:
  how = f'status {status}'
  if status < 0:
    with contextlib.suppress(ValueError):
      how = signal.Signals(-status).name
  lines = [
    line.strip()
    for line in said.read_text(errors='replace').splitlines()
    if line.strip() and not line.startswith(('***', '@', 'PC:', ' ', '\t'))
  ]
  telling = [line for line in lines if 'Check failed' in line or line.startswith('F')] or lines
  return f'the compiler ended with {how}' + (f': {telling[-1]:.200}' if telling else '')
