"""Work of the processes of a pod in tests/test_pods.py, by launch/local_pod.py."""

import dataclasses
import importlib
import json
import pathlib
import time

import jax
import numpy as np
import optax

from dprjax.base import cli, distributed, flags
from dprjax.base import mesh as meshes
from dprjax.training import checkpoint

SHA = 'a' * 64


def state(mesh, seed):
  """Parameters and optimiser state, from numbers of the seed, placed by the sharding rules."""
  rng = np.random.default_rng(seed)
  shapes = {
    'backbone/layers/attention/query/kernel': (2, 8, 8),
    'backbone/layers/mlp/down/kernel': (2, 16, 8),
    'backbone/embeddings/word/embedding': (9, 4),
    'prompt/prefix': (2, 2, 3, 2, 4),
  }
  values = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
  shardings = meshes.param_shardings(mesh, values)
  trainable = {name: meshes.put(value, shardings[name]) for name, value in values.items()}
  # Values of Adam after three steps.
  mu, nu = (
    {name: meshes.put(factor * value, shardings[name]) for name, value in values.items()}
    for factor in (np.float32(0.1), np.float32(0.3))
  )
  return trainable, optax.ScaleByAdamState(meshes.put(np.int32(3), meshes.replicated(mesh)), mu, nu)


def check_restored(workdir, sizes):
  """Arrays of the checkpoint on another mesh have every bit of those of the seed."""
  mesh = meshes.make_mesh(sizes)
  expected, other = state(mesh, 0), state(mesh, 1)
  saved = checkpoint.Checkpoints(workdir, SHA)
  target = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), other
  )
  restored = saved.restore(1, *target)
  saved.close()
  assert restored.extra['data'] == {'position': 5}
  for there, here in zip(
    jax.tree.leaves((restored.trainable, restored.opt_state)),
    jax.tree.leaves(expected),
    strict=True,
  ):
    assert there.sharding == here.sharding
    for one, two in zip(there.addressable_shards, here.addressable_shards, strict=True):
      np.testing.assert_array_equal(
        np.asarray(one.data).view(np.uint32), np.asarray(two.data).view(np.uint32)
      )


def take_turns(path):
  """A slow process 1 reads in its turn what process 0 left, and nothing that it writes later."""
  with distributed.turn():
    if jax.process_index():
      time.sleep(1.0)
      assert path.read_text() == 'left'
    else:
      path.parent.mkdir()
      path.write_text('left')
  if not jax.process_index():
    path.write_text('changed')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  jobs: str = flags.flag('what to do, as JSON')
  job: flags.Job = flags.job()


def command(args):
  for line in json.loads(pathlib.Path(args.jobs).read_text()):
    if line['do'] == 'train':
      from dprjax.training import (
        config,
        train,  # a second, which the others save
      )

      train.train(config.parse(line['flags']), line['workdir'])
    elif line['do'] == 'command':
      module = importlib.import_module(line['module'])
      module._command(flags.parse(module.Flags, line['flags'], line['module'], module.__doc__)[0])
    elif line['do'] == 'save':
      saved = checkpoint.Checkpoints(line['workdir'], SHA)
      saved.save(1, *state(meshes.make_mesh(line['mesh']), 0), {'data': {'position': 5}})
      saved.close()
    elif line['do'] == 'turn':
      take_turns(pathlib.Path(line['workdir']) / 'turn')
    elif line['do'] == 'restore':
      check_restored(line['workdir'], line['mesh'])


if __name__ == '__main__':
  cli.run(Flags, command)
