import jax
import numpy as np
import pytest
import safetensors

from dprjax.models import hub, model_folders
from dprjax.text.vector_spec import same_length
from tests.refusals import refused


def test_round_trip_keeps_every_bit(write_checkpoint, tmp_path):
  source = write_checkpoint('roberta', 3, prefix='roberta.')
  (source / 'tokenizer.json').write_text('{"kept": true}')
  first = hub.load_backbone(source)
  sentence = same_length(12, 'mean', True, 'query: ', 'passage: ')
  out = tmp_path / 'out'
  for _ in range(2):  # the second replaces the first
    model_folders.save_backbone(
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
    model_folders.save_backbone(folder, backbone.config, backbone.params)
  harm(folder)
  before = {path: path.is_file() and path.read_bytes() for path in folder.rglob('*')}
  with refused('precious'):
    model_folders.save_backbone(folder, backbone.config, backbone.params)
  assert {path: path.is_file() and path.read_bytes() for path in folder.rglob('*')} == before
  assert sorted(path.name for path in tmp_path.iterdir()) == ['checkpoint', 'precious']


def _write(path):
  path.write_text('a')


@pytest.mark.slow
@pytest.mark.parametrize('model_type', ['bert', 'roberta', 'xlm-roberta'])
def test_transformers_loads_the_masked_lm_head(write_heads, tmp_path, golden, model_type, torch):
  import transformers

  backbone = hub.load_backbone(write_heads(model_type), ('mlm', 'condenser'))
  out = tmp_path / 'out'
  model_folders.save_backbone(out, backbone.config, backbone.params, heads=backbone.heads)
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
  model_folders.save_backbone(
    out, first.config, first.params, hf_config=first.hf_config, heads=heads
  )
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
  model_folders.save_backbone(out, first.config, first.params)
  third = hub.load_backbone(out, ('mlm', 'condenser'))
  assert (third.sha256, third.heads) == (first.sha256, {})
  assert sorted(file.name for file in out.iterdir()) == [
    'config.json',
    'dprjax.json',
    'model.safetensors',
  ]
