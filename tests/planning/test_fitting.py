import pytest

from dprjax.planning import compiling
from dprjax.planning.programs import CompileJob
from dprjax.training import config as configs

GIB = 2**30


def update(needs, held=0.0):
  """An update on a v5e, which has 15.75 GiB."""
  sizes = {'argument': round(needs * GIB), 'output': 0, 'temp': 0, 'alias': 0}
  answer = {
    'memory': sizes,
    'held': {'trained': round(held * GIB)},
  }
  return compiling.Program(CompileJob('v5e:2x4', ()), answer)


def option(flags, name, default):
  return next(
    (flag.split('=')[1] for flag in flags if flag.startswith(f'--config.{name}=')), default
  )


def config(**changes):
  made = configs.default()
  made.batch_size = 64
  made.backbone.dtype = 'bfloat16'
  for name, value in changes.items():
    made[name] = value
  return made


def make(activations, weights=1.0):
  """(attempt, its requests): an update as of a transformer; remat saves 60 % of activations."""
  asked = []

  def attempt(flags):
    asked.append(flags)
    chunks, remat = int(option(flags, 'grad_cache', 1)), option(flags, 'backbone.remat', '')
    needs = activations / chunks * (0.4 if remat else 1)
    shared = weights / int(option(flags, 'mesh.fsdp', 1))
    return update(needs + shared, shared)

  return attempt, asked


@pytest.mark.parametrize(
  ('activations', 'weights', 'flags'),
  [
    (20.0, 1.0, ('--config.grad_cache=2',)),
    (100.0, 1.0, ('--config.grad_cache=8',)),
    (200.0, 1.0, ('--config.grad_cache=8', '--config.backbone.remat=true')),
    (20.0, 40.0, ('--config.grad_cache=4', '--config.mesh.fsdp=4', '--config.mesh.data=-1')),
    (10000.0, 1.0, ()),
  ],
)
def test_the_fewest_chunks_or_remat_then_sharded_weights(activations, weights, flags):
  attempt, asked = make(activations, weights)
  found = compiling.fit(config(), 8, update(activations + weights, weights), attempt)
  assert found.flags == flags
  assert (found.program is None) == (not flags)
  if flags:
    assert found.program.fits
  assert len(asked) == len(set(asked)) and all(flags for flags in asked)


def test_chunks_share_the_rows_of_all_devices():
  assert compiling.chunks(config(), 8) == [1, 2, 4, 8]
  assert compiling.chunks(config(grad_cache=2), 8) == [2, 4, 8]
  assert compiling.chunks(config(batch_size=96), 8) == [1, 2, 3, 4, 6, 12]
  assert compiling.chunks(config(batch_size=4), 8) == []
