"""Metrics of a training run by step: metrics.jsonl and TensorBoard."""

import json
from collections.abc import Mapping

import tensorboardX
from etils import epath

from dprjax.base import files


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
      kept = []
      for line in path.read_text().splitlines():
        try:
          row = json.loads(line)
        except json.JSONDecodeError:
          continue  # a line cut off by a kill
        if row['step'] <= resume_step:
          kept.append(line + '\n')
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
