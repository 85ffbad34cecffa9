"""Writes results of a benchmark to benchmarks/results/NAME-HARDWARE.json.

$BENCHMARK_RESULTS names another folder, for runs that are not kept or for another machine.
"""

import os
import pathlib
import platform
import re
from collections.abc import Mapping
from typing import Any

from dprjax.base import files

_RESULTS = pathlib.Path(
  os.environ.get('BENCHMARK_RESULTS') or pathlib.Path(__file__).parent / 'results'
)


def write(
  benchmark: str,
  cases: Any,
  settings: Mapping[str, Any],
  versions: Mapping[str, str],
  device: str = '',
) -> None:
  """Writes the file and prints its path.

  Args:
    benchmark: name of the script.
    cases: the measurements.
    settings: the options of the run.
    versions: of the packages that matter, besides Python.
    device: name of the accelerator; '' or 'cpu' is the processor of this machine.
  """
  device = device if device not in ('', 'cpu') else _cpu()
  path = _RESULTS / f'{benchmark}-{re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")}.json'
  files.write_json(
    path,
    {
      'hardware': {
        'device': device,
        'cores': len(os.sched_getaffinity(0)),
        'load_average_at_the_end': round(os.getloadavg()[0], 1),
      },
      'versions': {'python': platform.python_version(), **versions},
      'settings': dict(settings),
      'cases': cases,
    },
  )
  print(f'wrote {path}')


def write_jax(
  benchmark: str, cases: Any, settings: Mapping[str, Any], versions: Mapping[str, str] | None = None
) -> None:
  """``write`` for a benchmark in this process on the first device of JAX."""
  import jax

  device = jax.devices()[0].device_kind
  write(benchmark, cases, settings, {'jax': jax.__version__, **(versions or {})}, device)


def _cpu() -> str:
  for line in pathlib.Path('/proc/cpuinfo').read_text().splitlines():
    if line.startswith('model name'):
      return line.partition(':')[2].strip()
  return platform.machine()
