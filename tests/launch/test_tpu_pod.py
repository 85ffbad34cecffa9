"""launch/tpu_pod.sh with a stand-in for gcloud: hosts are folders, and ssh is bash at home there.

It shows that the script does the right things in the right order, also when the slice is taken
away. It cannot show that flags of gcloud are still valid.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
SCRIPT = ROOT / 'launch' / 'tpu_pod.sh'

# queued-resources of one slice with two hosts, which becomes active after some requests.
GCLOUD = r"""#!/bin/bash
set -u
cd "$CLOUD"
echo "$*" >>calls
[ "$1 $2 $3" = 'compute tpus queued-resources' ] || exit 64
flag() { local word; for word in "${@:2}"; do case $word in --"$1"=*) echo "${word#*=}";; esac; done; }
state=$(cat state 2>/dev/null || echo none)
case $4 in
  create)
    [ "$state" = none ] || { echo 'ALREADY_EXISTS' >&2; exit 1; }
    echo WAITING_FOR_RESOURCES >state ;;
  describe)
    [ "$state" != none ] || { echo 'ERROR: (gcloud.compute.tpus.queued-resources.describe) NOT_FOUND: no such resource' >&2; exit 1; }
    echo "$state"
    case $state in
      WAITING_FOR_RESOURCES) echo PROVISIONING >state ;;
      PROVISIONING) mkdir host0 host1; echo ACTIVE >state ;;
    esac ;;
  delete) rm -rf state host0 host1 ;;
  scp | ssh)
    [ "$state" = ACTIVE ] || { echo 'ERROR: not reachable' >&2; exit 1; }
    while [ -e connecting ]; do touch waits; sleep 0.05; done
    [ "$(flag node "$@") $(flag worker "$@")" = 'all all' ] || exit 64
    for host in host0 host1; do
      if [ "$4" = scp ]; then cp "$5" "$host/"; else HOME=$CLOUD/$host HOST=$host bash -c "$(flag command "$@")" || exit; fi
    done ;;
esac
"""  # noqa: E501

# Counts in a file that outlives the hosts, like a bucket; exits with 143 at SIGTERM.
COUNTING = """
import os, pathlib, signal, sys, time
total, file = int(sys.argv[1]), pathlib.Path(sys.argv[2]) / os.environ['HOST']
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
step = int(file.read_text() or 0) if file.exists() else 0
print('after step', step, flush=True)
while step < total:
  time.sleep(0.05)
  step += 1
  file.write_text(str(step))
"""


@pytest.fixture
def pod(tmp_path):
  """``pod(*arguments)`` starts the script in a clone; ``pod.cloud`` is the folder of the cloud."""
  if shutil.which('git') is None:
    pytest.skip('no git here')
  cloud, clone, programs = tmp_path / 'cloud', tmp_path / 'clone', tmp_path / 'bin'
  for folder in (cloud, clone, programs, tmp_path / 'bucket'):
    folder.mkdir()
  (programs / 'gcloud').write_text(GCLOUD)
  (programs / 'gcloud').chmod(0o755)
  (clone / 'source.py').write_text('1')
  for words in (
    ['init', '--quiet'],
    ['add', '.'],
    ['-c', 'user.name=a', '-c', 'user.email=a', 'commit', '--quiet', '--message=a'],
  ):
    subprocess.run(['git', *words], cwd=clone, check=True)
  environment = os.environ | {
    'CLOUD': str(cloud),
    'PATH': f'{programs}:{os.environ["PATH"]}',
    'NAME': 'pod',
    'PROJECT': 'mine',
    'ZONE': 'there',
    'TYPE': 'v6e-8',
    'PAUSE': '0.2',
    'INSTALL': f'test -f source.py && mkdir -p .venv/bin && ln -sf {sys.executable} '
    '.venv/bin/python',
  }
  started = []

  def run(*words):
    started.append(
      subprocess.Popen(
        [SCRIPT, *map(str, words)],
        cwd=clone,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
      )
    )
    return started[-1]

  run.cloud, run.bucket = cloud, tmp_path / 'bucket'
  yield run
  (cloud / 'connecting').unlink(missing_ok=True)  # else a call waits, with the output open
  for process in started:
    process.kill()
    process.communicate()
  lose(cloud)


def lose(cloud):
  """Removes the hosts and their processes."""
  for pid in cloud.glob('host*/dprjax/pid'):
    subprocess.run(
      ['kill', '-KILL', '--', f'-{pid.read_text().strip()}'], check=False, stderr=subprocess.DEVNULL
    )
  for host in cloud.glob('host*'):
    shutil.rmtree(host)


def until(condition, seconds=30):
  limit = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < limit
    time.sleep(0.02)


def calls(cloud, verb):
  return [line for line in (cloud / 'calls').read_text().splitlines() if line.split()[3] == verb]


def steps(pod):
  return [int(file.read_text() or 0) for file in sorted(pod.bucket.iterdir())]


@pytest.mark.slow
def test_a_preempted_slice_is_requested_again_and_the_run_goes_on(pod):
  process = pod('-c', COUNTING, 100, pod.bucket)
  until(lambda: len(steps(pod)) == 2 and min(steps(pod)) > 10)
  # The hosts go while the script connects to them: it finds them, but no process.
  (pod.cloud / 'connecting').touch()
  until((pod.cloud / 'waits').exists)
  (pod.cloud / 'state').write_text('SUSPENDED\n')  # first, so that no failure looks like a crash
  lose(pod.cloud)
  (pod.cloud / 'connecting').unlink(missing_ok=True)
  before = steps(pod)
  out, _ = process.communicate(timeout=60)
  assert process.returncode == 0, out
  assert steps(pod) == [100, 100]
  assert 'preempted: starting again' in out
  assert [
    int((pod.cloud / host / 'dprjax' / 'log').read_text().split()[-1])
    for host in ('host0', 'host1')
  ] == before
  create = (
    'compute tpus queued-resources create pod --node-id=pod --accelerator-type=v6e-8 '
    '--runtime-version=v2-alpha-tpuv6e --spot'
  )
  assert calls(pod.cloud, 'create') == [f'{create} --project=mine --zone=there --quiet'] * 2
  assert calls(pod.cloud, 'delete') == [
    'compute tpus queued-resources delete pod --force --project=mine --zone=there --quiet'
  ]
  assert len(calls(pod.cloud, 'scp')) == 2


@pytest.mark.slow
def test_a_second_call_watches_the_run_and_stop_saves(pod):
  first = pod('-c', COUNTING, 1_000_000, pod.bucket)
  until(lambda: len(steps(pod)) == 2)
  first.kill()  # the laptop is closed
  first.wait()
  second = pod('-c', COUNTING, 1_000_000, pod.bucket)
  until(lambda: len(calls(pod.cloud, 'ssh')) > 6)
  assert pod('status').communicate(timeout=30)[0].split() == ['slice:', 'ACTIVE', 'running']
  assert pod('stop').wait(timeout=30) == 0
  out, _ = second.communicate(timeout=30)
  assert second.returncode == 143, out
  assert 'it runs already' in out
  assert len(calls(pod.cloud, 'create')) == len(calls(pod.cloud, 'scp')) == 1
  assert (pod.cloud / 'host0' / 'dprjax' / 'log').read_text() == 'after step 0\n'
  assert (pod.cloud / 'host0' / 'dprjax' / 'status').read_text() == '143\n'


@pytest.mark.slow
@pytest.mark.parametrize(
  'program, status, starts, message',
  [
    ('print("begun"); raise SystemExit(2)', 2, 1, 'bad input'),
    ('print("begun"); raise SystemExit(1)', 1, 4, 'crashed 4 times'),
  ],
)
def test_restarts_after_crashes_but_not_after_bad_input(pod, program, status, starts, message):
  process = pod('-c', program)
  out, _ = process.communicate(timeout=60)
  assert process.returncode == status, out
  assert message in out
  logs = pod.cloud.glob('host*/dprjax/log')
  assert [log.read_text().count('begun') for log in logs] == [starts, starts]
