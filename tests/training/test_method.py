"""A method of one's own: one file with a loss and one config, and nothing changed elsewhere."""

import numpy as np
import pytest

from dprjax import export, load_prompt, train
from dprjax.training import config as configs
from dprjax.training import method
from dprjax.training import train as training
from tests import devices
from tests.options import with_options
from tests.refusals import refused
from tests.resuming import train_and_resume

TOY = '''
"""A toy: the prompt learns to make each query's vector like its passage's."""

import jax.numpy as jnp

from dprjax.training import dpr, dual_encoder
from dprjax.training.method import Model


def build(config, model, devices, tokenizer):
  encoders = dual_encoder.build(config, model, devices)

  def loss(params, batch, key):
    vectors = encoders.vectors(params, batch, key)
    value = config.toy.scale * jnp.mean(jnp.square(vectors.query - vectors.passage[:, 0]))
    return value, {'loss': value, 'distance': value / config.toy.scale}

  return Model(encoders.init, loss, encoders.embed, {'distance': 'distance'})


METHOD = dpr.METHOD._replace(build=build)
'''
CONFIG = """
import ml_collections

from dprjax.training import config as defaults


def get_config(arg=''):
  c = defaults.default()
  c.method = 'lab_of_mine.toy'
  c.prompt.length = 2
  c.toy = ml_collections.ConfigDict({'scale': 3.0})
  return defaults.local(c)
"""


@pytest.mark.slow
def test_a_method_of_ones_own_trains_resumes_and_exports(tmp_path, monkeypatch, command, trained):
  (tmp_path / 'lab_of_mine').mkdir()
  (tmp_path / 'lab_of_mine' / 'toy.py').write_text(TOY)
  (tmp_path / 'toy_config.py').write_text(CONFIG)
  monkeypatch.syspath_prepend(tmp_path)
  flags = [
    f'--config={tmp_path}/toy_config.py',
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
  assert '(0.' in log and 'distance' in log and 'done at step 4' in log
  assert '--method=lab_of_mine.toy' in log  # in the command that it names next
  assert whole.keys() == {'prompt/prefix'}
  # Whether so few steps gain anything is chance.
  flags = (f'--workdir={tmp_path}/whole', f'--out={tmp_path}/toy.npz', '--force')
  status, log = command(export, *flags)
  assert status == 2 and '--method=lab_of_mine.toy' in log
  assert command(export, *flags, '--method=lab_of_mine.toy')[0] == 0
  np.testing.assert_array_equal(
    load_prompt(tmp_path / 'toy.npz').of_side('query')['prefix'], whole['prompt/prefix']
  )


@pytest.mark.parametrize('name', ['pretrain', 'lab.sections'])
def test_a_method_of_one_data_set_refuses_tasks(name, tmp_path):
  config = with_options(method=name, backbone__path='x', tasks__qa=configs.task(dir='x'))
  with refused('config.tasks', name):
    training.train(config, tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('name', ['dpt', 'contrastive', 'json', '../dpr', 'dprjax.dpr'])
def test_what_is_not_a_method(name):
  with refused('cross_encoder', 'nir_reranker', 'nir_retriever', 'topic_dpr'):
    method.load(name)


def test_a_method_that_lacks_a_package_says_so(tmp_path, monkeypatch):
  (tmp_path / 'lacking_method').mkdir()
  (tmp_path / 'lacking_method' / 'own.py').write_text('import a_package_that_nobody_has\n')
  monkeypatch.syspath_prepend(tmp_path)
  with refused('own.py', 'line 1', 'a_package_that_nobody_has'):
    method.load('lacking_method.own')
