"""The folders of runs: their experiments, claims, marks and inputs.

In a workdir, `config.json` names the experiment, and `dprjax.json` the kind of run and, for a
training, the SHA-256 of its input files (`begin`).
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import ml_collections
import msgspec
import numpy as np
from etils import epath

from dprjax.base import files, outputs, provenance, reading, repository
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.text import seen
from dprjax.training import config as configs
from dprjax.training import methods

BASELINE = 'baseline.json'  # dev scores before the first step
SHORTER = 'shorter'  # folder of the same with shorter lengths, those of the training
SELECTION = 'selection.json'  # the choice by held-out queries, see `selection`
PASSAGES = 'passages'  # folder of vectors of the frozen backbone
FOLDS, ALTERNATIVES = 'folds', 'alternatives'  # folders of trainings for the choice
CHOSEN = 'choice.json'  # estimates of all candidates by held-out queries
SATURATED = 'saturated.json'  # the reason why nothing was trained
_SATURATED = 'dprjax.saturated'  # its format
DEV = 'dev.tsv'  # judgements of the held-out queries
MEASURED = (BASELINE, SELECTION, SATURATED, CHOSEN)
SEEN_BEFORE = 'queries-init_from.npz'  # of the prompt that starts the run
_QUERIES = 'queries*.npz'  # hashes of the queries used for training and choice
CHOICE = 'dprjax.selection'  # the format of the selection
TRAINING, PIPELINE, QUICKSTART = 'dprjax.training', 'dprjax.pipeline', 'dprjax.quickstart'
FIT = 'dprjax.fit'
_NAMES = {
  TRAINING: 'a training of dprjax.train',
  PIPELINE: 'a run of dprjax.pipeline',
  QUICKSTART: 'a comparison of dprjax.quickstart',
  FIT: 'a training of dprjax.fit',
}


@contextlib.contextmanager
def claim(
  workdir: files.PathLike,
  kind: str,
  inputs: outputs.Inputs,
  *,
  flag: str = '--workdir',
  lock: bool = True,
) -> Iterator[epath.Path]:
  """Claims and marks the folder of a run. If nothing else was made, it is removed.

  Args:
    kind: of run, one of ``_NAMES``.
    lock: False in all but one of several processes that work together.
  """

  def ours(folder: epath.Path) -> bool:
    return bool(provenance.read_mark(folder).get('format') == kind)

  with outputs.claim_folder(
    workdir, inputs, what=_NAMES[kind], ours=ours, flag=flag, grows=True, lock=lock
  ) as path:
    if not lock:
      yield path
      return
    fresh = not path.exists() or outputs.is_vacant(path)
    if not (path / provenance.MARK).exists():
      provenance.write_mark(path, kind)
    try:
      yield path
    except BaseException:  # also after an interrupt
      ours_alone = {provenance.MARK, outputs.LOCK, 'config.json'}
      if fresh and {item.name for item in path.iterdir()} <= ours_alone:
        for name in (provenance.MARK, 'config.json'):
          (path / name).unlink(missing_ok=True)
      raise


def top(workdir: epath.Path) -> epath.Path:
  """The workdir of the run that a fold or alternative belongs to, or the workdir itself."""
  while workdir.parent.name in (FOLDS, ALTERNATIVES):
    above = workdir.parent.parent
    if provenance.read_mark(above).get('format') != TRAINING:
      break
    workdir = above
  return workdir


def begun(workdir: epath.Path) -> bool:
  """Whether a training in this workdir has a checkpoint or folds."""
  return _has_checkpoint(workdir) or (workdir / FOLDS).exists()


def _has_checkpoint(workdir: epath.Path) -> bool:
  checkpoints = workdir / 'checkpoints'
  return checkpoints.is_dir() and any(path.name.isdecimal() for path in checkpoints.iterdir())


def write_saturated(workdir: epath.Path, why: str) -> None:
  """Writes the reason why nothing was trained; '' removes the file."""
  if why:
    files.write_json(workdir / SATURATED, {'format': _SATURATED, 'why': why})
  else:
    (workdir / SATURATED).unlink(missing_ok=True)


def show_held_out(workdir: epath.Path, chosen: str) -> None:
  """Copies the judgements of held-out queries from the chosen alternative."""
  if (judgements := alternative(workdir, chosen) / DEV).exists():
    files.clear(workdir / DEV)
    judgements.copy(workdir / DEV, overwrite=True)


def seen_queries(workdir: epath.Path) -> seen.Seen:
  """Hashes of the queries used for training and choice in a run."""
  return seen.join(*map(seen.read, sorted(workdir.glob(_QUERIES), key=str)))


def seen_before(workdir: epath.Path) -> str:
  """A warning if the prompt that starts a run was trained on dev queries of the run; else ''."""
  trained = seen.read(workdir / SEEN_BEFORE).get('train', np.zeros(0))
  held_out = seen.read(workdir / seen.FILE).get('dev', np.zeros(0))
  count = int(np.isin(held_out, trained).sum())
  if not count:
    return ''
  return (
    f'config.prompt.init_from was trained on {count:,} of {counted(len(held_out), "dev queries")}: '
    'the gain here is too high; hold out the same queries in both trainings'
  )


def scored(workdir: epath.Path) -> list[epath.Path]:
  """The workdirs with the held-out scores of a training: its folds, or its own."""
  folds = workdir / FOLDS
  if not folds.exists():
    return [workdir]
  return sorted(
    (path for path in folds.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name)
  )


def alternative(workdir: epath.Path, name: str) -> epath.Path:
  """The workdir of one of ``config.alternatives``."""
  return workdir / ALTERNATIVES / name


class _Saturated(msgspec.Struct):
  format: Literal['dprjax.saturated']
  why: str


def trained(workdir: files.PathLike) -> epath.Path:
  """The workdir with the checkpoints of a run: its own, or that of the chosen alternative."""
  config, workdir = load_workdir(workdir), epath.Path(workdir)
  if why := why_untrained(workdir):
    raise InputError(f'{workdir}: nothing was trained: {why}')
  if not config.alternatives:
    return workdir
  path = epath.Path(workdir) / SELECTION
  best = reading.read_json_object(path, 'selection').get('chosen') if path.exists() else ''
  if best not in config.alternatives:
    folders = ' or '.join(str(alternative(workdir, name)) for name in config.alternatives)
    raise InputError(
      f'{workdir}: no alternative is chosen yet; run its training to the end, or name {folders}'
    )
  return alternative(workdir, str(best))


def why_untrained(workdir: files.PathLike) -> str:
  """The reason why a run trained nothing, or ''."""
  config, workdir = load_workdir(workdir), epath.Path(workdir)
  for folder in (workdir, *(alternative(workdir, name) for name in config.alternatives)):
    if (folder / SATURATED).exists():
      return reading.read(folder / SATURATED, 'record', _Saturated).why
  return ''


def inputs(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """The inputs of a training by flag, hub ids included."""
  folder = config.data.dir
  parts = [folder, *(part.strip() for part in folder.split(','))]
  if config.data.format in ('auto', 'beir', 'msmarco'):  # which read no other folders below
    parts = [inside for part in parts for inside in _files_of(part)]
  scratch = config.backbone.path.startswith('scratch:')
  return {f'--{option}': paths for option, paths in configs.inputs(config).items()} | {
    '--config.data.dir': [] if config.data.format == 'docstrings' else parts,
    '--config.data.mined_negatives': config.data.mined_negatives,
    '--config.prompt.init_from': config.prompt.init_from,
    '--config.backbone.path': None if scratch else config.backbone.path,
  }


def _files_of(path: str) -> list[str]:
  """The files and judgements in a folder; another path alone."""
  if not path or not (folder := epath.Path(path)).is_dir():
    return [path]
  direct = [str(inside) for inside in folder.iterdir() if not inside.is_dir()]
  return [*direct, str(folder / 'qrels')]


def check_folders(config: ml_collections.ConfigDict, inputs: outputs.Inputs) -> None:
  """Raises InputError if the token cache is an input."""
  if folder := config.data.token_cache:
    outputs.check_name(folder, '--config.data.token_cache')
    outputs.check_apart(folder, inputs, '--config.data.token_cache')


def model_name(config: ml_collections.ConfigDict) -> str:
  """The name of the model that a config trains: the kind of adapter, or the sides of a prompt."""
  if not config.prompt.length:
    return 'trained'
  return str(config.prompt.sides if config.prompt.kind == 'prefix' else config.prompt.kind)


def model_files(config: ml_collections.ConfigDict, folder: str) -> dict[str, epath.Path]:
  """The files of the initial model of a training, by role."""
  by_role = {
    f'backbone ({path.name})': path
    for path in sorted(epath.Path(folder).iterdir(), key=str)
    if path.suffix in ('.json', '.safetensors', '.txt', '.model') and not path.is_dir()
  }
  if config.prompt.init_from:
    by_role['config.prompt.init_from'] = repository.locate(
      config.prompt.init_from, 'prompt.npz', 'config.prompt.init_from'
    )
  return by_role


def begin(workdir: epath.Path, sources: Mapping[str, epath.Path]) -> None:
  """Records the input files of a training, or compares them once there is a checkpoint."""
  before = provenance.read_mark(workdir).get('inputs')
  if not _has_checkpoint(workdir):
    if before is None or provenance.changes(before, sources):
      for path in (*(workdir / name for name in MEASURED), *workdir.glob(_QUERIES)):
        path.unlink(missing_ok=True)  # made from other files
      provenance.write_mark(workdir, TRAINING, inputs=provenance.stamp(sources))
    return
  if not isinstance(before, dict):
    return
  for role in provenance.changes(before, sources):
    if role in sources and role in before:
      what = f'{role} file {sources[role]} differs from the one'
    else:
      what = f'{role} file is {"new" if role in sources else "missing"}, unlike those'
    raise InputError(
      f'the {what} that {workdir} began with; put it back, or choose a fresh --workdir'
    )


# The experiment of a workdir.

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
_RESULTS = ('checkpoints', 'backbone', 'folds', 'alternatives')


def default_workdir(arguments: Sequence[str], config: ml_collections.ConfigDict) -> str:
  """The workdir of a command line without one: runs/CONFIG-RECIPE."""
  named = next(word for word in arguments if word.startswith('--config='))
  path, _, recipe = named.removeprefix('--config=').partition('.py')
  words = [os.path.basename(path), *re.findall(r'[\w.+-]+', recipe or str(config.get('task', '')))]
  return os.path.join('runs', '-'.join(dict.fromkeys(words)))


def begun_options(workdir: epath.PathLike) -> dict[str, Any]:
  """The options of a workdir with results, by full name; else none."""
  path = epath.Path(workdir) / 'config.json'
  has_results = any((path.parent / name).exists() for name in _RESULTS)
  return configs.flat(_read(workdir)) if path.exists() and has_results else {}


def check_workdir(config: ml_collections.ConfigDict, workdir: epath.PathLike) -> bool:
  """Whether the workdir has results, which must be of this experiment."""
  if not (stored := begun_options(workdir)):
    return False
  options = configs.flat(json.loads(configs.to_json(config)))
  differ = [
    key
    for key in sorted(stored.keys() | options.keys())
    if _resolved(stored.get(key)) != _resolved(options.get(key)) and not key.startswith(_FREE)
  ]
  if differ:
    shown = '; '.join(
      f'{key}: {stored.get(key)!r} there, {options.get(key)!r} here' for key in differ[:3]
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
  configs.check_ranges(config, f'{workdir}/config.json: config')
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
      merged['tasks'] = {name: _merge(entry, task) for name, task in merged['tasks'].items()}
  return merged


def _merge(defaults: Any, stored: Any) -> Any:
  if not (isinstance(defaults, dict) and isinstance(stored, dict)):
    return stored
  return defaults | {key: _merge(defaults.get(key), value) for key, value in stored.items()}
