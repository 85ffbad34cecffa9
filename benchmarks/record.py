"""Where a benchmark's results go: benchmarks/results/NAME-HARDWARE.json, with what is needed to
read them later.

$BENCHMARK_RESULTS names another folder, for runs that are not to be kept or a machine from which
results are carried home.
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
  """Writes the file and says so.

  Args:
    benchmark: its name, the script's.
    cases: what was measured.
    settings: what it was measured with.
    versions: of the packages that count, Python's apart.
    device: ``jax.devices()[0].device_kind`` of an accelerator; '' or 'cpu': this machine's
      processor.
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


def _cpu() -> str:
  for line in pathlib.Path('/proc/cpuinfo').read_text().splitlines():
    if line.startswith('model name'):
      return line.partition(':')[2].strip()
  return platform.machine()
