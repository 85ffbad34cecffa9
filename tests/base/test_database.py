import resource
import subprocess
import sys

from dprjax.base import database
from tests.refusals import refused


def test_a_full_disk_is_named(tmp_path):
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
  try:
    with refused(tmp_path), database.temporary(tmp_path) as tables:
      tables.execute('CREATE TABLE numbers AS SELECT random() AS number FROM range(1_000_000)')
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# Interrupts itself where C++ code of DuckDB calls Python for its first enumeration.
_INTERRUPTED = """
import os, pathlib, signal, sys
from dprjax.base import database, errors
def interrupt(frame, event, _):
  if event == 'call' and 'duckdb' in sys.modules and frame.f_code.co_filename.endswith('enum.py'):
    sys.setprofile(None)
    os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, errors.raise_interrupt)
sys.setprofile(interrupt)
with database.temporary(pathlib.Path(sys.argv[1])):
  print('went on')
"""


def test_an_interrupt_while_duckdb_is_imported_ends_the_command(tmp_path):
  program = [sys.executable, '-c', _INTERRUPTED, str(tmp_path)]
  done = subprocess.run(program, capture_output=True, text=True, check=False)
  assert done.returncode == 130 and 'Traceback' not in done.stderr, done
