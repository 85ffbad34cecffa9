"""Values of modules that users bring: families of backbones, poolings.

``DPRJAX_EXTENSIONS=lab.rms,lab.top`` names modules on Python's path. They are imported where such a
value is looked up first. No file that a command reads can name one.
"""

import functools
import importlib
import os
from typing import Any

from dprjax.base.errors import InputError, place

VARIABLE = 'DPRJAX_EXTENSIONS'


def values(name: str) -> list[Any]:
  """The values of this name, such as ``FAMILY``, in the modules that have one.

  Raises:
    InputError: a module cannot be imported.
  """
  found = (getattr(module, name, None) for module in _modules(os.environ.get(VARIABLE, '')))
  return [value for value in found if value is not None]


@functools.cache
def _modules(names: str) -> list[Any]:
  return [_import(name) for name in names.split(',') if name]


def _import(name: str) -> Any:
  try:
    return importlib.import_module(name)
  except MemoryError:
    raise
  except Exception as error:  # of code that is not ours
    raise InputError(f'{VARIABLE}: {name!r:.80} cannot be imported ({place(error)})') from error
