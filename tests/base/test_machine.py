import os
import subprocess
import sys

import pytest

from dprjax.base import machine


def test_memory_is_what_the_container_may_have(tmp_path, monkeypatch):
  limit, none = tmp_path / 'memory.max', tmp_path / 'absent'
  monkeypatch.setattr(machine, '_LIMITS', (str(none), str(limit)))
  limit.write_text('123456\n')
  assert machine.memory_bytes() == 123456
  limit.write_text('max\n')
  assert machine.memory_bytes() > 2**26


PROGRAM = """
import jax, jax.numpy as jnp
from dprjax.base import machine
machine.keep_programs()
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((8, 8))).block_until_ready()
print(jax.config.jax_compilation_cache_dir)
"""


def run(tmp_path, **environment):
  variables = {
    name: value
    for name, value in os.environ.items()
    if name not in ('JAX_COMPILATION_CACHE_DIR', 'XDG_CACHE_HOME')
  }
  ended = subprocess.run(
    [sys.executable, '-c', PROGRAM],
    env=variables | {'HOME': str(tmp_path)} | environment,
    cwd=tmp_path,
    capture_output=True,
    text=True,
    check=True,
  )
  assert ended.stderr == ''
  return ended.stdout.strip()


@pytest.mark.slow
def test_where_programs_are_kept(tmp_path):
  kept = run(tmp_path)
  assert kept.startswith(f'{tmp_path}/.cache/dprjax/compiled-')
  programs = sorted(name for name in os.listdir(kept) if name.endswith('-cache'))
  assert programs
  assert run(tmp_path) == kept
  # Read, not compiled again.
  assert sorted(name for name in os.listdir(kept) if name.endswith('-cache')) == programs

  variable = str(tmp_path / 'variable')
  assert run(tmp_path, JAX_COMPILATION_CACHE_DIR=variable) == variable and os.listdir(variable)
  before = set(os.listdir(tmp_path))
  (tmp_path / 'file').write_text('')
  # A folder that cannot be written: nothing is kept, and nothing is printed.
  assert run(tmp_path, XDG_CACHE_HOME=str(tmp_path / 'file')) == 'None'
  assert set(os.listdir(tmp_path)) == before | {'file'}
