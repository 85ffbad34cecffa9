"""Pretraining by the commands: train, resume, export, continue from the export."""

import functools
import json
import pathlib
import shutil

import numpy as np
import pytest

from dprjax import export, load_prompt, train
from dprjax.models import hub
from dprjax.text import tokenizing
from dprjax.text.vector_spec import same_length
from tests.workdirs import (
  assert_backbone_moved,
  assert_goes_on,
  assert_same_bits,
  files_of,
  metrics_of,
  trainable_of,
)

ROOT = pathlib.Path(__file__).parents[3]
CONFIGS = {
  'rip.py:local': {'backbone', 'head/mlm'},
  'rip.py:prompt,local': {'prompt', 'head/mlm'},
  'condenser.py:local': {'backbone', 'head/mlm', 'head/condenser'},
  'condenser.py:cocondenser,local': {'backbone', 'head/mlm', 'head/condenser'},
  'condenser.py:ict,local': {'backbone'},
}
# The other recipes differ from these only in data and numbers.
RESUMED = ('rip.py:local', 'rip.py:prompt,local', 'condenser.py:cocondenser,local')


@pytest.fixture(scope='module')
def shared(trained):
  """Flags of six updates, on the text and the backbone that the tests share."""
  return [
    f'--config.backbone.path={trained}/backbone',
    '--config.data.format=corpus',
    f'--config.data.dir={trained}/data/corpus.jsonl',
    f'--config.data.token_cache={trained}/token_cache',
    '--config.batch_size=8',
    '--config.grad_cache=1',  # test_pretrain.py has chunks, which take twice as long
    '--config.steps=6',
    '--config.checkpoint.every=2',
  ]


@pytest.fixture
def go(command, one_device, shared, tmp_path):
  """``go(config, *flags, workdir='run')`` -> (exit status, standard error)."""

  def run(config, *flags, workdir='run'):
    return command(
      train, f'--config={ROOT}/configs/{config}', f'--workdir={tmp_path / workdir}', *shared, *flags
    )

  return run


@pytest.fixture(scope='module')
def finished(one_device, trained, shared, tmp_path_factory):
  """``finished(config)`` -> the workdir of a training that the tests share."""

  @functools.cache
  def make(config):
    workdir, before = tmp_path_factory.mktemp('finished') / 'run', files_of(trained / 'backbone')
    train.main([f'--config={ROOT}/configs/{config}', f'--workdir={workdir}', *shared])
    assert files_of(trained / 'backbone') == before
    return workdir

  return make


@pytest.mark.slow
@pytest.mark.parametrize(
  'config', [pytest.param(one, marks=pytest.mark.xdist_group(one)) for one in CONFIGS]
)
def test_trains_resumes_and_changes_what_is_trainable_alone(
  go, finished, trained, tmp_path, config
):
  run = tmp_path / 'run'
  shutil.copytree(finished(config), run)
  step, trainable = trainable_of(run)
  assert step == 6
  assert {
    '/'.join(name.split('/')[:2]) if name.startswith('head') else name.split('/')[0]
    for name in trainable
  } == CONFIGS[config]
  assert_backbone_moved(trainable, trained / 'backbone')
  assert [row['step'] for row in metrics_of(run)] == [2, 4, 6]
  if config.startswith('rip.py:prompt'):
    # A fresh head beside a prompt learns at its own rate, 1e-4: Adam moves a bias by less a step.
    bias = np.abs(trainable['head/mlm/bias'])
    assert 1e-5 < bias.max() < 6 * 1.1e-4
    assert np.abs(trainable['prompt/prefix']).max() > 0.08  # from N(0, 0.02), at 7e-3

  if config in RESUMED:
    assert_goes_on(run, lambda: go(config))


@pytest.mark.slow
@pytest.mark.xdist_group('condenser.py:local')
def test_what_is_exported_is_what_was_trained_and_can_be_trained_on(
  go, finished, command, trained, tmp_path
):
  run = finished('condenser.py:local')
  trainable = trainable_of(run)[1]
  out = tmp_path / 'out'
  status, err = command(export, '--force', f'--workdir={run}', f'--out={out}')
  assert status == 0, err
  backbone = hub.load_backbone(out, ('mlm', 'condenser'))
  assert backbone.heads['condenser'].settings['split'] == 1
  for top, params in (
    ('backbone', backbone.params),
    ('head/mlm', backbone.heads['mlm'].params),
    ('head/condenser', backbone.heads['condenser'].params),
  ):
    for name, leaf in trainable.items():
      if name.startswith(f'{top}/'):
        there = params
        for key in name.removeprefix(f'{top}/').split('/'):
          there = there[key]
        assert there.tobytes() == np.asarray(leaf, np.float32).tobytes(), name
  assert json.loads((out / 'config.json').read_text())['architectures'] == ['BertForMaskedLM']
  before = tokenizing.load_tokenizer(trained / 'backbone')
  assert tokenizing.load_tokenizer(out).sha256 == before.sha256
  # First token, raw: the defaults, so that no sentence-transformers file has to say it.
  assert backbone.spec == same_length() and not (out / 'modules.json').exists()
  # At a learning rate of 0 the heads that the next run starts from are those of the directory.
  status, err = go(
    'condenser.py:local',
    f'--config.backbone.path={out}',
    '--config.optim.learning_rate=0.0',
    '--config.steps=1',
    workdir='on',
  )
  assert status == 0, err
  assert_same_bits(trainable_of(tmp_path / 'on')[1], trainable)


@pytest.mark.slow
@pytest.mark.xdist_group('rip.py:prompt,local')
def test_a_pretrained_prompt_starts_a_prompt(finished, command, reuse, tmp_path):
  run = finished('rip.py:prompt,local')
  status, err = command(export, '--force', f'--workdir={run}', f'--out={tmp_path}/prompt.npz')
  assert status == 0, err
  prompt = load_prompt(tmp_path / 'prompt.npz')
  np.testing.assert_array_equal(
    prompt.of_side('query')['prefix'], trainable_of(run)[1]['prompt/prefix']
  )
  assert (
    prompt.meta['query_max_length'],
    prompt.meta['passage_max_length'],
    prompt.meta['pooling'],
  ) == (32, 32, 'cls')
  status, err = command(
    train,
    f'--config={ROOT}/configs/dptdr.py:local',
    f'--workdir={tmp_path}/tuned',
    *reuse,
    '--config.steps=1',
    '--config.data.dev_split=',
    '--config.optim.learning_rate=0.0',
    f'--config.prompt.init_from={tmp_path}/prompt.npz',
  )
  assert status == 0, err
  np.testing.assert_array_equal(
    trainable_of(tmp_path / 'tuned')[1]['prompt/prefix'], prompt.of_side('query')['prefix']
  )


@pytest.mark.slow
def test_from_scratch_with_a_sentencepiece_vocabulary(command, trained, tmp_path):
  (tmp_path / 'more.txt').write_text(
    'One sentence stands here. Another one follows it.\n\nA third.\n'
  )
  status, err = command(
    train,
    f'--config={ROOT}/configs/rip.py:local',
    f'--workdir={tmp_path}/run',
    *('--config.backbone.vocabulary=sentencepiece', '--config.backbone.vocab_size=1000'),
    f'--config.data.dir={trained}/data/corpus.jsonl,{tmp_path}/more.txt',
    *('--config.data.format=corpus', '--config.grad_cache=1', '--config.steps=1'),
  )
  assert status == 0, err
  status, err = command(export, '--force', f'--workdir={tmp_path}/run', f'--out={tmp_path}/out')
  assert status == 0, err
  found = hub.load_backbone(tmp_path / 'out', ('mlm',)).config
  tokenizer = tokenizing.load_tokenizer(tmp_path / 'out')
  assert found.model_type == 'xlm-roberta' and found.vocab_size == tokenizer.vocab_size <= 1000
  assert found.pad_token_id == tokenizer.pad_id == 1
