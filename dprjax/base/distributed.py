"""Jobs of several processes, which join, wait for each other and end together.

`together` wraps a command that may run in several processes. A process learns its place from the
flags ``--coordinator --processes --process`` (or ``DPRJAX_COORDINATOR`` and so on), or from the
launchers that jax detects: SLURM, Open MPI, a TPU VM, a TPU slice or an indexed Job on GKE.
Otherwise it is a single process, and the functions here do nothing.

``watch.Watch`` ends the job when one of its processes ends. Only ``gather`` uses the devices;
everything else goes through the coordinator, which process 0 runs.
"""

import contextlib
import importlib.util
import itertools
import json
import logging
import os
import socket
import threading
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

# jax has no public access to the client of its coordinator, whose keys and barriers need no device
# (orbax uses it too), nor to the test for a TPU VM. test_distributed.py notices when they move.
from jax._src import cloud_tpu_init
from jax._src import distributed as internals
from jax.experimental import multihost_utils

from dprjax.base.errors import InputError, end, explain, wants_traceback
from dprjax.base.flags import Job

if TYPE_CHECKING:
  from dprjax.base.watch import Watch

FLAGS = ('coordinator', 'processes', 'process')
_SLURM = ('SLURM_JOB_ID', 'SLURM_STEP_NODELIST', 'SLURM_NTASKS', 'SLURM_PROCID', 'SLURM_LOCALID')
_FOREVER_MS = 7 * 24 * 3600 * 1000  # the watch ends pointless waits
_LINGER_S = 2  # from our time-out to that of jax

_watch: 'Watch | None' = None
# Numbers of barriers and agreements; all processes reach them in the same order.
_numbers = itertools.count()


@contextlib.contextmanager
def together(job: Job, raw: bool = False) -> Iterator[None]:
  """Joins the job, if any, around a command, and ends with the job.

  An exception in one process ends all, each with a line that names the process and the reason;
  ``raw`` also shows tracebacks.
  """
  if not start(job):
    yield
    return
  try:
    yield
    barrier('end')
  except BaseException as error:
    leave(error, trace=raw)
  _finish()


def start(job: Job) -> bool:
  """Joins the job of the flags or the environment; False for a single process."""
  global _watch
  flags = {name: getattr(job, name) for name in FLAGS if getattr(job, name) not in (None, '')}
  place = _from_flags(flags) if flags else _from_surroundings()
  if place is None or place.get('num_processes') == 1:
    return False
  # Gloo is only for collectives between CPUs. `stopping.Stop` handles SIGTERM.
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.config.update('jax_enable_preemption_service', False)
  # jax aborts if not all processes join; explain it first.
  late = threading.Timer(
    job.join_timeout,
    lambda: end(
      2,
      f'not all processes joined within {job.join_timeout} s (--join_timeout): look at their '
      'output, and check that all have the same '
      f'coordinator{f", {job.coordinator}," if job.coordinator else ""} and number of processes',
    ),
  )
  late.daemon = True
  try:
    if place.get('process_id') == 0:
      _check_port(place['coordinator_address'])
    late.start()
    jax.distributed.initialize(
      **place,
      initialization_timeout=job.join_timeout + _LINGER_S,
      # Later than our watch, whose message is clearer.
      heartbeat_timeout_seconds=max(100, 4 * job.peer_timeout),
    )
  except (RuntimeError, ValueError, OSError, KeyError, ImportError) as error:
    raise InputError(
      f'this process cannot join its job, with --coordinator={job.coordinator} '
      f'({" ".join(str(error).split())[:200]}); give --coordinator=HOST:PORT --processes=N '
      '--process=I'
    ) from error
  finally:
    late.cancel()
  state = internals.global_state
  if state.num_processes == 1:
    jax.distributed.shutdown()
    return False
  from dprjax.base import watch  # only in a job

  _watch = watch.Watch(
    state.client,
    state.process_id,
    state.num_processes,
    str(state.coordinator_address),
    job.peer_timeout,
    end,
  )
  if state.process_id:
    logging.getLogger('dprjax').info(
      'if process 0, the coordinator at %s, is lost, JAX ends this process with a stack trace',
      state.coordinator_address,
    )
    logging.getLogger('dprjax').setLevel(logging.WARNING)  # only process 0 logs
  return True


def _from_flags(flags: dict[str, Any]) -> dict[str, Any]:
  coordinator, processes, process = map(flags.get, FLAGS)
  host, _, port = str(coordinator).rpartition(':')
  place = host and port.isdecimal() and 0 < int(port) < 65536
  if not place or process is None or not 0 <= process < (processes or 0):
    raise InputError(
      f'--coordinator={coordinator} --processes={processes} --process={process}: expected '
      'HOST:PORT of process 0, how many there are, and the number of this one, from 0'
    )
  return {
    'coordinator_address': coordinator,
    'num_processes': processes,
    'process_id': process,
    'cluster_detection_method': 'deactivate',
  }


def _from_surroundings() -> dict[str, Any] | None:
  """The arguments of jax.distributed.initialize for launchers that jax detects, or None."""
  environment = os.environ
  if all(name in environment for name in _SLURM):
    return {} if int(environment['SLURM_NTASKS']) > 1 else None
  if int(environment.get('OMPI_COMM_WORLD_SIZE', '1')) > 1:
    if 'OMPI_MCA_orte_hnp_uri' in environment:
      return {}
    return {'cluster_detection_method': 'mpi4py'}
  if cloud_tpu_init.running_in_cloud_tpu_vm:
    hosts = (
      environment.get('TPU_PROCESS_ADDRESSES') or environment.get('TPU_WORKER_HOSTNAMES') or ','
    )
    alone = ',' not in hosts and int(environment.get('MEGASCALE_NUM_SLICES') or '1') == 1
    return None if alone else {}
  if (
    'KUBERNETES_SERVICE_HOST' in environment
    and 'JOB_COMPLETION_INDEX' in environment
    and importlib.util.find_spec('kubernetes') is not None
  ):
    return {}
  return None


def _check_port(address: str) -> None:
  """Raises OSError if the port is in use, where jax may end in a segmentation fault."""
  with socket.socket() as probe:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(('', int(address.rpartition(':')[2])))  # jax listens on all addresses, too


def leave(error: BaseException, trace: bool = False) -> None:
  """Ends this process, and so the job, because of ``error``; does nothing without a job.

  Call it before any cleanup that would wait for other processes.
  """
  if _watch is None:
    return
  status, line = explain(error)
  if status == 1:
    # Probably another process is gone; then the watch names it and ends this process.
    _watch.wait()
  if trace or wants_traceback():
    traceback.print_exception(error)
  _watch.report(status, line)
  end(status, line)


def _finish() -> None:
  global _watch
  assert _watch is not None
  _watch.stop()
  _watch = None
  jax.distributed.shutdown()


def _client() -> Any:
  client = internals.global_state.client
  assert client is not None
  return client


def barrier(name: str) -> None:
  if _watch is not None:
    _client().wait_at_barrier(f'dprjax/{next(_numbers)}/{name}', _FOREVER_MS)


@contextlib.contextmanager
def turn() -> Iterator[None]:
  """Process 0 runs the block first, then all others at the same time.

  All leave together: what process 0 does after the block cannot change what the others read in it.
  """
  if jax.process_index():
    barrier('turn')
  yield
  if not jax.process_index():
    barrier('turn')
  barrier('after the turn')


def agree(value: Any) -> Any:
  """The ``value`` (JSON) of process 0, on every process."""
  if _watch is None:
    return value
  client, key = _client(), f'dprjax/agreed/{next(_numbers)}'
  if jax.process_index() == 0:
    client.key_value_set(key, json.dumps(value))
    return value
  return json.loads(client.blocking_key_value_get(key, _FOREVER_MS))


def gather(array: np.ndarray) -> np.ndarray:
  """Stacks arrays of the same shape, one a process, to ``[processes, ...]`` on every process."""
  if _watch is None:
    return array[None]
  barrier('gather')  # collectives may time out; barriers do not
  return np.asarray(multihost_utils.process_allgather(array))
