import pytest

from dprjax.planning import compiling, fitting
from dprjax.planning.programs import CompileJob
from dprjax.training import config as configs

GIB = 2**30


def update(needs, held=0.0, flops=0.0, moved=0.0):
  """An update on a v5e, which has 15.75 GiB, 197 TFLOP/s in bfloat16 and 819 GB/s."""
  sizes = {'argument': round(needs * GIB), 'output': 0, 'temp': 0, 'alias': 0}
  answer = {
    'memory': sizes,
    'held': {'trained': round(held * GIB)},
    'xla': {'flops': flops, 'bytes': moved, 'collectives': ()},
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


def make(activations, weights=1.0, read=0.0):
  """(attempt, its requests): an update as of a transformer.

  Remat saves 60 % of the memory and takes a third more than 100 ms of products; each chunk reads
  and writes so many ms of weights.
  """
  asked = []

  def attempt(flags):
    asked.append(flags)
    chunks, remat = int(option(flags, 'grad_cache', 1)), option(flags, 'backbone.remat', '')
    needs = activations / chunks * (0.4 if remat else 1)
    shared = weights / int(option(flags, 'mesh.fsdp', 1))
    flops = 0.1 * 197e12 * (4 / 3 if remat else 1)
    return update(needs + shared, shared, flops, read / 1e3 * chunks * 819e9)

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
  found = fitting.fit(config(), 8, update(activations + weights, weights), attempt)
  assert found.flags == flags
  assert (found.program is None) == (not flags)
  if flags:
    assert found.program.fits
  assert len(asked) == len(set(asked)) and all(flags for flags in asked)


@pytest.mark.parametrize(
  ('read', 'flags'),
  [
    (0.0, ('--config.grad_cache=8',)),
    (17.0, ('--config.grad_cache=4', '--config.backbone.remat=true')),
  ],
)
def test_remat_is_taken_where_its_fewer_chunks_move_fewer_bytes(read, flags):
  attempt, asked = make(100.0, read=read)
  found = fitting.fit(config(), 8, update(101.0, 1.0), attempt)
  assert found.flags == flags and found.program.fits
  assert ('--config.grad_cache=8', '--config.backbone.remat=true') not in asked


def test_chunks_share_the_rows_of_all_devices():
  assert fitting.chunks(config(), 8) == [1, 2, 4, 8]
  assert fitting.chunks(config(grad_cache=2), 8) == [2, 4, 8]
  assert fitting.chunks(config(batch_size=96), 8) == [1, 2, 3, 4, 6, 12]
  assert fitting.chunks(config(batch_size=4), 8) == []
