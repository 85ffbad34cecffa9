import socket
import subprocess
import sys

import jax
import jaxlib
import numpy as np
import pytest

from dprjax.base import distributed, flags
from tests.refusals import command_refused, refused

SLURM = {
  'SLURM_JOB_ID': '7',
  'SLURM_STEP_NODELIST': 'node[1-2]',
  'SLURM_NTASKS': '1',
  'SLURM_PROCID': '0',
  'SLURM_LOCALID': '0',
}


@pytest.fixture(autouse=True)
def bare(monkeypatch):
  """An environment without a job."""
  ours = [f'DPRJAX_{flag.upper()}' for flag in distributed.FLAGS]
  others = ('OMPI_COMM_WORLD_SIZE', 'OMPI_MCA_orte_hnp_uri', 'KUBERNETES_SERVICE_HOST')
  for name in (*SLURM, *others, *ours):
    monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
  ('given', 'words'),
  [
    (('host:1234', None, None), '--processes'),
    ((None, 2, 1), '--coordinator'),
    (('host', 2, 1), ('--coordinator', 'host')),
    (('host:1234', 2, 2), '--process'),
  ],
)
def test_bad_flags(given, words):
  with refused(words):
    distributed.start(flags.Job(**dict(zip(distributed.FLAGS, given, strict=True))))


def test_a_single_process_starts_nothing(monkeypatch):
  assert not distributed.start(flags.Job())
  assert not distributed.start(flags.Job(coordinator='host:1234', processes=1, process=0))
  for name, value in SLURM.items():
    monkeypatch.setenv(name, value)
  assert not distributed.start(flags.Job())
  monkeypatch.setenv('OMPI_COMM_WORLD_SIZE', '1')
  assert not distributed.start(flags.Job())
  assert not jax.distributed.is_initialized()
  # The collective functions work for one process.
  with distributed.turn():
    distributed.barrier('here')
  assert distributed.agree({'a': 1.5}) == {'a': 1.5}
  assert distributed.gather(np.arange(3)).tolist() == [[0, 1, 2]]
  distributed.leave(ValueError('passed on to the caller'))


def test_flags_override_the_environment(monkeypatch):
  monkeypatch.setenv('DPRJAX_COORDINATOR', 'host:1')
  monkeypatch.setenv('DPRJAX_PROCESSES', '4')
  monkeypatch.setenv('DPRJAX_PROCESS', '')
  job, _ = flags.parse(flags.Job, ['--processes=8'])
  assert job == flags.Job(coordinator='host:1', processes=8)
  assert (job.process, job.join_timeout, job.peer_timeout) == (None, 300, 20)


def test_what_jax_does_not_publish_is_still_there():
  """`distributed` uses it: nothing public gives the client, or says whether this is a TPU VM."""
  assert isinstance(distributed.cloud_tpu_init.running_in_cloud_tpu_vm, bool)
  state = distributed.internals.global_state
  assert {'client', 'process_id', 'num_processes', 'coordinator_address'} <= set(dir(state))
  for method in (
    'key_value_set',
    'key_value_dir_get',
    'blocking_key_value_get',
    'wait_at_barrier',
  ):
    assert callable(getattr(jaxlib._jax.DistributedRuntimeClient, method))


JOIN = """
import sys
from dprjax.base import cli, distributed, errors, flags
place, process, seconds = sys.argv[1], *map(int, sys.argv[2:])
job = flags.Job(coordinator=place, processes=2, process=process, join_timeout=seconds)
try:
  distributed.start(job)
except errors.InputError as error:
  cli.fail(str(error))
"""


@pytest.mark.slow
@pytest.mark.parametrize(('process', 'seconds'), [(0, 300), (1, 2)])
def test_a_port_in_use_and_a_coordinator_that_does_not_answer(process, seconds):
  with socket.socket() as probe:
    probe.bind(('', 0))
    if process == 0:
      probe.listen()
    place = f'127.0.0.1:{probe.getsockname()[1]}'
    words = [sys.executable, '-c', JOIN, place, str(process), str(seconds)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
  command_refused((ended.returncode, ended.stderr), place)
