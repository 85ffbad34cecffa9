"""Real processes on one machine: they train, encode and search as one does, and survive what pods
do to them.

That one process with several devices trains as one with one does is tested beside each method.
"""

import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from dprjax import encode, search
from dprjax.exports import exporting
from tests import pod_work
from tests.workdirs import assert_same_bits, metrics_of, steps_of, trainable_of

ROOT = pathlib.Path(__file__).parent.parent

# Name -> its config and flags: those that share the least. Each process compiles for itself.
METHODS = {
  'DPT of queries': [
    'dptdr.py:local,query',
    '--config.corpus_negatives=-1',
    '--config.prompt.regularization=0.5',
    '--config.optim.learning_rate=10.0',  # its gradient is small
  ],
  'RIP': ['rip.py:local'],
}
MESHES = [{'data': 2, 'model': 2}, {'fsdp': 4}]  # of each in turn
# Gradient descent, nearly: where Adam's eps is small its first updates are the gradient's signs,
# and rounding decides those near zero.
STEADY = [
  '--config.steps=2',
  '--config.optim.eps=1.0',
  '--config.optim.learning_rate=0.1',
  '--config.optim.warmup=0.0',
  '--config.optim.decay=none',
  '--config.checkpoint.every=1',
  '--config.log_every=1',
]


# Random dropout of a prompt, a dev split, a checkpoint every other step.
LOSING = [
  'dptdr.py:local',
  '--config.optim.learning_rate=10.0',
  '--config.steps=20',
  '--config.eval.every=10',
  '--config.checkpoint.every=2',
  '--config.log_every=1',
]


STARTED = []


@pytest.fixture(autouse=True)
def ended():
  """Ends the pods that a failed or interrupted test has left; the launcher ends its processes."""
  yield
  while STARTED:
    pod = STARTED.pop()
    if pod.process.poll() is None:
      pod.process.terminate()
      pod.end()


class Pod:
  """A command in several processes, running."""

  def __init__(self, processes, devices, *command, grace=60):
    self.said = ''
    self.process = subprocess.Popen(
      [
        sys.executable,
        str(ROOT / 'launch' / 'local_pod.py'),
        f'--processes={processes}',
        f'--devices={devices}',
        f'--grace={grace}',
        *map(str, command),
      ],
      cwd=ROOT,
      env=os.environ | {'PYTHONPATH': str(ROOT)},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    self._reader = threading.Thread(target=self._read)
    self._reader.start()
    STARTED.append(self)

  def _read(self):
    with self.process.stdout as lines:
      for line in lines:
        self.said += line

  def pids(self):
    """Ids of the processes, in their order; none where the launcher has ended."""
    found, children = {}, ''
    with contextlib.suppress(OSError):
      children = pathlib.Path(
        f'/proc/{self.process.pid}/task/{self.process.pid}/children'
      ).read_text()
    for child in children.split():
      with contextlib.suppress(OSError):
        environment = pathlib.Path(f'/proc/{child}/environ').read_bytes()
        if number := re.search(rb'DPRJAX_PROCESS=(\d+)', environment):
          found[int(number[1])] = int(child)
    return [found[i] for i in sorted(found)]

  def end(self, timeout=900):
    """(status, output)."""
    try:
      status = self.process.wait(timeout)
    finally:
      self.process.kill()
      self._reader.join()
    return status, self.said

  def errors(self):
    return [line for line in self.said.splitlines() if 'dprjax: error:' in line]


def run(processes, devices, *command):
  status, said = Pod(processes, devices, *command).end()
  assert status == 0, said
  return said


def wait_for(condition, seconds=600):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, 'it did not happen'
    time.sleep(0.02)


@pytest.fixture(scope='module')
def data(trained, tmp_path_factory):
  """The text that the tests share, ten words of each: each process compiles for all lengths."""
  folder = tmp_path_factory.mktemp('short') / 'data'
  shutil.copytree(trained / 'data', folder)
  for name in ('corpus', 'queries'):
    lines = [json.loads(line) for line in (folder / f'{name}.jsonl').read_text().splitlines()]
    cut = (line | {'text': ' '.join(line['text'].split()[:10])} for line in lines)
    (folder / f'{name}.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in cut))
  return folder


@pytest.fixture(scope='module')
def flags(trained, data):
  """``flags(config, *more)``: its flags, on the text and the backbone that the tests share."""

  def make(name, *more):
    if name.startswith(('dptdr', 'ft')):
      form, source, cache = 'beir', data, data.parent / 'token_cache'
    else:  # spans of whole texts
      form, source, cache = 'corpus', trained / 'data' / 'corpus.jsonl', trained / 'token_cache'
    return [
      f'--config={ROOT}/configs/{name}',
      f'--config.backbone.path={trained}/backbone',
      f'--config.data.format={form}',
      f'--config.data.dir={source}',
      f'--config.data.token_cache={cache}',
      *more,
    ]

  return make


def work(folder, jobs):
  """The command of jobs of `tests.pod_work`."""
  (folder / 'jobs.json').write_text(json.dumps(jobs))
  return '-m', 'tests.pod_work', f'--jobs={folder}/jobs.json'


@pytest.fixture(scope='module')
def together(flags, tmp_path_factory):
  """Folders of workdirs of all methods: of one process, and of two with two devices each."""
  made = []
  for processes, devices in ((1, 1), (2, 2)):
    folder, jobs = tmp_path_factory.mktemp('pod'), []
    for (method, (config, *own)), mesh in zip(METHODS.items(), MESHES, strict=True):
      sizes = mesh if processes > 1 else {}
      axes = [f'--config.mesh.{axis}={sizes.get(axis, 1)}' for axis in ('data', 'fsdp', 'model')]
      words = flags(config, *STEADY, *axes, *own)
      jobs.append({'do': 'train', 'flags': words, 'workdir': str(folder / method)})
    if processes > 1:  # a pod takes seconds to start, so it also does the work of other tests
      saved = {'do': 'save', 'mesh': {'data': 2, 'fsdp': 2}}
      jobs += [one | {'workdir': str(folder / 'saved')} for one in ({'do': 'turn'}, saved)]
      jobs.append({'do': 'train', 'flags': flags(*LOSING), 'workdir': str(folder / 'whole')})
    run(processes, devices, *work(folder, jobs))
    made.append(folder)
  return made


@pytest.mark.slow
@pytest.mark.xdist_group('pods')  # one worker trains the shared workdirs
@pytest.mark.parametrize('method', METHODS)
def test_a_pod_trains_to_the_same_parameters_as_one_process(together, method):
  one, many = (folder / method for folder in together)
  first, last = trainable_of(one, 1)[1], trainable_of(one, 2)[1]
  for step, expected in ((1, first), (2, last)):
    there = trainable_of(many, step)[1]
    assert there.keys() == expected.keys()
    for name, leaf in expected.items():
      moved = np.abs(last[name] - first[name]).max()
      # The bias of keys adds the same to all scores of a query: its gradient is only rounding.
      if not name.endswith('attention/key/bias'):
        np.testing.assert_allclose(
          there[name], leaf, rtol=0, atol=1e-3 * moved + 1e-7, err_msg=f'{name} at step {step}'
        )
  assert max(np.abs(last[name] - first[name]).max() for name in last) > 1e-3
  for row, expected in zip(metrics_of(many), metrics_of(one), strict=True):
    assert row.keys() == expected.keys()
    for name in row.keys() & {'loss', 'gradient_norm'}:  # a row of the dev split has neither
      np.testing.assert_allclose(row[name], expected[name], rtol=1e-3)
    if 'dev/nDCG@10' in row:  # two passages of nearly the same score may change places
      np.testing.assert_allclose(row['dev/nDCG@10'], expected['dev/nDCG@10'], atol=0.02)


@pytest.mark.slow
@pytest.mark.xdist_group('pods')
def test_a_checkpoint_of_two_processes_is_restored_by_one_and_by_four_bit_for_bit(
  together, tmp_path
):
  saved = together[1] / 'saved'
  meshes = {'fsdp': 2, 'model': 2}, {'fsdp': 4}
  jobs = [{'do': 'restore', 'mesh': mesh, 'workdir': str(saved)} for mesh in meshes]
  run(4, 1, *work(tmp_path, jobs))
  for mesh in ({'data': 8}, {'fsdp': 2, 'model': 4}):
    pod_work.check_restored(saved, mesh)


@pytest.mark.slow
def test_encode_and_exact_search_write_the_files_of_one_process(trained, command, tmp_path):
  prompt = exporting.export(trained, tmp_path / 'prompt.npz', force=True)
  data = {'passage': trained / 'data' / 'corpus.jsonl', 'query': trained / 'data' / 'queries.jsonl'}

  def commands(folder):
    for side, source in data.items():
      usual = (f'--backbone={trained}/backbone', f'--prompt={prompt}', '--shard_rows=60')
      yield encode, *usual, f'--side={side}', f'--input={source}', f'--out={folder}/{side}'
    vectors = (f'--corpus={folder}/passage', f'--queries={folder}/query')
    yield search, *vectors, f'--out={folder}/run.trec', '--index=exact', '--k=40'

  def contents(folder):
    return {
      str(path.relative_to(folder)): path.read_bytes()
      for path in folder.rglob('*')
      if path.is_file() and path.name != 'run.trec.json'
    }

  for module, *arguments in commands(tmp_path / 'one'):
    assert command(module, *arguments)[0] == 0
  # All of them in one pod: each of its processes takes seconds to start.
  jobs = [
    {'do': 'command', 'module': module.__name__, 'flags': arguments}
    for module, *arguments in commands(tmp_path / 'two')
  ]
  run(2, jax.device_count(), *work(tmp_path, jobs))
  one = contents(tmp_path / 'one')
  assert contents(tmp_path / 'two') == one
  assert (
    len([name for name in one if name.endswith('.npy')]) >= 6
    and one['run.trec'].count(b'\n') > 1000
  )
  # Another number of processes keeps existing files and makes missing ones.
  shutil.copytree(tmp_path / 'two', tmp_path / 'three')
  for lost in ('embeddings-00001*', 'ids-00003*'):
    next((tmp_path / 'three' / 'passage').glob(lost)).unlink()
  module, *arguments = next(commands(tmp_path / 'three'))
  said = run(3, jax.device_count(), '-m', module.__name__, *arguments)
  assert re.search(r'\d+ of \d+ texts already there', said), said
  assert contents(tmp_path / 'three') == one


# Life of pods.

PATIENCE = 8  # seconds, where the test has to wait for it


def training(flags, workdir, *more):
  """The command of a run that has something to lose."""
  return '-m', 'dprjax.train', f'--workdir={workdir}', *flags(*LOSING, *more)


def steps_logged(workdir):
  return len(metrics_of(workdir)) if (workdir / 'metrics.jsonl').exists() else 0


@pytest.mark.slow
def test_sigterm_on_one_process_saves_on_all_and_ends_in_time(flags, tmp_path):
  workdir = tmp_path / 'run'
  many = ('--config.steps=1000000', '--config.checkpoint.every=1000000')
  endless = (*many, '--config.data.dev_split=')
  pod = Pod(2, 1, *training(flags, workdir, *endless))
  wait_for(lambda: steps_logged(workdir) >= 3)
  os.kill(pod.pids()[1], signal.SIGTERM)
  asked = time.monotonic()
  status, said = pod.end(60)
  assert status == 143 and not pod.errors(), said
  assert time.monotonic() - asked < 30
  [step] = steps_of(workdir)
  assert said.count(f'[0] asked to stop (SIGTERM): saved step {step};') == 1
  # Passed on by the launcher to all of them; and what was saved is gone on with.
  pod = Pod(2, 1, *training(flags, workdir, *endless))
  wait_for(lambda: steps_logged(workdir) >= step + 3)
  pod.process.send_signal(signal.SIGTERM)
  status, said = pod.end(60)
  assert status == 143 and f'resuming after step {step} of 1000000' in said, said
  assert metrics_of(workdir)[-1]['step'] == max(steps_of(workdir)) > step


@pytest.mark.slow
def test_an_error_on_one_process_is_reported_by_all(trained, flags, tmp_path):
  # Only process 0 looks at the folder of the cache.
  (tmp_path / 'other').mkdir()
  (tmp_path / 'other' / 'train').mkdir()
  (tmp_path / 'other' / 'train' / 'something').write_text('else')
  pod = Pod(2, 1, *training(flags, tmp_path / 'run', f'--config.data.token_cache={tmp_path}/other'))
  status, said = pod.end(60)
  assert status == 2, said
  assert sorted(line[:4] for line in pod.errors()) == ['[0] ', '[1] '] and all(
    'neither empty nor a token cache' in line for line in pod.errors()
  ), said
  assert 'process 0' in next(line for line in pod.errors() if line.startswith('[1]'))


@pytest.mark.slow
@pytest.mark.xdist_group('pods')
def test_a_killed_host_ends_the_others_and_the_run_ends_with_the_same_bits(
  together, flags, tmp_path
):
  whole, broken = together[1] / 'whole', tmp_path / 'broken'
  victim = random.SystemRandom().randrange(2)
  pod = Pod(2, 2, *training(flags, broken), f'--peer_timeout={PATIENCE}', '--join_timeout=20')
  wait_for(lambda: steps_logged(broken) >= 3)
  os.kill(pod.pids()[victim], signal.SIGKILL)
  began = time.monotonic()
  status, said = pod.end(60)
  assert status == 128 + signal.SIGKILL and time.monotonic() - began < 30, said
  if victim:  # it is named by the other
    [line] = pod.errors()
    assert line.startswith(f'[0] dprjax: error: process {victim}'), said
    assert 'killed' in line and 'Traceback' not in said, said
  else:  # the coordinator, whose loss ends the other in C++
    assert pod.errors() or 'JAX distributed service' in said, said
  run(2, 2, *training(flags, broken))
  assert_same_bits(trainable_of(broken)[1], trainable_of(whole)[1])
  assert metrics_of(broken) == metrics_of(whole)


# The launcher.


@pytest.mark.slow
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGKILL])
def test_the_launcher_leaves_no_orphans(tmp_path, number):
  script = tmp_path / 'script.py'
  script.write_text('import sys, time\nprint("here", flush=True)\ntime.sleep(600)\n')
  pod = Pod(2, 1, script)
  wait_for(lambda: pod.said.count('here') == 2, 30)
  pids = pod.pids()
  assert len(pids) == 2
  pod.process.send_signal(number)
  status, _ = pod.end(30)
  assert status in (128 + number, -signal.SIGKILL)
  wait_for(lambda: not any(pathlib.Path(f'/proc/{pid}').exists() for pid in pids), 10)


@pytest.mark.slow
def test_the_launcher_ends_those_that_go_on_after_one_ended_badly(tmp_path):
  script = tmp_path / 'script.py'
  script.write_text(
    'import os, time\n'
    'if os.environ["DPRJAX_PROCESS"] == "0": os.kill(os.getpid(), 11)\ntime.sleep(600)\n'
  )
  began = time.monotonic()
  assert Pod(2, 1, script, grace=1).end(30)[0] == 128 + signal.SIGSEGV
  assert time.monotonic() - began < 15
