"""Simulates a pod on one machine: runs a command in several processes with their own CPU devices.

    python launch/local_pod.py --processes=2 --devices=2 -m dprjax.train \\
        --config=configs/dptdr.py:local --workdir=runs/pod

Each process runs the command after the options, from -m (or the name of a script) on. The
processes find each other by DPRJAX_COORDINATOR, DPRJAX_PROCESSES and DPRJAX_PROCESS in their
environment. Each line of output has the number of its process in front.

SIGTERM and SIGINT are passed on to all. When a process fails, the others have --grace seconds to
notice and end by themselves before they are killed. The exit status is that of the process that
failed first (128 + N if signal N ended it).
"""

import argparse
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
    prog='python launch/local_pod.py',
    description=__doc__,
    allow_abbrev=False,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument('--processes', type=positive, default=2, metavar='N', help='default: 2')
  parser.add_argument(
    '--devices', type=positive, default=1, metavar='M', help='devices of each process (default: 1)'
  )
  parser.add_argument(
    '--grace',
    type=float,
    default=30.0,
    metavar='SECONDS',
    help='for the others to end by themselves after one failed (default: 30)',
  )
  arguments = list(sys.argv[1:] if argv is None else argv)
  split = next((i for i, word in enumerate(arguments) if not word.startswith('--')), len(arguments))
  args = parser.parse_args(arguments[:split])
  command = arguments[split:]
  if not command:
    parser.error(
      'what should the processes run? for instance -m dprjax.train --config=... --workdir=...'
    )
  address = f'127.0.0.1:{free_port()}'
  processes = []
  # Before the first child starts, so that none is orphaned.
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: [process.send_signal(number) for process in processes])
  for i in range(args.processes):
    processes.append(
      subprocess.Popen(
        [sys.executable, *command],
        env=environment(address, args.processes, i, args.devices),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # Ctrl-C in a terminal then reaches only this process, which passes it on.
        start_new_session=True,
        preexec_fn=die_with_parent,
      )
    )
  threads = [
    threading.Thread(target=pass_on, args=(i, process)) for i, process in enumerate(processes)
  ]
  for thread in threads:
    thread.start()
  status = wait(processes, args.grace)
  for thread in threads:
    thread.join()
  return status


def positive(text: str) -> int:
  if not text.isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f'expected a whole number above 0, not {text!r}')
  return int(text)


def free_port() -> int:
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    return int(probe.getsockname()[1])


def environment(address: str, processes: int, process: int, devices: int) -> dict[str, str]:
  flags = re.sub(r'--xla_force_host_platform_device_count=\d+', '', os.environ.get('XLA_FLAGS', ''))
  return os.environ | {
    'DPRJAX_COORDINATOR': address,
    'DPRJAX_PROCESSES': str(processes),
    'DPRJAX_PROCESS': str(process),
    'JAX_PLATFORMS': 'cpu',
    'XLA_FLAGS': f'{flags} --xla_force_host_platform_device_count={devices}'.strip(),
    'PYTHONUNBUFFERED': '1',
  }


def die_with_parent() -> None:
  """Runs in the child: it will be killed with its parent (on Linux; elsewhere it finishes)."""
  if sys.platform == 'linux':
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def pass_on(number: int, process: subprocess.Popen[bytes]) -> None:
  assert process.stdout is not None
  for line in process.stdout:
    if line.startswith(b'[Gloo] Rank'):  # a line for every group of processes that connects
      continue
    sys.stdout.buffer.write(f'[{number}] '.encode() + line.rstrip(b'\n') + b'\n')
    sys.stdout.buffer.flush()


def wait(processes: list[subprocess.Popen[bytes]], grace: float) -> int:
  """Waits for all; returns the status of the first that failed, or 0."""
  first, deadline = 0, None

  def worst() -> int:
    # If several failed since the last look, one ended by a signal (a negative status) is more
    # likely the cause than a consequence.
    return min((process.returncode for process in processes if process.returncode), default=0)

  while None in [process.poll() for process in processes]:  # polls all of them
    bad = worst()
    if bad and deadline is None:
      first, deadline = bad, time.monotonic() + grace
    if deadline is not None and time.monotonic() > deadline:
      for process in processes:
        process.kill()
    time.sleep(0.05)
  first = first or worst()
  return 128 - first if first < 0 else first


if __name__ == '__main__':
  sys.exit(main())
