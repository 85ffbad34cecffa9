"""A training that is stopped half the way, for methods, adapters and families of one's own."""

import shutil

import numpy as np
import pytest

from dprjax import export, train
from dprjax.training import checkpoint


def train_small(command, trained, backbone, workdir, *more, steps=4):
  """Trains a backbone on the small data, with a checkpoint every two updates."""
  return command(
    train,
    f'--config={train.__file__.replace("dprjax/train.py", "configs/dptdr.py")}:local',
    f'--workdir={workdir}',
    f'--config.backbone.path={backbone}',
    f'--config.data.dir={trained}/data',
    '--config.data.format=beir',
    *(f'--config.steps={steps}', '--config.checkpoint.every=2', f'--config.eval.every={steps}'),
    *more,
  )


def export_to(command, workdir, out):
  out.parent.mkdir(exist_ok=True)
  status, log = command(export, f'--workdir={workdir}', f'--out={out}', '--force')
  assert status == 0, log


def served(backbone, prompt, side, texts):
  """The vectors of texts under a prompt, by a server with the prompts of its folder."""
  pytest.importorskip('prometheus_client', reason="pip install 'dprjax[serve]'")
  from dprjax.serving.engine import Engine
  from dprjax.serving.options import ServerOptions

  options = ServerOptions(rows=(1, 4), lengths=(32,), budget=4 * 48, slots=6, prompt_length=32)
  engine = Engine(backbone, prompt.parent, options=options)
  try:
    engine.ready.result(60)
    return engine.submit(prompt.stem, side, texts).result(60)
  finally:
    engine.close()


def train_and_resume(run, folder):
  """Trains four updates with a checkpoint every two, then the last two once more.

  Args:
    run: trains in a folder of this name below ``folder``; returns the status and the log.
    folder: where ``whole`` and ``resumed`` are made.

  Returns:
    The log of the whole training, and its trained parameters; those of the other are the same bits.
  """
  status, log = run('whole')
  assert status == 0, log
  shutil.copytree(folder / 'whole', folder / 'resumed')
  shutil.rmtree(folder / 'resumed' / 'checkpoints' / '4')
  status, resumed_log = run('resumed')
  assert status == 0 and 'resuming after step 2 of 4' in resumed_log, resumed_log
  whole, resumed = (
    checkpoint.Checkpoints(folder / name, '').restore_trainable(4) for name in ('whole', 'resumed')
  )
  assert whole.keys() == resumed.keys()
  for name, value in whole.items():
    np.testing.assert_array_equal(value, resumed[name])
  return log, whole
