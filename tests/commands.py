"""The modules of commands."""

import importlib

from dprjax import __main__


def module(name):
  """The module of a command."""
  return importlib.import_module(f'dprjax.{__main__.modules()[name]}')


# They share their names with functions of the package.
evaluate, fuse, mine = map(module, ('evaluate', 'fuse', 'mine'))
