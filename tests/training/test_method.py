"""A method of one's own: one file with a loss and one config, and nothing changed elsewhere."""

import json
import pathlib
import re

import numpy as np
import pytest

from dprjax import bm25, export, load_prompt, train
from dprjax.training import method
from tests import devices
from tests.options import with_options
from tests.refusals import refused
from tests.resuming import train_and_resume

PAGE = pathlib.Path(__file__).parents[2] / 'CONTRIBUTING.md'


@pytest.fixture
def shown(tmp_path, monkeypatch):
  """The example of the page, as a module ``lab_of_mine.margins`` and a config."""
  loss, config = re.findall(r'```python\n(.*?)```', PAGE.read_text(), re.DOTALL)
  (tmp_path / 'lab_of_mine').mkdir()
  (tmp_path / 'lab_of_mine' / 'margins.py').write_text(loss)
  (tmp_path / 'shown.py').write_text(config.replace('lab.margins', 'lab_of_mine.margins'))
  monkeypatch.syspath_prepend(tmp_path)
  return tmp_path / 'shown.py'


@pytest.mark.slow
def test_the_method_shown_to_contributors(shown, tmp_path, command, trained):
  """It trains with gradient cache, resumes and is exported."""
  teacher = tmp_path / 'teacher.trec'
  texts = (f'--{name}={trained}/data/{name}.jsonl' for name in ('corpus', 'queries'))
  qrels = f'--qrels={trained}/data/qrels/train.tsv'
  assert command(bm25, *texts, qrels, f'--out={teacher}')[0] == 0
  flags = [
    f'--config={shown}',
    f'--config.distillation.scores={teacher}',
    f'--config.backbone.path={trained}/backbone',
    f'--config.data.dir={trained}/data',
    '--config.data.format=beir',
    f'--config.data.token_cache={trained}/token_cache',
    '--config.backbone.dropout=0.0',  # its masks depend on the chunks
    '--config.prompt.dropout=0.0',
    '--config.steps=4',
    '--config.checkpoint.every=2',
    '--config.eval.every=4',
  ]

  def run(workdir, *more):
    with devices.one():
      return command(train, *flags, f'--workdir={tmp_path}/{workdir}', *more)

  log, whole = train_and_resume(run, tmp_path)
  assert 'pairs that the teacher scores' in log and 'done at step 4' in log
  assert '--method=lab_of_mine.margins' in log  # in the command that it names next
  assert whole.keys() == {'prompt/prefix'}
  # As the loss of the package, in one chunk.
  own = ('--config.method=dpr', '--config.distillation.weight=1.0', '--config.grad_cache=1')
  status, log = run('own', *own)
  assert status == 0, log
  losses = [
    [row['loss'] for row in map(json.loads, lines) if 'loss' in row]
    for lines in ((tmp_path / name / 'metrics.jsonl').read_text().splitlines()
                  for name in ('whole', 'own'))
  ]  # fmt: skip
  np.testing.assert_allclose(*losses, rtol=1e-4)
  # Whether so few steps gain anything is chance.
  flags = (f'--workdir={tmp_path}/whole', f'--out={tmp_path}/margins.npz', '--force')
  status, log = command(export, *flags)
  assert status == 2 and '--method=lab_of_mine.margins' in log
  assert command(export, *flags, '--method=lab_of_mine.margins')[0] == 0
  np.testing.assert_array_equal(
    load_prompt(tmp_path / 'margins.npz').of_side('query')['prefix'], whole['prompt/prefix']
  )


@pytest.mark.parametrize('option', ['prompt.regularization', 'backbone.two_encoders', 'grad_cache'])
def test_a_loss_of_ones_own_has_the_options_that_it_declares(shown, option):
  values = {'prompt.regularization': 0.5, 'backbone.two_encoders': True, 'grad_cache': 2}
  name = f'lab_of_mine.margins_{option.replace(".", "_")}'
  path = shown.parent / f'{name.replace(".", "/")}.py'
  said = (shown.parent / 'lab_of_mine' / 'margins.py').read_text()
  path.write_text(said.replace('options={build: OPTIONS}', 'options={**dpr.METHOD.options}'))
  config = with_options(
    method=name, prompt__length=2, **{option.replace('.', '__'): values[option]}
  )
  config.prompt.length = 0
  with refused(f'config.{option}', name):
    method.of(config)


@pytest.mark.parametrize('name', ['dpt', 'json', '../dpr'])
def test_what_is_not_a_method(name):
  with refused('cross_encoder', 'dpr'):
    method.load(name)
