"""The config of an experiment: read, checked against the table of options, kept in its workdir.

A file in ``configs/`` starts from ``default()`` and changes options. ``--config.a.b=value`` on the
command line overrides an option; an unknown one is an error.
"""

import collections
import difflib
import importlib.util
import json
import os
import pathlib
import re
import sys
import traceback
import types
from collections.abc import Collection, Container, Mapping, Sequence
from typing import Any

import ml_collections
from absl import flags
from etils import epath
from ml_collections import config_flags

from dprjax.base.errors import InputError, describe_error
from dprjax.training import methods, options

_NO_OPTION, _ALL = 'there is no such option', '; dprjax configs --options lists them all'
_LONGEST = 60  # compared letters of a name
_TASK = re.compile(r'[A-Za-z][A-Za-z0-9_-]{0,63}')


def default(method: str = 'dpr') -> ml_collections.ConfigDict:
  """The options of a method: by default deep prompt tuning, as in the released DPTDR code.

  A method of one's own begins with those of 'dpr'.
  """
  config = ml_collections.ConfigDict(values(table(method if method in methods.METHODS else 'dpr')))
  config.method = method
  return config


def table(method: str, sections: Container[str] = ()) -> types.SimpleNamespace:
  """The options of every experiment and of a method, see `methods.option_modules`."""
  whole = options.table()
  for module in methods.option_modules(method, sections):
    for name, item in vars(module.table()).items():
      if isinstance(item, types.SimpleNamespace) and name in vars(whole):
        vars(getattr(whole, name)).update(vars(item))  # adds to a section
      else:
        setattr(whole, name, item)
  return whole


def values(section: types.SimpleNamespace) -> dict[str, Any]:
  settings: dict[str, Any] = {}
  for name, item in vars(section).items():
    settings[name] = values(item) if isinstance(item, types.SimpleNamespace) else item.value
    if getattr(item, 'mixed', False):
      settings[name] = ml_collections.FieldReference(item.value, object)
  return settings


def replace(
  config: ml_collections.ConfigDict, changes: Mapping[str, Any]
) -> ml_collections.FrozenConfigDict:
  changed = ml_collections.ConfigDict(config.to_dict())
  with changed.ignore_type():  # of 'auto'
    for name, value in changes.items():
      section, _, leaf = name.rpartition('.')
      option(changed, section)[leaf] = value
  return ml_collections.FrozenConfigDict(changed)


def resolve(
  config: ml_collections.ConfigDict,
) -> dict[str, ml_collections.FrozenConfigDict]:
  """The checked experiments of a config: itself under '', or its alternatives by name.

  Prompts for queries only come first: they train fastest, and later ones may stop early.
  """
  check_ranges(config)
  if not config.alternatives:
    check(config)
    return {'': ml_collections.FrozenConfigDict(config)}
  for key, data in data_sections(config).items():
    if not (data.hold_out or data.dev_split or data.get('folds')):
      raise InputError(
        f'config.alternatives: {", ".join(config.alternatives)} need held-out queries for the '
        f'choice; set for example config.{key}.hold_out=0.2'
      )
  experiments = {}
  for name, entry in sorted(config.alternatives.items()):
    changes = flat(entry.to_dict()) | {'alternatives': {}}
    if config.data.token_cache:
      changes['data.token_cache'] = str(epath.Path(config.data.token_cache) / name)
    experiments[name] = replace(config, changes)
    check(experiments[name])
  return dict(sorted(experiments.items(), key=lambda item: item[1].prompt.sides != 'query'))


# Packages whose docstrings are the data of a recipe without other data.
EMBEDDED = 'stdlib'

# A start of prompts, see config.prompt.init_text.
START = 'Represent this question for searching passages that answer it:'


def local(c: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """Shrinks any experiment to seconds on a CPU: a tiny random backbone, standard-library text."""
  c.backbone.path = 'scratch:tiny'
  c.backbone.vocab_size = 8000
  c.prompt.length = min(c.prompt.length, 4)
  c.batch_size = 16
  c.grad_cache = min(c.grad_cache, 2)
  c.epochs, c.steps = 0.0, 12
  c.ema, c.weight_interpolation = 0.0, 0.0
  c.data.format, c.data.mined_negatives = 'docstrings', ''
  c.data.dir = 'email,http,json,logging,asyncio,unittest,xml'
  c.data.train_split, c.data.dev_split, c.data.hold_out = 'train', 'dev', 0.0
  c.alternatives = {}
  if c.pooling == options.AUTO:
    c.pooling, c.normalize = 'mean', True
  c.data.query_max_length, c.data.passage_max_length = 16, 32
  c.data.query_prefix = c.data.passage_prefix = ''
  c.eval.every, c.checkpoint.every, c.log_every = 6, 4, 2
  c.eval.corpus_limit = 64
  c.mesh = ml_collections.ConfigDict({'data': -1, 'fsdp': 1, 'model': 1})
  for module in methods.option_modules(c.method, c):
    if hasattr(module, 'local'):
      module.local(c)
  return c


def shipped(name: str = 'configs') -> pathlib.Path:
  """A folder shipped with dprjax: beside this module in the wheel, else in the checkout."""
  here = pathlib.Path(__file__)
  inside = here.parent / name
  return inside if inside.is_dir() else here.parents[2] / name


def locate(config: str) -> str:
  """Locates ``FILE[:RECIPE]``; a ``configs/NAME.py`` missing here comes from dprjax."""
  path, colon, recipe = config.partition(':')
  if not re.fullmatch(r'configs/\w+\.py', path) or os.path.exists(path):
    return config
  ours = shipped() / path.removeprefix('configs/')
  return f'{ours}{colon}{recipe}' if ours.is_file() else config


def _located(argument: str) -> str:
  """An argument with its config file located; raises InputError if the file does not exist."""
  flag, equals, value = argument.partition('=')
  if flag != '--config' or not value:
    return argument
  located = locate(value)
  path = located.partition(':')[0] if '.py:' in located else located
  if not os.path.exists(path):
    raise InputError(
      f'--config: there is no file {path}; dprjax configs lists the shipped ones, such as '
      'configs/dptdr.py'
    )
  # A custom method may be beside its config.
  if located == value and (folder := os.path.dirname(os.path.abspath(path))) not in sys.path:
    sys.path.append(folder)
  return f'{flag}{equals}{located}'


def parse(arguments: Sequence[str]) -> ml_collections.ConfigDict:
  """Reads ``--config=FILE[:recipe] --config.key=value ...``.

  The file is Python code and is executed; command-line values are literals and never executed.
  """
  # ml_collections would reuse definitions of an earlier config file.
  sys.modules.pop('config_config', None)
  values = flags.FlagValues()
  arguments = ['train', *map(_located, arguments)]
  config_flags.DEFINE_config_file('config', flag_values=values, sys_argv=arguments)
  try:
    values(arguments)
    config = values['config'].value
    if not isinstance(config, ml_collections.ConfigDict):
      getattr(config, 'to_dict', None)  # raises the reason if the file failed to load
      raise InputError(
        f'--config: expected a file whose get_config returns a ConfigDict, such as '
        f'--config=configs/dptdr.py:local (dprjax configs lists them), not {config!r:.60}'
      )
  except (InputError, KeyboardInterrupt, MemoryError):
    raise
  except BaseException as error:  # a config file is code and may raise anything
    raise InputError(_unknown(arguments[1:]) or f'--config: {_said(error, arguments)}') from error
  _prefer(config, given(arguments))
  return config


def embed(config: ml_collections.ConfigDict, keys: Collection[str]) -> bool:
  """Lets a recipe for any data, without a data folder, train on docstrings for some minutes.

  Of a prompt for queries and one for both sides, only the first is trained, which is faster.
  Options on the command line, ``keys``, stay. Returns whether the config changed.
  """
  if config.data.dir or config.data.get('format') != 'auto' or config.get('tasks'):
    return False
  settings = {
    'data.format': 'docstrings',
    'data.dir': EMBEDDED,
    'data.hold_out': 0.0,
    'data.folds': 0,
    'data.dev_split': 'dev',
    'data.query_max_length': 32,
    'data.passage_max_length': 96,
    'epochs': min(config.epochs, 4.0),
  }
  config.update_from_flattened_dict({k: v for k, v in settings.items() if k not in keys})
  explicit = any(key.startswith('alternatives.') for key in keys)
  if {*config.alternatives} == {'query', 'both'} and not explicit:
    config.alternatives = {}
  return True


def given(arguments: Sequence[str]) -> set[str]:
  keys = (word.partition('=')[0] for word in arguments)
  return {key.removeprefix('--config.') for key in keys if key.startswith('--config.')}


def _prefer(config: ml_collections.ConfigDict, keys: set[str]) -> None:
  """Drops settings of a recipe that would override the command line."""
  sections = {section for section, _, name in (key.rpartition('.') for key in keys)}
  for section in sorted(sections):
    if section == 'data' or section.endswith('.data'):
      data = option(config, section)
      _prefer_dev(data, section, keys)
      named = f'{section}.dir' in keys and f'{section}.format' not in keys
      if named and data.get('format') == 'docstrings':
        # Other names than those of files are packages.
        there = all(os.path.exists(part.strip()) for part in data.dir.split(','))
        data.format = 'auto' if there else 'docstrings'
  for name in sorted(key for key in keys if key.rpartition('.')[2] == 'epochs'):
    section, _, _ = name.rpartition('.')
    over, lengths = 'every' if section.endswith('eval') else 'steps', option(config, section)
    updates = f'{section}.{over}'.lstrip('.')
    if over in lengths and updates not in keys:
      lengths[over] = 0
    elif over in lengths and lengths['epochs'] and lengths[over]:
      raise InputError(f'config.{name}, config.{updates}: both set the same length; leave one out')
  alternatives, known = config.get('alternatives') or {}, _table(config)
  for name, entry in alternatives.items():
    for key in sorted(keys & flat(entry.to_dict()).keys()):
      if key == 'prompt.sides':
        raise InputError(
          f'config.{key}: the alternatives {", ".join(alternatives)} differ in it; name a recipe '
          'for one of them, such as configs/dptdr.py:beir,query or :beir,both'
        )
      # An option for one side selects an alternative, so both keep their own.
      one_sided = 'prompt.sides' in known[key].requires
      if not one_sided and f'alternatives.{name}.{key}' not in keys:
        section, _, leaf = f'alternatives.{name}.{key}'.rpartition('.')
        with option(config, section).unlocked() as changes:
          del changes[leaf]
  differ = [flat(entry.to_dict()) for entry in alternatives.values()]
  if differ and all(changes == differ[0] for changes in differ):
    config.alternatives = {}


def _prefer_dev(data: ml_collections.ConfigDict, section: str, keys: set[str]) -> None:
  """Lets the source of dev queries on the command line replace that of the recipe."""
  ways = {'hold_out': 0.0, 'folds': 0, 'dev_split': ''}
  sources = [name for name in ways if f'{section}.{name}' in keys and data.get(name)]
  below = f'{section}.folds_below' in keys
  if len(sources) > 1 and ('dev_split' in sources or not below):
    raise InputError(
      f'config.{section}.{sources[-1]}, config.{section}.{sources[0]}: both give dev queries; '
      f'use one, or set config.{section}.folds_below to use folds and hold_out'
    )
  off = {'hold_out', 'folds'} if 'dev_split' in sources else {'dev_split'} if sources else set()
  if f'{section}.hold_out' in keys and 'folds' not in sources and not below:
    off.add('folds')
  for name in off.intersection(data):
    data[name] = ways[name]
  if sources == ['folds'] and not below:
    data.folds_below = 10**9


def option(config: ml_collections.ConfigDict, name: str) -> Any:
  """An option or section by its full name, such as ``data.hold_out``; '' is the whole config."""
  for part in name.split('.') if name else ():
    config = config[part]
  return config


def _unknown(arguments: Sequence[str]) -> str:
  named = [word for word in arguments if word.partition('=')[0] == '--config']
  if len(named) == len(arguments):
    return ''
  try:
    config = parse(named)
  except InputError:
    return ''
  known = list(flat(config.to_dict()))
  for word in arguments:
    key = word.partition('=')[0].removeprefix('--config').removeprefix('.')
    if key and key not in known and not any(name.startswith(f'{key}.') for name in known):
      near = ' or '.join(f'config.{name}' for name in _near(key, known))
      meant = f'; did you mean {near}?' if near else ''
      return f'config.{key}: {_NO_OPTION}{meant or _ALL}'
  return ''


def _near(key: str, known: Sequence[str]) -> list[str]:
  """Options with a similar name or initials (``optim.lr``), those of the same section first."""
  section, _, leaf = key.rpartition('.')
  parts = [(name, *name.rpartition('.')[::2]) for name in known]
  parts.sort(key=lambda part: part[1] != section)
  if moved := [name for name, _, last in parts if last == leaf]:
    return moved[:1]
  short = [
    part for part in parts if '_' in part[2] and leaf == ''.join(w[:1] for w in part[2].split('_'))
  ]
  if short:
    return [name for name, where, _ in short if not section or where == short[0][1]][:2]
  leaves = {last: name for name, _, last in reversed(parts)}
  near = difflib.get_close_matches(leaf[:_LONGEST], leaves, 1, cutoff=0.82)
  return [leaves[name] for name in near]


def _said(error: BaseException, arguments: Sequence[str]) -> str:
  """An error in one line, with its line in the config file."""
  # The message of ml_collections includes the traceback; its last line is the cause.
  text = str(error).strip()
  text = text.splitlines()[-1] if 'Traceback' in text else ' '.join(text.split())
  if isinstance(error, SyntaxError):
    return describe_error(error)
  message = text.removeprefix('ValueError: ')
  if message.startswith('configs/'):  # from `split_argument`
    return message
  named = [word.partition('=')[2] for word in arguments if word.startswith('--config=')]
  folders = {os.path.dirname(os.path.realpath(name)) for name in named}
  for frame in reversed(traceback.extract_tb(error.__traceback__)):
    if os.path.dirname(os.path.realpath(frame.filename)) in folders:
      return f'{frame.filename}, line {frame.lineno}: {type(error).__name__}: {text}'
  return text


def check(config: ml_collections.ConfigDict) -> None:
  check_ranges(config)
  if not config.backbone.path:
    raise InputError(
      'config.backbone.path is empty; name a Hugging Face folder, a hub id or scratch:tiny'
    )
  if config.get('tasks') and config.data.dir:
    raise InputError('config.data.dir: the entries of config.tasks name their own; leave it empty')
  for name, section in data_sections(config).items():
    if not section.dir and section.format != 'docstrings':
      raise InputError(
        f'config.{name}.dir is empty; --config.{name}.dir=DIR names the data, such as a folder '
        'with queries, corpus and judgements: see docs/recipes.md and docs/own-data.md'
      )
  if not config.steps and not config.epochs:
    raise InputError('config.epochs: must be above 0 if config.steps is 0')


def data_sections(config: ml_collections.ConfigDict) -> dict[str, ml_collections.ConfigDict]:
  """``config.data``, or the data section of each task, by name."""
  tasks = sorted(config.get('tasks', {}).items())
  return {f'tasks.{name}.data': entry.data for name, entry in tasks} or {'data': config.data}


def check_rules(
  config: ml_collections.ConfigDict, declared: Sequence[str], requires: Mapping[str, Any]
) -> None:
  """Checks that options fit each other and the method, which has ``declared`` optional ones."""

  def check_needs(what: str, needs: Mapping[str, Any]) -> None:
    for name, wanted in needs.items():
      value = option(config, name)
      if value == options.AUTO:
        continue  # it becomes the wanted value
      if wanted is options.SET or not wanted:
        wrong, goes = bool(value) != bool(wanted), f'with{"" if wanted else "out"} config.{name}'
      else:
        wrong, goes = value != wanted, f'with config.{name}={wanted!r}'
      if wrong:
        raise InputError(f'{what} goes {goes}, not {_shown(value)}')

  for name, spec in _table(config).items():
    value = option(config, name)
    if value == spec.value or (isinstance(value, list) and tuple(value) == spec.value):
      continue
    if spec.optional and name not in declared:
      raise InputError(
        f'config.{name}={_shown(value)}: {config.method} does not support this option; leave it at '
        f'{spec.value!r}, or choose another config.method'
      )
    check_needs(f'config.{name}={_shown(value)}', spec.requires)
  check_needs(f'config.method={config.method}', requires)


def _shown(value: Any) -> str:
  if isinstance(value, ml_collections.ConfigDict):
    return ', '.join(sorted(value))
  return f'{value!r:.60}'


def evaluate_every(config: ml_collections.ConfigDict, epoch: int) -> int:
  """Updates between evaluations, with ``epoch`` updates an epoch."""
  return config.eval.every or max(round(config.eval.epochs * epoch), 1)


def settle(config: ml_collections.ConfigDict, platform: str) -> ml_collections.FrozenConfigDict:
  """The experiment with an ``'auto'`` dtype resolved for a platform ('cpu', 'gpu', 'tpu')."""
  dtype = 'float32' if platform == 'cpu' else 'bfloat16'
  return replace(config, {'backbone.dtype': dtype} if config.backbone.dtype == 'auto' else {})


def check_ranges(config: ml_collections.ConfigDict, name: str = 'config') -> None:
  """Checks that exactly the known options exist and are in range.

  Those in the section of a custom method are left to `check_own`.
  """
  for module in methods.option_modules(str(config.get('method')), config):
    if lacks := [section for section in vars(module.table()) if section not in config]:
      raise InputError(
        f'{name}.method={config.method}: the config lacks its options {", ".join(lacks)}; begin '
        f'with a recipe of this method, or with default({config.method!r}) in a config file'
      )
  known, settings, prefix = _known(config, name), flat(config.to_dict()), f'{_own_section(config)}.'
  prefixes = (prefix, *(f'alternatives.{one}.{prefix}' for one in config.alternatives))
  settings = {
    key: value for key, value in settings.items() if key in known or not key.startswith(prefixes)
  }
  options.check(known, settings, name, 'dprjax configs --options')


def check_own(config: ml_collections.ConfigDict, table: Mapping[str, options.Option]) -> None:
  """Checks the options of a custom method against its table."""
  section = _own_section(config)
  settings = config.get(section)
  entries = settings.to_dict() if isinstance(settings, ml_collections.ConfigDict) else {}
  options.check(table, entries, f'config.{section}', f'OPTIONS of {config.method}')


def _table(config: ml_collections.ConfigDict) -> dict[str, options.Option]:
  """The options of the method of a config, by full name, without those of entries."""
  return flat(vars(table(str(config.get('method')), config)))


def _known(config: ml_collections.ConfigDict, name: str) -> dict[str, options.Option]:
  """The options of a config with its tasks and alternatives."""
  known = _table(config)
  for section in ('tasks', 'alternatives'):
    entries = config.get(section) or {}
    # Names are folders, and some file systems ignore case.
    folded = collections.Counter(str(entry).lower() for entry in entries)
    for entry, of_entry in entries.items():
      if (
        not _TASK.fullmatch(str(entry))
        or folded[str(entry).lower()] > 1
        or not isinstance(of_entry, ml_collections.ConfigDict)
      ):
        raise InputError(
          f'{name}.{section}: expected a name (a letter, then up to 63 letters, digits, _ or -; '
          'names differ in more than case) and a section of options, not '
          f'{entry!r:.60}: {of_entry!r:.60}'
        )
  for module in methods.option_modules(str(config.get('method')), config):
    if hasattr(module, 'task_table'):
      of_task = flat(vars(module.task_table()))
      known |= {
        f'tasks.{task}.{key}': spec for task in config.tasks for key, spec in of_task.items()
      }
  for one, entry in config.alternatives.items():
    changes = flat(entry.to_dict())
    known |= {f'alternatives.{one}.{key}': known[key] for key in changes if key in known}
  return known


def inputs(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """The files that options of the method name, by option."""
  paths: dict[str, Any] = {}
  for module in methods.option_modules(config.method, config):
    paths |= module.inputs(config) if hasattr(module, 'inputs') else {}
  return paths


def split_argument(
  file: str, arg: str, recipes: Sequence[str], options: Sequence[str] = ('local',)
) -> tuple[str, list[str]]:
  """Splits the argument of a config file: ``'nq,local'`` -> ``('nq', ['local'])``.

  ``parse`` turns the ValueError for an unknown word into an InputError.
  """
  name = f'configs/{pathlib.Path(file).name}'
  recipe, *rest = (arg or recipes[0]).split(',')
  if recipe not in recipes:
    *others, last = recipes
    raise ValueError(f'{name}:{recipe}: choose {", ".join(others)} or {last}')
  if unknown := set(rest) - set(options):
    raise ValueError(
      f'{name}:{arg}: unknown {", ".join(sorted(unknown))}; {recipe} allows {" and ".join(options)}'
    )
  return recipe, rest


def sibling(path: str, name: str) -> types.ModuleType:
  """The config file ``name.py`` beside ``path``, so that recipes can share code."""
  file = pathlib.Path(path).with_name(f'{name}.py')
  spec = importlib.util.spec_from_file_location(f'dprjax_config_{name}', file)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def to_json(config: ml_collections.ConfigDict) -> str:
  return json.dumps(config.to_dict(), indent=2, sort_keys=True, default=list)


def _own_section(config: ml_collections.ConfigDict) -> str:
  """The section of a custom method: ``toy`` for ``lab.toy``."""
  return str(config.get('method')).rpartition('.')[2]


def flat(tree: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """The leaves of a config or of a table of options, by their full names."""
  leaves: dict[str, Any] = {}
  for key, value in tree.items():
    value = vars(value) if isinstance(value, types.SimpleNamespace) else value
    if isinstance(value, dict):
      leaves |= flat(value, f'{prefix}{key}.')
    else:
      leaves[prefix + key] = value
  return leaves
