"""The settings of the encoder in an experiment: those of its folder, unless it names others."""

import dataclasses
import json
import pathlib

import jax
import pytest

from dprjax import train
from dprjax.base import mesh as meshes
from dprjax.base import provenance
from dprjax.exports import exporting
from dprjax.models import artifact, encoder_config, model_folders, scratch
from dprjax.planning import backbones
from dprjax.text import vocabularies
from dprjax.text.vector_spec import VectorSpec, of_config, same_length
from dprjax.training import config as configs
from dprjax.training import dual_encoder
from dprjax.training import workdir as workdirs
from tests.options import with_options
from tests.refusals import refused
from tests.training.conftest import WORDS

RECIPE = pathlib.Path(configs.__file__).parents[2] / 'configs' / 'dptdr.py'
SPEC = same_length(24, 'max', True, 'oak\nash ', 'elm ')


@pytest.fixture
def save(tokenizer, model, tmp_path):
  """``save(spec, **changes)`` -> the folder of an encoder, with changes of its shape."""
  words = vocabularies.train_wordpiece(
    [f'{one} {other}.' for one in WORDS for other in WORDS], 200, tmp_path / 'words'
  )
  assert words.vocab_size == tokenizer.vocab_size

  def write(spec, **changes):
    shape = dataclasses.replace(model, **changes)
    params = scratch.init_params(shape, jax.random.key(0))
    model_folders.save_backbone(
      tmp_path / 'model', shape, params, source=tmp_path / 'words', spec=spec
    )
    return str(tmp_path / 'model')

  return write


def resolve(path, begun=(), method='dpr', **changes):
  config = configs.default(method)
  config.backbone.path = path
  config.update_from_flattened_dict(changes)
  return dual_encoder.resolve_settings(config, dict(begun))


def test_what_an_experiment_does_not_name_is_as_in_the_folder(save):
  found, line = resolve(save(SPEC), **{'normalize': False, 'data.query_max_length': 9})
  assert of_config(found) == SPEC.replace(normalize=False, query_max_length=9)
  assert "config.pooling='max'" in line and "config.data.query_prefix='oak\\nash '" in line
  assert 'config.normalize' not in line and 'query_max_length' not in line
  configs.check_ranges(found)
  again, line = dual_encoder.resolve_settings(found, {})
  assert (again, line) == (found, '')


def test_an_encoder_whose_folder_does_not_say(save):
  folder = save(None)
  assert of_config(resolve(folder)[0]) == same_length(32, 'cls')  # as dprjax wrote it
  (pathlib.Path(folder) / provenance.MARK).unlink()
  assert of_config(resolve(folder)[0]) == same_length(32, 'mean', True)
  assert of_config(resolve('scratch:tiny')[0]) == VectorSpec()


def test_a_prompt_that_shifts_positions_leaves_room_for_itself(save):
  shifted = {'prompt.length': 4, 'prompt.shift_positions': True}
  assert of_config(resolve(save(None), **shifted)[0]).longest == 28


def test_long_texts_get_buckets(save):
  folder = save(same_length(5000), max_positions=6000)
  found, _ = resolve(folder, **{'data.query_max_length': 600, 'data.passage_buckets': (64,)})
  assert found.data.query_buckets[-1] == 512  # a length that is named needs buckets that are
  assert found.data.passage_buckets == (64, 1024, 2048, 4096, 5000)
  assert resolve(save(same_length(9000), max_positions=9000))[0].data.query_max_length == 8192


def test_a_method_and_a_run_that_goes_on_come_first(save):
  folder = save(SPEC)
  found, _ = resolve(folder, method='cross_encoder')
  assert (found.data.query_prefix, found.data.passage_prefix) == ('', '')
  begun = {'pooling': 'cls', 'normalize': False, 'data.query_prefix': ''}
  found, _ = resolve(folder, begun)
  assert of_config(found) == SPEC.replace(pooling='cls', normalize=False, query_prefix='')


def test_a_plan_has_the_settings_of_the_training(save):
  folder, config = save(SPEC), configs.default()
  for path in (folder, f'{folder}/config.json'):
    config.backbone.path = path
    assert backbones.spec_of(config, path, 0) == SPEC
  config.backbone.path = 'qwen3-embedding-0.6b'
  assert backbones.spec_of(config, config.backbone.path, 0) == same_length(512, 'lasttoken', True)


@pytest.mark.slow
def test_a_training_from_the_command_line(save, command, tmp_path, trained):
  folder = save(SPEC, max_positions=40)
  base = [f'--config={RECIPE}:local,query', f'--config.backbone.path={folder}']
  base += ['--config.data.format=beir', f'--config.data.dir={trained}/data']
  auto = [f'--config.{name}=auto' for name in dual_encoder.SETTINGS]
  run = tmp_path / 'run'
  status, log = command(train, *base, *auto, f'--workdir={run}')
  assert status == 0 and log.splitlines()[0].startswith("from 'auto': config.pooling='max'")
  assert 'the baseline has' not in log
  assert of_config(workdirs.load_workdir(run)) == SPEC
  prompt = artifact.load_prompt(exporting.export(run, tmp_path / 'p.npz', force=True))
  assert {name: prompt.meta[name] for name in SPEC.to_meta()} == SPEC.to_meta()

  # A run that named other settings goes on with them.
  run = tmp_path / 'older'
  named = ['--config.normalize=False', '--config.data.query_prefix=']
  status, log = command(train, *base, *auto, *named, f'--workdir={run}')
  assert status == 0 and "config.data.query_prefix is ''; the baseline has 'oak\\nash '" in log
  before = (run / 'config.json').read_text()
  assert json.loads(before)['normalize'] is False
  assert command(train, *base, *auto, f'--workdir={run}')[0] == 0
  assert (run / 'config.json').read_text() == before


def test_which_attention_devices_have(monkeypatch):
  mesh = meshes.make_mesh({'data': -1})
  for platform, words in (('cpu', 'plain'), ('gpu', 'plain'), ('tpu', 'fused')):
    monkeypatch.setattr(encoder_config, 'platform_of', lambda split, platform=platform: platform)
    config = with_options()
    assert dual_encoder.encoder_options(config, mesh).attention == words
    arithmetic = encoder_config.arithmetic('float32')
    assert encoder_config.EncoderOptions.of(arithmetic, mesh).attention == words
    config.backbone.attention = 'fused'
    if platform == 'gpu':
      with refused('config.backbone.attention', 'fused'):
        dual_encoder.encoder_options(config, mesh)
    else:
      assert dual_encoder.encoder_options(config, mesh).attention == 'fused'
