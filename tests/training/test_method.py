"""A method of one's own: one file with a loss and one config, and nothing changed elsewhere."""

import pathlib
import re

import numpy as np
import pytest

from dprjax import export, load_prompt, train
from dprjax.training import method
from dprjax.training import train as training
from tests import devices
from tests.options import with_options
from tests.refusals import refused
from tests.resuming import train_and_resume

PAGE = pathlib.Path(__file__).parents[2] / 'CONTRIBUTING.md'


@pytest.mark.slow
def test_the_method_shown_to_contributors(tmp_path, monkeypatch, command, trained):
  """It trains, resumes and is exported."""
  loss, config = re.findall(r'```python\n(.*?)```', PAGE.read_text(), re.DOTALL)
  (tmp_path / 'lab_of_mine').mkdir()
  (tmp_path / 'lab_of_mine' / 'hinge.py').write_text(loss)
  (tmp_path / 'shown.py').write_text(config.replace('lab.hinge', 'lab_of_mine.hinge'))
  monkeypatch.syspath_prepend(tmp_path)
  flags = [
    f'--config={tmp_path}/shown.py',
    f'--config.backbone.path={trained}/backbone',
    f'--config.data.dir={trained}/data',
    '--config.data.format=beir',
    f'--config.data.token_cache={trained}/token_cache',
    '--config.steps=4',
    '--config.checkpoint.every=2',
    '--config.eval.every=4',
  ]

  def run(workdir, *more):
    with devices.one():
      return command(train, *flags, f'--workdir={tmp_path}/{workdir}', *more)

  log, whole = train_and_resume(run, tmp_path)
  assert 'in-batch accuracy' in log and 'done at step 4' in log
  assert '--method=lab_of_mine.hinge' in log  # in the command that it names next
  assert whole.keys() == {'prompt/prefix'}
  # Whether so few steps gain anything is chance.
  flags = (f'--workdir={tmp_path}/whole', f'--out={tmp_path}/hinge.npz', '--force')
  status, log = command(export, *flags)
  assert status == 2 and '--method=lab_of_mine.hinge' in log
  assert command(export, *flags, '--method=lab_of_mine.hinge')[0] == 0
  np.testing.assert_array_equal(
    load_prompt(tmp_path / 'hinge.npz').of_side('query')['prefix'], whole['prompt/prefix']
  )


def test_options_of_another_method_are_refused(tmp_path):
  config = with_options(backbone__path='x', data__dir='x')
  config.topics = {'keep': 3}
  with refused('config.topics.keep'):
    training.train(config, tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('name', ['dpt', 'contrastive', 'json', '../dpr', 'dprjax.dpr'])
def test_what_is_not_a_method(name):
  with refused('cross_encoder', 'dpr'):
    method.load(name)


def test_a_method_that_lacks_a_package_says_so(tmp_path, monkeypatch):
  (tmp_path / 'lacking_method').mkdir()
  (tmp_path / 'lacking_method' / 'own.py').write_text('import a_package_that_nobody_has\n')
  monkeypatch.syspath_prepend(tmp_path)
  with refused('own.py', 'line 1', 'a_package_that_nobody_has'):
    method.load('lacking_method.own')
