"""launch/slurm.sbatch on a real SLURM: munge, a controller and two nodes on this machine.

The daemons run in their own namespaces: the names of the nodes are in an /etc/hosts that only they
see, and all of them end with the first, with every process that they started. They write only into
the folder of the test and use only ports of the loopback interface.
"""

import json
import os
import pathlib
import re
import shutil
import socket
import stat
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
SCRIPT = ROOT / 'launch' / 'slurm.sbatch'
PROGRAMS = ('munged', 'slurmctld', 'slurmd', 'sbatch', 'squeue', 'scontrol', 'scancel')
PROGRAMS += ('unshare', 'setpriv')
NODES = ('rehearsal1', 'rehearsal2')

# The script itself requests nodes with GPUs.
WITHOUT_GPUS = ('--nodes=2', '--gpus-per-node=0', '--ntasks-per-node=1', '--cpus-per-task=1')

CONFIG = """
ClusterName=rehearsal
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
# A job that is queued again waits until the credential of its last start expires.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
PlugStackConfig={folder}/plugstack.conf
TaskPlugin=task/none
ProctrackType=proctrack/linuxproc
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,batch_sched_delay=1,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
# The nodes claim what the script requests: more processors than this machine has.
SlurmdParameters=config_overrides
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=32 Gres=gpu:4 State=UNKNOWN
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=32 Gres=gpu:4 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 State=UP MaxTime=INFINITE
PartitionName=high Nodes=ALL PriorityTier=10 State=UP MaxTime=INFINITE
"""  # noqa: E501

DAEMONS = """
set -eu
cd "$1"
mount --bind hosts /etc/hosts
munged --foreground --force --key-file="$1/munge.key" --socket="$1/munge.socket" --pid-file="$1/munge.pid" --log-file="$1/munge.log" \
  --seed-file="$1/munge.seed" --num-threads=2 &
while [ ! -S munge.socket ]; do sleep 0.1; done
slurmctld -D -c -f "$1/slurm.conf" &
slurmd -D -N "$2" -f "$1/slurm.conf" &
slurmd -D -N "$3" -f "$1/slurm.conf" &
wait
"""  # noqa: E501

pytestmark = pytest.mark.slow


class Cluster:
  """Jobs on the two nodes, submitted with the script."""

  def __init__(self, folder):
    self.folder = folder
    self.environment = {
      name: value
      for name, value in os.environ.items()
      if not name.startswith(('SLURM_', 'SBATCH_', 'JAX_', 'XLA_'))
    } | {
      'SLURM_CONF': str(folder / 'slurm.conf'),
      'PYTHON': sys.executable,
      'PYTHONPATH': str(ROOT),
      'JAX_PLATFORMS': 'cpu',
    }
    self.jobs = {}

  def call(self, *command):
    done = subprocess.run(
      command, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout

  def submit(self, *arguments, script=SCRIPT):
    """Submits a job and returns its number; flags of sbatch, '--', then arguments of the script."""
    at = arguments.index('--')
    job = self.call('sbatch', '--parsable', *arguments[:at], script, *arguments[at + 1 :]).strip()
    self.jobs[job] = self.folder / f'dprjax-{job}.log'
    return job

  def log(self, job):
    return self.jobs[job].read_text() if self.jobs[job].exists() else ''

  def state(self, job):
    return re.search(r'JobState=(\w+)', self.call('scontrol', 'show', 'job', job))[1]

  def wait(self, until, seconds, about):
    """Waits until ``until()`` is true; fails with the logs after ``seconds``."""
    limit = time.monotonic() + seconds
    while not until():
      if time.monotonic() > limit:
        pytest.fail(
          f'{about}: not within {seconds} s\n'
          + '\n'.join(f'--- {job} {self.state(job)}\n{self.log(job)}' for job in self.jobs)
        )
      time.sleep(0.2)

  def wait_for_log(self, job, pattern, seconds=60):
    self.wait(
      lambda: re.search(pattern, self.log(job)), seconds, f'{pattern!r} in the log of job {job}'
    )
    return re.search(pattern, self.log(job))

  def wait_for_end(self, job, seconds=60):
    ended = ('COMPLETED', 'FAILED', 'CANCELLED', 'TIMEOUT', 'NODE_FAIL', 'PREEMPTED')
    self.wait(lambda: self.state(job) in ended, seconds, f'the end of job {job}')
    return self.state(job)


@pytest.fixture(scope='module')
def daemons(tmp_path_factory):
  """The folder of a running SLURM."""
  if os.geteuid() != 0:
    pytest.skip('a SLURM of its own needs root: munge keys, namespaces')
  missing = [name for name in PROGRAMS if shutil.which(name) is None]
  if missing:
    pytest.skip(
      f'no {", ".join(missing)} here; on Debian and Ubuntu: apt-get install slurm-wlm munge'
    )
  namespaces = ['unshare', '--mount', '--pid', '--fork', '--kill-child', '--mount-proc']
  probe = subprocess.run([*namespaces, 'true'], capture_output=True, text=True)
  if probe.returncode:
    pytest.skip(f'no namespaces here: {probe.stderr.strip()}')

  folder = tmp_path_factory.mktemp('slurm')
  sockets = [socket.socket() for _ in range(3)]
  for probe in sockets:
    probe.bind(('127.0.0.1', 0))
  ports = [probe.getsockname()[1] for probe in sockets]
  for probe in sockets:
    probe.close()
  (folder / 'munge.key').write_bytes(os.urandom(1024))
  (folder / 'munge.key').chmod(0o600)
  (folder / 'hosts').write_text(
    pathlib.Path('/etc/hosts').read_text() + f'\n127.0.0.1 {" ".join(NODES)}\n'
  )
  (folder / 'slurm.conf').write_text(
    CONFIG.format(folder=folder, host=socket.gethostname(), ports=ports, nodes=NODES)
  )
  (folder / 'plugstack.conf').write_text('')
  # Four fake GPUs a node: SLURM numbers them and only checks that the files are devices.
  (folder / 'gres.conf').write_text(f'Name=gpu File={folder}/gpu[0-3]\n')
  for number in range(4):
    os.mknod(folder / f'gpu{number}', 0o600 | stat.S_IFCHR, os.stat('/dev/null').st_rdev)
  with (folder / 'daemons.log').open('wb') as log:
    # Killed when the thread that runs the tests ends for any reason.
    end_with_us = ['setpriv', '--pdeathsig', 'KILL']
    program = [*end_with_us, *namespaces, 'bash', '-c', DAEMONS, 'daemons', folder, *NODES]
    process = subprocess.Popen(program, stdout=log, stderr=log)
  try:
    cluster = Cluster(folder)
    for _ in range(100):
      done = subprocess.run(
        ['sinfo', '--noheader', '--format=%T %D', '--partition=low'],
        env=cluster.environment,
        capture_output=True,
        text=True,
      )
      if done.stdout.split() == ['idle', '2']:
        break
      assert process.poll() is None, (folder / 'daemons.log').read_text()
      time.sleep(0.2)
    else:
      pytest.fail(f'{done.stdout} {done.stderr}\n' + (folder / 'daemons.log').read_text())
    yield folder
  finally:
    process.kill()
    process.wait()


@pytest.fixture
def cluster(daemons):
  """The cluster without jobs of other tests."""
  made = Cluster(daemons)
  yield made
  for job in made.jobs:
    subprocess.run(
      ['scancel', '--quiet', '--signal=KILL', '--full', job], env=made.environment, check=False
    )
    subprocess.run(['scancel', '--quiet', job], env=made.environment, check=False)
  made.wait(lambda: not made.call('squeue', '--noheader'), 60, 'an empty queue')


# In place of a training: counts steps that all processes take together, and saves at SIGTERM.
COUNTING = """
import os, pathlib, signal, sys, time
import jax, numpy as np
from jax.experimental import multihost_utils
jax.distributed.initialize()
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
total, saved = int(sys.argv[1]), pathlib.Path(sys.argv[2])
together = lambda x: multihost_utils.process_allgather(np.array(x)).tolist()
step = int(saved.read_text()) if saved.exists() else 0
index, count = jax.process_index(), jax.process_count()
print(f'process {index} of {count}: {jax.device_count()} devices; all: {together(index)}; '
      f'after step {step}', flush=True)
while step < total:
  time.sleep(0.2)
  step += 1
  if any(together(len(asked))):
    break
if jax.process_index() == 0:
  saved.write_text(str(step))
together(0)
sys.exit(0 if step == total else 143)
"""


def test_a_training_on_two_nodes_survives_preemption(cluster, tmp_path):
  """A job of higher priority takes the nodes; the training saves, and goes on after it."""
  steps = 300
  config = (f'--config={ROOT}/configs/dptdr.py:local', f'--workdir={tmp_path}/run')
  seldom = ('--config.eval.every=1000', '--config.checkpoint.every=1000')
  train = ('-m', 'dprjax.train', *config, f'--config.steps={steps}', *seldom)
  job = cluster.submit('--partition=low', '--time=20', *WITHOUT_GPUS, '--', *train)
  cluster.wait_for_log(job, f'step 10/{steps} ', 180)
  assert 'mesh data 2 x fsdp 1 x model 1 of cpu cpu, 2 processes' in cluster.log(job)
  (tmp_path / 'urgent.sbatch').write_text('#!/bin/sh\nsrun hostname\n')
  flags = ('--partition=high', '--nodes=2', '--exclusive')
  flags += (f'--output={cluster.folder}/dprjax-%j.log', '--')
  urgent = cluster.submit(*flags, script=tmp_path / 'urgent.sbatch')
  saved = cluster.wait_for_log(job, r'asked to stop \(SIGTERM\): saved step (\d+);')[1]
  assert cluster.wait_for_end(urgent) == 'COMPLETED'
  assert cluster.wait_for_end(job, 240) == 'COMPLETED'
  log = cluster.log(job)
  expected = ['start 0 of job', 'DUE TO PREEMPTION', 'stopped from outside (status 143)']
  expected += ['start 1 of job', f'resuming after step {saved} of {steps}', 'slurm.sbatch: done']
  places = [log.index(words) for words in expected]
  assert places == sorted(places)
  rows = [
    json.loads(line) for line in (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()
  ]
  assert [row['step'] for row in rows if 'loss' in row] == list(range(2, steps + 1, 2))
  assert not list(cluster.folder.glob('*.ends'))


def test_after_the_loss_of_a_node_the_job_is_queued_again(cluster, tmp_path):
  job = cluster.submit(
    '--time=10', *WITHOUT_GPUS, '--', '-c', COUNTING, '1000000', tmp_path / 'step'
  )
  cluster.wait_for_log(job, 'process 1 of 2: .* after step 0')
  cluster.call('scontrol', 'update', f'NodeName={NODES[1]}', 'State=DOWN', 'Reason=rehearsal')
  cluster.wait_for_log(job, 'DUE TO NODE FAILURE')
  time.sleep(1)
  cluster.call('scontrol', 'update', f'NodeName={NODES[1]}', 'State=RESUME')
  cluster.wait_for_log(job, r'start 1 of job (.|\n)*process 1 of 2: .* after step [1-9]')


def test_at_the_time_limit_the_job_is_queued_again(cluster, tmp_path):
  program = ('-c', COUNTING, '1000000', tmp_path / 'step')
  job = cluster.submit('--time=1', '--signal=TERM@30', *WITHOUT_GPUS, '--', *program)
  cluster.wait_for_log(job, 'saved at the time limit; queued again', 90)
  step = (tmp_path / 'step').read_text()
  cluster.wait_for_log(job, rf'start 1 of job (.|\n)*after step {step}\b')
  assert not list(cluster.folder.glob('*.ends'))
  # After scancel it does not start again.
  cluster.call('scancel', job)
  assert cluster.wait_for_end(job) == 'CANCELLED'
  cluster.wait_for_log(job, 'stopped from outside')
  time.sleep(3)
  assert cluster.state(job) == 'CANCELLED'


def test_a_job_restarts_three_times_after_crashes(cluster):
  # One of two processes dies; the other would wait for it.
  program = (
    "import os, time; number = os.environ['SLURM_PROCID']; print('process', number, flush=True); "
    "number == '1' and os.abort(); "
    'time.sleep(600)'
  )
  job = cluster.submit('--time=10', *WITHOUT_GPUS, '--', '-c', program)
  assert cluster.wait_for_end(job, 120) == 'FAILED'
  log = cluster.log(job)
  assert log.count('; queued again') == 3
  assert len(re.findall('^process 1$', log, re.MULTILINE)) == 4
  assert (
    'crashed (start 3: 134 is how process 1 on rehearsal2 ended' in log
    and 'as it did the last 3 times' in log
  )
  assert {
    line[:12] for line in (cluster.folder / f'dprjax-{job}.ends').read_text().splitlines()
  } >= {f'start {n}: 134' for n in range(4)}


def test_after_bad_input_the_job_does_not_restart(cluster):
  train = ('-m', 'dprjax.train', f'--config={ROOT}/configs/nonesuch.py', '--workdir=run')
  job = cluster.submit('--time=10', *WITHOUT_GPUS, '--', *train)
  assert cluster.wait_for_end(job) == 'FAILED'
  log = cluster.log(job)
  assert 'dprjax: error: ' in log and 'slurm.sbatch: bad input (start 0: 2 is how process' in log
  assert 'ExitCode=2:0' in cluster.call('scontrol', 'show', 'job', job)


@pytest.mark.parametrize(
  'tasks, per_node, devices',
  [(4, 4, None), (1, 1, '0,1,2,3')],
)
def test_gpus(cluster, tasks, per_node, devices):
  """Every process sees all GPUs of its node, and JAX_LOCAL_DEVICE_IDS names several of its own."""
  program = (
    "import os; print('process', os.environ['SLURM_PROCID'], os.environ['SLURM_LOCALID'], "
    "os.environ['CUDA_VISIBLE_DEVICES'], "
    "os.environ.get('JAX_LOCAL_DEVICE_IDS'), os.environ['SLURM_CPUS_PER_TASK'], flush=True)"
  )
  job = cluster.submit(f'--ntasks-per-node={tasks}', '--', '-c', program)
  assert cluster.wait_for_end(job) == 'COMPLETED'
  lines = sorted(re.findall(r'^process (.*)$', cluster.log(job), re.MULTILINE))
  assert lines == [
    f'{index} {index % per_node} 0,1,2,3 {devices} 8' for index in range(2 * per_node)
  ]


def test_processes_that_do_not_fit_the_gpus_are_refused(cluster):
  job = cluster.submit('--ntasks-per-node=2', '--', '-c', '')
  assert cluster.wait_for_end(job) == 'FAILED'
  assert '2 processes on 4 GPUs a node: --ntasks-per-node must be 1 or 4' in cluster.log(job)
