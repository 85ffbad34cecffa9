"""Runs the benchmarks of speed on the accelerator of this machine or, without one, its processor.

    python benchmarks/all.py [--out=DIR] [--minutes=60] [--only=step,limit,...]
    python benchmarks/all.py --out=$OUT --minutes=9.5      a GPU for ten minutes

The most informative come first. Each runs in its own process with its defaults for the machine, for
at most the rest of the time. Those that fail or do not fit are named at the end, and the exit
status is then 1. Results and output (all.log) go to --out.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import time

# The most informative first. A missing package makes only the benchmark fail that needs it.
BENCHMARKS = {
  'step': [],
  'limit': [],
  'encode': [],
  'contrastive': [],
  'grad_cache': [],
  'startup': ['--runs=2'],
  'index': [],
}


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--out', help='a folder for the results (default: benchmarks/results)')
  parser.add_argument('--minutes', type=float, default=60, help='for all of them (default: 60)')
  parser.add_argument(
    '--only', default=','.join(BENCHMARKS), help=f'some of {", ".join(BENCHMARKS)}, in order'
  )
  args = parser.parse_args()
  here = pathlib.Path(__file__).resolve().parent
  out = pathlib.Path(args.out).resolve() if args.out else here / 'results'
  out.mkdir(parents=True, exist_ok=True)
  path = os.pathsep.join(filter(None, [str(here.parent), os.environ.get('PYTHONPATH', '')]))
  settings = os.environ | {
    'BENCHMARK_RESULTS': str(out),
    'PYTHONPATH': path,
    'PYTHONUNBUFFERED': '1',
  }
  ends = time.monotonic() + 60 * args.minutes
  missed = []
  with (out / 'all.log').open('w+', encoding='utf-8') as log:
    for name in args.only.split(','):
      began, place = time.monotonic(), log.tell()
      try:
        command = [sys.executable, str(here / f'{name}.py'), *BENCHMARKS[name]]
        # If startup.py is cut off, its child ends by itself after one step.
        done = subprocess.run(
          command,
          stdout=log,
          stderr=subprocess.STDOUT,
          env=settings,
          timeout=max(ends - began, 0.1),
        )
        status = 'done' if not done.returncode else f'failed with status {done.returncode}'
      except subprocess.TimeoutExpired:
        status = 'cut off'
      log.seek(place)
      print(log.read())
      log.seek(0, os.SEEK_END)
      print(f'{name}: {status} after {time.monotonic() - began:.0f} s', file=log, flush=True)
      print(f'{name}: {status} after {time.monotonic() - began:.0f} s\n', flush=True)
      if status != 'done':
        missed.append(name)
  if missed:
    print(f'not measured: {", ".join(missed)}')
    sys.exit(1)


if __name__ == '__main__':
  main()
