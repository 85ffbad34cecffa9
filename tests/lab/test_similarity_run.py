"""Sentence similarity by the commands: train, resume, export, inspect the export."""

import pathlib
import random

import numpy as np
import pytest

from dprjax import export, load_prompt, train
from dprjax.models import hub
from tests.workdirs import (
  assert_goes_on,
  files_of,
  metrics_of,
  trainable_of,
)

CONFIGS = pathlib.Path(__file__).parents[2] / 'experiments' / 'lab' / 'configs'
METHOD = '--method=lab.similarity'
PROMPT = [
  r"--config.trainable=('prompt/.*',)",
  '--config.prompt.length=4',
  '--config.optim.learning_rate=1e-2',
]


@pytest.fixture(scope='module')
def pairs(tmp_path_factory):
  """train.csv and dev.csv: the more words two sentences share, the higher their score."""
  folder = tmp_path_factory.mktemp('pairs')
  words = [
    'return',
    'value',
    'list',
    'of',
    'the',
    'object',
    'file',
    'name',
    'key',
    'error',
    'string',
    'message',
    'test',
    'data',
  ]
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


@pytest.fixture
def go(command, one_device, trained, pairs, tmp_path):
  """``go(*flags, workdir='run')`` -> (exit status, standard error), on these pairs and the backbone
  that the tests share.
  """

  def run(*flags, workdir='run'):
    return command(
      train,
      f'--config={CONFIGS}/stsb.py:local',
      f'--workdir={tmp_path / workdir}',
      f'--config.backbone.path={trained}/backbone',
      f'--config.data.dir={pairs}',
      '--config.data.train_split=train.csv',
      '--config.data.dev_split=dev.csv',
      *flags,
    )

  return run


def check_prompt(command, trained, run, out):
  """Exports a run: the best prompt, with its score."""
  status, err = command(export, '--force', METHOD, f'--workdir={run}', f'--out={out}')
  assert status == 0, err
  prompt = load_prompt(out)
  scores = {
    row['step']: row['dev/spearman']
    for row in metrics_of(run)
    if row['step'] and 'dev/spearman' in row
  }
  best = max(scores, key=scores.__getitem__)
  np.testing.assert_array_equal(
    prompt.of_side('query')['prefix'], trainable_of(run, best)[1]['prompt/prefix']
  )
  assert prompt.meta['metrics'] == {'dev/spearman': scores[best]}
  assert (
    prompt.meta['backbone_sha256'] == hub.load_backbone(str(trained / 'backbone')).sha256
    and prompt.meta['task'] == 'stsb'
  )


@pytest.mark.slow
def test_trains_resumes_and_changes_what_is_trainable_alone(go, command, trained, tmp_path):
  before = files_of(trained / 'backbone')
  status, err = go(*PROMPT)
  assert status == 0 and 'done at step 12' in err, err
  assert files_of(trained / 'backbone') == before
  run = tmp_path / 'run'
  step, trainable = trainable_of(run)
  assert step == 12
  assert trainable.keys() == {'prompt/prefix'}
  assert [row['step'] for row in metrics_of(run) if 'loss' in row] == [2, 4, 6, 8, 10, 12]
  assert [row['step'] for row in metrics_of(run) if 'dev/spearman' in row] == [0, 6, 12]
  assert all(-1 <= row['dev/spearman'] <= 1 for row in metrics_of(run) if 'dev/spearman' in row)

  assert_goes_on(run, lambda: go(*PROMPT))
  check_prompt(command, trained, run, tmp_path / 'prompt.npz')
