import errno
import functools
import importlib

import duckdb
import pytest

from dprjax.base import counts, errors
from tests.refusals import named_in


@pytest.mark.parametrize(
  ('text', 'masked'),
  [
    ('milvus://me:hunter2@host:19530/db', 'milvus://me:***@host:19530/db'),
    ('http://host/?a=1&token=hunter2&b=2', 'http://host/?a=1&token=***&b=2'),
    ('http://me:hunt@er2@host', 'http://me:***@host'),
    ('http://hunter2@host', 'http://***@host'),
    ('--uri=me:hunter2@host: no', '--uri=me:***@host: no'),
    (
      'unrecognized arguments: --tokn me --tokens hunter2',
      'unrecognized arguments: --tokn me --tokens ***',
    ),
    ('http://host:19530/user@home', 'http://host:19530/user@home'),
    ('query token 3 of the text', 'query token 3 of the text'),
  ],
)
def test_secrets_are_masked(text, masked):
  assert errors.mask(text) == masked


def test_an_error_is_one_line_of_500_characters():
  line = errors.error_line('a\nb ' + 'x' * 5000 + ' do this')
  assert line.startswith('dprjax: error: a b x') and line.endswith('x do this')
  assert len(line) == 500 and '\n' not in line


@pytest.mark.parametrize(
  ('error', 'status', 'message'),
  [
    (OSError(errno.ENOSPC, 'No space left on device', 'a'), 2, 'a: No space left on device; free'),
    (
      ImportError('Install s3fs to access S3'),
      2,
      'Install s3fs to access S3; or name a local path',
    ),
    (MemoryError('Unable to allocate 4 TiB'), 2, 'not enough memory (Unable to allocate 4 TiB); a'),
    (
      ModuleNotFoundError('', name='tomotopy'),
      2,
      "tomotopy is not installed: pip install 'dprjax[",
    ),
    ('\ud800'.encode, 2, "'utf-8' codec can't encode character"),
    (duckdb.IOException('IO Error: disk full'), 2, 'IO Error: disk full'),
    (KeyError('foo://'), 2, "'foo://': no such kind of path; name a local path"),
    (KeyboardInterrupt(), 130, 'interrupted'),
    (ZeroDivisionError('x'), 1, 'a fault of dprjax, ZeroDivisionError: x; please report it'),
  ],
)
def test_every_error_has_a_status_and_a_sentence(error, status, message):
  if callable(error):
    with pytest.raises(Exception) as raised:
      error()
    error = raised.value
  found = errors.explain(error)
  assert found[0] == status and found[1].startswith(message)


def test_a_fault_in_a_users_own_code_names_its_last_line_there(tmp_path, monkeypatch):
  own = 'import json\ndef loss(calls):\n  return calls() if calls else json.loads("{")\n'
  (tmp_path / 'own_method.py').write_text(own)
  monkeypatch.syspath_prepend(tmp_path)
  loss = importlib.import_module('own_method').loss
  for calls in (None, functools.partial(counts.counted, None, 'x')):
    with pytest.raises(Exception) as caught:
      loss(calls)
    caught.value.__traceback__ = caught.value.__traceback__.tb_next  # without this file
    status, message = errors.explain(caught.value)
    assert status == 2 and named_in(message, f'{tmp_path}/own_method.py', 'line 3', '--traceback')
    assert type(caught.value).__name__ in message


def test_a_fault_after_an_interrupt_is_the_interrupt(monkeypatch):
  monkeypatch.setattr(errors, '_interrupted', False)
  lost = AttributeError("partially initialized module 'pandas'")
  assert errors.explain(lost)[0] == 1
  with pytest.raises(KeyboardInterrupt):
    errors.raise_interrupt()
  assert errors.explain(lost) == errors.explain(KeyboardInterrupt())
