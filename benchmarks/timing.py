"""Times several ways to do one thing. They take turns, so that other load affects all of them."""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Otherwise JAX allocates three quarters of the GPU memory, which leaves PyTorch too little. It is
# read when a backend starts.
os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')

Seconds = dict[str, list[float]]


def take_turns(
  ways: Mapping[str, Callable[[], Any]],
  runs: int,
  warm: int = 1,
  clock: Callable[[], float] = time.perf_counter,
) -> Seconds:
  """The seconds of every way, in ``runs`` rounds of one call each, after ``warm`` untimed rounds.

  A way must return only when its work is done. ``clock`` may be `time.process_time`.
  """
  seconds: Seconds = {name: [] for name in ways}
  for number in range(-warm, runs):
    for name, way in ways.items():
      began = clock()
      way()
      if number >= 0:
        seconds[name].append(clock() - began)
  return seconds


def summary(seconds: Seconds, base: str | None = None, per: int = 1) -> dict[str, dict[str, Any]]:
  """The median, the fastest and the slowest of each way, in milliseconds.

  Args:
    seconds: from ``take_turns``.
    base: the way that the others are compared with: ``ratio`` is the median over rounds of the
      seconds over those of the base (above 1: slower). A changing load affects it less than a
      ratio of medians.
    per: how often a way does its work in one call.
  """
  cases = {}
  for name, values in seconds.items():
    milliseconds = [1e3 * value / per for value in values]
    cases[name] = {
      'milliseconds': _rounded(statistics.median(milliseconds)),
      'fastest_and_slowest': [_rounded(f(milliseconds)) for f in (min, max)],
    }
    if base is not None:
      cases[name]['ratio'] = round(
        statistics.median(x / y for x, y in zip(values, seconds[base], strict=True)), 3
      )
  return cases


def show(cases: Mapping[str, Mapping[str, Any]], columns: Sequence[str], title: str = '') -> None:
  """Prints one line for each case, with the columns that it has."""
  width = max(map(len, [*cases, title]))
  print(f'{title:{width}}  ' + '  '.join(f'{column.replace("_", " "):>14}' for column in columns))
  for name, case in cases.items():
    print(
      f'{name:{width}}  ' + '  '.join(f'{_cell(case.get(column, "")):>14}' for column in columns),
      flush=True,
    )


def temporary_mib(program: Any) -> float:
  """The MiB that a compiled program requests beside its arguments and results."""
  return program.memory_analysis().temp_size_in_bytes / 2**20


def _cell(value: Any) -> str:
  if isinstance(value, list):
    return ' - '.join(map(_cell, value))
  return f'{value:,}' if isinstance(value, int | float) else str(value)


def _rounded(value: float) -> float:
  return float(f'{value:.4g}')
