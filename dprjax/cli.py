"""What every command shares: its arguments' types, and how it ends.

A command ends with status 0, or, where the input was bad, with 2 and one line on standard error that
begins ``dprjax: error:``. ``--debug`` shows the traceback as well.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from dprjax.errors import InputError


class Parser(argparse.ArgumentParser):
  """argparse with dprjax's error line, ``--debug``, and defaults shown in ``--help``."""

  def __init__(self, module: str, description: str):
    super().__init__(
        prog=f'python -m dprjax.{module}', description=description, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    self.add_argument('--debug', action='store_true', help='show the traceback of an error')

  def error(self, message: str) -> NoReturn:
    fail(f'{message} (see {self.prog} --help)')


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


def fail(message: str) -> NoReturn:
  """Prints the one error line and exits with status 2."""
  print('dprjax: error: ' + ' '.join(message.split()), file=sys.stderr)
  sys.exit(2)


def run(parser: Parser, command: Callable[[argparse.Namespace], None], argv: Sequence[str] | None = None) -> None:
  """Parses ``argv`` (default: the process's) and calls ``command``; InputError ends it with status 2."""
  args = parser.parse_args(argv)
  logging.basicConfig(level=logging.INFO, format='%(message)s', stream=sys.stderr)
  try:
    command(args)
  except InputError as error:
    if args.debug:
      raise
    fail(str(error))
