"""The settings of the encoder in an experiment: ``'auto'`` becomes what `dprjax.encode` uses.

In this order: the value of a run that has begun, the value that the method requires, and that of
the backbone folder (`sentence.read_folder`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import ml_collections

from dprjax.models import hub
from dprjax.text.vector_spec import SIDES, VectorSpec
from dprjax.training import config as configs
from dprjax.training import method as methods
from dprjax.training.options import AUTO

_LONGEST = 8192  # of data.query_max_length
NAMES = (
  'pooling',
  'normalize',
  *(f'data.{side}_{name}' for name in ('prefix', 'max_length') for side in SIDES),
)


def load(path: str, reserved: int) -> VectorSpec:
  """The settings of a backbone, with ``reserved`` positions for a prompt."""
  return VectorSpec() if path.startswith('scratch:') else hub.load_spec(path, reserved)


def resolve(
  config: ml_collections.ConfigDict,
  begun: Mapping[str, Any],
  load: Callable[[str, int], VectorSpec] = load,
) -> tuple[ml_collections.FrozenConfigDict, str]:
  """The experiment without ``'auto'``, and a log line with the values, or ''.

  Args:
    begun: the options of a run that goes on, by full name.
  """
  names = [name for name in NAMES if configs.option(config, name) == AUTO]
  if not names:
    return ml_collections.FrozenConfigDict(config), ''
  reserved = config.prompt.length * config.prompt.shift_positions
  spec = load(config.backbone.path, reserved).at_most(_LONGEST)
  requires = methods.load(config.method).requires
  changes = {}
  for name in names:
    own = getattr(spec, name.removeprefix('data.'))
    changes[name] = begun.get(name, requires.get(name, own))
  line = ', '.join(f'config.{name}={changes[name]!r}' for name in names if name not in requires)
  for side in SIDES:
    buckets, length = config.data[f'{side}_buckets'], changes.get(f'data.{side}_max_length', 0)
    if length > max(buckets):
      longer = (n for n in (1024, 2048, 4096, length) if max(buckets) < n <= length)
      changes[f'data.{side}_buckets'] = (*buckets, *dict.fromkeys(longer))
  return configs.replace(config, changes), f"from 'auto': {line}" if line else ''
