"""What a run says while it works: console lines, TensorBoard, and metrics.jsonl."""

import json
import logging
import time
from collections.abc import Mapping

import tensorboardX
from etils import epath

from dprjax.base import files

logger = logging.getLogger('dprjax')
_SPEAK_EVERY = 5.0  # seconds


def duration(seconds: float) -> str:
  """``75`` -> ``1m15s``."""
  seconds = max(round(seconds), 0)
  hours, minutes, seconds = seconds // 3600, seconds % 3600 // 60, seconds % 60
  return (
    f'{hours}h{minutes:02}m' if hours else f'{minutes}m{seconds:02}s' if minutes else f'{seconds}s'
  )


def size(count: float, unit: str = '') -> str:
  """``118000`` -> ``118k``; with ``unit='B'``, ``118 kB``."""
  for factor, prefix in ((1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
    if count >= factor:
      return f'{count / factor:.3g}{" " if unit else ""}{prefix}{unit}'
  return f'{count:.0f}{" " + unit if unit else ""}'


class MetricLog:
  """Scalars by step to ``metrics.jsonl`` and TensorBoard. Only one process writes.

  A resumed run drops the lines after the step it resumes from, so the file reads like that of a run
  which was never stopped.
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
          continue  # the line that a kill cut off
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


class Pace:
  """Rate and time left, over this process's steps without the first one (which compiles)."""

  def __init__(self, total: int, start: int):
    self._total, self._start, self._since = total, start, 0.0
    self._paused = 0.0

  def __call__(self, step: int) -> tuple[float, float]:
    """Steps a second so far, and seconds left."""
    now = time.monotonic()
    if not self._since:
      self._since, self._start = now, step
      return 0.0, 0.0
    rate = (step - self._start) / max(now - self._since - self._paused, 1e-9)
    return rate, (self._total - step) / rate if rate else 0.0

  def pause(self, seconds: float) -> None:
    """Time that was not spent on steps (an evaluation)."""
    if self._since:
      self._paused += seconds


class Countdown:
  """Tells every few seconds how far a job in pieces is: ``960 of 1,400 texts  10 a second  45s
  left``.

  Args:
    unit: what is counted, in the plural.
    total: how many there are to do.
  """

  def __init__(self, unit: str, total: int):
    self._unit, self._total = unit, total
    self._began = self._spoke = time.monotonic()
    self._done = 0  # in the pieces that are finished

  def __call__(self, count: int) -> None:
    """So many of the piece in hand are done."""
    now, count = time.monotonic(), self._done + count
    if now - self._spoke > _SPEAK_EVERY and count < self._total:
      self._spoke = now
      rate = count / (now - self._began)
      logger.info(
        '%s of %s %s  %.0f a second  %s left',
        f'{count:,}',
        f'{self._total:,}',
        self._unit,
        rate,
        duration((self._total - count) / rate) if rate else '?',
      )

  def finish(self, count: int) -> None:
    """The piece in hand is done, and had so many."""
    self._done += count

  @property
  def seconds(self) -> float:
    return time.monotonic() - self._began
