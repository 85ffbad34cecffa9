"""LoRA against numpy, and against PyTorch and peft (tests/golden/make_lora_golden.py)."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from dprjax.exports import prompt_folders as peft
from dprjax.models import adapter as adapters
from dprjax.models import artifact, encoder, hub
from dprjax.models.adapter import stack
from dprjax.models.adapters import lora
from dprjax.models.adapters.lora import Lora
from dprjax.training import dual_encoder
from dprjax.training.method import Parts
from tests import reference
from tests.options import check_options, with_options
from tests.peft_files import lora_prompt
from tests.refusals import refused

BERT = ('attention/key', 'attention/output', 'attention/query', 'attention/value')
META = {
  'format': artifact.FORMAT,
  'version': artifact.VERSION,
  'kind': 'lora',
  'backbone': 'tiny',
  'backbone_sha256': 'a' * 64,
  'tokenizer_sha256': 'b' * 64,
  'pooling': 'mean',
  'normalize': True,
  'temperature': 0.05,
  'query_max_length': 8,
  'passage_max_length': 16,
  'dprjax_version': '0.1.0',
}

# The golden files of encoders, and the prefix of names in them.
FILES = {
  **{name: (name, '3/') for name in ('bert', 'roberta', 'xlm-roberta')},
  **{name: (f'family_{name}', '') for name in ('modernbert', 'distilbert', 'electra', 'mpnet')},
  **{name: (f'family_{name}', '') for name in ('gte', 'nomic')},
  't5': ('family_t5-gated', ''),
  **{name: (f'llama_{name}', '') for name in ('eurobert', 'gemma3', 'llama', 'mistral')},
  **{name: (f'llama_{name}', '') for name in ('qwen2', 'qwen3')},
}

encode = jax.jit(encoder.encode, static_argnames='config')


def random(config, rank, targets, seed=0, std=1.0):
  """An adapter large enough to matter."""
  draw, sizes = np.random.default_rng(seed), adapters.sizes(config)
  a, b = {}, {}
  for name in targets:
    shape = config.num_layers, sizes[f'{name}/in'], rank
    a[name] = std * draw.standard_normal(shape, np.float32)
    shape = config.num_layers, rank, sizes[f'{name}/out']
    b[name] = std * draw.standard_normal(shape, np.float32)
  return Lora(a, b, 1.5 / rank)


def batch():
  tokens = np.random.default_rng(2).integers(1, 50, (3, 6)).astype(np.int32)
  mask = np.arange(6)[None] < np.array([[6], [4], [5]])
  return tokens, mask


def states(model, adapter):
  config, params = model
  tokens, mask = batch()
  return np.asarray(encode(config, params, tokens, mask, adapter=adapter))


def apart(model, adapter):
  """States in float64 of numpy, W + scale A B in place of each W."""
  config, params = model
  params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
  for name, a in adapter.a.items():
    half, last = name.split('/')
    change = adapter.scale * np.einsum('lir,lro->lio', a, adapter.b[name], dtype=np.float64)
    params['layers'][half][last]['kernel'] += change
  return reference.encode(config, params, *batch())


@pytest.mark.slow
def test_equals_numpy_shared_merged_and_in_a_bank(small):
  """Adapters of a bank differ in rank and modules."""
  _, mask = batch()
  given = [
    random(small[0], 3, (*BERT, 'mlp/up', 'mlp/down')),
    None,
    random(small[0], 5, ('attention/query', 'mlp/down'), seed=1),
  ]
  bank = stack(given)
  assert bank.a['attention/query'].shape == (3, 3, 32, 5) and len(bank.a) == 6
  mixed = states(small, bank.choose(jnp.arange(3)))
  for row, adapter in enumerate(given):
    own = states(small, adapter)
    np.testing.assert_allclose(mixed[row], own[row], atol=2e-5)
    if adapter is not None:
      np.testing.assert_allclose(own[mask], apart(small, adapter)[mask], atol=2e-5)
      merged = lora.merge(*small, adapter)
      np.testing.assert_allclose(states(merged, None)[mask], own[mask], atol=2e-5)


@pytest.mark.slow
def test_training_begins_at_the_frozen_encoder(small):
  config = with_options(
    prompt__kind='lora', prompt__length=4, lora__targets=('attention/(query|value)', 'mlp/.*')
  )
  check_options(config)
  params = dual_encoder.init_adapter(config, small[0], Parts({}), jax.random.key(0))
  names = {f'{half}/{last}' for half, own in params['prompt'].items() for last in own}
  assert names == {'attention/query', 'attention/value', 'mlp/up', 'mlp/down'}
  a = np.asarray(params['prompt']['mlp']['down']['a'])
  assert a.shape == (3, 64, 4) and 0.12 < np.abs(a).max() <= 1 / 8
  adapter = dual_encoder.expand(config, small[0], params)['query']
  assert adapter.scale == 16 / 4
  np.testing.assert_array_equal(states(small, adapter), states(small, None))


def test_options_that_mean_nothing_are_refused(small):
  config = with_options(prompt__kind='lora', prompt__length=4, lora__targets=('mlp/gate',))
  with refused('config.lora.targets', 'mlp/gate', 'mlp/up'):
    dual_encoder.init_adapter(config, small[0], Parts({}), jax.random.key(0))


@pytest.mark.slow
def test_a_file_of_another_backbone(small, tmp_path):
  arrays, _ = lora._export(with_options(prompt__length=3), random(small[0], 3, ('mlp/up',)))
  meta = META | {'rank': 3, 'alpha': 16.0, 'targets': ['mlp/up']}
  path = tmp_path / 'lora.npz'
  artifact.save_prompt(path, artifact.Prompt(meta, arrays))
  read = artifact.load_prompt(path)
  assert read.adapters('passage')[0].scale == 16 / 3
  for change in ({'intermediate_size': 48}, {'num_layers': 2}):
    config = type(small[0])(**(vars(small[0]) | change))
    with refused(path, 'mlp/up'):
      artifact.check_prompt(read, config, 'a' * 64, 'b' * 64)
  for change in ({'rank': 2}, {'targets': ['mlp/gate']}, {'targets': ['../x']}, {'alpha': 0.0}):
    with refused('x.npz'):
      artifact.check_content(artifact.Prompt(meta | change, arrays, 'x.npz'))
  gate = {name.replace('up', 'gate'): array for name, array in arrays.items()}
  with refused('x.npz', 'mlp/gate'):
    prompt = artifact.Prompt(meta | {'targets': ['mlp/gate']}, gate, 'x.npz')
    artifact.check_prompt(prompt, small[0], 'a' * 64, 'b' * 64)


@pytest.fixture
def theirs(golden, tmp_path):
  """``theirs(model)``: the golden arrays, the backbone, and the folder that peft saved."""

  def load(name, config=None, tensors=None):
    file, start = FILES[name]
    base, own = golden(file), golden('lora_models')
    weights = {
      key.removeprefix(f'{start}weights/'): value.astype(np.float32)
      for key, value in base.items()
      if key.startswith(f'{start}weights/')
    }
    folder, adapter = tmp_path / name, tmp_path / f'{name}-lora'
    for path in (folder, adapter):
      path.mkdir(exist_ok=True)
    safetensors.numpy.save_file(weights, folder / 'model.safetensors')
    (folder / 'config.json').write_text(base[f'{start}config'].item())
    stored = {
      key.removeprefix(f'{name}/weights/'): value.astype(np.float32)
      for key, value in own.items()
      if key.startswith(f'{name}/weights/')
    }
    safetensors.numpy.save_file(
      {key: value for key, value in (stored | (tensors or {})).items() if value is not None},
      adapter / 'adapter_model.safetensors',
    )
    settings = json.loads(own[f'{name}/config'].item()) | (config or {})
    (adapter / 'adapter_config.json').write_text(json.dumps(settings))
    return base | own, hub.load_backbone(folder), adapter

  return load


def vectors(states, mask):
  """Vectors of unit length, as users compare them; the states of some models magnify rounding."""
  pooled = reference.pool(np.asarray(states, np.float64), mask, 'mean', False)
  return pooled / np.linalg.norm(pooled, axis=1, keepdims=True)


def hidden(arrays, backbone, adapter):
  return encode(backbone.config, backbone.params, arrays['tokens'], arrays['mask'], adapter=adapter)


@pytest.mark.slow
@pytest.mark.parametrize('name', FILES)
def test_states_are_those_of_peft_and_so_is_the_file(name, theirs, tmp_path):
  """In each family, by the names of its modules in transformers."""
  arrays, backbone, folder = theirs(name)
  prompt = lora_prompt(folder, backbone.config, META)
  (adapter,) = prompt.adapters('query')
  mask, expected = arrays['mask'], vectors(arrays[f'{name}/hidden'], arrays['mask'])
  found = vectors(hidden(arrays, backbone, adapter), mask)
  np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)
  assert np.abs(found - vectors(hidden(arrays, backbone, None), mask)).max() > 0.01
  # And back, and forth again.
  out = tmp_path / 'back'
  peft.write_adapters(out, prompt, backbone.config, None)
  again = lora_prompt(out, backbone.config, META)
  found = vectors(hidden(arrays, backbone, again.adapters('query')[0]), mask)
  np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)
  written = safetensors.numpy.load_file(out / peft.WEIGHTS)
  stored = {key for key in arrays if key.startswith(f'{name}/weights/')}
  assert stored <= {f'{name}/weights/{key}' for key in written}
  if name == 'bert':
    assert again.meta == prompt.meta
    for key, value in written.items():
      np.testing.assert_array_equal(value, arrays[f'bert/weights/{key}'])


@pytest.mark.slow
@pytest.mark.parametrize('name', ['bert', 'modernbert'])
def test_gradients_are_those_of_peft(name, theirs):
  """ModernBERT has queries, keys and values in one module, and the gate and inputs of the MLP."""
  arrays, backbone, folder = theirs(name)
  (adapter,) = lora_prompt(folder, backbone.config, META).adapters('query')
  mask, expected = arrays['mask'], arrays[f'{name}/hidden']
  weights = np.random.default_rng(9).standard_normal(expected.shape).astype(np.float32)

  def loss(matrices):
    found = hidden(arrays, backbone, Lora(*matrices, adapter.scale))
    return jnp.sum(found * weights * mask[:, :, None].astype(np.float32))

  gradients = jax.grad(loss)((adapter.a, adapter.b))
  seen = 0
  for module in lora.modules(backbone.config):
    for key, by_name in zip('AB', gradients, strict=True):
      found = f'{name}/gradients/base_model.model.{module.module}.lora_{key}.weight'
      if found in arrays:
        own = [np.asarray(by_name[one])[module.layer].T for one in module.names]
        own = sum(own) if key == 'A' else np.concatenate(own)  # one A for all
        scale = np.abs(arrays[found]).max()
        np.testing.assert_allclose(own / scale, arrays[found] / scale, atol=1e-4, err_msg=found)
        seen += 1
  assert seen == sum(key.startswith(f'{name}/gradients/') for key in arrays)


@pytest.mark.filterwarnings('ignore::FutureWarning')
@pytest.mark.parametrize('name', FILES)
def test_peft_gives_the_same_states(name, theirs, tmp_path):
  """With peft itself, which reads the written adapter."""
  torch, theirs_peft = pytest.importorskip('torch'), pytest.importorskip('peft')
  transformers = pytest.importorskip('transformers')
  arrays, backbone, _ = theirs(name)
  tokens, mask = arrays['tokens'], arrays['mask']
  names = sorted({one for _, own in adapters.projections(backbone.config) for one in own})
  adapter = random(backbone.config, 2, names[1:], std=0.1)
  arrays_of, meta = lora._export(with_options(prompt__length=2, lora__alpha=1.5), adapter)
  out = tmp_path / 'ours'
  peft.write_adapters(out, artifact.Prompt(META | meta, arrays_of), backbone.config, None)
  kind = transformers.T5EncoderModel if name == 't5' else transformers.AutoModel
  model = kind.from_pretrained(backbone.path, attn_implementation='eager')
  model = theirs_peft.PeftModel.from_pretrained(model, out).eval()
  with torch.no_grad():
    expected = model(
      input_ids=torch.tensor(tokens).long(), attention_mask=torch.tensor(mask).long()
    ).last_hidden_state.numpy()
  found = vectors(hidden(arrays, backbone, adapter), mask)
  np.testing.assert_allclose(found, vectors(expected, mask), rtol=0, atol=2e-6)
