"""Trackers of a training besides `metrics.jsonl`: ``config.log.to``.

| name | place |
|---|---|
| tensorboard | ``tensorboard`` in the workdir |
| wandb | by ``wandb login`` or ``WANDB_MODE=offline``; its files are in the workdir |
| mlflow | by ``MLFLOW_TRACKING_URI``, or the default of mlflow |
| trackio | the folder of Trackio, or the Space in ``TRACKIO_SPACE_ID`` |

A package is imported only when named. A resumed training continues its tracker run where possible.
`dprjax export` sends what it wrote to the MLflow run.
A tracker that fails to take numbers does not end the training: it is dropped with a warning.
"""

import importlib
import importlib.util
import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from etils import epath

from dprjax.base import files, reading
from dprjax.base.errors import InputError

logger = logging.getLogger('dprjax')

FILE = 'trackers.json'  # in the workdir: ids of tracker runs
_PACKAGES = {
  'tensorboard': 'tensorboardX',
  'wandb': 'wandb',
  'mlflow': 'mlflow-skinny',
  'trackio': 'trackio',
}
_MODULES = {'tensorboard': 'tensorboardX'}
_MOST = 500  # characters of a config value


class About(NamedTuple):
  """Information about a training for trackers.

  Attributes:
    workdir: of the training.
    step: the last step before a resumption; -1 at the start.
    project, name: of the run.
    config: options by full name.
  """

  workdir: epath.Path
  step: int
  project: str
  name: str
  config: Mapping[str, Any]


class Tracker(NamedTuple):
  """An open tracker run: a function for the scalars of a step, and one to end it."""

  name: str
  write: Callable[[int, Mapping[str, float]], None]
  close: Callable[[], None]


def check(to: str) -> None:
  """Raises InputError for an unknown tracker of ``config.log.to``."""
  for name in _names(to):
    if name not in _PACKAGES:
      known = ', '.join(_PACKAGES)
      raise InputError(f'config.log.to: there is no tracker {name!r:.40}; trackers are {known}')


def _names(to: str) -> list[str]:
  return [name.strip() for name in to.split(',') if name.strip()]


def open_all(to: str, about: About) -> list[Tracker]:
  """Opens the trackers of ``config.log.to``."""
  check(to)
  opened: list[Tracker] = []
  try:
    for name in _names(to):
      opened.append(_open(name, about))
  except BaseException:
    for one in opened:
      one.close()
    raise
  return opened


def _open(name: str, about: About) -> Tracker:
  begins = {'tensorboard': _tensorboard, 'wandb': _wandb, 'mlflow': _mlflow, 'trackio': _trackio}
  try:
    write, close = begins[name](importlib.import_module(_MODULES.get(name, name)), about)
  except Exception as error:  # from a server, a login or a file
    why = f'{type(error).__name__}: {" ".join(str(error).split()):.200}'
    hint = f'; pip install {_PACKAGES[name]}' if isinstance(error, ImportError) else ''
    raise InputError(f'config.log.to={name} cannot start ({why}){hint}') from error
  broken: list[str] = []

  def careful(action: Callable[[], None]) -> None:
    if broken:
      return
    try:
      action()
    except OSError:
      if name == 'tensorboard':  # no room in the workdir
        raise
      broken.append(name)
    except Exception as error:
      broken.append(str(error))
    if broken:
      logger.warning(
        '%s failed and gets no more numbers: %s', name, ' '.join(broken[0].split())[:200]
      )

  return Tracker(
    name,
    lambda step, scalars: careful(lambda: write(step, scalars)),
    lambda: careful(close),
  )


_Pair = tuple[Callable[[int, Mapping[str, float]], None], Callable[[], None]]


def _tensorboard(module: Any, about: About) -> _Pair:
  board = module.SummaryWriter(str(about.workdir / 'tensorboard'), purge_step=about.step + 1)

  def write(step: int, scalars: Mapping[str, float]) -> None:
    for name, value in scalars.items():
      board.add_scalar(name, value, step)

  return write, board.close


def _wandb(module: Any, about: About) -> _Pair:
  run = module.init(
    project=about.project,
    name=about.name,
    dir=str(about.workdir),
    id=_id(about, 'wandb'),
    resume='allow',
    config=dict(about.config),
    reinit='create_new',
  )
  return lambda step, scalars: run.log(dict(scalars), step=step), run.finish


def _mlflow(module: Any, about: About) -> _Pair:
  # A client, since module.start_run would change the state of the surrounding program.
  client = module.MlflowClient()
  kept = _read(about.workdir).get('mlflow')
  if kept is None or about.step < 0:
    experiment = client.get_experiment_by_name(about.project)
    number = experiment.experiment_id if experiment else client.create_experiment(about.project)
    kept = client.create_run(number, run_name=about.name).info.run_id
    _keep(about, 'mlflow', kept)
    entities = module.entities
    params = [entities.Param(name, str(value)[:_MOST]) for name, value in about.config.items()]
    for start in range(0, len(params), 100):  # limit of a request
      client.log_batch(kept, params=params[start : start + 100])
  else:
    client.update_run(kept, status='RUNNING')

  def write(step: int, scalars: Mapping[str, float]) -> None:
    now = int(time.time() * 1000)
    # Names may not contain @.
    metrics = [
      module.entities.Metric(name.replace('@', '_at_'), value, now, step)
      for name, value in scalars.items()
    ]
    client.log_batch(kept, metrics=metrics)

  return write, lambda: client.set_terminated(kept)


def send(workdir: epath.PathLike, path: epath.PathLike) -> None:
  """Sends a file or folder to the MLflow run of a workdir, if it has one, or warns."""
  run = _read(epath.Path(workdir)).get('mlflow')
  if run is None:
    return
  try:
    client = importlib.import_module('mlflow').MlflowClient()
    whole = epath.Path(path).is_dir()
    (client.log_artifacts if whole else client.log_artifact)(run, os.fspath(path))
  except Exception as error:  # from a server, a login or a missing package
    why = f'{type(error).__name__}: {" ".join(str(error).split()):.200}'
    logger.warning('MLflow did not take %s (%s)', path, why)
  else:
    logger.info('MLflow run %s has %s', run, path)


def _trackio(module: Any, about: About) -> _Pair:
  run = module.init(
    project=about.project,
    name=f'{about.name}-{_id(about, "trackio")[:6]}',
    config=dict(about.config),
    resume='allow',
    embed=False,
  )
  return lambda step, scalars: run.log(dict(scalars), step=step), run.finish


def _id(about: About, name: str) -> str:
  """The id of the tracker run, kept in the workdir; a new id for a training from its start."""
  found = _read(about.workdir).get(name) if about.step >= 0 else None
  if found is None:
    found = uuid.uuid4().hex[:12]
    _keep(about, name, found)
  return found


def _read(workdir: epath.Path) -> dict[str, str]:
  path = workdir / FILE
  return reading.read(path, 'runs of trackers', dict[str, str]) if path.exists() else {}


def _keep(about: About, name: str, id_: str) -> None:
  files.write_json(about.workdir / FILE, _read(about.workdir) | {name: id_})
