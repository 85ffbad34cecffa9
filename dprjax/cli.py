"""What every command shares: its arguments' types, and how it ends.

A command ends with status 0, or, where the input was bad, with 2 and one line on standard error that
begins ``dprjax: error:``. ``--debug`` shows the traceback as well.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import rich.box
import rich.console
import rich.table
import rich.text

from dprjax.errors import InputError

_LISTED = 5  # ids, where there may be many


class Parser(argparse.ArgumentParser):
  """argparse with dprjax's error line, ``--debug``, and defaults shown in ``--help``."""

  def __init__(self, module: str, description: str):
    super().__init__(
        prog=f'python -m dprjax.{module}', description=description, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    self.add_argument('--debug', action='store_true', help='show the traceback of an error')

  def add_config(self, config: str, knob: str) -> None:
    """Adds ``--config`` and ``--config.KEY`` to what ``--help`` shows, with these texts; see ``split_config``."""
    self.add_argument('--config', metavar='FILE[:RECIPE]', help=config)
    self.add_argument('--config.KEY', dest='override', metavar='VALUE', help=knob)

  def error(self, message: str) -> NoReturn:
    fail(f'{message} (see {self.prog} --help)')


def split_config(argv: Sequence[str] | None, prefix: str = '--config') -> tuple[list[str], list[str]]:
  """The words of a command line (default: the process's) that argparse reads, and those that begin with ``prefix``: it cannot know all knobs."""
  words = list(sys.argv[1:] if argv is None else argv)
  return [word for word in words if not word.startswith(prefix)], [word for word in words if word.startswith(prefix)]


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
  """Says what is odd about the input, which ids (the first few) and what is done about it, if there are any. Raises InputError if strict."""
  if not ids:
    return
  said = f'{sentence}: {", ".join(ids[:_LISTED])}{", ..." if len(ids) > _LISTED else ""}'
  if strict:
    raise InputError(said)
  logging.getLogger('dprjax').info('%s', said + (f'; {then}' if then else ''))


def fail(message: str) -> NoReturn:
  """Prints the one error line and exits with status 2."""
  print('dprjax: error: ' + ' '.join(message.split()), file=sys.stderr)
  sys.exit(2)


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


def run(parser: Parser, command: Callable[[argparse.Namespace], None], argv: Sequence[str] | None = None) -> None:
  """Parses ``argv`` (default: the process's) and calls ``command``; InputError ends it with status 2."""
  args = parser.parse_args(argv)
  speak()
  logging.getLogger('jax').setLevel(logging.WARNING)  # it would tell of every backend that is not there
  try:
    command(args)
  except InputError as error:
    if args.debug:
      raise
    fail(str(error))
