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
from dprjax.models import hub
from dprjax.text.vector_spec import same_length
from tests.refusals import named_in, refused

GAMMA = 'encoder.layer.0.output.LayerNorm'


def error(path):
  with pytest.raises(InputError) as info:
    hub.load_backbone(path)
  assert '\n' not in str(info.value)
  return str(info.value)


def test_sha256_is_over_names_types_shapes_and_bytes(write_checkpoint, golden):
  backbone = hub.load_backbone(write_checkpoint('bert', 1))
  digest = hashlib.sha256()
  for name in sorted(name for name in golden('bert') if name.startswith('1/weights/')):
    value = golden('bert')[name].astype(np.float32)
    digest.update(
      json.dumps([name.removeprefix('1/weights/'), 'F32', list(value.shape)]).encode()
      + value.tobytes()
    )
  assert (
    backbone.sha256 == digest.hexdigest() == hub.backbone_sha256(backbone.config, backbone.params)
  )
  changed = jax.tree.map(np.copy, backbone.params)
  changed['layers']['mlp']['down']['bias'][0, 3] += 1e-7
  assert hub.backbone_sha256(backbone.config, changed) != backbone.sha256


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


def test_round_trip_keeps_every_bit(write_checkpoint, tmp_path):
  source = write_checkpoint('roberta', 3, prefix='roberta.')
  (source / 'tokenizer.json').write_text('{"kept": true}')
  first = hub.load_backbone(source)
  sentence = same_length(12, 'mean', True, 'query: ', 'passage: ')
  out = tmp_path / 'out'
  for _ in range(2):  # the second replaces the first
    hub.save_backbone(
      out,
      first.config,
      first.params,
      source=first.path,
      spec=sentence,
      hf_config=first.hf_config,
    )
  second = hub.load_backbone(out)
  jax.tree.map(np.testing.assert_array_equal, first.params, second.params)
  assert (second.sha256, second.config, second.spec) == (first.sha256, first.config, sentence)
  assert (
    second.hf_config['architectures'] == ['RobertaModel']
    and (out / 'tokenizer.json').read_text() == '{"kept": true}'
  )
  assert sorted(p.name for p in tmp_path.iterdir()) == ['checkpoint', 'out']


def _unmark(folder):
  (folder / 'dprjax.json').unlink()


def _change(folder):
  (folder / 'config.json').write_text((folder / 'config.json').read_text() + ' ')


@pytest.mark.parametrize(
  'harm',
  [
    lambda folder: (folder / 'notes.txt').write_text('mine'),
    lambda folder: (folder / 'sub' / 'deep').mkdir(parents=True) or _write(folder / 'sub' / 'a'),
    _unmark,
    _change,
    lambda folder: (folder / 'dprjax.json').write_text('[' * 9999),
  ],
)
def test_save_replaces_only_what_it_wrote_itself(write_checkpoint, tmp_path, harm):
  backbone = hub.load_backbone(write_checkpoint('bert', 1))
  folder = tmp_path / 'precious'
  folder.mkdir()
  for _ in range(2):  # empty, then its own: taken
    hub.save_backbone(folder, backbone.config, backbone.params)
  harm(folder)
  before = {path: path.is_file() and path.read_bytes() for path in folder.rglob('*')}
  with refused('precious'):
    hub.save_backbone(folder, backbone.config, backbone.params)
  assert {path: path.is_file() and path.read_bytes() for path in folder.rglob('*')} == before
  assert sorted(path.name for path in tmp_path.iterdir()) == ['checkpoint', 'precious']


def _write(path):
  path.write_text('a')


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
  config = hub.scratch_config('mini', 100, model_type='roberta')
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
  assert hub.init_params(config, jax.random.key(0))['layers']['mlp']['up'][
    'kernel'
  ].std() == pytest.approx(0.034641, rel=0.01)
  assert hub.scratch_config('base', 100).initializer_range == 0.02
  with refused('huge'):
    hub.scratch_config('huge', 100)


@pytest.mark.slow
@pytest.mark.parametrize('model_type', ['bert', 'roberta', 'xlm-roberta'])
def test_transformers_loads_the_masked_lm_head(write_heads, tmp_path, golden, model_type, torch):
  import transformers

  backbone = hub.load_backbone(write_heads(model_type), ('mlm', 'condenser'))
  out = tmp_path / 'out'
  hub.save_backbone(out, backbone.config, backbone.params, heads=backbone.heads)
  model, info = transformers.AutoModelForMaskedLM.from_pretrained(out, output_loading_info=True)
  assert not any(info[kind] for kind in ('missing_keys', 'unexpected_keys', 'mismatched_keys')), (
    info
  )
  assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
  encoder, info = transformers.AutoModel.from_pretrained(out, output_loading_info=True)
  assert not info['mismatched_keys'] and all(
    key.startswith('pooler.') for key in info['missing_keys']
  ), info
  assert all(key.startswith(('cls.', 'lm_head.')) for key in info['unexpected_keys']), info
  arrays = golden(f'heads_{model_type}')
  inputs = {
    'input_ids': torch.from_numpy(arrays['tokens']).long(),
    'attention_mask': torch.from_numpy(arrays['mask']).long(),
    'token_type_ids': torch.from_numpy(arrays['token_types']).long(),
  }
  mask = arrays['mask']
  with torch.no_grad():
    logits, hidden = (
      model.eval()(**inputs).logits.numpy(),
      encoder.eval()(**inputs).last_hidden_state.numpy(),
    )
  np.testing.assert_allclose(logits[mask], arrays['mlm/logits'][mask], rtol=2e-5, atol=2e-5)
  np.testing.assert_allclose(hidden[mask], arrays['late'][mask], rtol=2e-5, atol=2e-5)
  # Files of transformers are read back, bit for bit.
  model.save_pretrained(tmp_path / 'theirs')
  theirs = hub.load_backbone(tmp_path / 'theirs', ('mlm', 'condenser'))
  assert theirs.sha256 == backbone.sha256
  jax.tree.map(
    np.testing.assert_array_equal, theirs.heads['mlm'].params, backbone.heads['mlm'].params
  )


@pytest.mark.parametrize('model_type', ['bert', 'xlm-roberta'])
def test_a_folder_says_which_heads_it_has(write_heads, tmp_path, model_type):
  first = hub.load_backbone(
    write_heads(model_type, change={'tie_word_embeddings': False}), ('mlm', 'condenser')
  )
  out = tmp_path / 'out'
  heads = first.heads | {'condenser': first.heads['condenser']._replace(settings={'split': 2})}
  hub.save_backbone(out, first.config, first.params, hf_config=first.hf_config, heads=heads)
  second = hub.load_backbone(out, ('mlm', 'condenser'))
  assert second.sha256 == first.sha256
  name = {'bert': 'Bert', 'xlm-roberta': 'XLMRoberta'}[model_type]
  assert (
    second.hf_config['architectures'] == [f'{name}ForMaskedLM']
    and second.hf_config['tie_word_embeddings'] is True
  )
  with safetensors.safe_open(out / 'condenser.safetensors', 'np') as file:
    assert file.metadata() == {'format': 'pt', 'num_layers': '2', 'split': '2'}
    assert 'layer.1.attention.self.query.weight' in file.keys()  # noqa: SIM118 (not a dict)
  # Without the heads: a bare encoder, of the same SHA-256.
  hub.save_backbone(out, first.config, first.params)
  third = hub.load_backbone(out, ('mlm', 'condenser'))
  assert (third.sha256, third.heads) == (first.sha256, {})
  assert sorted(file.name for file in out.iterdir()) == [
    'config.json',
    'dprjax.json',
    'model.safetensors',
  ]
