import asyncio
import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from dprjax.base import mesh as meshes
from dprjax.base import provenance
from dprjax.training import checkpoint
from tests.refusals import refused

SHA = 'a' * 64
ROOT = pathlib.Path(__file__).parent.parent.parent


def make_state(mesh, seed=0):
  sharding = jax.sharding.NamedSharding(mesh, P('data'))
  trainable = {
    'prompt/prefix': jax.device_put(jax.random.normal(jax.random.key(seed), (8, 3)), sharding),
    'prompt/query/bias': jax.device_put(jnp.arange(8.0), sharding),
  }
  optimizer = optax.masked(
    optax.adamw(0.1), {**dict.fromkeys(trainable, True), 'backbone/kernel': False}
  )
  return trainable, optimizer.init({**trainable, 'backbone/kernel': jnp.zeros(())})


@contextlib.contextmanager
def opened(folder, sha256=SHA):
  saved = checkpoint.Checkpoints(folder, sha256)
  try:
    yield saved
  finally:
    saved.close()


def targets(*trees):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), trees)


@pytest.mark.slow
def test_restores_every_bit_onto_another_mesh(tmp_path):
  trainable, opt_state = make_state(meshes.make_mesh({'data': 8}))
  saved = checkpoint.Checkpoints(tmp_path, SHA)
  saved.save(3, trainable, opt_state, {'data': {'position': 5}})
  saved.close()
  other = make_state(meshes.make_mesh({'data': 2, 'model': 4}), seed=1)
  with opened(tmp_path) as again:
    restored = again.restore(3, *targets(*other))
  assert restored.extra['data'] == {'position': 5}
  for name, leaf in trainable.items():
    np.testing.assert_array_equal(restored.trainable[name], leaf)
    assert restored.trainable[name].sharding == other[0][name].sharding
  jax.tree.map(np.testing.assert_array_equal, restored.opt_state, opt_state)
  with opened(tmp_path) as again:
    alone = again.restore_trainable(3)
  assert alone.keys() == trainable.keys()
  for name, leaf in trainable.items():
    np.testing.assert_array_equal(alone[name], leaf)


def test_keeps_the_latest_and_the_best(tmp_path):
  state = make_state(meshes.make_mesh({'data': 8}))
  saved = checkpoint.Checkpoints(tmp_path, SHA, keep=2)
  for step, score in ((1, 0.2), (2, 0.9), (3, None), (4, 0.5), (5, None)):
    saved.save(step, *state, {}, score)
  saved.wait()
  saved.close()
  for again in (saved, checkpoint.Checkpoints(tmp_path, SHA)):
    assert (again.steps(), again.best(), again.latest()) == ([2, 4, 5], 2, 5)
  again.close()


def test_another_backbone_is_refused(tmp_path):
  state = make_state(meshes.make_mesh({'data': 8}))
  saved = checkpoint.Checkpoints(tmp_path, SHA)
  saved.save(1, *state, {})
  saved.close()
  with (
    opened(tmp_path, 'b' * 64) as again,
    refused('1', 'config.backbone.path'),
  ):
    again.restore(1, *targets(*state))


def test_what_comes_for_a_closed_event_loop_is_dropped():
  """So that reading a damaged checkpoint ends in one line; see `pass_over_closed_loops`."""
  loop = asyncio.new_event_loop()
  loop.close()
  checkpoint.pass_over_closed_loops()
  assert loop.call_soon_threadsafe(print) is None


def test_a_half_written_checkpoint_is_not_one(tmp_path):
  state = make_state(meshes.make_mesh({'data': 8}))
  saved = checkpoint.Checkpoints(tmp_path, SHA)
  saved.save(1, *state, {})
  saved.close()
  (tmp_path / 'checkpoints' / '2.orbax-checkpoint-tmp').mkdir()
  with opened(tmp_path) as again:
    assert again.latest() == 1


def test_a_removal_that_was_cut_short_harms_nothing(tmp_path):
  state = make_state(meshes.make_mesh({'data': 8}))
  saved = checkpoint.Checkpoints(tmp_path, SHA, keep=1)
  for step in (1, 2):
    saved.save(step, *state, {})
  saved.close()
  folder = tmp_path / 'checkpoints'
  assert [path.name for path in folder.iterdir()] == ['2']
  # Half of an old one, where old ones are moved before they are removed.
  (folder / 'removed' / '1' / 'extra').mkdir(parents=True)
  with opened(tmp_path) as again:
    assert again.steps() == [2]
  again = checkpoint.Checkpoints(tmp_path, SHA, keep=1)
  again.save(3, *state, {})
  again.close()
  assert [path.name for path in folder.iterdir()] == ['3']


def flipped(path):
  """One bit in the middle of the file: which checks of a format need not notice."""
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('item', 'harm'),
  [
    ('live', flipped),
    ('opt_state', lambda path: path.write_bytes(path.read_bytes()[:10])),
    ('extra', lambda path: path.unlink()),
    ('metrics', flipped),
  ],
)
def test_a_damaged_or_lost_file_is_named(tmp_path, item, harm):
  state = make_state(meshes.make_mesh({'data': 8}))
  saved = checkpoint.Checkpoints(tmp_path, SHA)
  for step in (1, 2):
    saved.save(step, *state, {}, score=0.5 * step)
  saved.close()
  folder = tmp_path / 'checkpoints' / '2'
  largest = max(
    (path for path in (folder / item).rglob('*') if path.is_file()),
    key=lambda path: path.stat().st_size,
  )
  harm(largest)
  said = ('checkpoints/2', largest.relative_to(folder), 'step 1')
  with refused(*said), opened(tmp_path) as again:
    again.restore(2, *targets(*state))
  if item in ('extra', 'metrics'):  # before it is decided which is the best
    with refused(*said):
      checkpoint.Checkpoints(tmp_path, SHA, read_only=True)
  if item == 'live':
    with opened(tmp_path) as again, refused(*said):
      again.restore_trainable(2)


def _remove(folder):
  shutil.rmtree(folder / '2' / 'metrics')


def _other_sum(path):
  """Changes the sum of a file of the parameters."""
  lines = path.read_text().splitlines()
  number = next(i for i, line in enumerate(lines) if '  live/' in line)
  lines[number] = '0' * 8 + lines[number][8:]
  path.write_text('\n'.join(lines) + '\n')


def _make_better(folder):
  shutil.copytree(folder / '2' / 'metrics', folder / '3' / 'metrics')


@pytest.mark.slow
@pytest.mark.parametrize(
  ('harm', 'said'),
  [
    (_remove, ('metrics/commit_success.txt', 'metrics/metrics')),
    (_make_better, 'metrics/commit_success.txt'),
    (lambda folder: _other_sum(folder / '1' / 'SHA256SUMS'), 'live/'),
    (lambda folder: shutil.rmtree(folder / '2'), ('3', '2')),
  ],
)
def test_another_best_is_not_chosen_silently(tmp_path, harm, said):
  state = make_state(meshes.make_mesh({'data': 8}))
  provenance.write_mark(tmp_path, 'dprjax.training')
  with contextlib.closing(checkpoint.Checkpoints(tmp_path, SHA, keep=3)) as saved:
    for step, score in ((1, 0.1), (2, 0.7), (3, None)):
      saved.save(step, *state, {'best_step': min(step, 2)}, score)
    assert saved.best() == 2
  harm(tmp_path / 'checkpoints')

  def best():
    saved = checkpoint.Checkpoints(tmp_path, SHA, keep=3, read_only=True)
    try:
      step = saved.best()
      saved.restore_trainable(step)
      saved.restore_trainable(1)
    finally:
      saved.close()

  with refused(said):
    best()


# The limit is a refusal of the kernel, as on a full disk; in a process of its own, for it strikes
# whatever else writes there.
FULL = """
import resource, sys
import jax
from dprjax.base import outputs
from dprjax.base.errors import InputError
from dprjax.training import checkpoint

saved = checkpoint.Checkpoints(*sys.argv[1:])
large = {'prompt/prefix': jax.random.normal(jax.random.key(0), (512, 1024))}
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
  saved.save(2, large, {'count': jax.numpy.zeros(())}, {})
  saved.wait()
except InputError as error:
  print(error)
saved.close()
"""


@pytest.mark.slow
def test_no_room_names_the_last_good_checkpoint_and_leaves_it_whole(tmp_path):
  state = make_state(meshes.make_mesh({'data': 8}))
  saved = checkpoint.Checkpoints(tmp_path, SHA)
  saved.save(1, *state, {})
  saved.close()
  # Without a cache of the bytecode, which the limit would cut off too.
  done = subprocess.run(
    [sys.executable, '-B', '-c', FULL, str(tmp_path), SHA], cwd=ROOT, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  assert re.match(
    r'cannot save a checkpoint.*no space left; the last good one is step 1|cannot write',
    done.stdout,
  ), (done.stdout, done.stderr)
  with opened(tmp_path) as again:
    assert again.latest() == 1
    restored = again.restore(1, *targets(*state))
  jax.tree.map(np.testing.assert_array_equal, (restored.trainable, restored.opt_state), state)
  assert not any(
    name.startswith('2') and 'tmp' not in name for name in os.listdir(tmp_path / 'checkpoints')
  )


def test_metadata_of_orbax_that_cannot_be_read(tmp_path):
  state = make_state(meshes.make_mesh({'data': 8}))
  provenance.write_mark(tmp_path, 'dprjax.training')
  with opened(tmp_path) as saved:
    saved.save(1, *state, {}, 0.5)
  path = tmp_path / 'checkpoints' / '1' / '_CHECKPOINT_METADATA'
  for text in ('[]', '{"item_handlers": 5}', '{"metrics": 5}', '[' * 100_000):
    path.write_text(text)
    with refused('_CHECKPOINT_METADATA'):
      checkpoint.Checkpoints(tmp_path, SHA)
  # Nothing else of it matters, not even whether it is there.
  for text in ('', '{"metrics": {"score": 9}, "item_handlers": {}}', None):
    path.unlink() if text is None else path.write_text(text)
    with opened(tmp_path) as again:
      assert (again.best(), again.steps()) == (1, [1])
      for name, leaf in again.restore(1, *targets(*state)).trainable.items():
        np.testing.assert_array_equal(leaf, state[0][name])
