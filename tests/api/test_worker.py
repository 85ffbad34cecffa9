import asyncio
import os
import signal
import threading
import time

import pytest

from dprjax.api import worker
from dprjax.base import progress, stopping


def test_the_result_and_the_failure():
  assert worker.apart(threading.current_thread).name == 'dprjax'
  with pytest.raises(ZeroDivisionError):
    worker.apart(lambda: 1 / 0)


def test_no_event_loop_in_a_coroutine():
  async def main():
    return worker.apart(lambda: asyncio.run(asyncio.sleep(0, 'own loop')))

  assert asyncio.run(main()) == 'own loop'


def test_one_bar(capsys):
  def work():
    with_parts = progress.Progress('texts', 40, 'encoding')
    for _ in range(4):
      with_parts.advance(10)
    progress.Progress('steps', 7, 'training').show(7)
    time.sleep(0.3)

  worker.apart(work, bar=True, task='fit')
  shown = capsys.readouterr().err
  assert 'fit: training: 100%' in shown and '7/7' in shown
  assert shown.count('\n') == 1  # one line, drawn again and again
  worker.apart(work)
  assert capsys.readouterr() == ('', '')


def interrupted(work):
  """The error of `apart` if an interrupt comes while it works."""
  began = threading.Event()

  def interrupt():
    began.wait()
    os.kill(os.getpid(), signal.SIGINT)

  threading.Thread(target=interrupt).start()
  with pytest.raises(KeyboardInterrupt):
    worker.apart(lambda: work(began))


def test_an_interrupt_ends_the_work():
  ended = []

  def work(began):
    try:
      began.set()
      while True:
        time.sleep(0.01)
    finally:
      ended.append(threading.current_thread())

  interrupted(work)
  assert ended and not ended[0].is_alive()
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_asks_a_training_to_save():
  done = []

  def work(began):
    stop = stopping.Stop(None)
    began.set()
    while not stop():
      time.sleep(0.01)
    stop.restore()
    done.append('saved')

  interrupted(work)
  assert done == ['saved'] and not stopping.ask()


def test_the_bar_is_drawn_in_a_thread_that_hears_no_interrupt(monkeypatch):
  """An interrupt inside tqdm would leave its lock taken, and the next call would wait for ever."""
  drawn = set()
  monkeypatch.setattr(worker._Bar, 'draw', lambda _: drawn.add(threading.current_thread().name))
  assert worker.apart(lambda: time.sleep(0.3) or 7, bar=True) == 7
  assert drawn == {'dprjax-bar'}
