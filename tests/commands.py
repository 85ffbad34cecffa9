"""The modules of commands that share their names with functions of the package."""

import importlib

evaluate, fuse, mine = (
  importlib.import_module(f'dprjax.{name}') for name in ('evaluate', 'fuse', 'mine')
)
