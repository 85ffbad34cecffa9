"""Metrics of a training by step, for metrics.jsonl and trackers."""

import json
from collections.abc import Mapping
from typing import Annotated

import ml_collections
import msgspec
from etils import epath

from dprjax.base import files, reading
from dprjax.base.errors import InputError
from dprjax.training import config as configs
from dprjax.training import trackers
from dprjax.training import workdir as workdirs


class _Row(msgspec.Struct):
  step: Annotated[int, msgspec.Meta(ge=0)]


def _until(path: epath.Path, step: int) -> list[str]:
  """The lines of a file of metrics up to a step."""
  kept: list[str] = []
  if not files.is_empty(path):
    with reading.open_text(path, 'metrics') as file, reading.decoding(str(path)):
      for number, line in enumerate(file, start=1):
        where = f'{path}, line {number}'
        try:
          if reading.parse(line, where, _Row).step <= step:
            kept.append(line.rstrip('\n') + '\n')
        except InputError:
          if line.endswith('\n'):  # not where a kill cut it off
            raise
  return kept


class MetricLog:
  """Scalars by step in ``metrics.jsonl`` and ``config.log.to``; the ``active`` process writes.

  A resumed run drops the lines after the step it resumes from, so that the file reads like that of
  a run without interruption.
  """

  def __init__(
    self,
    workdir: epath.PathLike,
    resume_step: int,
    config: ml_collections.ConfigDict,
    active: bool = True,
  ):
    """Opens the log, to continue after ``resume_step``."""
    self._file = None
    self._trackers: list[trackers.Tracker] = []
    if not active:
      return
    workdir = epath.Path(workdir)
    path = workdir / 'metrics.jsonl'
    if path.exists():
      kept = _until(path, resume_step)
      with files.atomic_write(path) as file:
        file.writelines(kept)
    settings, options = config.log, configs.flat(config.to_dict())
    top = workdirs.top(workdir)
    inside = workdir.relative_to(top).parts  # of a fold or an alternative
    name = ' '.join([top.absolute().name, *inside])
    about = trackers.About(workdir, resume_step, settings.project, name, options)
    self._trackers = trackers.open_all(settings.to, about)
    self._file = path.open('a')

  def write(self, step: int, scalars: Mapping[str, float]) -> None:
    if self._file is None:
      return
    with files.no_room('metrics.jsonl'):
      self._file.write(
        json.dumps({'step': step, **{name: float(value) for name, value in scalars.items()}}) + '\n'
      )
      self._file.flush()
    values = {name: float(value) for name, value in scalars.items()}
    for tracker in self._trackers:
      tracker.write(step, values)

  def close(self) -> None:
    if self._file is not None:
      self._file.close()
    for tracker in self._trackers:
      tracker.close()
