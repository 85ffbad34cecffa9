import os
import subprocess
import sys

import pytest

from dprjax.base import machine


@pytest.mark.skipif(not hasattr(os, 'sched_setaffinity'), reason='no affinity on this system')
def test_cores_are_those_that_a_process_may_use():
  allowed = os.sched_getaffinity(0)
  assert machine.cores() == len(allowed)
  code = (
    f'import os; os.sched_setaffinity(0, [{min(allowed)}]); '
    'from dprjax.base import machine; print(machine.cores())'
  )
  said = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
  assert said.stdout.strip() == '1'


def test_memory_is_what_the_container_may_have(tmp_path, monkeypatch):
  limit, none = tmp_path / 'memory.max', tmp_path / 'absent'
  monkeypatch.setattr(machine, '_LIMITS', (str(none), str(limit)))
  limit.write_text('123456\n')
  assert machine.memory_bytes() == 123456
  limit.write_text('max\n')
  assert machine.memory_bytes() > 2**26
