"""The distinction of sections by the commands: train, resume, export."""

import bz2
import pathlib

import numpy as np
import pytest

from dprjax import export, load_prompt, train
from tests.lab.test_sections import dump  # noqa: F401, a fixture
from tests.refusals import named_in
from tests.workdirs import (
  assert_goes_on,
  files_of,
  metrics_of,
  trainable_of,
)

CONFIGS = pathlib.Path(__file__).parents[2] / 'experiments' / 'lab' / 'configs'
PROMPT = [r"--config.trainable=('prompt/.*',)", '--config.prompt.length=4']


@pytest.mark.slow
@pytest.mark.usefixtures('one_device')
def test_trains_resumes_exports_and_changes_what_is_trainable_alone(
  command,
  trained,
  dump,  # noqa: F811
  tmp_path,
):
  run = tmp_path / 'run'

  def go():
    return command(
      train,
      f'--config={CONFIGS}/sections.py:local',
      f'--workdir={run}',
      f'--config.backbone.path={trained}/backbone',
      f'--config.data.dir={dump}',
      '--config.data.hold_out=0.25',
      '--config.optim.learning_rate=1e-3',
      *PROMPT,
    )

  before = files_of(trained / 'backbone')
  status, err = go()
  assert status == 0 and 'done at step 12' in err, err
  assert files_of(trained / 'backbone') == before
  step, trainable = trainable_of(run)
  assert step == 12
  assert trainable.keys() == {'prompt/prefix'}
  rows = metrics_of(run)
  scores = {row['step']: row['dev/accuracy'] for row in rows if 'dev/accuracy' in row}
  assert scores.keys() == {0, 6, 12} and all(0 <= score <= 1 for score in scores.values())

  assert_goes_on(run, go)

  # The same sentences, but another dump: the held-out articles might have been trained on.
  there = dump.read_bytes()
  dump.write_bytes(bz2.compress(bz2.decompress(there).replace(b'Article 7<', b'Article 7b<')))
  status, err = go()
  assert status == 2 and named_in(err, 'wiki.xml.bz2'), err
  dump.write_bytes(there)

  best = max((6, 12), key=scores.__getitem__)
  out = tmp_path / 'prompt.npz'
  flags = ('--force', f'--workdir={run}', f'--out={out}')
  status, err = command(export, *flags)
  assert status == 2 and named_in(err, '--method=lab.sections'), err
  status, err = command(export, *flags, '--method=lab.sections')
  assert status == 0, err
  exported = load_prompt(out).of_side('query')['prefix']
  there = trainable_of(run, best)[1]['prompt/prefix']
  np.testing.assert_array_equal(exported, there)
