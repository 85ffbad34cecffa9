import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dprjax.base import programs
from dprjax.base.programs import Programs


@pytest.fixture
def make(tmp_path):
  """``make(about, size)``: a result of a program, and whether it was loaded."""
  store = Programs(tmp_path / 'programs')

  def make(about='a', size=3):
    args = ({'x': jax.ShapeDtypeStruct((size,), jnp.float32)},)
    device = jax.devices()[0]
    run = jax.jit(lambda of: 2 * of['x'] + len(about))
    lower = functools.partial(run.lower, *args)
    program, loaded = store.compile(about, lower, args, 0, device)
    found = program({'x': jnp.arange(size, dtype=jnp.float32)})
    np.testing.assert_array_equal(found, 2 * np.arange(size) + len(about))
    return loaded

  return make


def test_a_program_is_loaded_where_nothing_changed(make, tmp_path, monkeypatch):
  assert [make(), make(), make('ab'), make('ab'), make(size=4)] == [
    *(False, True, False, True, False)
  ]
  assert make() and len([*(tmp_path / 'programs').iterdir()]) == 3
  monkeypatch.setenv('XLA_ANYTHING', 'x')
  assert not make()
  monkeypatch.delenv('XLA_ANYTHING')
  monkeypatch.setattr(programs, '_here', lambda: 'other code')
  assert not make()


def test_files_that_are_not_used(make, tmp_path, monkeypatch, caplog):
  assert not make()
  [file] = (tmp_path / 'programs').iterdir()
  assert file.stat().st_mode & 0o077 == 0
  content = file.read_bytes()
  for damaged in (b'', content[:-100], b'x' * 100):
    file.write_bytes(damaged)
    assert not make() and make()
  file.chmod(0o666)
  assert not make() and make()
  assert caplog.text.count('is made again') == 4
  moved = file.rename(tmp_path / 'elsewhere')
  file.symlink_to(moved)
  assert not make()
  monkeypatch.setattr(programs, '_MOST', 1)
  make('ab')
  assert len([*(tmp_path / 'programs').iterdir()]) == 1
