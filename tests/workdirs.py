"""Workdirs of trainings: what they hold, and whether a training goes on from them."""

import json
import re
import shutil

from dprjax.base import files
from dprjax.models import hub
from dprjax.runtime import checkpoint, tree


def trainable_of(workdir, step=None):
  """(step, trained parameters) of a run, from its checkpoint."""
  config = json.loads((workdir / 'config.json').read_text())
  path = config['backbone']['path']
  saved = checkpoint.Checkpoints(
    workdir,
    hub.load_backbone(str(workdir / 'backbone') if path.startswith('scratch:') else path).sha256,
  )
  try:
    step = saved.latest() if step is None else step
    return step, saved.restore_trainable(step)
  finally:
    saved.close()


def steps_of(workdir):
  return sorted(
    int(path.name) for path in (workdir / 'checkpoints').iterdir() if path.name.isdecimal()
  )


def metrics_of(workdir):
  """The rows of metrics.jsonl without the column that depends on the clock."""
  rows = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  return [
    {name: value for name, value in row.items() if not name.endswith('_per_second')} for row in rows
  ]


def files_of(folder):
  return {
    str(path.relative_to(folder)): files.sha256_file(path)
    for path in sorted(folder.rglob('*'))
    if path.is_file()
  }


def assert_same_bits(one, other):
  assert one.keys() == other.keys()
  for name, leaf in one.items():
    assert leaf.dtype == other[name].dtype and leaf.tobytes() == other[name].tobytes(), name


def assert_backbone_moved(trainable, backbone):
  """Every parameter of the backbone that was trained differs from that of its directory."""
  start = tree.flatten({'backbone': hub.load_backbone(str(backbone)).params})
  for name, leaf in trainable.items():
    if name.startswith('backbone/'):
      name = re.sub('^backbone/(query|passage)/', 'backbone/', name)  # of two encoders
      # The bias of keys adds the same to all scores of a query: softmax does not see it.
      assert (leaf != start[name]).any() or name.endswith('attention/key/bias'), name


def assert_goes_on(workdir, run):
  """Trains on as if killed before the last checkpoint: with the same bits and metrics.

  Args:
    run: trains in the workdir; returns the status and the log.

  Returns:
    The log.
  """
  (last, trainable), rows = trainable_of(workdir), metrics_of(workdir)
  shutil.rmtree(workdir / 'checkpoints' / str(last))
  earlier = max(steps_of(workdir))
  status, log = run()
  assert status == 0 and f'resuming after step {earlier} of {last}' in log, log
  assert_same_bits(trainable_of(workdir)[1], trainable)
  assert metrics_of(workdir) == rows
  return log
