"""Metrics of a training by step, in ``metrics.jsonl`` and the trackers of ``config.log.to``.

| tracker | place |
|---|---|
| tensorboard | ``tensorboard`` in the workdir |
| wandb | by ``wandb login`` or ``WANDB_MODE=offline``; its files are in the workdir |

A package is imported only when named. A resumed training continues its run.
A tracker that fails to take numbers does not end the training: it is dropped with a warning.
"""

import importlib
import json
import logging
import uuid
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import ml_collections
import msgspec
from etils import epath

from dprjax.base import files, reading
from dprjax.base.errors import InputError
from dprjax.training import config as configs
from dprjax.training import workdir as workdirs

logger = logging.getLogger('dprjax')

WANDB = 'wandb.json'  # in the workdir: the id of the run there
_PACKAGES = {'tensorboard': 'tensorboardX', 'wandb': 'wandb'}


class _Row(msgspec.Struct):
  step: Annotated[int, msgspec.Meta(ge=0)]


class _Tracker(NamedTuple):
  """An open tracker run: a function for the scalars of a step, and one to end it."""

  write: Callable[[int, Mapping[str, float]], None]
  close: Callable[[], None]


class MetricLog:
  """Scalars by step in ``metrics.jsonl`` and ``config.log.to``; the ``active`` process writes.

  A run that resumes after ``resume_step`` (-1: the start) drops later lines, so that the file reads
  like that of a run without interruption.
  """

  def __init__(
    self,
    workdir: epath.PathLike,
    resume_step: int,
    config: ml_collections.ConfigDict,
    active: bool = True,
  ):
    self._file = None
    self._trackers: list[_Tracker] = []
    if not active:
      return
    workdir = epath.Path(workdir)
    path = workdir / 'metrics.jsonl'
    if path.exists():
      lines = _until(path, resume_step)
      with files.atomic_write(path) as file:
        file.writelines(lines)
    try:
      for name in _names(config.log.to):
        self._trackers.append(_open(name, workdir, resume_step, config))
    except BaseException:
      self.close()
      raise
    self._file = path.open('a')

  def write(self, step: int, scalars: Mapping[str, float]) -> None:
    if self._file is None:
      return
    values = {name: float(value) for name, value in scalars.items()}
    with files.no_room('metrics.jsonl'):
      self._file.write(json.dumps({'step': step, **values}) + '\n')
      self._file.flush()
    for tracker in self._trackers:
      tracker.write(step, values)

  def close(self) -> None:
    if self._file is not None:
      self._file.close()
    for tracker in self._trackers:
      tracker.close()


def _until(path: epath.Path, step: int) -> list[str]:
  lines: list[str] = []
  if not files.is_empty(path):
    with reading.open_text(path, 'metrics') as file, reading.decoding(str(path)):
      for number, line in enumerate(file, start=1):
        where = f'{path}, line {number}'
        try:
          if reading.parse(line, where, _Row).step <= step:
            lines.append(line.rstrip('\n') + '\n')
        except InputError:
          if line.endswith('\n'):  # not where a kill cut it off
            raise
  return lines


def check(to: str) -> None:
  """Raises InputError for an unknown tracker of ``config.log.to``."""
  for name in _names(to):
    if name not in _PACKAGES:
      known = ', '.join(_PACKAGES)
      raise InputError(f'config.log.to: there is no tracker {name!r:.40}; trackers are {known}')


def _names(to: str) -> list[str]:
  return [name.strip() for name in to.split(',') if name.strip()]


def _open(
  name: str, workdir: epath.Path, resume_step: int, config: ml_collections.ConfigDict
) -> _Tracker:
  """Opens a tracker, whose functions fail only for lack of room in the workdir."""
  begin = {'tensorboard': _tensorboard, 'wandb': _wandb}[name]
  try:
    tracker = begin(importlib.import_module(_PACKAGES[name]), workdir, resume_step, config)
  except Exception as error:  # from a server, a login or a file
    why = f'{type(error).__name__}: {" ".join(str(error).split()):.200}'
    hint = f'; pip install {_PACKAGES[name]}' if isinstance(error, ImportError) else ''
    raise InputError(f'config.log.to={name} cannot start ({why}){hint}') from error
  broken = False

  def careful(action: Callable[[], None]) -> None:
    nonlocal broken
    if broken:
      return
    try:
      action()
    except Exception as error:
      if name == 'tensorboard' and isinstance(error, OSError):
        raise
      broken = True
      why = ' '.join(str(error).split())[:200]
      logger.warning('%s failed and gets no more numbers: %s', name, why)

  return _Tracker(
    lambda step, scalars: careful(lambda: tracker.write(step, scalars)),
    lambda: careful(tracker.close),
  )


def _tensorboard(
  module: Any, workdir: epath.Path, resume_step: int, _: ml_collections.ConfigDict
) -> _Tracker:
  board = module.SummaryWriter(str(workdir / 'tensorboard'), purge_step=resume_step + 1)

  def write(step: int, scalars: Mapping[str, float]) -> None:
    for name, value in scalars.items():
      board.add_scalar(name, value, step)

  return _Tracker(write, board.close)


def _wandb(
  module: Any, workdir: epath.Path, resume_step: int, config: ml_collections.ConfigDict
) -> _Tracker:
  path, top = workdir / WANDB, workdirs.top(workdir)
  if resume_step >= 0 and path.exists():
    id_ = reading.read(path, 'run of wandb', dict[str, str])['id']
  else:
    id_ = uuid.uuid4().hex[:12]
    files.write_json(path, {'id': id_})
  inside = workdir.relative_to(top).parts  # of a fold or an alternative
  run = module.init(
    project=config.log.project,
    name=' '.join([top.absolute().name, *inside]),
    dir=str(workdir),
    id=id_,
    resume='allow',
    config=configs.flat(config.to_dict()),
    reinit='create_new',
  )
  return _Tracker(lambda step, scalars: run.log(dict(scalars), step=step), run.finish)
