"""Sentence similarity by the commands: train, resume, export, inspect the export."""

import pathlib
import random

import numpy as np
import pytest

from dprjax import export, load_prompt, train
from tests.workdirs import (
  assert_goes_on,
  files_of,
  metrics_of,
  trainable_of,
)

CONFIGS = pathlib.Path(__file__).parents[2] / 'experiments' / 'lab' / 'configs'
PROMPT = [
  r"--config.trainable=('prompt/.*',)",
  '--config.prompt.length=4',
  '--config.optim.learning_rate=1e-2',
]


@pytest.fixture(scope='module')
def pairs(tmp_path_factory):
  """train.csv and dev.csv: the more words two sentences share, the higher their score."""
  folder = tmp_path_factory.mktemp('pairs')
  words = ['return', 'value', 'list', 'of', 'the', 'object', 'file', 'name', 'key', 'error']
  draw = random.Random(0)
  for name, count in (('train', 64), ('dev', 24)):
    rows = []
    for _ in range(count):
      first, shared = draw.sample(words, 5), draw.randrange(6)
      second = first[:shared] + draw.sample(
        [word for word in words if word not in first], 5 - shared
      )
      rows.append(f'{" ".join(first)},{" ".join(second)},{shared}\n')
    (folder / f'{name}.csv').write_text(''.join(rows))
  return folder


@pytest.mark.slow
def test_trains_resumes_and_is_exported(command, one_device, trained, pairs, tmp_path):
  run, before = tmp_path / 'run', files_of(trained / 'backbone')

  def go():
    data = f'--config.data.dir={pairs}', '--config.data.train_split=train.csv'
    data += ('--config.data.dev_split=dev.csv', f'--config.backbone.path={trained}/backbone')
    return command(train, f'--config={CONFIGS}/stsb.py:local', f'--workdir={run}', *data, *PROMPT)

  status, err = go()
  assert status == 0 and 'done at step 12' in err, err
  step, trainable = trainable_of(run)
  assert step == 12 and trainable.keys() == {'prompt/prefix'}
  scores = {row['step']: row['dev/spearman'] for row in metrics_of(run) if 'dev/spearman' in row}
  assert list(scores) == [0, 6, 12] and all(-1 <= score <= 1 for score in scores.values())
  assert_goes_on(run, go)
  assert files_of(trained / 'backbone') == before
  # The best prompt, with its score.
  out = tmp_path / 'prompt.npz'
  status, err = command(
    export, '--force', '--method=lab.similarity', f'--workdir={run}', f'--out={out}'
  )
  assert status == 0, err
  prompt, best = load_prompt(out), max((6, 12), key=scores.__getitem__)
  prefix = trainable_of(run, best)[1]['prompt/prefix']
  np.testing.assert_array_equal(prompt.of_side('query')['prefix'], prefix)
  assert prompt.meta['metrics'] == {'dev/spearman': scores[best]} and prompt.meta['task'] == 'stsb'
