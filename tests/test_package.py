"""The names and costs of `import dprjax`."""

import importlib
import subprocess
import sys

import pytest

import dprjax


@pytest.mark.parametrize('name', ['evaluate', 'fuse', 'mine'])
def test_a_function_with_the_name_of_a_command(name):
  command = importlib.import_module(f'dprjax.{name}')
  function = getattr(dprjax, name)
  assert callable(function) and function.__module__ == 'dprjax.api.measuring'
  assert callable(command.main) and sys.modules[f'dprjax.{name}'] is command
  importlib.reload(command)
  assert getattr(dprjax, name) is function
  with pytest.raises(AttributeError):
    setattr(dprjax, name, None)


CODE = """
import logging, sys, time
began = time.perf_counter()
import dprjax
took = time.perf_counter() - began
assert took < .5, took
assert 'jax' not in sys.modules and 'numpy' not in sys.modules
import dprjax.fuse
assert dprjax.fuse.__module__ == 'dprjax.api.measuring', dprjax.fuse
from dprjax import fuse
from dprjax.fuse import main
assert callable(fuse) and callable(main)
for name in dprjax.__all__:
  assert getattr(dprjax, name).__doc__, name
assert not logging.getLogger().handlers and not logging.getLogger('dprjax').handlers
assert logging.getLogger('absl').level == logging.NOTSET or logging.getLogger('absl').level > 0
import asyncio
assert asyncio.BaseEventLoop.call_soon_threadsafe.__module__ == 'asyncio.base_events'
print('fine')
"""


@pytest.mark.slow
def test_in_a_fresh_process():
  found = subprocess.run([sys.executable, '-c', CODE], capture_output=True, text=True)
  assert (found.stdout, found.returncode) == ('fine\n', 0), found.stderr
