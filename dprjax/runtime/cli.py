"""What every command shares: its arguments' types, and how it ends.

A command ends with status 0, or, where the input was bad, with 2 and one line on standard error
that begins ``dprjax: error:``. ``--debug`` shows the traceback as well.
"""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import rich.box
import rich.console
import rich.table
import rich.text

from dprjax.base.errors import InputError

_LISTED = 5  # ids, where there may be many


class Parser(argparse.ArgumentParser):
  """argparse with dprjax's error line, ``--debug``, and defaults shown in ``--help``.

  With ``processes``, the flags (and variables of the environment) that say which process of a job
  this is; ``runtime.distributed`` reads them.
  """

  def __init__(self, module: str, description: str, processes: bool = False):
    super().__init__(
      prog=f'python -m dprjax.{module}',
      description=description,
      allow_abbrev=False,
      formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    self.add_argument('--debug', action='store_true', help='show the traceback of an error')
    if processes:
      group = self.add_argument_group(
        'several processes',
        'The same command on every host, as one job. SLURM, Open MPI, TPU VMs and GKE say '
        'themselves which process is which;\n'
        'elsewhere the first three say it. A variable of the environment stands for each: '
        'DPRJAX_COORDINATOR for --coordinator, and so on.',
      )
      for flag, kind, metavar, default, text in (
        ('coordinator', str, 'HOST:PORT', None, 'where process 0 listens: a free port of its host'),
        ('processes', positive, 'N', None, 'how many there are'),
        ('process', count, 'I', None, 'which one this is, from 0 to N - 1'),
        ('join_timeout', positive, 'SECONDS', '300', 'until all must have come (default: 300)'),
        (
          'peer_timeout',
          positive,
          'SECONDS',
          '20',
          'without a sign of life after which a process is given up, and the job ended (default: '
          '20)',
        ),
      ):
        # An empty variable is one that is not set.
        group.add_argument(
          f'--{flag}',
          type=kind,
          metavar=metavar,
          help=text,
          default=os.environ.get(f'DPRJAX_{flag.upper()}') or default,
        )

  def add_config(self, config: str, knob: str) -> None:
    """Adds ``--config`` and ``--config.KEY`` to what ``--help`` shows, with these texts; see
    ``split_config``.
    """
    self.add_argument('--config', metavar='FILE[:RECIPE]', help=config)
    self.add_argument('--config.KEY', dest='override', metavar='VALUE', help=knob)

  def error(self, message: str) -> NoReturn:
    fail(f'{message} (see {self.prog} --help)')


def split_config(
  argv: Sequence[str] | None, prefix: str = '--config'
) -> tuple[list[str], list[str]]:
  """The words of a command line (default: the process's) that argparse reads, and those that begin
  with ``prefix``: it cannot know all knobs.
  """
  words = list(sys.argv[1:] if argv is None else argv)
  return [word for word in words if not word.startswith(prefix)], [
    word for word in words if word.startswith(prefix)
  ]


def boolean(text: str) -> bool:
  """``--flag=true`` or ``--flag=false``, for argparse's ``type``."""
  if text.lower() not in ('true', 'false'):
    raise argparse.ArgumentTypeError(f'expected true or false, not {text!r}')
  return text.lower() == 'true'


def positive(text: str) -> int:
  """A whole number above zero, for argparse's ``type``."""
  if not text.isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f'expected a whole number above 0, not {text!r}')
  return int(text)


def count(text: str) -> int:
  """A whole number from zero on, for argparse's ``type``."""
  if not text.isdecimal():
    raise argparse.ArgumentTypeError(f'expected a whole number from 0 on, not {text!r}')
  return int(text)


def named(text: str) -> tuple[str, str]:
  """``NAME=VALUE``, for argparse's ``type``."""
  name, equals, value = text.partition('=')
  if not (name and equals and value):
    raise argparse.ArgumentTypeError(f'expected NAME=VALUE, not {text!r}')
  return name, value


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
  """A table on standard output: the first column to the left, the others, numbers, to the right."""
  table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
  for number, column in enumerate(columns):
    table.add_column(rich.text.Text(column), justify='right' if number else 'left', no_wrap=True)
  for row in rows:
    table.add_row(*(rich.text.Text(cell) for cell in row))
  # Into a pipe, rich would take 80 columns and cut the rest off.
  console = rich.console.Console(file=sys.stdout, highlight=False)
  if not console.is_terminal:
    console.width = 500
  console.print(table)


def tell(sentence: str, ids: Sequence[str], strict: bool, then: str = '') -> None:
  """Says what is odd about the input, which ids (the first few) and what is done about it, if there
  are any. Raises InputError if strict.
  """
  if not ids:
    return
  said = f'{sentence}: {", ".join(ids[:_LISTED])}{", ..." if len(ids) > _LISTED else ""}'
  if strict:
    raise InputError(said)
  logging.getLogger('dprjax').info('%s', said + (f'; {then}' if then else ''))


def fail(message: str) -> NoReturn:
  """Prints the one error line and exits with status 2."""
  print(error_line(message), file=sys.stderr)
  sys.exit(2)


def error_line(message: str) -> str:
  return 'dprjax: error: ' + ' '.join(message.split())


def speak() -> None:
  """Sends what dprjax says to standard error, as bare lines.

  On a logger of our own: absl has put its handler on the root logger by the time a command runs.
  """
  logger = logging.getLogger('dprjax')
  handler = logging.StreamHandler(sys.stderr)
  handler.setFormatter(logging.Formatter('%(message)s'))
  logger.handlers, logger.propagate = [handler], False
  logger.setLevel(logging.INFO)
  logging.getLogger('absl').setLevel(logging.ERROR)  # orbax warns of every save without a score


def run(
  parser: Parser, command: Callable[[argparse.Namespace], None], argv: Sequence[str] | None = None
) -> None:
  """Parses ``argv`` (default: the process's) and calls ``command``; InputError ends it with status
  2.
  """
  args = parser.parse_args(argv)
  speak()
  logging.getLogger('jax').setLevel(
    logging.WARNING
  )  # it would tell of every backend that is not there
  try:
    command(args)
  except InputError as error:
    if args.debug:
      raise
    fail(str(error))
