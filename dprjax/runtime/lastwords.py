"""Replaces the C++ stack trace after the loss of the coordinator by one line.

When a process loses the coordinator, a C++ thread of jax aborts it with a stack trace, and no
Python runs after that. So standard error goes through a small program, this file itself, which
outlives the process and explains the trace.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys

_FATAL = re.compile(rb'F\d{4} .*\] Terminating process because the JAX distributed service')
_NOISE = re.compile(rb'E\d{4} .*coordination_service(_agent)?\.cc:')
_MAY_BE = re.compile(rb'[EF]\d')  # the start of a line that may be held back

_program: subprocess.Popen[bytes] | None = None
_own = -1  # the original standard error


def listen(coordinator: str) -> None:
  """Sends standard error of this process through the program; the line names ``coordinator``."""
  global _program, _own
  sys.stderr.flush()
  _own = os.dup(2)
  _program = subprocess.Popen(
    [sys.executable, '-I', '-S', __file__, coordinator],
    stdin=subprocess.PIPE,
    stdout=subprocess.DEVNULL,
  )
  assert _program.stdin is not None
  os.dup2(_program.stdin.fileno(), 2)
  _program.stdin.close()


def stop() -> None:
  """Restores standard error after everything written to it came out."""
  global _program
  if _program is not None:
    sys.stderr.flush()
    os.dup2(_own, 2)
    os.close(_own)
    _program.wait()
    _program = None


def main() -> None:
  # It must outlive the process whose output it passes on.
  for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
  rest, fatal, explained = b'', False, False
  with contextlib.suppress(BrokenPipeError):
    while piece := os.read(0, 1 << 16):
      *lines, rest = (rest + piece).split(b'\n')
      for line in lines:
        fatal = fatal or bool(_FATAL.match(line))
        explained = explained or line.startswith(b'dprjax: error:')
        if not (fatal and not line.startswith(b'dprjax:')) and not _NOISE.match(line):
          _write(line + b'\n')
      if rest and not fatal and not _MAY_BE.match(rest):
        _write(rest)  # part of a line, such as a progress bar
        rest = b''
    if rest and not fatal:
      _write(rest)
    if fatal and not explained:
      _write(
        f'dprjax: error: process 0, the coordinator at {sys.argv[1]}, is gone: it was killed, '
        'failed, or its host cannot be reached; its own output may say more. Run the same command '
        'again on all of them to continue from the last checkpoint\n'.encode()
      )


def _write(text: bytes) -> None:
  while text:
    text = text[os.write(2, text) :]


if __name__ == '__main__':
  main()
