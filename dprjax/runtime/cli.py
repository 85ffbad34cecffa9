"""The command line: arguments, tables, errors.

A command exits with status 0. On bad input, or where a file system or the memory fails it, it exits
with status 2 and one line on standard error that begins ``dprjax: error:``; with 130 after an
interrupt from the keyboard; with 1 after a fault of dprjax. ``--debug``, or ``DPRJAX_TRACEBACK=1``
in the environment, shows the traceback as well.
"""

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import rich.box
import rich.console
import rich.table
import rich.text

from dprjax.base.errors import (
  InputError,
  end,
  end_interrupted,
  error_line,
  explain,
  mask,
  wants_traceback,
)

_LISTED = 5  # ids in a message
_DIGITS = 18  # of a number
_LONGEST_S = 7 * 24 * 3600  # of a time-out


class Parser(argparse.ArgumentParser):
  """argparse with dprjax's error line and ``--debug``.

  With ``processes``, it has the flags (and environment variables) that ``runtime.distributed``
  reads to find the process's place in a job.
  """

  def __init__(self, module: str, description: str, processes: bool = False):
    super().__init__(
      prog=_program(module),
      description=description,
      allow_abbrev=False,
      formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    self.joins = processes
    self.add_argument('--debug', action='store_true', help='show the traceback of an error')
    if processes:
      group = self.add_argument_group(
        'several processes',
        'The same command on every host runs as one job. On SLURM, Open MPI, TPU VMs and GKE each '
        'process finds its place by itself;\n'
        'elsewhere give the first three flags. Each can also be set in the environment, as '
        'DPRJAX_COORDINATOR and so on.',
      )
      for flag, kind, metavar, default, text in (
        ('coordinator', str, 'HOST:PORT', None, 'where process 0 listens: a free port of its host'),
        ('processes', positive, 'N', None, 'how many processes there are'),
        ('process', count, 'I', None, 'which process this is, from 0 to N - 1'),
        (
          'join_timeout',
          up_to(_LONGEST_S),
          'SECONDS',
          '300',
          'for all processes to join (default: 300)',
        ),
        (
          'peer_timeout',
          up_to(_LONGEST_S),
          'SECONDS',
          '20',
          'without a sign of life before a process counts as lost and the job ends (default: 20)',
        ),
      ):
        # An empty variable counts as not set.
        group.add_argument(
          f'--{flag}',
          type=kind,
          metavar=metavar,
          help=text,
          default=os.environ.get(f'DPRJAX_{flag.upper()}') or default,
        )

  def add_config(self, config: str, knob: str) -> None:
    """Adds ``--config`` and ``--config.KEY`` to ``--help``; see ``split_config``."""
    self.add_argument('--config', metavar='FILE[:RECIPE]', help=config)
    self.add_argument('--config.KEY', dest='override', metavar='VALUE', help=knob)

  def error(self, message: str) -> NoReturn:
    fail(f'{message} (see {self.prog} --help)')


def add_dtype(group: argparse._ActionsContainer, use: str = '') -> None:
  """Adds ``--dtype``, a name that ``models.encoder_config.arithmetic`` takes; ``use``: what for."""
  group.add_argument(
    '--dtype',
    choices=('auto', 'float32', 'bfloat16', 'mixed'),
    default='auto',
    help=f'of the arithmetic{use} (default: auto, bfloat16 on accelerators and float32 on '
    'processors); mixed is faster on processors with AMX',
  )


def _program(module: str) -> str:
  """How the command was started: as ``python -m dprjax.train`` or ``dprjax train``."""
  started = f'dprjax.{module}'
  return f'python -m {started}' if started in sys.orig_argv else f'dprjax {module}'


def split_config(
  argv: Sequence[str] | None, prefix: str = '--config'
) -> tuple[list[str], list[str]]:
  """Splits a command line into the words for argparse and those that begin with ``prefix``.

  argparse cannot know all knobs of a config. By default the process's own command line. A value may
  stand behind its flag, as everywhere: ``--config FILE`` is ``--config=FILE``.
  """
  own: list[str] = []
  ours: list[str] = []
  waits = False  # the flag before this word, for its value
  for word in sys.argv[1:] if argv is None else argv:
    if waits and not word.startswith('-'):
      ours[-1] += f'={word}'
      waits = False
    else:
      taken = word.startswith(prefix)
      (ours if taken else own).append(word)
      waits = taken and '=' not in word
  return own, ours


def boolean(text: str) -> bool:
  """``--flag=true`` or ``--flag=false``, for argparse's ``type``."""
  if text.lower() not in ('true', 'false'):
    raise argparse.ArgumentTypeError(f'expected true or false, not {text!r}')
  return text.lower() == 'true'


def positive(text: str) -> int:
  """A whole number above zero, for argparse's ``type``."""
  if not text.isdecimal() or len(text) > _DIGITS or int(text) < 1:
    raise argparse.ArgumentTypeError(f'expected a whole number above 0, not {text!r:.40}')
  return int(text)


def up_to(most: int, least: int = 1) -> Callable[[str], int]:
  """A whole number from ``least`` to ``most``, for argparse's ``type``."""

  def parse(text: str) -> int:
    # Not the number of digits that Python refuses to read.
    value = int(text) if text.isdecimal() and len(text) <= len(str(most)) else -1
    if not least <= value <= most:
      raise argparse.ArgumentTypeError(
        f'expected a whole number from {least} to {most}, not {text!r:.40}'
      )
    return value

  return parse


def count(text: str) -> int:
  """A whole number from zero on, for argparse's ``type``."""
  if not text.isdecimal() or len(text) > _DIGITS:
    raise argparse.ArgumentTypeError(f'expected a whole number from 0 on, not {text!r:.40}')
  return int(text)


def named(text: str) -> tuple[str, str]:
  """``NAME=VALUE``, for argparse's ``type``."""
  name, equals, value = text.partition('=')
  if not (name and equals and value):
    raise argparse.ArgumentTypeError(f'expected NAME=VALUE, not {text!r}')
  return name, value


class _Console(rich.console.Console):
  def on_broken_pipe(self) -> None:
    raise  # noqa: PLE0704 (the BrokenPipeError; rich itself would exit)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
  """Prints a table; all columns but the first hold numbers and are aligned to the right."""
  table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
  for number, column in enumerate(columns):
    table.add_column(rich.text.Text(column), justify='right' if number else 'left', no_wrap=True)
  for row in rows:
    table.add_row(*(rich.text.Text(cell) for cell in row))
  # In a pipe, rich would cut the table off at 80 columns.
  console = _Console(file=sys.stdout, highlight=False)
  if not console.is_terminal:
    console.width = 500
  console.print(table)


def report_ids(sentence: str, ids: Sequence[str], strict: bool, then: str = '') -> None:
  """Logs what is wrong with ids, if there are any, the first few, and what is done about it.

  Raises InputError if strict.
  """
  if not ids:
    return
  listed = ', '.join(f'{id_:.80}' for id_ in ids[:_LISTED])
  message = f'{sentence}: {listed}{", ..." if len(ids) > _LISTED else ""}'
  if strict:
    raise InputError(message)
  logging.getLogger('dprjax').info('%s', message + (f'; {then}' if then else ''))


def fail(message: str, status: int = 2) -> NoReturn:
  """Prints the one error line and exits."""
  with contextlib.suppress(OSError, ValueError):
    print(error_line(message), file=sys.stderr, flush=True)
  sys.exit(status)


class _Formatter(logging.Formatter):
  """Bare lines without secrets."""

  def format(self, record: logging.LogRecord) -> str:
    return mask(super().format(record))


def _is_no_interrupt(record: logging.LogRecord) -> bool:
  return not (record.exc_info and isinstance(record.exc_info[1], KeyboardInterrupt))


def speak() -> None:
  """Logs dprjax's messages to standard error, as bare lines.

  Its logger does not propagate: by now absl has put a handler on the root logger.
  """
  logger = logging.getLogger('dprjax')
  handler = logging.StreamHandler(sys.stderr)
  handler.setFormatter(_Formatter('%(message)s'))
  logger.handlers, logger.propagate = [handler], False
  logger.setLevel(logging.INFO)
  # orbax warns about every save without a score, and shows where it was interrupted.
  logging.getLogger('absl').setLevel(logging.ERROR)
  logging.getLogger('absl').addFilter(_is_no_interrupt)


def run(
  parser: Parser, command: Callable[[argparse.Namespace], None], argv: Sequence[str] | None = None
) -> None:
  """Parses ``argv`` (default: the process's) and runs ``command``.

  With a parser of several ``processes``, it joins their job first. Whatever it raises ends in one
  line and a status (`base.errors.explain`).
  """
  _prepare_streams()
  sys.unraisablehook = _keep_interrupt
  trace = wants_traceback()
  try:
    args = parser.parse_args(argv)
    trace = trace or args.debug
    if parser.joins:
      from dprjax.runtime import distributed  # JAX, which --help need not wait for

      command = distributed.together(command)
    if signal.getsignal(signal.SIGINT) is end_interrupted:
      signal.signal(signal.SIGINT, signal.default_int_handler)
    speak()
    logging.getLogger('jax').setLevel(logging.WARNING)  # below it, jax lists each missing backend
    command(args)
    sys.stdout.flush()
  except SystemExit:
    raise
  except BaseException as error:  # here all errors end: each in one line, with its status
    if trace:
      print(mask(traceback.format_exc()), file=sys.stderr)
    if isinstance(error, OSError):
      _drop_stdout()
    status, message = explain(error)
    if isinstance(error, KeyboardInterrupt):
      end(status, message)
    fail(message, status)


@contextlib.contextmanager
def loading() -> Iterator[None]:
  """Around imports that take long and that ``--help`` and bad arguments do not need.

  An interrupt ends the process meanwhile, as before ``run``.
  """
  ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
  if not ours or threading.current_thread() is not threading.main_thread():
    yield
    return
  signal.signal(signal.SIGINT, end_interrupted)
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _keep_interrupt(unraisable: Any) -> None:
  """Sends an interrupt again that came where Python ignores it, as in garbage collection."""
  if unraisable.exc_type is KeyboardInterrupt:
    # From a thread, since here it would be ignored again.
    again = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    again.daemon = True
    again.start()
  else:
    sys.__unraisablehook__(unraisable)


def _prepare_streams() -> None:
  """Lets every text be printed on every terminal, and replaces closed streams."""
  for name in ('stdout', 'stderr'):
    stream = getattr(sys, name)
    if stream is None:  # closed by whoever started the command
      setattr(sys, name, open(os.devnull, 'w'))  # noqa: SIM115 (until the process ends)
    elif hasattr(stream, 'reconfigure'):
      stream.reconfigure(errors='backslashreplace')


def _drop_stdout() -> None:
  """Gives up what a closed or full standard output does not take, which Python tries again."""
  try:
    sys.stdout.flush()
  except (OSError, ValueError):
    with contextlib.suppress(OSError, ValueError):
      null = os.open(os.devnull, os.O_WRONLY)
      os.dup2(null, sys.stdout.fileno())
      os.close(null)
