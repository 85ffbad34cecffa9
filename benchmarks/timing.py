"""Ways to do one thing that take turns, so that whatever else the machine does hurts all of them
alike; medians and ratios of them.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# JAX would take three quarters of a GPU's memory at its first array, and leave PyTorch beside it
# too little. Read when a backend starts.
os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')

Seconds = dict[str, list[float]]


def take_turns(ways: Mapping[str, Callable[[], Any]], runs: int, warm: int = 1) -> Seconds:
  """Seconds of every way in ``runs`` rounds, in each of which every way is called once; the first
  ``warm`` rounds (compilation) do not count.

  A way returns when its work is done, not when it is asked for.
  """
  seconds: Seconds = {name: [] for name in ways}
  for number in range(-warm, runs):
    for name, way in ways.items():
      began = time.perf_counter()
      way()
      if number >= 0:
        seconds[name].append(time.perf_counter() - began)
  return seconds


def summary(seconds: Seconds, base: str | None = None, per: int = 1) -> dict[str, dict[str, Any]]:
  """What is kept of each way: its median, its fastest and its slowest, in milliseconds.

  Args:
    seconds: as ``take_turns`` gives them.
    base: the way that the others are compared with: ``ratio`` is the median, over the rounds, of a
      way's seconds over the base's of the same round (above 1: slower), which a machine's changing
      load hurts less than a ratio of medians.
    per: how often a way did its work in a turn.
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
        statistics.median(one / other for one, other in zip(values, seconds[base], strict=True)), 3
      )
  return cases


def show(cases: Mapping[str, Mapping[str, Any]], columns: Sequence[str], title: str = '') -> None:
  """Prints a line a case, with the columns that it has."""
  width = max(map(len, [*cases, title]))
  print(f'{title:{width}}  ' + '  '.join(f'{column.replace("_", " "):>14}' for column in columns))
  for name, case in cases.items():
    print(
      f'{name:{width}}  ' + '  '.join(f'{_cell(case.get(column, "")):>14}' for column in columns),
      flush=True,
    )


def _cell(value: Any) -> str:
  return (
    f'{value:,}'
    if isinstance(value, int | float)
    else ' - '.join(map(_cell, value))
    if isinstance(value, list)
    else str(value)
  )


def _rounded(value: float) -> float:
  return float(f'{value:.4g}')
