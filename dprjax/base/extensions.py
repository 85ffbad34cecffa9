"""Extensions by users: backbone families, adapter kinds, poolings.

``DPRJAX_EXTENSIONS=lab.rms,lab.top`` names modules on the Python path, which are imported at the
first look-up of such a value. Only this variable can name them: no file that a command reads can.
"""

import functools
import importlib
import importlib.util
import os
import types
from collections.abc import Mapping
from typing import Any

VARIABLE = 'DPRJAX_EXTENSIONS'
NONE: Mapping[str, str] = types.MappingProxyType({})


def values(name: str, places: Mapping[str, str] = NONE) -> list[Any]:
  """The values at these places of dprjax, and the values of this name in modules of the user.

  Args:
    places: ``MODULE.VALUE`` by the key of the value.
  """
  shipped = [_value(place) for place in places.values() if there(place.rpartition('.')[0])]
  added = (getattr(module, name, None) for module in _modules(os.environ.get(VARIABLE, '')))
  return [*shipped, *(value for value in added if value is not None)]


def find(name: str, key: str, wanted: str, places: Mapping[str, str]) -> Any:
  """The one of `values` whose attribute ``key`` is ``wanted``, or None. Imports no other place."""
  if wanted in places and there(places[wanted].rpartition('.')[0]):
    return _value(places[wanted])
  return next((one for one in values(name) if getattr(one, key) == wanted), None)


def there(module: str) -> bool:
  """Whether a module of dprjax exists; the folder of a paper may be deleted."""
  try:
    return importlib.util.find_spec(module) is not None
  except ModuleNotFoundError:
    return False


def _value(place: str) -> Any:
  module, _, name = place.rpartition('.')
  return getattr(importlib.import_module(module), name)


@functools.cache
def _modules(names: str) -> list[Any]:
  return [importlib.import_module(name) for name in names.split(',') if name]
