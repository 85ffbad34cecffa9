"""SIGTERM: the loop saves and leaves, on all processes at the same step."""

import os
import signal
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dprjax.runtime import mesh as meshes


class Stop:
  """Notes a SIGTERM; one more, two seconds later or after that, ends the process as usual.
  (Launchers send it twice: to their own, and to all.)

      stop = Stop(mesh)
      ... after every step: if stop(): save and leave

  Of several processes any may be told. Each puts its flag on its devices at every step, and the
  largest of them all is looked at one step later: by then it is there, and it is the same
  everywhere, so that all leave after the same step. (jax's own way,
  ``multihost_utils.reached_preemption_sync_point``, takes SIGTERM away from the commands that have
  no steps.)
  """

  def __init__(self, mesh: Mesh):
    self._asked = 0.0  # when
    self._everywhere: NamedSharding | None = None
    if jax.process_count() > 1:
      self._everywhere = NamedSharding(mesh, P(meshes.AXES))
      self._largest = jax.jit(lambda flags: flags.max(), out_shardings=meshes.replicated(mesh))
    self._last: jax.Array | None = None
    try:
      self._previous = signal.signal(signal.SIGTERM, self._note)
    except ValueError:  # not the main thread: somebody else's program, somebody else's signals
      self._previous = None

  def __call__(self) -> bool:
    """Whether to stop after this step. To be called at every step, on every process."""
    if self._everywhere is None:
      return bool(self._asked)
    last, flags = self._last, np.full(jax.local_device_count(), self._asked > 0, np.int32)
    self._last = self._largest(jax.make_array_from_process_local_data(self._everywhere, flags))
    return last is not None and bool(last)

  def _note(self, *_: Any) -> None:
    now = time.monotonic()
    self._asked = self._asked or now
    if now - self._asked > 2.0:
      self.restore()
      os.kill(os.getpid(), signal.SIGTERM)

  def restore(self) -> None:
    """SIGTERM as it was before."""
    if self._previous is not None:
      signal.signal(signal.SIGTERM, self._previous)
      self._previous = None
