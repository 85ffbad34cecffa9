"""A training that is stopped half the way, for methods, adapters and families of one's own."""

import shutil

import numpy as np

from dprjax.training import checkpoint


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
