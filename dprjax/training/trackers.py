"""Trackers of a training besides `metrics.jsonl`: ``config.log.to``.

| name | place |
|---|---|
| tensorboard | ``tensorboard`` in the workdir |
| wandb | by ``wandb login`` or ``WANDB_MODE=offline``; its files are in the workdir |

A package is imported only when named. A resumed training continues its tracker run where possible.
A tracker that fails to take numbers does not end the training: it is dropped with a warning.
"""

import importlib
import importlib.util
import logging
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from etils import epath

from dprjax.base import files, reading
from dprjax.base.errors import InputError

logger = logging.getLogger('dprjax')

FILE = 'trackers.json'  # in the workdir: ids of tracker runs
_PACKAGES = {'tensorboard': 'tensorboardX', 'wandb': 'wandb'}


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
  begin = {'tensorboard': _tensorboard, 'wandb': _wandb}[name]
  try:
    write, close = begin(importlib.import_module(_PACKAGES[name]), about)
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
    id=_id(about),
    resume='allow',
    config=dict(about.config),
    reinit='create_new',
  )
  return lambda step, scalars: run.log(dict(scalars), step=step), run.finish


def _id(about: About) -> str:
  """The id of the run in W&B, kept in the workdir; a new one for a training from its start."""
  path = about.workdir / FILE
  if about.step >= 0 and path.exists():
    return reading.read(path, 'runs of trackers', dict[str, str])['wandb']
  found = uuid.uuid4().hex[:12]
  files.write_json(path, {'wandb': found})
  return found
