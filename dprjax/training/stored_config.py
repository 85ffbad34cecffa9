"""The config.json of a workdir, which names its experiment."""

import json
import os
import re
from collections.abc import Sequence
from typing import Any

import ml_collections
from etils import epath

from dprjax.base import files, reading
from dprjax.base.errors import InputError
from dprjax.training import config as configs
from dprjax.training import methods

# Options that may differ between runs in the same workdir: they change logs, kept files, or the
# devices.
_FREE = (
  'checkpoint',
  'log_every',
  'log.',
  'eval.every',
  'eval.epochs',
  'eval.batch_size',
  'eval.skip_saturated',
  'mesh',
)


# Folders of a workdir with results.
_MADE = ('checkpoints', 'backbone', 'folds', 'alternatives')


def default_workdir(arguments: Sequence[str], config: ml_collections.ConfigDict) -> str:
  """The workdir of a command line without one: runs/CONFIG-RECIPE."""
  named = next(word for word in arguments if word.startswith('--config='))
  path, _, recipe = named.removeprefix('--config=').partition('.py')
  words = [os.path.basename(path), *re.findall(r'[\w.+-]+', recipe or str(config.get('task', '')))]
  return os.path.join('runs', '-'.join(dict.fromkeys(words)))


def begun(workdir: epath.PathLike) -> dict[str, Any]:
  """The options of a workdir with results, by full name; else empty."""
  path = epath.Path(workdir) / 'config.json'
  has_results = any((path.parent / name).exists() for name in _MADE)
  return configs.flat(_read(workdir)) if path.exists() and has_results else {}


def check_workdir(config: ml_collections.ConfigDict, workdir: epath.PathLike) -> bool:
  """Whether the workdir has results, which must be of this experiment."""
  if not (stored := begun(workdir)):
    return False
  given = configs.flat(json.loads(configs.to_json(config)))
  differ = [
    key
    for key in sorted(stored.keys() | given.keys())
    if _resolved(stored.get(key)) != _resolved(given.get(key)) and not key.startswith(_FREE)
  ]
  if differ:
    shown = '; '.join(
      f'{key}: {stored.get(key)!r} there, {given.get(key)!r} here' for key in differ[:3]
    )
    more = f' and {len(differ) - 3} more' if len(differ) > 3 else ''
    raise InputError(
      f'{workdir} has another experiment ({shown}{more}); use a fresh --workdir or the same options'
    )
  return True


def _resolved(value: Any) -> Any:
  """A value with paths made absolute, without links."""
  if not isinstance(value, str):
    return value
  parts = value.split(',')
  return [os.path.realpath(part) if os.path.exists(part) else part for part in parts]


def claim_workdir(config: ml_collections.ConfigDict, workdir: epath.PathLike) -> None:
  """Writes ``config.json`` into the workdir; a workdir without results may be reused."""
  if not check_workdir(config, workdir):
    with files.atomic_write(epath.Path(workdir) / 'config.json') as file:
      file.write(configs.to_json(config) + '\n')


def load_workdir(workdir: epath.PathLike) -> ml_collections.ConfigDict:
  """The config of the experiment in ``workdir``."""
  config = ml_collections.ConfigDict(_read(workdir))
  configs.check_ranges(config, configs.prefix_of(config), f'{workdir}/config.json: config')
  return config


def backbone_path(config: ml_collections.ConfigDict, workdir: epath.PathLike) -> str:
  """The backbone folder: ``config.backbone.path``, or a folder of the workdir if from scratch."""
  path = config.backbone.path
  return str(epath.Path(workdir) / 'backbone') if path.startswith('scratch:') else path


def _read(workdir: epath.PathLike) -> dict[str, Any]:
  """The config.json of a workdir; options newer than the file get their defaults."""
  path = epath.Path(workdir) / 'config.json'
  stored = reading.read_json_object(path, 'config.json of the workdir')
  method = str(stored.get('method'))
  whole = ml_collections.ConfigDict(configs.values(configs.table(method, stored)))
  merged = _merge(json.loads(configs.to_json(whole)), stored)
  for module in methods.option_modules(method, stored):
    if hasattr(module, 'task_table') and isinstance(merged['tasks'], dict):
      table = ml_collections.ConfigDict(configs.values(module.task_table()))
      entry = json.loads(configs.to_json(table))
      merged['tasks'] = {name: _merge(entry, given) for name, given in merged['tasks'].items()}
  return merged


def _merge(defaults: Any, given: Any) -> Any:
  if not (isinstance(defaults, dict) and isinstance(given, dict)):
    return given
  return defaults | {key: _merge(defaults.get(key), value) for key, value in given.items()}
