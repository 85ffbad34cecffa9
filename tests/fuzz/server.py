"""Runs commands of dprjax in forks of one warm process, so that none of them imports JAX again.

    python -m tests.fuzz.server

Reads a JSON request a line and writes a JSON reply a line (``Reply``). A fork has a session of its
own, a limit on its memory, and files for its output.
"""

import contextlib
import importlib
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import time
import traceback
import warnings
from typing import Any, NamedTuple

from dprjax.base import errors
from tests import commands, devices

ROOT = pathlib.Path(__file__).parent.parent.parent
COMMANDS = (
  *('evaluate', 'bm25', 'fuse', 'mine', 'report', 'search', 'papers', 'topics'),
  *('encode', 'rerank', 'export', 'train', 'index'),
)
# What they import when their arguments are read, in each fork anew. Not bm25s, which starts JAX.
LATER = (
  *('pandas', 'pytrec_eval', 'rich.table', 'tomotopy'),
  *(f'dprjax.retrieval.{name}' for name in ('reranker', 'retriever')),
  'dprjax.exports.exporting',
  'dprjax.training.train',
)
_MEMORY = 48 << 30  # bytes of addresses; XLA and ScaNN reserve more than they use


class Reply(NamedTuple):
  """How a command ended.

  Attributes:
    status: its exit status; negative: the signal that ended it. None: it was still running after
      the time that it had.
    out, err: its output.
    seconds: how long it ran.
  """

  status: int | None
  out: str
  err: str
  seconds: float


class Server:
  """The warm process, started by ``with``."""

  def __enter__(self) -> 'Server':
    self._process = subprocess.Popen(
      [sys.executable, '-m', 'tests.fuzz.server'],
      cwd=ROOT,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env=devices.environment(PYTHONPATH=str(ROOT)),
    )
    return self

  def __exit__(self, *_: object) -> None:
    assert self._process.stdin is not None and self._process.stdout is not None
    self._process.stdin.close()
    self._process.stdout.close()
    self._process.wait()

  def run(
    self,
    folder: pathlib.Path,
    argv: list[str],
    *,
    timeout: float = 60.0,
    kill: tuple[int, float] | None = None,
  ) -> Reply:
    """Runs ``python -m dprjax.ARGV`` in ``folder``; ``kill``: a signal, after so many seconds."""
    assert self._process.stdin is not None and self._process.stdout is not None
    request = {'folder': str(folder), 'argv': argv, 'timeout': timeout, 'kill': kill}
    self._process.stdin.write(json.dumps(request) + '\n')
    self._process.stdin.flush()
    return Reply(*json.loads(self._process.stdout.readline()))


def _serve(folder: str, argv: list[str], timeout: float, kill: list[Any] | None) -> Reply:
  out, err = (pathlib.Path(f'{folder}.{name}') for name in ('out', 'err'))
  began = time.monotonic()
  # No signal reaches the fork before it is the command.
  masked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
  pid = os.fork()
  if not pid:
    _run(folder, argv, out, err)
  signal.pthread_sigmask(signal.SIG_SETMASK, masked)
  number, after = kill or (signal.SIGKILL, timeout)
  status, killed = None, False
  while True:
    ended, code = os.waitpid(pid, os.WNOHANG)
    seconds = time.monotonic() - began
    if ended:
      status = os.waitstatus_to_exitcode(code)
      break
    if seconds > after and not killed:
      killed = True
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    if seconds > timeout:
      os.kill(pid, signal.SIGKILL)
      os.waitpid(pid, 0)
      break
    time.sleep(0.001)
  texts = [path.read_text(errors='replace') if path.exists() else '' for path in (out, err)]
  for path in (out, err):
    path.unlink(missing_ok=True)
  return Reply(status, *texts, time.monotonic() - began)


def _run(folder: str, argv: list[str], out: pathlib.Path, err: pathlib.Path) -> None:
  """Becomes the command; never returns."""
  status = 1
  try:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for descriptor, path in ((1, out), (2, err)):
      file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
      os.dup2(file, descriptor)
      os.close(file)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    sys.stdin, sys.stdout, sys.stderr = (
      os.fdopen(descriptor, mode, closefd=False)
      for descriptor, mode in ((0, 'r'), (1, 'w'), (2, 'w'))
    )
    os.chdir(folder)
    name, *arguments = argv
    sys.argv = [f'dprjax.{name}', *arguments]
    errors.hear_interrupts()  # as the process of the command
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    commands.module(name).main(arguments)
    status = 0
  except KeyboardInterrupt:  # before the command could notice it, as while Python starts
    status = 130
  except SystemExit as end:
    status = end.code if isinstance(end.code, int) else int(end.code is not None)
  except BaseException:  # as Python itself ends a process
    traceback.print_exc()
  finally:
    with contextlib.suppress(BaseException):
      sys.stdout.flush()
      sys.stderr.flush()
    os._exit(status)


def main() -> None:
  warnings.filterwarnings('ignore')  # JAX warns of forks; it has no threads yet
  for name in COMMANDS:
    commands.module(name)
  for name in LATER:
    importlib.import_module(name)
  replies = os.fdopen(os.dup(1), 'w')
  for line in sys.stdin:
    replies.write(json.dumps(_serve(**json.loads(line))) + '\n')
    replies.flush()


if __name__ == '__main__':
  main()
