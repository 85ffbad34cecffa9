"""Prompts in PEFT and sentence-transformers: a golden file has their results."""

import contextlib
import json
import pathlib
import re

import huggingface_hub
import jax
import numpy as np
import pytest
import safetensors.numpy

from dprjax import Retriever, export, load_backbone, load_prompt
from dprjax.base import mesh
from dprjax.exports import prompt_folders as peft
from dprjax.models import artifact
from dprjax.text.vector_spec import SIDES
from tests import fake_hub, other_tools, peft_files
from tests.refusals import command_refused, named_in, refused

ALONE = 'alone', 'passage'  # which the bare backbone encodes
GOLDEN = pathlib.Path(__file__).parent / 'golden' / 'other_tools.npz'


def one_device():
  return mesh.make_mesh({'data': 1}, jax.devices()[:1])


@pytest.fixture(scope='module')
def golden():
  with np.load(GOLDEN, allow_pickle=False) as arrays:
    return dict(arrays)


@pytest.fixture(scope='module')
def material(tmp_path_factory):
  """A folder for each model."""
  folder = tmp_path_factory.mktemp('other_tools')
  return {name: other_tools.write(folder, name) for name in other_tools.MODELS}


@pytest.mark.slow
@pytest.mark.parametrize('model_type', ['bert', 'roberta'])
def test_vectors_are_those_of_the_other_tools(golden, material, model_type):
  root = material[model_type]
  retriever = Retriever.load(
    root / 'backbone',
    {name: root / f'{name}.npz' for name in other_tools.CASES},
    batch_size=12,
    mesh=one_device(),
  )
  seen = 0
  for side, texts in other_tools.TEXTS.items():
    names = [name for name in other_tools.CASES for _ in texts]
    vectors = retriever.encode(texts * len(other_tools.CASES), side, prompt=names)
    for number, name in enumerate(other_tools.CASES):
      own = vectors[number * len(texts) : (number + 1) * len(texts)]
      for tool in ('peft', 'sentence-transformers'):
        expected = golden.get(f'{model_type}/{name}/{tool}/{side}')
        assert (expected is None) == (
          tool == 'peft'
          and ('shift_positions' not in other_tools.CASES[name] or (name, side) == ALONE)
        )
        if expected is not None:
          np.testing.assert_allclose(own, expected, atol=1e-5, err_msg=f'{name} {tool} {side}')
          seen += 1
  assert seen == 15


@pytest.mark.parametrize('name', ['tied', 'alone'])
def test_an_adapter_holds_what_peft_read(golden, material, command, tmp_path, name):
  for model_type, root in material.items():
    out = tmp_path / model_type
    status, err = command(
      export, f'--from={root}/{name}.npz', f'--backbone={root}/backbone', f'--out={out}',
      '--format=peft', '--base_model=somebody/tiny',
    )  # fmt: skip
    assert status == 0, err
    for side in SIDES:
      place = out if name == 'tied' else out / side
      if (name, side) == ALONE:
        assert not place.exists()
        continue
      np.testing.assert_array_equal(
        safetensors.numpy.load_file(place / peft.WEIGHTS)['prompt_embeddings'],
        golden[f'{model_type}/{name}/peft/{side}/embeddings'],
      )
      assert json.loads((place / peft.CONFIG).read_text()) == {
        'base_model_name_or_path': 'somebody/tiny',
        'encoder_hidden_size': 16,
        'inference_mode': True,
        'num_attention_heads': 2,
        'num_layers': 2,
        'num_transformer_submodules': 1,
        'num_virtual_tokens': 3 if name == 'tied' else other_tools.LENGTHS[side],
        'peft_type': 'PREFIX_TUNING',
        'prefix_projection': False,
        'task_type': 'FEATURE_EXTRACTION',
        'token_dim': 16,
      }
    settings = json.loads((out / 'tokenizer_config.json').read_text())
    assert settings['padding_side'] == 'right' and settings['model_max_length'] == 40


@pytest.mark.filterwarnings('ignore')  # of peft and PyTorch
@pytest.mark.parametrize('name', ['tied', 'lora'])
def test_the_snippet_of_a_card_gives_these_vectors(material, command, tmp_path, name):
  torch = pytest.importorskip('torch', reason='PyTorch is an oracle here, not a dependency')
  pytest.importorskip('peft')
  root = material['bert']
  backbone, path = load_backbone(root / 'backbone'), root / f'{name}.npz'
  if name == 'lora':
    shapes = dict.fromkeys(('attention/query', 'attention/value'), (16, 16))
    path = lora_file(root, tmp_path / 'lora.npz', shapes, pooling='mean', query_prefix='')
  status, err = command(
    export, f'--from={path}', f'--backbone={root}/backbone', f'--out={tmp_path}/adapter',
    '--format=peft', '--card=true',
  )  # fmt: skip
  assert status == 0, err
  card = (tmp_path / 'adapter' / 'README.md').read_text()
  assert ('deep prompt' in card) == (name != 'lora')
  (block,) = re.findall(r'```python\n(.*?)```', card, re.DOTALL)
  block = block.replace("'somebody/tiny'", repr(str(root / 'backbone')))
  made = {}
  exec(block.replace("'DIR'", repr(str(tmp_path / 'adapter'))), made)
  texts = other_tools.TEXTS['query'][:2]
  batch = made['tokenizer'](texts, padding=True, return_tensors='pt')
  assert not batch['attention_mask'].numpy().all()
  with torch.no_grad():
    states = made['model'](**batch).last_hidden_state
  mask = batch['attention_mask'][..., None]
  found = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1).numpy()
  own = Retriever.load(backbone.path, path, batch_size=2, mesh=one_device())
  np.testing.assert_allclose(found, own.encode(texts, 'query'), atol=1e-5)


def test_a_prefix_that_peft_made_gives_its_vectors(golden, material, tmp_path):
  root = material['roberta']
  for file in (peft.CONFIG, peft.WEIGHTS):
    (tmp_path / file).write_bytes(golden[f'roberta/theirs/{file}'].tobytes())
  meta = load_prompt(root / 'plain.npz').meta
  meta |= {'shift_positions': True, 'normalize': False, 'pooling': 'mean', 'passage_prefix': ''}
  vectors = peft_files.prefix(peft_files.read(tmp_path)[1], load_backbone(root / 'backbone').config)
  assert vectors.shape == (2, 2, 4, 2, 8)
  out = tmp_path / 'theirs.npz'
  artifact.save_prompt(out, artifact.Prompt(meta, {'prefix': vectors}))
  retriever = Retriever.load(root / 'backbone', out, batch_size=3, mesh=one_device())
  found = retriever.encode(other_tools.TEXTS['passage'])
  np.testing.assert_allclose(found, golden['roberta/theirs/passage'], atol=1e-5)


def test_a_sentence_transformers_folder(material, command, tmp_path):
  root, out = material['bert'], tmp_path / 'model'
  flags = (f'--from={root}/unlike.npz', f'--backbone={root}/backbone', f'--out={out}')
  status, err = command(export, *flags, '--format=sentence-transformers')
  assert status == 0, err
  assert sorted(str(path.relative_to(out)) for path in out.rglob('*') if path.is_file()) == [
    '1_Pooling/config.json',
    'config.json',
    'config_sentence_transformers.json',
    'dprjax.json',
    'dprjax_prompt.py',
    'model.safetensors',
    'modules.json',
    'prompt.npz',
    'sentence_bert_config.json',
    'tokenizer_config.json',
    'vocab.txt',
  ]
  for name in ('config.json', 'model.safetensors', 'vocab.txt', 'tokenizer_config.json'):
    assert (out / name).read_bytes() == (root / 'backbone' / name).read_bytes()
  assert (out / 'prompt.npz').read_bytes() == (root / 'unlike.npz').read_bytes()
  compile((out / 'dprjax_prompt.py').read_text(), 'dprjax_prompt.py', 'exec')
  modules = json.loads((out / 'modules.json').read_text())
  assert [module['type'].rpartition('.')[2] for module in modules] == [
    'PromptedTransformer',
    'Pooling',
  ]
  settings = json.loads((out / 'config_sentence_transformers.json').read_text())
  assert settings['prompts'] == {'query': '', 'document': 'a '}
  assert settings['similarity_fn_name'] == 'dot'
  # dprjax reads the folder as a backbone and as a prompt; the same command replaces it.
  backbone = load_backbone(out)
  assert backbone.sha256 == load_backbone(root / 'backbone').sha256
  assert load_prompt(out).path == f'{out}/prompt.npz'
  assert command(export, *flags, '--format=sentence-transformers')[0] == 0
  assert [path.name for path in tmp_path.iterdir()] == ['model']
  (out / 'prompt.npz').write_bytes((root / 'sides.npz').read_bytes())
  with refused('prompt.npz'):
    load_prompt(out)


def adapter_file(root, path, kind, arrays, **more):
  """An adapter of another kind for the backbone in ``root``."""
  meta = dict(load_prompt(root / 'plain.npz').meta)
  del meta['shift_positions']
  meta |= {'kind': kind, 'query_max_length': 12, **more}
  artifact.save_prompt(path, artifact.Prompt(meta, arrays))
  return path


def lora_file(root, path, shapes, **more):
  draw, arrays = np.random.default_rng(1), {}
  for name, (rows, columns) in shapes.items():
    arrays[f'{name}/a'] = draw.standard_normal((2, rows, 3), np.float32)
    arrays[f'{name}/b'] = 0.2 * draw.standard_normal((2, 3, columns), np.float32)
  more |= {'rank': 3, 'alpha': 2.0, 'targets': [*shapes]}
  return adapter_file(root, path, 'lora', arrays, **more)


@pytest.mark.slow
@pytest.mark.parametrize(('kind', 'sides'), [('lora', 'both'), ('linear', 'query')])
def test_an_adapter_is_merged_into_a_folder(material, command, tmp_path, kind, sides):
  root, out = material['bert'], tmp_path / 'model'
  path = tmp_path / f'{kind}.npz'
  if kind == 'lora':
    lora_file(root, path, {'mlp/up': (16, 24), 'attention/value': (16, 16)})
  else:
    change = 0.3 * np.random.default_rng(1).standard_normal((16, 16), np.float32)
    adapter_file(root, path, kind, {'query/change': change}, sides=sides)
  flags = (f'--from={path}', f'--backbone={root}/backbone', f'--out={out}')
  assert command(export, *flags, '--format=sentence-transformers')[0] == 0
  under, merged = (
    Retriever.load(*place, batch_size=3, mesh=one_device())
    for place in ((root / 'backbone', path), (out,))
  )
  for side, texts in other_tools.TEXTS.items():
    expected = under.encode(texts, side)
    np.testing.assert_allclose(merged.encode(texts, side), expected, atol=2e-6)
    with contextlib.suppress(ImportError):
      from sentence_transformers import SentenceTransformer

      model = SentenceTransformer(str(out / (side if sides == 'query' else '')), device='cpu')
      encode = {'query': model.encode_query, 'passage': model.encode_document}[side]
      np.testing.assert_allclose(encode(texts), expected, atol=2e-6)


@pytest.mark.parametrize(
  ('flags', 'words'),
  [
    (('--format=peft', '--out=o'), ('PEFT', 'prompt.shift_positions=True')),
    (('--out=o.npz', '--license=mit'), ('card',)),
  ],
)
def test_refused_in_one_line(material, command, tmp_path, monkeypatch, flags, words):
  monkeypatch.chdir(tmp_path)
  root = material['bert']
  status, err = command(export, f'--from={root}/plain.npz', f'--backbone={root}/backbone', *flags)
  command_refused((status, err), *words)
  assert list(tmp_path.iterdir()) == []


def test_prompts_that_no_other_tool_can_express(templates, command, tmp_path):
  for name, tool in (('qa', 'sentence-transformers'), ('pairs', 'peft')):
    status, err = command(
      export, f'--from={templates}/{name}.npz', f'--backbone={templates}/backbone',
      f'--out={tmp_path}/out', f'--format={tool}',
    )  # fmt: skip
    last = err.splitlines()[-1]
    assert status == 2 and named_in(last, 'template'), err
    assert '--format=npz' in last
  assert list(tmp_path.iterdir()) == []


@pytest.fixture
def hub(tmp_path):
  with fake_hub.serve(tmp_path / 'cache') as running:
    yield running


def test_a_card_and_a_prompt_from_the_hub(material, hub, command, tmp_path):
  root, out = material['bert'], tmp_path / 'model'
  metrics = {'mean': {'RR': 0.5}, 'per_query': {'RR': {'q': 0.5}}, 'counts': {}, 'settings': {}}
  (tmp_path / 'metrics.json').write_text(json.dumps(metrics))
  flags = [
    f'--from={root}/plain.npz', f'--backbone={root}/backbone', f'--out={out}', '--format=npz',
    '--base_model=somebody/tiny', '--card=true', '--name=me/mine', '--license=mit',
    f'--metrics=test={tmp_path}/metrics.json',
  ]  # fmt: skip
  status, err = command(export, *flags)
  assert status == 0, err
  card = (out / 'README.md').read_text()
  assert '| RR | 0.5000 | 0.5000 to 0.5000 | 1 |' in card and '# me/mine' in card
  commit = hub.add('me/mine', {path.name: path.read_bytes() for path in out.iterdir()})
  prompt = load_prompt(f'me/mine@{commit}')
  assert prompt.meta['backbone'] == 'somebody/tiny'
  again = f'--out={tmp_path}/again', '--format=sentence-transformers'
  status, err = command(export, '--from=me/mine', f'--backbone={root}/backbone', *again)
  assert status == 0 and load_prompt(tmp_path / 'again').meta == prompt.meta, err


def test_the_base_model_of_an_adapter_is_checked(material, hub, command, tmp_path):
  root = material['bert']
  tiny = {path.name: path.read_bytes() for path in (root / 'backbone').iterdir()}
  hub.add('somebody/tiny', tiny)
  hub.add('somebody/cousin', tiny | {'model.safetensors': _other_weights(root)})

  def run(name):
    out = tmp_path / f'{len(list(tmp_path.iterdir()))}'
    status, err = command(
      export, f'--from={root}/tied.npz', f'--backbone={root}/backbone', f'--out={out}',
      '--format=peft', f'--base_model={name}',
    )  # fmt: skip
    assert out.exists() == (status == 0)
    return status, err

  status, err = run('somebody/cousin')
  assert status == 0 and '--base_model=somebody/cousin' in err and 'not compared' in err
  for name in ('tiny', 'cousin'):
    huggingface_hub.snapshot_download(f'somebody/{name}')
  status, err = run('somebody/tiny')
  assert status == 0 and '--base_model' not in err, err
  status, err = run('somebody/cousin')
  assert status == 2 and named_in(err, '--base_model=somebody/cousin'), err


def _other_weights(root):
  tensors = safetensors.numpy.load_file(root / 'backbone' / 'model.safetensors')
  return safetensors.numpy.save({name: array + 1 for name, array in tensors.items()})
