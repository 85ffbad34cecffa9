"""How far a long job is: a line of the log every few seconds, its rate and the time left."""

import logging
import time

from dprjax.base.counts import counted, rate

_EVERY_S = 5.0  # between two lines

logger = logging.getLogger('dprjax')


def duration(seconds: float) -> str:
  """``75`` -> ``1m15s``."""
  seconds = max(round(seconds), 0)
  hours, minutes, seconds = seconds // 3600, seconds % 3600 // 60, seconds % 60
  if hours:
    return f'{hours}h{minutes:02}m'
  return f'{minutes}m{seconds:02}s' if minutes else f'{seconds}s'


def pace(done: int, seconds: float) -> str:
  """`` in 1m15s (12 a second)``; nothing where nothing was done."""
  if not done:
    return ''
  took = duration(seconds) if seconds >= 1 else 'less than a second'
  return f' in {took} ({rate(done / max(seconds, 1e-9))} a second)'


def size(count: float, unit: str = '') -> str:
  """``118000`` -> ``118k``; with ``unit='B'``, ``118 kB``."""
  for factor, prefix in ((1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
    if count >= factor:
      return f'{count / factor:.3g}{" " if unit else ""}{prefix}{unit}'
  return f'{count:.0f}{" " + unit if unit else ""}'


class Progress:
  """Logs ``encoding: 960 of 1,400 texts, 10/s, 44s left`` every few seconds while a job runs.

      progress = Progress('texts', len(texts), task='encoding')
      for part in parts:
        encode(part, progress)     # calls progress(n) when n texts of the part are done
        progress.advance(len(part))

  A job without parts calls only ``progress(n)``, or ``progress.advance()`` after each item. The end
  is not logged: the caller knows what to say about it, and reads ``seconds`` and ``rate``.

  Args:
    unit: what is counted, in the plural.
    total: how many there are; None: unknown. Without it there is no time left, unless each call
      gives the fraction that is done.
    task: the start of each line.
    skip_first: measure from the first count on, which leaves out what it takes to begin (such as a
      compilation).
  """

  def __init__(self, unit: str, total: int | None = None, task: str = '', skip_first: bool = False):
    self._unit, self._total, self._task = unit, total, f'{task}: ' if task else ''
    self._began = self._logged = time.monotonic()
    self._before = self._done = 0  # in the finished parts; in all
    self._first = None if skip_first else 0
    self._fraction = 0.0

  def __call__(self, count: int, fraction: float = 0.0) -> None:
    """``count`` items of the current part are done; of the whole job, ``fraction``."""
    self.update(count)
    self._fraction = fraction or (self._done / self._total if self._total else 0.0)
    if time.monotonic() - self._logged > _EVERY_S and self._fraction < 1:
      self._logged = time.monotonic()
      logger.info('%s', self._line())

  def advance(self, count: int = 1) -> None:
    """The current part is done; it had ``count`` items."""
    self._before += count
    self(0)

  def update(self, count: int) -> None:
    """Counts as ``__call__`` does, and logs nothing."""
    self._done = self._before + count
    if self._first is None:
      self._first, self._began = self._done, time.monotonic()

  def pause(self, seconds: float) -> None:
    """Leaves out time that was spent on something else."""
    self._began += seconds

  @property
  def seconds(self) -> float:
    return time.monotonic() - self._began

  @property
  def rate(self) -> float:
    """Items a second."""
    return (self._done - (self._first or 0)) / max(self.seconds, 1e-9)

  @property
  def left(self) -> float | None:
    """Seconds; None where they cannot be estimated."""
    if self._total and self.rate:
      return (self._total - self._done) / self.rate
    return self.seconds * (1 / self._fraction - 1) if self._fraction else None

  def _line(self) -> str:
    done = f'{self._done:,} of ' if self._total else ''
    line = f'{self._task}{done}{counted(self._total or self._done, self._unit)}'
    line += f', {size(self.rate)}/s'
    if self._fraction and not self._total:
      line += f', {100 * self._fraction:.0f} %'
    return line if self.left is None else f'{line}, {duration(self.left)} left'
