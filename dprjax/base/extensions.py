"""Extensions by users: backbone families, adapter kinds, poolings.

``DPRJAX_EXTENSIONS=lab.rms,lab.top`` names modules on the Python path, which are imported at the
first look-up of such a value. Only this variable can name them: no file that a command reads can.
"""

import functools
import importlib
import os
import pkgutil
from typing import Any

VARIABLE = 'DPRJAX_EXTENSIONS'


def values(name: str, package: str = '') -> list[Any]:
  """The values of this name, such as ``FAMILY``, in all modules that have one.

  Args:
    package: of dprjax, whose modules come first.
  """
  modules = [*(_inside(package) if package else ()), *_modules(os.environ.get(VARIABLE, ''))]
  found = (getattr(module, name, None) for module in modules)
  return [value for value in found if value is not None]


def find(name: str, key: str, wanted: str, package: str) -> Any:
  """The value of this name whose attribute ``key`` is ``wanted``; None if there is none.

  The module of dprjax with that file name is looked at first, so that no other is imported.
  """
  file = wanted.replace('-', '_')
  folder = importlib.import_module(package)
  if file in {one.name for one in pkgutil.iter_modules(folder.__path__)}:
    value = getattr(importlib.import_module(f'{package}.{file}'), name, None)
    if value is not None and getattr(value, key) == wanted:
      return value
  return next((one for one in values(name, package) if getattr(one, key) == wanted), None)


@functools.cache
def _inside(package: str) -> list[Any]:
  folder = importlib.import_module(package)
  return [
    importlib.import_module(f'{package}.{one.name}')
    for one in pkgutil.iter_modules(folder.__path__)
  ]


@functools.cache
def _modules(names: str) -> list[Any]:
  return [importlib.import_module(name) for name in names.split(',') if name]
