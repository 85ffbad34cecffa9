"""Metrics of a training run by step: metrics.jsonl and TensorBoard."""

import json
from collections.abc import Mapping
from typing import Annotated

import msgspec
import tensorboardX
from etils import epath

from dprjax.base import files, reading
from dprjax.base.errors import InputError


class _Row(msgspec.Struct):
  step: Annotated[int, msgspec.Meta(ge=0)]


def _until(path: epath.Path, step: int) -> list[str]:
  """The lines of a file of metrics up to a step.

  Raises:
    InputError: a line is damaged. The last one may be cut off, by a kill.
  """
  kept: list[str] = []
  if not files.is_empty(path):
    with reading.open_text(path, 'metrics') as file, reading.decoding(str(path)):
      for number, line in enumerate(file, start=1):
        where = f'{path}, line {number}'
        try:
          if reading.parse(line, where, _Row).step <= step:
            kept.append(line.rstrip('\n') + '\n')
        except InputError as error:
          if line.endswith('\n'):
            raise InputError(f'{error}; remove that line to go on') from error
  return kept


class MetricLog:
  """Scalars by step in ``metrics.jsonl`` and TensorBoard; one process writes, the ``active`` one.

  A resumed run drops the lines after the step it resumes from, so that the file reads like that of
  a run without interruption.
  """

  def __init__(self, workdir: epath.PathLike, resume_step: int, active: bool = True):
    self._file = None
    self._board = None
    if not active:
      return
    workdir = epath.Path(workdir)
    path = workdir / 'metrics.jsonl'
    if path.exists():
      kept = _until(path, resume_step)
      with files.atomic_write(path) as file:
        file.writelines(kept)
    self._file = path.open('a')
    self._board = tensorboardX.SummaryWriter(
      str(workdir / 'tensorboard'), purge_step=resume_step + 1
    )

  def write(self, step: int, scalars: Mapping[str, float]) -> None:
    if self._file is None or self._board is None:
      return
    with files.no_room('metrics.jsonl'):
      self._file.write(
        json.dumps({'step': step, **{name: float(value) for name, value in scalars.items()}}) + '\n'
      )
      self._file.flush()
    for name, value in scalars.items():
      self._board.add_scalar(name, float(value), step)

  def close(self) -> None:
    if self._file is not None and self._board is not None:
      self._file.close()
      self._board.close()
