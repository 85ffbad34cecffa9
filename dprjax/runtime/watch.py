"""Looks after the other processes of a job: one that was killed, hangs or failed ends them all,
with a line that says so.

Every process gives a sign of life to the coordinator's key-value store; process 0 reads them all,
the others look whether process 0 answers and whether it has given somebody up. (jax's own
heartbeats do likewise, but end a process in an abort of C++ from which nobody learns what happened,
and after 100 seconds.)
"""

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

_ALIVE, _ENDED = 'dprjax/alive/', 'dprjax/ended/'
_GO_ON = 'Run the same command again on all of them to go on from what was saved'


class Watch:
  """Begins to watch.

  Args:
    client: the coordinator's.
    process, processes: which one this is, of how many.
    coordinator: its address, for messages.
    timeout: seconds without a sign of life after which a process is given up.
    end: ``(status, line)``, called from a thread of the watch's own when the job is over; it is to
      end the process.
  """

  def __init__(
    self,
    client: Any,
    process: int,
    processes: int,
    coordinator: str,
    timeout: float,
    end: Callable[[int, str], Any],
  ):
    self._client, self._process, self._processes = client, process, processes
    self._coordinator, self._timeout, self._end = coordinator, timeout, end
    self._every = min(timeout / 10, 1.5)
    self._over = threading.Event()
    # seconds that this process ran: a process that is stopped for a while must not blame the others
    self._awake = 0.0
    self._heard = 0.0  # when, on that clock, the coordinator last answered
    self._seen: dict[int, tuple[str, float]] = {}  # process -> its last sign, and when
    self._hosts = {process: socket.gethostname()}
    self._lock = threading.Lock()  # who ends this process: the watch, or whoever calls tell
    self._threads = [
      threading.Thread(target=loop, name=f'watch-{loop.__name__.strip("_")}', daemon=True)
      for loop in (self._beat, self._look)
    ]
    for thread in self._threads:
      thread.start()

  def stop(self) -> None:
    """Ends the watch: the job is done."""
    self._over.set()
    for thread in self._threads:
      thread.join()

  def tell(self, status: int, line: str) -> None:
    """Tells the others that this process ends, with what status and why; the caller then ends it.

    The watch is silent from here on.
    """
    self._lock.acquire()
    self._over.set()
    self._pass_on(
      self._process, status, f'process {self._process} ({self._hosts[self._process]}) ended: {line}'
    )

  def wait(self) -> None:
    """Waits as long as it takes to find out that another process is gone; returns only if none is,
    for else the watch ends this process.
    """
    if self._over.wait(self._timeout + 4 * self._every):
      self._lock.acquire()  # which the watch, at its end, keeps

  def _beat(self) -> None:
    """Gives signs of life, and asks for those of the others."""
    count = 0
    while not self._over.wait(self._every if count else 0.0):
      count += 1
      if not self._set(
        f'{_ALIVE}{self._process}', {'host': self._hosts[self._process], 'count': count}
      ):
        continue
      for _, (status, line) in self._get(_ENDED):
        self._finish(status, line)
      if self._process == 0:
        for process, entry in self._get(_ALIVE):
          self._hosts[process] = entry['host']
          if process not in self._seen or self._seen[process][0] != entry['count']:
            self._seen[process] = entry['count'], self._awake
      self._heard = self._awake

  def _look(self) -> None:
    """Notices when there are no signs any more.

    A thread of its own: to ask a coordinator that hangs is to hang.
    """
    last = time.monotonic()
    while not self._over.wait(self._every / 2):
      now = time.monotonic()
      self._awake += min(now - last, self._every)
      last = now
      if self._process:
        if self._awake - self._heard > self._timeout:
          self._finish(1, self._silence('process 0', f'the coordinator at {self._coordinator}'))
        continue
      for process in range(1, self._processes):
        if self._awake - self._seen.get(process, ('', 0.0))[1] > self._timeout:
          line = self._silence(f'process {process}', self._hosts.get(process, 'never heard of'))
          self._pass_on(process, 1, line)
          self._finish(1, line)

  def _silence(self, name: str, where: str) -> str:
    return (
      f'{name} ({where}) has given no sign of life for {self._timeout:g} s (--peer_timeout): it '
      'was killed, hangs, or its host is gone. '
      f'{_GO_ON}'
    )

  def _pass_on(self, process: int, status: int, line: str) -> None:
    """Leaves word of why ``process`` is no more; the others find it at their next sign of life."""
    self._set(f'{_ENDED}{process}', [status, line])
    if self._process == 0:
      time.sleep(2.5 * self._every)  # it is kept in this process, which is about to end

  def _finish(self, status: int, line: str) -> None:
    if self._lock.acquire(blocking=False):
      self._over.set()
      self._end(status, line)

  def _set(self, key: str, value: Any) -> bool:
    try:
      self._client.key_value_set(key, json.dumps(value), allow_overwrite=True)
    except RuntimeError:  # jax's: the coordinator is gone, which is noticed by its silence
      return False
    return True

  def _get(self, folder: str) -> list[tuple[int, Any]]:
    try:
      return [
        (int(key.rsplit('/', 1)[1]), json.loads(value))
        for key, value in self._client.key_value_dir_get(folder)
      ]
    except RuntimeError:
      return []
