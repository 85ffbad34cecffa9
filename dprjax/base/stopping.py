"""Requests to stop: the training loop saves and stops after the same step on all processes.

For a command, SIGTERM is such a request; a program calls `ask`.
"""

import os
import signal
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dprjax.base import mesh as meshes

_ASKED, _SIGNALLED = 1, 2  # flags of processes
_running: 'Stop | None' = None


def ask() -> bool:
  """Asks the training of this process to save and stop; False if none runs or was asked."""
  if _running is None or _running.asked:
    return False
  _running.asked = time.monotonic()
  return True


class Stop:
  """Notices SIGTERM. A second signal, at least two seconds later, ends the process as usual.

  (Launchers send it twice in quick succession: to their own process and to all.)

      stop = Stop(mesh)
      ... after every step: if stop(): save and stop

  Any of several processes may get the signal. At every step each puts a flag on its devices, and
  reads the maximum flag of the previous step. By then it has arrived and is the same everywhere, so
  all stop after the same step. (jax ``multihost_utils.reached_preemption_sync_point`` would also
  take over SIGTERM in commands without steps.)
  """

  def __init__(self, mesh: Mesh):
    global _running
    self.asked = 0.0  # time of the signal or request
    self.signalled = False  # any process, once it stops
    self._everywhere: NamedSharding | None = None
    if jax.process_count() > 1:
      self._everywhere = NamedSharding(mesh, P(meshes.AXES))
      self._largest = jax.jit(lambda flags: flags.max(), out_shardings=meshes.replicated(mesh))
    self._last: jax.Array | None = None
    try:
      self._previous = signal.signal(signal.SIGTERM, self._note)
    except ValueError:  # not the main thread, so the surrounding program handles signals
      self._previous = None
    _running = self

  def __call__(self) -> bool:
    """Whether to stop after this step; call it at every step, on every process."""
    if self._everywhere is None:
      return bool(self.asked)
    why = _SIGNALLED if self.signalled else _ASKED if self.asked else 0
    last, flags = self._last, np.full(jax.local_device_count(), why, np.int32)
    self._last = self._largest(jax.make_array_from_process_local_data(self._everywhere, flags))
    if last is None:
      return False
    self.signalled |= int(last) == _SIGNALLED
    return bool(last)

  def _note(self, *_: Any) -> None:
    now, self.signalled = time.monotonic(), True
    self.asked = self.asked or now
    if now - self.asked > 2.0:
      self.restore()
      os.kill(os.getpid(), signal.SIGTERM)

  def restore(self) -> None:
    """Restores the previous handler of SIGTERM; ends requests."""
    global _running
    _running = None if _running is self else _running
    if self._previous is not None:
      signal.signal(signal.SIGTERM, self._previous)
      self._previous = None
