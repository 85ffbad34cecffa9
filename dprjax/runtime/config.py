"""The config of an experiment: read, checked against ``knobs``, and kept in its workdir.

A file in ``configs/`` starts from ``default()`` and sets what its experiment needs.
``--config.a.b=value`` on the command line overrides a knob; one that does not exist is an error.
"""

import difflib
import importlib.util
import json
import os
import pathlib
import re
import sys
import traceback
import types
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections
from absl import flags
from etils import epath
from ml_collections import config_flags

from dprjax.base import files, reading
from dprjax.base.errors import InputError, place
from dprjax.runtime import knobs, renamed

# Keys that may differ between two runs in one workdir: they change what is logged or kept, or where
# it is computed, not the result. (Another mesh or number of processes rounds differently.)
_FREE = (
  'checkpoint',
  'log_every',
  'eval.every',
  'eval.epochs',
  'eval.batch_size',
  'eval.skip_saturated',
  'compilation_cache',
  'mesh',
)

# Folders of a workdir in which something was made.
_MADE = ('checkpoints', 'backbone', 'folds', 'alternatives')

_NO_OPTION, _ALL = 'there is no such option', '; dprjax configs --options lists them all'
_LONGEST = 60  # letters of a name that are compared
_TASK = re.compile(r'[A-Za-z][A-Za-z0-9_-]{0,63}')


def default() -> ml_collections.ConfigDict:
  """Tuning of a dual encoder, or of a prompt for it, with the settings of DPTDR's released code."""

  return ml_collections.ConfigDict(_values(knobs.table()))


def task(**data: Any) -> ml_collections.ConfigDict:
  """An entry of ``config.tasks``, with these values in its ``data``."""
  entry = ml_collections.ConfigDict(_values(knobs.task_table()))
  entry.data.update(data)
  return entry


def _values(section: types.SimpleNamespace) -> dict[str, Any]:
  return {
    name: _values(item) if isinstance(item, types.SimpleNamespace) else item.value
    for name, item in vars(section).items()
  }


def replace(
  config: ml_collections.ConfigDict, changes: Mapping[str, Any]
) -> ml_collections.FrozenConfigDict:
  """The experiment with other values of some options, by their full names: ``data.fold``."""
  found = ml_collections.ConfigDict(config.to_dict())  # of a frozen one, too
  for name, value in changes.items():
    section, _, option = name.rpartition('.')
    _section(found, section)[option] = value
  return ml_collections.FrozenConfigDict(found)


def resolve(
  config: ml_collections.ConfigDict,
) -> dict[str, ml_collections.FrozenConfigDict]:
  """The experiments that a config asks for, checked: itself under '', or its alternatives by name.

  Those whose prompts are for queries only come first: they encode passages once, and what is behind
  them stops early. The others are in alphabetical order.

  Raises:
    InputError: as `check`; there is one alternative, or no held-out queries to choose by.
  """
  check_ranges(config, _own(config))
  if not config.alternatives:
    _check_together(config)
    return {'': ml_collections.FrozenConfigDict(config)}
  if len(config.alternatives) == 1:
    [name] = config.alternatives
    raise InputError(f'config.alternatives: {name} is the only one; name two or more, or none')
  for key, data in _data_sections(config).items():
    if not (data.hold_out or data.dev_split or data.get('folds')):
      raise InputError(
        'config.alternatives: held-out queries choose one of '
        f'{", ".join(config.alternatives)}, and there are none; set config.{key}.hold_out=0.2, for '
        'instance'
      )
  found = {}
  for name, entry in sorted(config.alternatives.items()):
    changes = flat(entry.to_dict()) | {'alternatives': {}}
    if config.data.store:
      changes['data.store'] = str(epath.Path(config.data.store) / name)
    found[name] = replace(config, changes)
    _check_together(found[name])
  return dict(sorted(found.items(), key=lambda item: item[1].prompt.sides != 'query'))


def local(c: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """Shrinks any experiment to seconds on a CPU.

  The backbone is tiny and random, the text docstrings of the standard library.
  """
  c.backbone.path = 'scratch:tiny'
  c.backbone.vocab_size = 8000
  c.prompt.length = min(c.prompt.length, 4)
  c.negatives = min(c.negatives, 2)
  c.batch_size = 16
  c.grad_cache = min(c.grad_cache, 2)
  c.epochs, c.steps = 0.0, 12
  c.ema, c.weight_interpolation = 0.0, 0.0  # twelve updates go nowhere near too far
  c.data.format, c.data.dir, c.data.mined_negatives = (
    'docstrings',
    'email,http,json,logging,asyncio,unittest,xml',
    '',
  )
  c.data.train_split, c.data.dev_split, c.data.hold_out = 'train', 'dev', 0.0
  c.data.folds = 0
  c.alternatives = {}
  c.data.query_max_length, c.data.passage_max_length = 16, 32
  c.pretrain.max_length, c.pretrain.span_length, c.pretrain.passage_length = 32, 16, 64
  c.cross_encoder.candidates, c.cross_encoder.dev_queries = 5, 32
  c.eval.every, c.checkpoint.every, c.log_every = 6, 4, 2
  c.eval.corpus_limit = 64
  c.mesh = ml_collections.ConfigDict({'data': -1, 'fsdp': 1, 'model': 1})
  return c


def shipped(name: str = 'configs') -> pathlib.Path:
  """The folder of the experiments that come with dprjax, or another one that does.

  setup.py copies them into a wheel, beside this module; elsewhere they are those of the checkout.
  """
  here = pathlib.Path(__file__)
  inside = here.parent / name
  return inside if inside.is_dir() else here.parents[2] / name


def find(config: str) -> str:
  """``FILE[:RECIPE]`` as it is, or of the file that comes with dprjax.

  That is for a ``configs/NAME.py`` that is not in the working folder, so that the same command runs
  everywhere.
  """
  path, colon, recipe = config.partition(':')
  if not re.fullmatch(r'configs/\w+\.py', path) or os.path.exists(path):
    return config
  ours = shipped() / path.removeprefix('configs/')
  return f'{ours}{colon}{recipe}' if ours.is_file() else config


def _located(argument: str) -> str:
  """An argument as ``find`` completes it; raises InputError for a config file that is not there."""
  flag, equals, value = argument.partition('=')
  if flag != '--config' or not value:
    return argument
  found = find(value)
  path = found.partition(':')[0] if '.py:' in found else found
  if not os.path.exists(path):
    raise InputError(
      f'--config: there is no file {path}; dprjax configs lists those that come with dprjax'
    )
  # A method of one's own may lie beside its config.
  if found == value and (folder := os.path.dirname(os.path.abspath(path))) not in sys.path:
    sys.path.append(folder)
  return f'{flag}{equals}{found}'


def parse(arguments: Sequence[str]) -> ml_collections.ConfigDict:
  """Reads ``--config=FILE[:recipe] --config.key=value ...``.

  The file is Python code, and runs. Values on the command line are literals, and do not. A
  ``configs/NAME.py`` that is not in the working folder is the one that comes with dprjax. Where a
  recipe and the command line exclude each other, the command line wins (`_prefer`).

  Raises:
    InputError: the file cannot be loaded, a key is unknown or has a new name, or two settings of
      the command line exclude each other.
  """
  for argument in arguments:
    _check_renamed(argument.partition('=')[0].removeprefix('--config.'))
  # Where ml_collections loads config files: what an earlier one defined would still be there.
  sys.modules.pop('config_config', None)
  values = flags.FlagValues()
  arguments = ['train', *map(_located, arguments)]
  config_flags.DEFINE_config_file('config', flag_values=values, sys_argv=arguments)
  try:
    values(arguments)
    config = values['config'].value
    if config is None:
      raise InputError('--config is missing; for instance --config=configs/dptdr.py:local')
    if not isinstance(config, ml_collections.ConfigDict):
      getattr(config, 'to_dict', None)  # of a file that is not there, it raises the reason
      raise InputError(f'--config: get_config gave {config!r:.60}; expected a ConfigDict')
    keys = flat(config.to_dict())  # a file that cannot be loaded fails when it is first read
  except (InputError, KeyboardInterrupt, MemoryError):
    raise
  except BaseException as error:  # a config file is code, and may raise whatever it likes
    raise InputError(_unknown(arguments[1:]) or f'--config: {_said(error, arguments)}') from error
  for key in keys:
    _check_renamed(key)
  _prefer(config, given(arguments))
  return config


def given(arguments: Sequence[str]) -> set[str]:
  """The knobs that a command line sets, ``data.hold_out`` for instance."""
  keys = (word.partition('=')[0] for word in arguments)
  return {key.removeprefix('--config.') for key in keys if key.startswith('--config.')}


def _prefer(config: ml_collections.ConfigDict, given: set[str]) -> None:
  """Takes back what a recipe says and the command line's settings would be overruled by.

  Raises:
    InputError: the command line itself says two things that exclude each other.
  """
  sections = {section for section, _, name in (key.rpartition('.') for key in given)}
  for section in sorted(sections):
    if section == 'data' or section.endswith('.data'):
      _prefer_dev(_section(config, section), section, given)
  for knob in sorted(key for key in given if key.rpartition('.')[2] == 'epochs'):
    section, _, _ = knob.rpartition('.')
    over = 'every' if section.endswith('eval') else 'steps'  # which replaces it
    if over in _section(config, section):
      _prefer_epochs(_section(config, section), knob, f'{section}.{over}'.lstrip('.'), given)
  alternatives, table = config.get('alternatives') or {}, flat(vars(knobs.table()))
  for name, entry in alternatives.items():
    for key in sorted(given & flat(entry.to_dict()).keys()):
      if key == 'prompt.sides':
        raise InputError(
          f'config.{key}: the alternatives {", ".join(alternatives)} differ in it; name a recipe '
          'that trains one of them, configs/dptdr.py:beir,query or :beir,both for instance'
        )
      of_queries = (
        'prompt.sides' in table[key].requires
      )  # they say which of the alternatives is meant
      if not of_queries and f'alternatives.{name}.{key}' not in given:
        section, _, knob = f'alternatives.{name}.{key}'.rpartition('.')
        with _section(config, section).unlocked() as changes:
          del changes[knob]
  differ = [flat(entry.to_dict()) for entry in alternatives.values()]
  if differ and all(changes == differ[0] for changes in differ):
    config.alternatives = {}  # the command line says all that they differed in


def _prefer_dev(data: ml_collections.ConfigDict, section: str, given: set[str]) -> None:
  """Three settings give queries to measure on; that of the command line replaces the recipe's."""
  ways = {'hold_out': 0.0, 'folds': 0, 'dev_split': ''}
  asked = [name for name in ways if f'{section}.{name}' in given and data.get(name)]
  below = f'{section}.folds_below' in given
  if 'dev_split' in asked and len(asked) > 1:
    raise InputError(
      f'config.{section}.dev_split, config.{section}.{asked[0]}: two ways to have queries to '
      'measure on; give one of them'
    )
  if asked == ['hold_out', 'folds'] and not below:
    raise InputError(
      f'config.{section}.folds, config.{section}.hold_out: two ways to have queries to measure on; '
      f'give one of them, or say with config.{section}.folds_below below how many training queries '
      'folds are made'
    )
  off = {'hold_out', 'folds'} if 'dev_split' in asked else {'dev_split'} if asked else set()
  if f'{section}.hold_out' in given and 'folds' not in asked and not below:
    off.add('folds')
  for name in off.intersection(data):
    data[name] = ways[name]
  if asked == ['folds'] and not below:
    data.folds_below = 10**9


def _prefer_epochs(
  section: ml_collections.ConfigDict, epochs: str, over: str, given: set[str]
) -> None:
  """A length in epochs on the command line replaces the recipe's in updates."""
  name, leaf = epochs.rpartition('.')[2], over.rpartition('.')[2]
  if over not in given:
    section[leaf] = 0
  elif section[name] and section[leaf]:
    raise InputError(f'config.{epochs}, config.{over}: two ways to say one length; leave one out')


def _section(config: ml_collections.ConfigDict, path: str) -> Any:
  """A part of a config: of ``'data'``, ``config.data``; of ``''`` all of it."""
  for name in path.split('.') if path else ():
    config = config[name]
  return config


def _unknown(arguments: Sequence[str]) -> str:
  """Which knob on the command line the experiment does not have; '' where it has them all."""
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
  """The options that a misspelt one is likely to be.

  Names in the same section come first. ``optim.lr`` is ``optim.learning_rate``: a name may be given
  by its initials.
  """
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
  """What an error says, in one line, and which line of a config file raised it."""
  # ml_collections puts a config file's traceback into its message; the last line is the cause.
  text = str(error).strip()
  text = text.splitlines()[-1] if 'Traceback' in text else ' '.join(text.split())
  if isinstance(error, SyntaxError):
    return place(error)
  said = text.removeprefix('ValueError: ')
  if said.startswith('configs/'):  # a recipe says what may stand behind its colon
    return said
  named = [word.partition('=')[2] for word in arguments if word.startswith('--config=')]
  folders = {os.path.dirname(os.path.realpath(name)) for name in named}
  for frame in reversed(traceback.extract_tb(error.__traceback__)):
    if os.path.dirname(os.path.realpath(frame.filename)) in folders:
      return f'{frame.filename}, line {frame.lineno}: {type(error).__name__}: {text}'
  return text


def check(config: ml_collections.ConfigDict) -> None:
  """Checks the options that every method has, before anything is read or written.

  A method's own options may stand in a section named after it: ``config.toy`` of ``lab.toy``. The
  method checks them by ``check_own``.

  Raises:
    InputError: an option has a value that it cannot have, or is unknown.
  """
  check_ranges(config, _own(config))
  _check_together(config)


def _check_together(config: ml_collections.ConfigDict) -> None:
  """Checks options that go together, whatever the method."""
  if not config.backbone.path:
    raise InputError(
      'config.backbone.path is empty; name a Hugging Face directory, a hub id or scratch:tiny'
    )
  if config.tasks and config.data.dir:
    raise InputError(
      f'config.data.dir: each of the tasks {", ".join(sorted(config.tasks))} names its own folder; '
      'leave it empty'
    )
  for name, section in _data_sections(config).items():
    if not section.dir and section.format != 'docstrings':
      raise InputError(
        f'config.{name}.dir is empty; name the folder that holds the training text, '
        f'--config.{name}.dir=DIR'
      )
  if not config.steps and not config.epochs:
    raise InputError('config.epochs: must be above 0 where config.steps is 0')
  if config.data.fold > config.data.folds:
    raise InputError(
      f'config.data.fold: {config.data.fold} of config.data.folds={config.data.folds}; leave it at '
      '0, a training sets it for itself'
    )


def _data_sections(config: ml_collections.ConfigDict) -> dict[str, ml_collections.ConfigDict]:
  """``config.data``, or that of each task, by its name."""
  tasks = {f'tasks.{name}.data': entry.data for name, entry in sorted(config.tasks.items())}
  return tasks or {'data': config.data}


def check_rules(
  config: ml_collections.ConfigDict, options: Sequence[str], requires: Mapping[str, Any]
) -> None:
  """Checks that options go with one another and with the method.

  Args:
    config: an experiment whose options are in range.
    options: the optional ones that its method has, see `knobs.Knob`.
    requires: what the method needs of others, likewise.

  Raises:
    InputError: naming the first option that is wrong.
  """

  def check_needs(what: str, needs: Mapping[str, Any]) -> None:
    for name, wanted in needs.items():
      value = option(config, name)
      if wanted is knobs.SET or not wanted:
        wrong, goes = bool(value) != bool(wanted), f'with{"" if wanted else "out"} config.{name}'
      else:
        wrong, goes = value != wanted, f'with config.{name}={wanted!r}'
      if wrong:
        raise InputError(f'{what} goes {goes}, which is {_shown(value)}')

  table = flat(vars(knobs.table())) | {'tasks': knobs.Knob({}, bool, '', optional=True)}
  for name, knob in table.items():
    value = option(config, name)
    if value == knob.value or (isinstance(value, list) and tuple(value) == knob.value):
      continue
    if not value and not knob.value:  # an empty section
      continue
    if knob.optional and name not in options:
      raise InputError(
        f'config.{name}: {config.method} does not have this option, which is {_shown(value)}; '
        f'leave it at {knob.value!r}, or choose another config.method'
      )
    check_needs(f'config.{name}={_shown(value)}', knob.requires)
  check_needs(f'config.method={config.method}', requires)


def option(config: ml_collections.ConfigDict, name: str) -> Any:
  """An option by its full name, ``data.hold_out`` for instance."""
  return _section(config, name)


def _shown(value: Any) -> str:
  if isinstance(value, ml_collections.ConfigDict):
    return ', '.join(sorted(value))
  return f'{value!r:.60}'


def evaluate_every(config: ml_collections.ConfigDict, epoch: int) -> int:
  """The updates between evaluations, where an epoch has so many."""
  return config.eval.every or max(round(config.eval.epochs * epoch), 1)


def settle(config: ml_collections.ConfigDict, platform: str) -> ml_collections.FrozenConfigDict:
  """The experiment on devices of a platform ('cpu', 'gpu', 'tpu'): ``'auto'`` is decided."""
  dtype = 'float32' if platform == 'cpu' else 'bfloat16'
  names = ('backbone.dtype', 'backbone.frozen_dtype')
  return replace(config, {name: dtype for name in names if option(config, name) == 'auto'})


def check_ranges(config: ml_collections.ConfigDict, own: str, name: str = 'config') -> None:
  """Checks that there are all knobs and no others, and that each has a value that it may have.

  Args:
    config: an experiment.
    own: the beginning of the method's own knobs, which it checks itself.
    name: of the config in messages.

  Raises:
    InputError: naming the first knob that is wrong.
  """
  known, given = _known(config, name), flat(config.to_dict())
  owns = (own, *(f'alternatives.{one}.{own}' for one in config.alternatives))
  if unknown := [key for key in given if key not in known and not key.startswith(owns)]:
    _check_renamed(unknown[0], name)
    raise InputError(f'{name}.{unknown[0]}: {_NO_OPTION}{_ALL}')
  if missing := [key for key in known if key not in given]:
    raise InputError(f'{name}.{missing[0]} is missing; begin a config file with default()')
  for key, knob in known.items():
    if not knob.fits(given[key]):
      raise InputError(f'{name}.{key}: expected {knob.expected}, not {given[key]!r:.60}')


def check_own(config: ml_collections.ConfigDict, table: Mapping[str, knobs.Knob]) -> None:
  """Checks a method's own knobs: ``config.toy`` of ``lab.toy`` has those of the table, in range.

  Raises:
    InputError: naming the first knob that is wrong.
  """
  section = _own(config).removesuffix('.')
  own = config.get(section)
  given = own.to_dict() if isinstance(own, ml_collections.ConfigDict) else {}
  if unknown := sorted(given.keys() - table.keys()):
    raise InputError(f'config.{section}.{unknown[0]}: {config.method} has no such knob')
  for name, knob in table.items():
    if name not in given:
      raise InputError(f'config.{section}.{name} is missing; set it in the config file')
    if not knob.fits(given[name]):
      raise InputError(
        f'config.{section}.{name}: expected {knob.expected}, not {given[name]!r:.60}'
      )


def _known(config: ml_collections.ConfigDict, name: str) -> dict[str, knobs.Knob]:
  """The knobs of a config with these tasks and alternatives.

  Raises InputError where they are no entries.
  """
  known, of_task = flat(vars(knobs.table())), flat(vars(knobs.task_table()))
  tasks = config.get('tasks')
  if tasks is None:
    raise InputError(f'{name}.tasks is missing; begin a config file with default()')
  if not isinstance(tasks, ml_collections.ConfigDict):
    raise InputError(f'{name}.tasks: expected entries by name, not {tasks!r:.60}')
  first: dict[str, str] = {}  # names are folders too, and some file systems ignore case
  for task, entry in tasks.items():
    if not isinstance(task, str) or not _TASK.fullmatch(task):
      raise InputError(
        f'{name}.tasks: {task!r:.60} is no name of a task; use up to 64 letters, digits, _ and -, '
        'the first one a letter'
      )
    if not isinstance(entry, ml_collections.ConfigDict):
      raise InputError(
        f'{name}.tasks.{task}: expected an entry, as runtime.config.task() makes it, not '
        f'{entry!r:.60}'
      )
    if first.setdefault(task.lower(), task) != task:
      raise InputError(
        f'{name}.tasks: {first[task.lower()]} and {task} are one name; give each task its own'
      )
    known |= {f'tasks.{task}.{key}': knob for key, knob in of_task.items()}
  alternatives = config.get('alternatives')
  if not isinstance(alternatives, ml_collections.ConfigDict):
    raise InputError(f'{name}.alternatives: expected knobs by name, not {alternatives!r:.60}')
  changes: dict[str, knobs.Knob] = {}  # of these knobs, each has those that differ
  for one, entry in alternatives.items():
    if not _TASK.fullmatch(one) or not isinstance(entry, ml_collections.ConfigDict):
      raise InputError(
        f'{name}.alternatives: expected a name of letters, digits, _ and -, and the knobs that '
        f'differ, not {one!r:.60}: {entry!r:.60}'
      )
    given = flat(entry.to_dict())
    changes |= {f'alternatives.{one}.{key}': known[key] for key in given if key in known}
  return known | changes


def split_argument(
  file: str, arg: str, recipes: Sequence[str], options: Sequence[str] = ('local',)
) -> tuple[str, list[str]]:
  """The argument of a config file: ``'nq,local'`` -> ``('nq', ['local'])``.

  Args:
    file: the config file.
    arg: what stands behind its colon; nothing stands for the first recipe.
    recipes: what it may start with.
    options: what may follow.

  Raises:
    ValueError: another word; ``parse`` makes an InputError of it.
  """
  name = f'configs/{pathlib.Path(file).name}'
  recipe, *rest = (arg or recipes[0]).split(',')
  if recipe not in recipes:
    *others, last = recipes
    raise ValueError(f'{name}:{recipe}: choose {", ".join(others)} or {last}')
  if unknown := set(rest) - set(options):
    raise ValueError(
      f'{name}:{arg}: {", ".join(sorted(unknown))}? only {" and ".join(options)} may follow '
      f'{recipe}'
    )
  return recipe, rest


def sibling(path: str, name: str) -> types.ModuleType:
  """The config file ``name.py`` beside the config file ``path``.

  So recipes build on one another without a package.
  """
  file = pathlib.Path(path).with_name(f'{name}.py')
  spec = importlib.util.spec_from_file_location(f'dprjax_config_{name}', file)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def to_json(config: ml_collections.ConfigDict) -> str:
  return json.dumps(config.to_dict(), indent=2, sort_keys=True, default=list)


def check_workdir(config: ml_collections.ConfigDict, workdir: epath.PathLike) -> bool:
  """Whether anything was made in the workdir. If so, it holds the same experiment.

  Raises:
    InputError: the workdir holds another experiment; the keys that differ are named.
  """
  path = epath.Path(workdir) / 'config.json'
  made = any((path.parent / name).exists() for name in _MADE)
  if not (path.exists() and made):
    return False
  stored, given = flat(_read(workdir)), flat(json.loads(to_json(config)))
  differ = [
    key
    for key in sorted(stored.keys() | given.keys())
    if stored.get(key) != given.get(key) and not key.startswith(_FREE)
  ]
  if differ:
    shown = '; '.join(
      f'{key}: {stored.get(key)!r} there, {given.get(key)!r} here' for key in differ[:3]
    )
    more = f' and {len(differ) - 3} more' if len(differ) > 3 else ''
    raise InputError(
      f'{workdir} holds another experiment ({shown}{more}); choose a fresh --workdir, or the '
      'settings it was begun with'
    )
  return True


def claim_workdir(config: ml_collections.ConfigDict, workdir: epath.PathLike) -> None:
  """Writes ``config.json`` into the workdir, or checks that it holds the same experiment.

  A workdir in which nothing was made yet (a path was mistyped, say) may be reused for another one.

  Raises:
    InputError: as ``check_workdir``.
  """
  if not check_workdir(config, workdir):
    with files.atomic_write(epath.Path(workdir) / 'config.json') as file:
      file.write(to_json(config) + '\n')


def load_workdir(workdir: epath.PathLike) -> ml_collections.ConfigDict:
  """The config of the experiment in ``workdir``.

  Raises InputError where there is none, or a knob has a value that it cannot have.
  """
  folder = epath.Path(workdir)
  if not (folder / 'config.json').exists():
    lacks = 'has no config.json' if folder.is_dir() else 'is a file' if folder.exists() else ''
    raise InputError(
      f'{workdir} {lacks or "is not there"}; name the --workdir that dprjax train was given'
    )
  try:
    config = ml_collections.ConfigDict(_read(workdir))
  except InputError:
    raise
  except ValueError as error:  # a key with a dot
    raise InputError(f'{workdir}/config.json: {error}') from error
  check_ranges(config, _own(config), f'{workdir}/config.json: config')
  return config


def _own(config: ml_collections.ConfigDict) -> str:
  """The beginning of the method's own knobs: ``toy.`` of ``lab.toy``."""
  return str(config.get('method')).rpartition('.')[2] + '.'


def backbone_path(config: ml_collections.ConfigDict, workdir: epath.PathLike) -> str:
  """The backbone's folder: ``config.backbone.path``, or in the workdir if it is from scratch."""
  path = config.backbone.path
  return str(epath.Path(workdir) / 'backbone') if path.startswith('scratch:') else path


def _check_renamed(key: str, name: str = 'config') -> None:
  """Raises InputError for a key's former name."""
  if new := renamed.key(key):
    raise InputError(f'{name}.{key} is now {name}.{new}')


def _read(workdir: epath.PathLike) -> dict[str, Any]:
  """A workdir's config.json; knobs that are younger than the file have their defaults."""
  path = epath.Path(workdir) / 'config.json'
  stored = reading.read_json_object(path, 'config.json of the workdir')
  merged = _merge(json.loads(to_json(default())), stored)
  if isinstance(merged['tasks'], dict):
    entry = json.loads(to_json(task()))
    merged['tasks'] = {name: _merge(entry, given) for name, given in merged['tasks'].items()}
  return merged


def _merge(defaults: Any, given: Any) -> Any:
  """What is given, and the defaults of what it lacks."""
  if not (isinstance(defaults, dict) and isinstance(given, dict)):
    return given
  return defaults | {key: _merge(defaults.get(key), value) for key, value in given.items()}


def flat(tree: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """The leaves of a config, or of the options' table, by their full names."""
  found: dict[str, Any] = {}
  for key, value in tree.items():
    value = vars(value) if isinstance(value, types.SimpleNamespace) else value
    if isinstance(value, dict):
      found |= flat(value, f'{prefix}{key}.')
    else:
      found[prefix + key] = value
  return found
