"""Runs long work inside another program, such as a notebook.

The work runs in a thread, because orbax would patch the event loop of a notebook, and the calling
thread must notice interrupts. Signal handlers, logging and asyncio of the program stay unchanged.
"""

import contextlib
import contextvars
import ctypes
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from dprjax.base import progress, stopping

T = TypeVar('T')

_TICK_S = 0.1  # between checks of the work


def apart(work: Callable[[], T], *, bar: bool = False, task: str = '') -> T:
  """Runs ``work`` in a thread and returns its result.

  An interrupt asks a training to save its state, and ends other work; a second one ends the
  training at once. The thread has ended when this returns.

  Raises:
    KeyboardInterrupt: the work was interrupted.
    BaseException: from ``work``.
  """
  results: list[T] = []
  failed: list[BaseException] = []
  context = contextvars.copy_context()
  begins, begun, ended = threading.Lock(), threading.Event(), threading.Event()
  interrupted = False

  def run() -> None:
    with begins:
      if interrupted:
        return
      begun.set()
    try:
      results.append(context.run(work))
    except BaseException as error:
      failed.append(error)
    finally:
      ended.set()

  shown = _Bar(task) if bar else None
  thread = threading.Thread(target=run, name='dprjax')
  # Only the main thread gets interrupts. An interrupt inside tqdm would leave its lock taken.
  drawer = threading.Thread(
    target=contextvars.copy_context().run, args=(_draw, shown, ended), name='dprjax-bar'
  )
  with progress.quiet(), progress.watched(shown.note) if shown else contextlib.nullcontext():
    while not ended.is_set():
      try:
        if thread.ident is None:
          thread.start()
        if shown and drawer.ident is None:
          drawer.start()
        ended.wait(_TICK_S)
      except KeyboardInterrupt:
        with begins:
          interrupted = True
          if not begun.is_set():
            ended.set()
            raise
        if not stopping.ask():
          _interrupt(thread)
    thread.join()
    if drawer.ident is not None:
      drawer.join()
  if interrupted and (not failed or isinstance(failed[0], KeyboardInterrupt)):
    raise KeyboardInterrupt from None
  if failed:
    raise failed[0]
  return results[0]


def _interrupt(thread: threading.Thread) -> None:
  """Raises KeyboardInterrupt in a thread, at its next step in Python."""
  if thread.ident is not None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
      ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt)
    )


def _draw(shown: '_Bar', ended: threading.Event) -> None:
  """Draws a bar until ``ended``."""
  while not ended.wait(_TICK_S):
    shown.draw()
  shown.close()


class _Bar:
  """A bar for all jobs of a call, drawn from the first report on."""

  def __init__(self, task: str):
    self._latest: tuple[str, int, int | None] | None = None
    self._shown, self._task = '', task
    self._bar: Any = None

  def note(self, task: str, done: int, total: int | None) -> None:
    """Records the progress of a job, from any thread."""
    self._latest = task, done, total

  def draw(self) -> None:
    latest, self._latest = self._latest, None
    if latest is None:
      return
    task, done, total = latest
    if self._bar is None:
      import tqdm

      self._bar = tqdm.tqdm(file=sys.stderr, dynamic_ncols=True, mininterval=0.2)
    if task != self._shown or done < self._bar.n:
      self._shown = task
      self._bar.reset(total)
      self._bar.set_description(f'{self._task}: {task}', refresh=False)
    self._bar.total = total
    self._bar.update(done - self._bar.n)

  def close(self) -> None:
    self.draw()
    if self._bar is not None:
      self._bar.close()
