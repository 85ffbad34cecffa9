"""Llama and its relatives against PyTorch transformers (tests/golden/make_llama_golden.py)."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from dprjax.exports import prompt_folders as adapters
from dprjax.models import artifact, encoder, hub, model_folders, rotary
from dprjax.models import family as families
from dprjax.models import pooling as poolings
from dprjax.models.adapters.prefix import ADAPTER as PREFIX
from dprjax.models.adapters.prefix import Prefix, keys_and_values
from dprjax.models.encoder_config import EncoderOptions
from dprjax.models.families import llama
from dprjax.training import dual_encoder
from tests.models.test_artifact import META
from tests.refusals import refused

QUICK = ('qwen3',)
SLOW = (
  'embeddinggemma',
  'llama',
  'llama-yarn',
  'llama-longrope',
  'mistral',
  'mistral-both',
  'qwen2',
  'gemma3',
  'eurobert',
)
ALL = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
DYNAMIC = {'rope_type': 'dynamic', 'factor': 4.0, 'original_max_position_embeddings': 8}
LONGROPE = {'rope_type': 'longrope', 'short_factor': [1, 2], 'long_factor': [3, 4]}
encode = jax.jit(encoder.encode, static_argnames=('config', 'options'))


@pytest.fixture
def load(write_golden):
  """The golden arrays of a name and the backbone in them."""

  def load(name):
    arrays, folder = write_golden(f'llama_{name}')
    return arrays, hub.load_backbone(folder)

  return load


@pytest.mark.parametrize('name', ALL)
def test_equals_transformers(name, load):
  arrays, backbone = load(name)
  rows, lengths = len(arrays['mask']), arrays['mask'].sum(axis=1)
  tokens, mask = (  # padded on the right, and on the left
    np.stack([*padded, *map(np.roll, padded, padded.shape[1] - lengths)])
    for padded in (arrays['tokens'], arrays['mask'])
  )

  def states(prompt, shift):
    adapter = None if prompt is None else Prefix(prompt, shift=shift)
    return encode(backbone.config, backbone.params, tokens, mask, adapter=adapter)

  def loss(prompt):
    hidden = states(prompt, 0)
    first = hidden[:rows]
    weights = np.cos(np.arange(first.size, dtype=np.float32)).reshape(first.shape)
    return jnp.sum(first * weights * mask[:rows, :, None].astype(np.float32)), hidden

  prompt = arrays['prompt'].astype(np.float32)
  gradient, prefixed = jax.jit(jax.grad(loss, has_aux=True))(prompt)
  outputs = {
    'plain': states(None, 0),
    'prefix': prefixed,
    'shifted': states(prompt, prompt.shape[2]),
  }
  for case, hidden in outputs.items():
    right, left = hidden[:rows], hidden[rows:]
    np.testing.assert_allclose(
      right[mask[:rows]], arrays[f'{case}/hidden'][mask[:rows]], rtol=0, atol=1e-5
    )
    for pooling in ('lasttoken', 'mean'):
      vectors, others = (
        jax.jit(poolings.find(pooling).pool)(side, there)
        for side, there in ((right, mask[:rows]), (left, mask[rows:]))
      )
      np.testing.assert_allclose(vectors, others, rtol=0, atol=1e-5)
  for case, there in (('plain', 'left'), ('prefix', 'left-prefix')):
    left = outputs[case][rows:][mask[rows:]]
    np.testing.assert_allclose(left, arrays[f'{there}/hidden'][mask[rows:]], rtol=0, atol=1e-5)
  expected = arrays['prefix/gradient']
  np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
  # The cases differ by far more than the tolerance.
  for case in ('plain', 'shifted'):
    assert np.abs(outputs[case] - outputs['prefix'])[mask].max() > 0.1


def old_keys(config):
  """The same shape as versions of transformers before 5 write it."""
  old = {key: value for key, value in config.items() if key not in ('rope_parameters',)}
  ropes = config['rope_parameters']
  if config['model_type'] == 'gemma3_text':
    full = dict(ropes['full_attention'])
    old['rope_local_base_freq'] = ropes['sliding_attention']['rope_theta']
    ropes = full
  ropes = dict(ropes)
  old['rope_theta'] = ropes.pop('rope_theta')
  ropes['type'] = ropes.pop('rope_type')
  old['rope_scaling'] = None if ropes['type'] == 'default' else ropes
  return old


@pytest.mark.parametrize('name', QUICK + SLOW)
def test_a_shape_is_read_from_old_and_new_keys_and_written(name, golden):
  config = json.loads(golden(f'llama_{name}')['config'].item())
  family = families.find(config['model_type'])
  shape = family.read_config(config)
  assert family.read_config(old_keys(config)) == shape
  written = json.loads(json.dumps(family.write_config(shape)))
  assert family.read_config(config | written) == shape
  assert family.read_config(written | {'model_type': config['model_type']}) == shape


@pytest.mark.parametrize(
  ('name', 'change', 'named'),
  [
    ('llama', {'rope_parameters': {'rope_type': 'spiral', 'factor': 2}}, ('spiral', 'llama3')),
    ('llama', {'rope_parameters': {'rope_type': 'longrope', 'factor': 2}}, ('short_factor',)),
    ('llama', {'rope_parameters': LONGROPE}, ('short_factor', '2')),
    (
      'llama',
      {'rope_parameters': {**DYNAMIC, 'partial_rotary_factor': 0.5}},
      ('partial_rotary_factor',),
    ),
    ('gemma3', {'attn_logit_softcapping': 30.0}, ('attn_logit_softcapping',)),
    ('gemma3', {'layer_types': ['chunked_attention'] * 3}, ('chunked_attention',)),
    ('qwen3', {'model_type': 'qwen3_moe'}, ('qwen3_moe', 'qwen3', 'llama')),
    ('qwen3', {'auto_map': {'AutoModel': 'modeling.Other'}}, ('auto_map', 'modeling.Other')),
  ],
)
def test_what_is_not_supported_is_named(name, change, named, golden, tmp_path):
  config = json.loads(golden(f'llama_{name}')['config'].item()) | change
  (tmp_path / 'config.json').write_text(json.dumps(config))
  with refused(f'{tmp_path}/config.json', *named):
    hub.read_shape(tmp_path)


def test_texts_have_at_most_the_original_positions_if_others_turn_otherwise(golden):
  config = json.loads(golden('llama_llama')['config'].item())
  family, plain = families.find('llama'), {'rope_type': 'default', 'rope_theta': 500.0}
  shape = family.read_config(config | {'rope_parameters': plain | DYNAMIC})
  usual = family.read_config(config | {'rope_parameters': plain})
  for one, other in zip(shape.rope.frequencies(8), usual.rope.frequencies(8), strict=True):
    np.testing.assert_array_equal(one, other)
  assert (shape.max_tokens, usual.max_tokens) == (8, 64)
  assert family.write_config(shape)['rope_scaling'] == DYNAMIC


def test_the_first_state_of_a_causal_backbone_is_no_vector(load):
  _, backbone = load('qwen3')
  assert backbone.spec.pooling == 'lasttoken'
  config = ml_collections.ConfigDict({'pooling': 'cls'})
  with refused('config.pooling', 'qwen3', 'lasttoken'):
    dual_encoder.check_pooling(config, backbone.config)


@pytest.mark.slow
@pytest.mark.parametrize('name', QUICK + SLOW)
def test_transformers_loads_what_was_saved(name, load, tmp_path, torch):
  import transformers

  arrays, backbone = load(name)
  base = {'pad_token_id': 0}
  model_folders.save_backbone(tmp_path / 'saved', backbone.config, backbone.params, hf_config=base)
  model = transformers.AutoModel.from_pretrained(tmp_path / 'saved', attn_implementation='sdpa')
  model.double()  # float32 differs between processors
  mask = arrays['mask']
  with torch.no_grad():
    hidden = model(
      torch.from_numpy(arrays['tokens']).long(), torch.from_numpy(mask).long()
    ).last_hidden_state.numpy()
  np.testing.assert_allclose(hidden[mask], arrays['plain/hidden'][mask], rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['qwen3', 'llama-yarn', 'gemma3'])
def test_a_prompt_that_begins_as_a_text_is_that_text(name, load):
  arrays, backbone = load(name)
  config, params = wide(backbone.config), backbone.params
  text, tokens = arrays['tokens'][0, :5], arrays['tokens'][:1, 5:12]
  both = np.concatenate([text[None], tokens], axis=1)
  whole = encode(config, params, both, both >= 0)[:, len(text) :]
  for shift in (False, True):
    settings = ml_collections.ConfigDict({'prompt': {'shift_positions': shift}})
    start = PREFIX.training.of_text(settings, config, params, text)['prefix']
    found = encode(
      config, params, tokens, tokens >= 0, adapter=Prefix(start, shift=len(text) * shift)
    )
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-5)
  assert np.abs(encode(config, params, tokens, tokens >= 0) - whole).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize('name', ['eurobert', 'embeddinggemma'])
def test_twice_the_keys_and_values_of_a_text_are_that_text(name, load):
  """Where tokens see all others, a second copy of each key changes no weighted mean."""
  arrays, backbone = load(name)
  config, text = wide(backbone.config), arrays['tokens'][0, :9]
  start = Prefix(keys_and_values(config, backbone.params, text))
  plain, found = (
    encode(config, backbone.params, text[None], text[None] >= 0, adapter=adapter)
    for adapter in (None, start)
  )
  np.testing.assert_allclose(found, plain, rtol=0, atol=1e-5)


def wide(config):
  """The same shape with windows that the golden texts fit into."""
  return dataclasses.replace(config, reach=40 * bool(config.reach))


def prompt_of(backbone, vectors, shift=False, longest=13):
  meta = META | {
    'backbone_sha256': backbone.sha256,
    'query_max_length': 8,
    'passage_max_length': longest,
    'shift_positions': shift,
  }
  return artifact.Prompt(meta, {'prefix': vectors}, 'p.npz')


def test_a_prompt_that_a_window_would_hide_in_peft_is_refused(load, tmp_path):
  arrays, backbone = load('embeddinggemma')
  vectors = arrays['prompt'].astype(np.float32)
  with refused('p.npz', 'PEFT', str(backbone.config.reach + 1)):
    adapters.write_adapters(tmp_path, prompt_of(backbone, vectors), backbone.config, None)
  # As long as the window is.
  config = wide(backbone.config)
  adapters.write_adapters(tmp_path, prompt_of(backbone, vectors, longest=36), config, None)
  with refused('p.npz', 'PEFT', '41'):
    adapters.write_adapters(tmp_path, prompt_of(backbone, vectors, longest=37), config, None)


def test_a_norm_and_its_gradient_are_those_of_the_definition():
  shape = llama.Config('llama', 5, 8, 1, 1, 1, 8, 8, 8, rotary.Rope(1e4), norm_offset=1.0)
  rng = np.random.default_rng(0)
  x, scale, weights = (
    jnp.asarray(rng.standard_normal(size), jnp.float32) for size in ((2, 3, 8), 8, (2, 3, 8))
  )

  def ours(x, scale):
    return jnp.sum(weights * llama.RMSNorm(shape).apply({'params': {'scale': scale}}, x))

  def plain(x, scale):
    mean = jnp.mean(x * x, axis=-1, keepdims=True)
    return jnp.sum(weights * x / jnp.sqrt(mean + 1e-6) * (1 + scale[None, None]))

  for one, other in zip(
    *(jax.jit(jax.grad(norm, (0, 1)))(x, scale) for norm in (ours, plain)), strict=True
  ):
    np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['qwen3', 'embeddinggemma', 'llama', 'mistral', 'gemma3'])
@pytest.mark.filterwarnings('ignore:.*gradient_checkpointing:FutureWarning')
def test_peft_computes_the_same_under_a_prompt(name, load, tmp_path, torch):
  peft = pytest.importorskip('peft', reason='PEFT is an oracle here: pip install peft')
  import transformers

  arrays, backbone = load(name)
  backbone = dataclasses.replace(backbone, config=wide(backbone.config))
  model_folders.save_backbone(
    tmp_path / 'saved', backbone.config, backbone.params, hf_config={'pad_token_id': 0}
  )
  vectors, mask = arrays['prompt'].astype(np.float32), arrays['mask']
  length = vectors.shape[2]
  tokens, seen = torch.from_numpy(arrays['tokens']).long(), torch.from_numpy(mask).long()
  # In float64: the conversion differs, not the order of sums.
  layers = torch.from_numpy(vectors).double().transpose(2, 3)[:, :, None]
  layers = layers.expand(-1, -1, len(mask), -1, -1, -1)
  for shift in (False, True):
    folder = tmp_path / f'adapter-{shift}'
    folder.mkdir()
    adapters.write_adapters(folder, prompt_of(backbone, vectors, shift), backbone.config, None)
    model = transformers.AutoModel.from_pretrained(
      tmp_path / 'saved', attn_implementation='eager', dtype=torch.float64
    )
    with torch.no_grad():
      expected = model(
        tokens,
        torch.cat([torch.ones(len(mask), length, dtype=torch.long), seen], dim=1),
        position_ids=torch.arange(mask.shape[1])[None] + length * shift,
        past_key_values=transformers.DynamicCache([(keys, values) for keys, values in layers]),
      ).last_hidden_state.numpy()
      found = peft.PeftModel.from_pretrained(model, folder)(input_ids=tokens, attention_mask=seen)
    largest = np.abs(expected[mask]).max()
    np.testing.assert_allclose(
      found.last_hidden_state[mask], expected[mask], rtol=0, atol=2e-6 * largest
    )
    prompt = Prefix(vectors, shift=length * shift)
    hidden = encode(backbone.config, backbone.params, arrays['tokens'], mask, adapter=prompt)
    np.testing.assert_allclose(hidden[mask], expected[mask], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['qwen3', 'gemma3'])
def test_bfloat16_is_as_near_to_float32_as_in_transformers(name, load):
  arrays, backbone = load(name)
  mask, options = arrays['mask'], EncoderOptions(jnp.dtype('bfloat16'))
  hidden = encode(backbone.config, backbone.params, arrays['tokens'], mask, options=options)
  ours, theirs = (
    np.abs(states - arrays['plain/hidden'])[mask].mean()
    for states in (hidden, arrays['bfloat16/hidden'])
  )
  assert 1e-3 < ours < 1.2 * theirs
