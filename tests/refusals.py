"""A refusal has to name the option, file, line or value. Its sentence is free to change."""

import contextlib
import re

import pytest

from dprjax.base.errors import InputError


def named_in(text, *names):
  """Whether each name stands in the text as a whole word; a tuple holds several names."""
  flat = [str(n) for name in names for n in (name if isinstance(name, tuple) else (name,))]
  assert flat and all(flat), 'a refusal names an option, a file, a line or a value'
  absent = [name for name in flat if not _whole(name).search(str(text))]
  assert not absent, f'{absent} not named in: {text}'
  return True


def _whole(name):
  before, after = (r'(?<!\w)', r'(?!\w)')
  return re.compile(
    (before if name[0].isalnum() else '') + re.escape(name) + (after if name[-1].isalnum() else '')
  )


@contextlib.contextmanager
def refused(*names, error=InputError):
  """Expects ``error`` from the block, and each name in its message.

  with refused('train.tsv', 'line 3', 'yes'):
    read(folder)
  """
  with pytest.raises(error) as info:
    yield info
  named_in(info.value, *names)


def command_refused(result, *names):
  """(status, standard error) of a command is 2 and one error line, its last, that has the names."""
  status, errors = result
  assert status == 2, errors
  last = errors.splitlines()[-1]
  assert last.startswith('dprjax: error: ') and len(last) <= 500, last
  assert errors.count('dprjax: error: ') == 1 and 'Traceback' not in errors
  if names:
    named_in(last, *names)
