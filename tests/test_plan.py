"""python -m dprjax.plan"""

import pathlib

import pytest

from dprjax import plan
from dprjax.planning import compiling, programs, tables, targets

ROOT = pathlib.Path(__file__).parent.parent
CONFIG = f'--config={ROOT}/configs/dptdr.py:local'
GIB = 2**30


def answer(needs, **more):
  """A report on an update whose parameters take a third of its memory, on 8 chips."""
  return {
    'held': {'trained': round(needs * GIB / 3), 'frozen': 0, 'optimizer': 0},
    'mesh': {'data': 8, 'fsdp': 1, 'model': 1},
    'trained': 10**6,
    'parameters': 10**8,
    'seconds': {'lower': 1.0, 'compile': 60.0},
    'memory': {
      'argument': round(needs * GIB / 2),
      'temp': round(needs * GIB / 2),
      'output': 10**6,
      'alias': 10**6,
    },
  } | more


def compiler(job):
  """An update that fits with two chunks, and forward passes."""
  if job.length:
    return compiling.Program(job, answer(1.0))
  if '--config.grad_cache=2' in job.config:
    return compiling.Program(job, answer(12.0))
  failed = {'why': 'RESOURCE_EXHAUSTED', 'memory': True, 'needs': 20.0 * GIB, 'has': 15.75 * GIB}
  shown = {name: answer(20.0)[name] for name in ('held', 'mesh', 'trained', 'parameters')}
  return compiling.Program(job, {**shown, 'failed': failed})


def test_a_plan_says_what_fits():
  arguments = [
    CONFIG,
    '--config.grad_cache=1',
    '--config.backbone.dtype=bfloat16',
    '--config.steps=0',
    '--config.epochs=3',
  ]
  found = plan.plan(arguments, targets.parse('v5e:2x4'), compiler)
  columns, rows = tables.table(found)
  assert columns == ['a chip', 'update', 'update that fits', 'encode 64 x 16', 'encode 64 x 32']
  cells = {row: dict(zip(columns[1:], values, strict=True)) for row, *values in rows}
  assert cells['fits']['update'] == 'no, 4.25 GiB over 15.75'
  assert cells['fits']['update that fits'] == 'yes, 12.00 of 15.75 GiB'
  assert found.flags == ('--config.grad_cache=2',)
  assert any(line == 'It fits with --config.grad_cache=2' for line in tables.note(found))
  text = tables.markdown(found)
  assert text.startswith('## v5e:2x4: 8 x TPU v5 lite\n') and '| fits | no, 4.25' in text


def test_a_compiler_that_crashed_is_a_row():
  def crashing(job):
    return compiling.Program(job, {'failed': {'why': 'ended with SIGABRT', 'memory': False}})

  found = plan.plan([CONFIG], targets.parse('v5e:2x4'), crashing, forward=False)
  assert tables.table(found)[1] == [['fits', 'not known'], ['why not', 'ended with SIGABRT']]


@pytest.mark.slow
def test_this_machine_is_a_target(tmp_path, capsys):
  """The compiler of the processor, the real command, and a program that is kept."""
  plan.main([CONFIG, '--target=cpu:2', '--forward=false', f'--out={tmp_path / "plan.md"}'])
  text = (tmp_path / 'plan.md').read_text()
  assert '| fits | yes' in text and text.count('| peak') == 1
  assert 'cpu:2: 2 of this processor' in capsys.readouterr().out


@pytest.mark.slow
def test_the_update_that_is_planned_is_the_one_that_is_trained():
  """From the same shapes, the same program as of `train`'s arrays."""
  import jax
  import numpy as np

  from dprjax.base import mesh
  from dprjax.training import updates

  experiment = programs.Experiment(programs.read_config([CONFIG], 'cpu'), jax.devices()[:2])
  shapes = programs.batch_of(experiment.config, experiment.shape)
  planned = experiment.lower_update(shapes.arrays).as_text()
  zeros = {name: np.zeros(leaf.shape, np.float32) for name, leaf in experiment.params.items()}
  state, frozen = experiment.layout.place(zeros)
  batch = mesh.put_batch(
    experiment.devices,
    {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in shapes.arrays.items()},
  )
  update = updates.make_update(experiment.model, experiment.layout)
  trained = update.lower(state, frozen, batch, jax.random.key(0), 1).as_text()

  def body(text):
    """Without the names of the placement of key and number."""
    lines = text.splitlines()
    named = 'func.func public', 'sdy.mesh @empty_mesh'
    return [line for line in lines if not any(name in line for name in named)]

  assert body(planned) == body(trained)
