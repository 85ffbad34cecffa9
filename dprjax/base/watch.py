"""Monitors the processes of a job: when one fails, hangs or is killed, all end with a message.

Every process writes signs of life to the key-value store of the coordinator. Process 0 reads them
all; the others check that process 0 answers and whether it reported a lost process. (The heartbeats
of jax take 100 seconds and end a process with an unexplained C++ abort.)
"""

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

_ALIVE, _ENDED = 'dprjax/alive/', 'dprjax/ended/'
_GO_ON = 'Run the same command again on all of them to continue from the last checkpoint'


class Watch:
  """Monitors the job from its creation until ``stop``.

  Args:
    timeout: seconds without a sign of life before a process counts as lost.
    end: called with ``(status, line)`` from a thread when another process has ended; it must end
      this process.
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
    # Running time of this process: after a suspension it must not blame the others.
    self._awake = 0.0
    self._heard = 0.0  # last answer of the coordinator, by that clock
    self._seen: dict[int, tuple[str, float]] = {}  # process -> last sign and its time
    self._hosts = {process: socket.gethostname()}
    self._lock = threading.Lock()  # held by whatever ends this process: the watch or ``report``
    self._threads = [
      threading.Thread(target=loop, name=f'watch-{loop.__name__.strip("_")}', daemon=True)
      for loop in (self._beat, self._look)
    ]
    for thread in self._threads:
      thread.start()

  def stop(self) -> None:
    self._over.set()
    for thread in self._threads:
      thread.join()

  def report(self, status: int, line: str) -> None:
    """Tells the others that this process is about to end; ends the monitoring."""
    self._lock.acquire()
    self._over.set()
    self._record(
      self._process, status, f'process {self._process} ({self._hosts[self._process]}) ended: {line}'
    )

  def wait(self) -> None:
    """Returns when no other process can be lost; if one is lost, the watch ends this process."""
    if self._over.wait(self._timeout + 4 * self._every):
      self._lock.acquire()  # blocks while the watch ends the process

  def _beat(self) -> None:
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
    """Notices missing signs of life.

    Runs in its own thread, since a request to a hanging coordinator does not return.
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
          line = self._silence(f'process {process}', self._hosts.get(process, 'never heard from'))
          self._record(process, 1, line)
          self._finish(1, line)

  def _silence(self, name: str, place: str) -> str:
    return (
      f'{name} ({place}) has given no sign of life for {self._timeout:g} s (--peer_timeout): it '
      f'was killed, hangs, or its host is gone. {_GO_ON}'
    )

  def _record(self, process: int, status: int, line: str) -> None:
    """Records why ``process`` ended; the others read it with their next sign of life."""
    self._set(f'{_ENDED}{process}', [status, line])
    if self._process == 0:
      time.sleep(2.5 * self._every)  # the record is stored in this process, which is about to end

  def _finish(self, status: int, line: str) -> None:
    if self._lock.acquire(blocking=False):
      self._over.set()
      self._end(status, line)

  def _set(self, key: str, value: Any) -> bool:
    try:
      self._client.key_value_set(key, json.dumps(value), allow_overwrite=True)
    except RuntimeError:  # the coordinator is gone; _look notices
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
