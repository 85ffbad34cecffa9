import dataclasses
import os
import signal
import subprocess
import sys

import pytest

from dprjax.base import cli, errors, flags
from dprjax.text import fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uri:
  uri: str = flags.flag('x')


# A command with the behaviour that its argument names.
COMMAND = """
import dataclasses, os, signal, sys
from dprjax.base import cli, flags
@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  do: str = flags.flag('x')
def command(args):
  match args.do:
    case 'table': cli.print_table(['a', 'b'], [[chr(0x1f600) + chr(0xef), '1']] * 9999)
    case 'interrupt': os.kill(os.getpid(), signal.SIGINT); signal.pause()
    case 'fault': raise ZeroDivisionError('the fault')
    case 'full': raise OSError(28, 'No space left on device', 'a')
cli.run(Flags, command)
"""


def run(do, *, redirect='', **environment):
  done = subprocess.run(
    ['bash', '-c', f'exec "$0" -c "$1" --do={do} {redirect}', sys.executable, COMMAND],
    capture_output=True,
    text=True,
    env=os.environ | environment,
    timeout=60,
  )
  return done.returncode, done.stdout, done.stderr


def slow(*values):
  return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
  ('do', 'redirect', 'environment', 'status', 'message'),
  [
    slow('table', '>&-', {}, 0, ''),
    slow('table', '', {'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0'}, 0, ''),
    slow('table', '>/dev/full', {}, 2, 'No space left on device'),
    slow('table', '> >(true)', {}, 141, ''),
    slow('interrupt', '', {}, 130, 'interrupted'),
    ('fault', '', {}, 1, 'a fault of dprjax, ZeroDivisionError: the fault; please report it'),
    slow('full', '', {}, 2, 'a: No space left on device; free some space'),
  ],
)
def test_a_command_ends_in_one_line_whatever_happens(do, redirect, environment, status, message):
  returned, _, err = run(do, redirect=redirect, **environment)
  assert returned == status, err
  lines = err.splitlines()
  assert len(lines) == bool(message), err
  if message:
    assert lines[0].startswith('dprjax: error: ') and message in lines[0]


@pytest.mark.slow
def test_a_traceback_is_shown_to_whom_asks_for_it():
  status, _, err = run('fault', DPRJAX_TRACEBACK='1')
  assert status == 1 and 'Traceback' in err and err.splitlines()[-1].startswith('dprjax: error: a')


def test_messages_hide_secrets(capsys):
  def command(args):
    fields.report_ids(f'{args.uri}: wrong', ['1'])
    raise errors.InputError(f'{args.uri}: wrong')

  with pytest.raises(SystemExit):
    cli.run(Uri, command, ['--uri=http://me:hunter2@host?token=abc&a=b'])
  err = capsys.readouterr().err
  assert err.count('http://me:***@host?token=***&a=b: wrong') == 2
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
