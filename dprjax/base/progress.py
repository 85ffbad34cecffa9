"""Progress of long jobs: a log line every few seconds, with rate and time left.

A program with its own display, such as a bar in a notebook, passes a watcher to `watched`.
`quiet` leaves the logging of such a program as it is.
"""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator

from dprjax.base.counts import counted, rate

_EVERY_S = 5.0  # between two lines of a log, at least
_EVERY = 0.2  # of the time so far, so that long jobs leave few lines
_CHANGES_S = 1.0  # between two changes of the line in a terminal
PASSING = {'passing': True}  # `extra` of a log record that the next one replaces in a terminal

logger = logging.getLogger('dprjax')

Watcher = Callable[[str, int, int | None], None]
"""Called with the name of a job, the number done, and the total if known."""

_watcher: Watcher | None = None


@contextlib.contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
  """Reports the progress of all jobs in this process to ``watcher`` too, from their threads."""
  global _watcher
  before, _watcher = _watcher, watcher
  try:
    yield
  finally:
    _watcher = before


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Inside the block, absl does not configure the root logger, and orbax logs nothing.

  absl calls ``logging.basicConfig`` where the root logger has no handler. Inside the block it has
  the last-resort handler of Python.
  """
  root, absl = logging.getLogger(), logging.getLogger('absl')
  stand_in, level = logging.lastResort, absl.level
  added = stand_in if stand_in is not None and not root.handlers else None
  if added is not None:
    root.addHandler(added)
  absl.setLevel(logging.ERROR)
  try:
    yield
  finally:
    absl.setLevel(level)
    if added is not None:
      root.removeHandler(added)


def duration(seconds: float) -> str:
  """``75`` -> ``1m15s``."""
  seconds = max(round(seconds), 0)
  hours, minutes, seconds = seconds // 3600, seconds % 3600 // 60, seconds % 60
  if hours:
    return f'{hours}h{minutes:02}m'
  return f'{minutes}m{seconds:02}s' if minutes else f'{seconds}s'


def pace(done: int, seconds: float) -> str:
  """`` in 1m15s (12 a second)``; empty if nothing was done."""
  if not done:
    return ''
  took = duration(seconds) if seconds >= 1 else 'less than a second'
  return f' in {took} ({rate(done / max(seconds, 1e-9))} a second)'


def rounded(count: float, unit: str = '') -> str:
  """``118000`` -> ``118k``; with ``unit='B'``, ``118 kB``."""
  for factor, prefix in ((1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
    if count >= factor:
      return f'{count / factor:.3g}{" " if unit else ""}{prefix}{unit}'
  return f'{count:.0f}{" " + unit if unit else ""}'


class Progress:
  """Logs ``encoding: 960 of 1,400 texts, 10/s, 44s left`` now and then while a job runs.

      progress = Progress('texts', len(texts), task='encoding')
      for part in parts:
        encode(part, progress)     # calls progress(n) when n texts of the part are done
        progress.advance(len(part))

  The caller logs the end of the job, with ``seconds`` and ``rate``.

  Args:
    unit: name of the counted things, in the plural.
    total: None if unknown; the time left then needs the fraction done.
    skip_first: measure from the first count on, which leaves out compilation.
  """

  def __init__(self, unit: str, total: int | None = None, task: str = '', skip_first: bool = False):
    self._unit, self._total, self._task = unit, total, f'{task}: ' if task else ''
    self._began = self._logged = time.monotonic()
    self._before = self._done = 0  # in the finished parts; in all
    self._first = None if skip_first else 0
    self._fraction = 0.0

  def __call__(self, count: int, fraction: float = 0.0) -> None:
    """Reports ``count`` items of the current part, and the ``fraction`` of the job."""
    self.update(count)
    self.show(self._done)
    self._fraction = fraction or (self._done / self._total if self._total else 0.0)
    if time.monotonic() - self._logged > self._interval and self._fraction < 1:
      self._logged = time.monotonic()
      logger.info('%s', self._line(), extra=PASSING)

  def advance(self, count: int = 1) -> None:
    """Ends the current part, of ``count`` items."""
    self._before += count
    self(0)

  def update(self, count: int) -> None:
    self._done = self._before + count
    if self._first is None:
      self._first, self._began = self._done, time.monotonic()

  def show(self, done: int) -> None:
    if _watcher is not None:
      _watcher(self._task.removesuffix(': ') or self._unit, done, self._total)

  def pause(self, seconds: float) -> None:
    self._began += seconds

  @property
  def seconds(self) -> float:
    return time.monotonic() - self._began

  @property
  def rate(self) -> float:
    return (self._done - (self._first or 0)) / max(self.seconds, 1e-9)

  @property
  def left(self) -> float | None:
    """Seconds; None if unknown."""
    if self._total and self.rate:
      return (self._total - self._done) / self.rate
    return self.seconds * (1 / self._fraction - 1) if self._fraction else None

  @property
  def _interval(self) -> float:
    if sys.stderr is not None and sys.stderr.isatty():
      return _CHANGES_S
    return max(_EVERY_S, _EVERY * (time.monotonic() - self._began))

  def _line(self) -> str:
    done = f'{self._done:,} of ' if self._total else ''
    line = f'{self._task}{done}{counted(self._total or self._done, self._unit)}'
    line += f', {rounded(self.rate)}/s'
    if self._fraction and not self._total:
      line += f', {100 * self._fraction:.0f} %'
    return line if self.left is None else f'{line}, {duration(self.left)} left'
