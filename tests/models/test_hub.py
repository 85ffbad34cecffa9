import hashlib
import json
import os
import time

import jax
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from dprjax.base.errors import InputError
from dprjax.models import hub, model_folders, scratch
from tests.refusals import named_in, refused

GAMMA = 'encoder.layer.0.output.LayerNorm'


def error(path):
  with pytest.raises(InputError) as info:
    hub.load_backbone(path)
  assert '\n' not in str(info.value)
  return str(info.value)


def test_sha256_is_over_names_types_shapes_and_bytes(write_checkpoint, golden, tmp_path):
  backbone = hub.load_backbone(write_checkpoint('bert', 1))
  digest = hashlib.sha256()
  for name in sorted(name for name in golden('bert') if name.startswith('1/weights/')):
    value = golden('bert')[name].astype(np.float32)
    digest.update(
      json.dumps([name.removeprefix('1/weights/'), 'F32', list(value.shape)]).encode()
      + value.tobytes()
    )
  assert backbone.sha256 == digest.hexdigest()
  changed = jax.tree.map(np.copy, backbone.params)
  changed['layers']['mlp']['down']['bias'][0, 3] += 1e-7
  model_folders.save_backbone(tmp_path / 'changed', backbone.config, changed)
  assert hub.load_backbone(tmp_path / 'changed').sha256 != backbone.sha256


def test_every_class_of_checkpoint_is_the_same_backbone(write_checkpoint):
  plain = hub.load_backbone(write_checkpoint('bert', 1, folder='plain'))
  head = {
    'cls.seq_relationship.bias': np.zeros(2, np.float32),
    'bert.pooler.dense.weight': np.zeros((24, 24), np.float32),
    'bert.embeddings.position_ids': np.arange(15)[None],
    'classifier.weight': np.zeros((2, 24), np.float32),
  }
  masked = hub.load_backbone(
    write_checkpoint('bert', 1, prefix='bert.', tensors=head, folder='masked')
  )
  assert masked.sha256 == plain.sha256
  weights = safetensors.numpy.load_file(os.path.join(plain.path, 'model.safetensors'))
  old = {
    f'{GAMMA}.gamma': weights[f'{GAMMA}.weight'],
    f'{GAMMA}.beta': weights[f'{GAMMA}.bias'],
    f'{GAMMA}.weight': None,
    f'{GAMMA}.bias': None,
  }
  assert (
    hub.load_backbone(write_checkpoint('bert', 1, tensors=old, folder='old')).sha256 == plain.sha256
  )
  roberta = hub.load_backbone(write_checkpoint('xlm-roberta', 1, folder='xlmr'))
  head = {'classifier.dense.weight': np.zeros((24, 24), np.float32)}
  prefixed = hub.load_backbone(
    write_checkpoint('xlm-roberta', 1, prefix='roberta.', tensors=head, folder='xlmr-lm')
  )
  assert prefixed.sha256 == roberta.sha256


@pytest.mark.parametrize('wrapper', ['student.', 'hebert.'])
def test_other_prefixes_are_named(write_checkpoint, wrapper):
  assert named_in(error(write_checkpoint('bert', 1, prefix=wrapper)), wrapper)


def test_shards(write_checkpoint):
  path = write_checkpoint('bert', 1)
  whole = hub.load_backbone(path)
  weights = safetensors.numpy.load_file(path / 'model.safetensors')
  (path / 'model.safetensors').unlink()
  names = sorted(weights)
  weight_map = {}
  for shard, part in (('model-1.safetensors', names[:7]), ('model-2.safetensors', names[7:])):
    safetensors.numpy.save_file({name: weights[name] for name in part}, path / shard)
    weight_map |= dict.fromkeys(part, shard)
  (path / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': weight_map}))
  sharded = hub.load_backbone(path)
  assert sharded.sha256 == whole.sha256
  jax.tree.map(np.testing.assert_array_equal, sharded.params, whole.params)
  (path / 'model-2.safetensors').unlink()
  assert named_in(error(path), 'model.safetensors.index.json', 'model-2.safetensors')
  (path / 'model.safetensors.index.json').write_text('{}')
  assert named_in(error(path), 'weight_map')


def test_wrong_tensors_are_listed(write_checkpoint):
  assert named_in(
    error(write_checkpoint(tensors={'encoder.layer.0.output.dense.bias': None})),
    'encoder.layer.0.output.dense.bias',
  )
  assert named_in(
    error(write_checkpoint(tensors={'adapter.weight': np.zeros(3, np.float32)})), 'adapter.weight'
  )
  assert named_in(
    error(write_checkpoint(change={'vocab_size': 50})),
    'embeddings.word_embeddings.weight',
    '[41, 24]',
    'config.json',
    '[50, 24]',
  )
  assert named_in(
    error(write_checkpoint(change={'num_hidden_layers': 3})),
    'encoder.layer.1.attention.self.query.weight',
  )
  twice = {'bert.embeddings.LayerNorm.bias': np.zeros(24, np.float32)}
  assert named_in(error(write_checkpoint(tensors=twice)), 'embeddings.LayerNorm.bias')
  assert named_in(
    error(write_checkpoint(tensors={'embeddings.LayerNorm.bias': np.zeros(24, np.int32)})),
    'embeddings.LayerNorm.bias',
    'I32',
  )


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'hidden_act': 'xielu'}, ('hidden_act', 'xielu')),
    ({'is_decoder': True}, 'is_decoder'),
    ({'num_hidden_layers': 10**9}, ('num_hidden_layers', '1000000000')),
    ({'hidden_size': 25}, ('hidden_size', '25', 'num_attention_heads')),
    ({'vocab_size': 10**9}, ('config.json', '[1000000000, 24]')),
    ({'model_type': ['bert']}, ('model_type', '[', 'bert', ']')),
  ],
  ids=str,
)
def test_a_config_that_its_weights_do_not_bear_out(write_checkpoint, change, message):
  began = time.monotonic()
  assert named_in(error(write_checkpoint(change=change)), message)
  assert time.monotonic() - began < 5


def test_weights_that_declare_what_they_have_not(write_checkpoint):
  path = write_checkpoint()
  whole = (path / 'model.safetensors').read_bytes()
  header = {'a': {'dtype': 'F32', 'shape': [10**12], 'data_offsets': [0, 4 * 10**12]}}
  text = json.dumps(header).encode()
  for content in (
    *(whole[:5], whole[:-1], (2**62).to_bytes(8, 'little') + text),
    len(text).to_bytes(8, 'little') + text + bytes(12),
  ):
    (path / 'model.safetensors').write_bytes(content)
    assert named_in(error(path), 'model.safetensors')


@pytest.mark.parametrize('name', ['../../etc/passwd', '/etc/passwd', 'a\0b'])
def test_shards_outside_the_folder(write_checkpoint, name):
  path = write_checkpoint()
  (path / 'model.safetensors').unlink()
  index = {'weight_map': {'embeddings.LayerNorm.bias': name}}
  (path / 'model.safetensors.index.json').write_text(json.dumps(index))
  text = error(path)
  assert named_in(text, 'model.safetensors.index.json')
  for index in ({'weight_map': {'a': 3}}, []):
    (path / 'model.safetensors.index.json').write_text(json.dumps(index))
    assert named_in(error(path), 'model.safetensors.index.json')


def test_a_package_is_located_without_running_it(tmp_path, monkeypatch):
  for package in ('here', 'there', 'there/inner'):
    (tmp_path / 'path' / package / 'model').mkdir(parents=True, exist_ok=True)
    (tmp_path / 'path' / package / '__init__.py').write_text('raise SystemExit("ran")')
  monkeypatch.syspath_prepend(tmp_path / 'path')
  (tmp_path / 'path' / 'with_word' / 'model').mkdir(parents=True)
  (tmp_path / 'path' / 'with_word' / '__init__.py').touch()
  for name in ('there', 'there.inner', 'with-word'):  # pip writes hyphens
    folder = tmp_path / 'path' / name.replace('.', '/').replace('-', '_') / 'model'
    assert hub.package_path(f'package:{name}') == str(folder)
  for name in ('', '.there', 'there.', 'there/inner', 'a-b', '../there', 'there\n', 'there\0', '1'):
    with refused('package:'):
      hub.package_path(f'package:{name}')
  monkeypatch.chdir(tmp_path / 'path')
  for path in ('', '.', str(tmp_path / 'path')):  # however the current folder gets there
    monkeypatch.setattr('sys.path', [path])
    with refused('here'):
      hub.package_path('package:here')


def test_pickles_are_never_loaded(write_checkpoint):
  path = write_checkpoint()
  (path / 'model.safetensors').rename(path / 'pytorch_model.bin')
  assert named_in(error(path), 'model.safetensors', 'pytorch_model.bin')
  (path / 'pytorch_model.bin').unlink()
  assert named_in(error(path), 'model.safetensors')


def test_paths_that_are_not_directories(tmp_path):
  assert named_in(error(tmp_path / 'absent'), tmp_path / 'absent')
  assert named_in(error(tmp_path), 'config.json')
  (tmp_path / 'file').write_text('x')
  assert named_in(error(tmp_path / 'file'), tmp_path / 'file')
  (tmp_path / 'config.json').write_text('[]')
  assert named_in(error(tmp_path), 'config.json')


def test_hub_id_offline():
  # The environment of the tests keeps the hub client off line.
  assert named_in(error('some-group/some-model'), 'some-group/some-model', 'HF_HUB_OFFLINE')


@pytest.mark.slow
def test_scratch():
  config = scratch.shape('mini', 100, model_type='roberta')
  assert (config.num_layers, config.hidden_size, config.num_heads, config.intermediate_size) == (
    4,
    256,
    4,
    1024,
  )
  assert (config.max_positions, config.max_tokens, config.pad_token_id) == (514, 512, 1)
  assert config.initializer_range == pytest.approx(
    0.034641
  )  # narrower than the 768 of BERT, so wider than its 0.02
  assert scratch.init_params(config, jax.random.key(0))['layers']['mlp']['up'][
    'kernel'
  ].std() == pytest.approx(0.034641, rel=0.01)
  assert scratch.shape('base', 100).initializer_range == 0.02
  with refused('huge'):
    scratch.shape('huge', 100)
