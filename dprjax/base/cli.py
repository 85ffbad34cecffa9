"""The command line: arguments, tables, errors.

A command exits with status 0; with 2 and one line ``dprjax: error: ...`` on standard error for bad
input or a fault in the user's own code, or if a file system or the memory fails; with 130 after an
interrupt; with 1 after a fault of dprjax. ``--traceback`` or ``DPRJAX_TRACEBACK=1`` also shows the
traceback.
"""

import contextlib
import logging
import os
import select
import shutil
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TextIO, TypeVar

from dprjax.base import flags
from dprjax.base.errors import (
  end,
  end_interrupted,
  error_line,
  explain,
  mask,
  raise_interrupt,
  wants_traceback,
)

Flags = TypeVar('Flags')


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
  """Prints a table; all columns except the first are right-aligned."""
  widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
  for cells in (columns, ['─' * width for width in widths], *rows):
    first, *others = zip(cells, widths, strict=True)
    print('  '.join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]))


def fail(message: str, status: int = 2) -> NoReturn:
  """Prints the one error line and exits."""
  with contextlib.suppress(OSError, ValueError):
    print(error_line(message), file=sys.stderr, flush=True)
  sys.exit(status)


class _Formatter(logging.Formatter):
  def format(self, record: logging.LogRecord) -> str:
    return mask(super().format(record))


class _Terminal(logging.StreamHandler[TextIO]):
  """In a terminal, the next line replaces a line of progress (`progress.PASSING`)."""

  _rows = 0  # of the last line, if the next one replaces it

  def emit(self, record: logging.LogRecord) -> None:
    passing = getattr(record, 'passing', False) and _is_terminal(self.stream)
    if self._rows:
      with contextlib.suppress(OSError, ValueError):
        self.stream.write(f'\x1b[{self._rows}A\x1b[J')  # up, and clear what follows
    super().emit(record)
    columns = max(shutil.get_terminal_size().columns, 1)
    self._rows = -(-len(self.format(record)) // columns) if passing else 0


def _is_terminal(stream: TextIO) -> bool:
  try:
    return stream.isatty()
  except ValueError:  # closed
    return False


def _is_no_interrupt(record: logging.LogRecord) -> bool:
  return not (record.exc_info and isinstance(record.exc_info[1], KeyboardInterrupt))


def speak() -> None:
  """Logs messages of dprjax to standard error as plain lines."""
  logger = logging.getLogger('dprjax')
  handler = _Terminal(sys.stderr)
  handler.setFormatter(_Formatter('%(message)s'))
  # Without propagation, since absl adds a handler to the root logger.
  logger.handlers, logger.propagate = [handler], False
  logger.setLevel(logging.INFO)
  # orbax warns about each save without a score, and prints where it was interrupted.
  logging.getLogger('absl').setLevel(logging.ERROR)
  logging.getLogger('absl').addFilter(_is_no_interrupt)


def run(
  kind: type[Flags], command: Callable[[Flags], int | None], argv: Sequence[str] | None = None
) -> None:
  """Reads ``argv`` (default: the process words) into ``kind`` and runs ``command`` on it.

  The module of ``kind`` gives the command name and description. A command whose flags have a
  ``Job`` joins it first. An exception ends the process with one line and a status
  (`base.errors.explain`). A status returned by the command also ends it.
  """
  _prepare_streams()
  sys.unraisablehook = _keep_interrupt
  trace = wants_traceback()
  try:
    module = sys.modules[kind.__module__]
    args, traced = flags.parse(kind, argv, _program(module), module.__doc__ or '')
    trace = trace or traced
    job = next((one for one in vars(args).values() if isinstance(one, flags.Job)), None)
    if job is not None:
      from dprjax.base import distributed  # imports JAX, so not before --help
    if signal.getsignal(signal.SIGINT) is end_interrupted:
      signal.signal(signal.SIGINT, raise_interrupt)
    speak()
    # Below this level, jax lists each missing backend.
    logging.getLogger('jax').setLevel(logging.WARNING)
    with contextlib.nullcontext() if job is None else distributed.together(job, trace):
      status = command(args)
    sys.stdout.flush()
    if status:
      sys.exit(status)
  except SystemExit:
    raise
  except BaseException as error:
    left = _has_no_reader(sys.stdout)
    if trace:
      print(mask(traceback.format_exc()), file=sys.stderr)
    if isinstance(error, OSError):
      _drop_stdout()
    if isinstance(error, BrokenPipeError) and left:
      sys.exit(128 + signal.SIGPIPE)  # as in dprjax ... | head
    status, message = explain(error)
    if isinstance(error, KeyboardInterrupt):
      end(status, message)
    fail(message, status)


def main(kind: type[Flags], command: Callable[[Flags], int | None]) -> Callable[..., None]:
  """The ``main(argv)`` of the module of a command; see `run`."""
  return lambda argv=None: run(kind, command, argv)


def _program(module: types.ModuleType) -> str:
  """The command as started: ``python -m dprjax.train`` or ``dprjax train``."""
  name = module.__spec__.name if module.__spec__ else module.__name__
  if name in sys.orig_argv:
    return f'python -m {name}'
  return f'dprjax {name.rpartition(".")[2].replace("_", " ")}'


@contextlib.contextmanager
def loading() -> Iterator[None]:
  """A context for slow imports, after the arguments are read; an interrupt ends them."""
  ours = signal.getsignal(signal.SIGINT) is raise_interrupt  # a command, not a user's program
  if not ours or threading.current_thread() is not threading.main_thread():
    yield
    return
  signal.signal(signal.SIGINT, end_interrupted)
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, raise_interrupt)


def _keep_interrupt(unraisable: Any) -> None:
  """Repeats an interrupt that Python ignored, such as in garbage collection."""
  if unraisable.exc_type is KeyboardInterrupt:
    # From a thread, since it would be ignored here.
    again = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    again.daemon = True
    again.start()
  else:
    sys.__unraisablehook__(unraisable)


def _prepare_streams() -> None:
  """Makes all text printable on any terminal, and replaces closed streams."""
  for name in ('stdout', 'stderr'):
    stream = getattr(sys, name)
    if stream is None:  # closed by the parent process
      setattr(sys, name, open(os.devnull, 'w'))  # noqa: SIM115
    elif hasattr(stream, 'reconfigure'):
      stream.reconfigure(errors='backslashreplace')


def _has_no_reader(stream: TextIO) -> bool:
  try:
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
  except (OSError, ValueError):
    return False


def _drop_stdout() -> None:
  """Drops output that a closed or full pipe refuses, so that Python does not retry."""
  try:
    sys.stdout.flush()
  except (OSError, ValueError):
    with contextlib.suppress(OSError, ValueError):
      null = os.open(os.devnull, os.O_WRONLY)
      os.dup2(null, sys.stdout.fileno())
      os.close(null)
