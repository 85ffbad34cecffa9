"""Further families against PyTorch transformers (tests/golden/make_families_golden.py)."""

import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from dprjax.base import mesh as meshes
from dprjax.base import tree
from dprjax.exports import prompt_folders
from dprjax.models import encoder, heads, hub, model_folders, scratch
from dprjax.models import family as families
from dprjax.models.adapters.prefix import Prefix
from dprjax.models.encoder_config import EncoderOptions
from dprjax.models.rotary import Rope
from tests.refusals import refused

QUICK = ('modernbert',)
SLOW = ('nomic', 't5-gated', 'mpnet', 'modernbert-biases', 'gte', 'gte-no-types', 't5')
SLOW += ('distilbert', 'electra')
LLAMAS = ('llama_llama', 'llama_mistral', 'llama_mistral-both', 'llama_qwen2', 'llama_qwen3')
LLAMAS += ('llama_gemma3', 'llama_embeddinggemma', 'llama_eurobert')
ALL = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
encode = jax.jit(encoder.encode, static_argnames=('config', 'options'))


@pytest.fixture
def load(write_golden):
  """The golden arrays of a name and the backbone in them, with its masked-LM head."""

  def load(name, head='mlm'):
    kinds = ('weights/',) if head == 'mlm' else ('weights/', 'classifier/')
    arrays, folder = write_golden(f'family_{name}', kinds=kinds, folder=head)
    return arrays, hub.load_backbone(folder, heads=() if name.startswith('t5') else (head,))

  return load


def prefix_of(vectors):
  return None if vectors is None else Prefix(jnp.asarray(vectors))


def shape_of(arrays):
  config = json.loads(arrays['config'].item())
  return config, families.find(config['model_type'])


@pytest.mark.parametrize('name', ALL)
def test_equals_transformers(name, load):
  arrays, backbone = load(name)
  prompt = arrays['prompt'].astype(np.float32)

  def states(prompt, tokens, mask, types):
    return encode(
      backbone.config, backbone.params, tokens, mask, adapter=prefix_of(prompt), token_types=types
    )

  def loss(prompt, tokens, mask, types):
    hidden = states(prompt, tokens, mask, types)
    weights = np.cos(np.arange(hidden.size, dtype=np.float32)).reshape(hidden.shape)
    return jnp.sum(hidden * weights * mask[:, :, None].astype(np.float32)), hidden

  gradient = jax.jit(jax.grad(loss, has_aux=True))
  inputs = arrays['tokens'], arrays['mask'], arrays.get('token_types')
  mask = arrays['mask']
  for side in ('', 'left-') if 'left-plain/hidden' in arrays else ('',):
    turned = [one[:, ::-1] if side and one is not None else one for one in inputs]
    there, (found, prefixed) = turned[1], gradient(prompt, *turned)
    for case, hidden in (('plain', states(None, *turned)), ('prefix', prefixed)):
      np.testing.assert_allclose(
        hidden[there],
        arrays[f'{side}{case}/hidden'][there],
        rtol=1e-5,  # processors round differently: T5 has 1.1e-5 at .83 on one of them
        atol=1e-5,
        err_msg=f'{side}{case}',
      )
    if not side:
      expected = arrays['gradient']
      np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
  # The cases differ by far more than the tolerance.
  assert np.abs(arrays['plain/hidden'] - arrays['prefix/hidden'])[mask].max() > 0.1


@pytest.mark.parametrize('name', [name for name in ALL if 't5' not in str(name)])
def test_heads_equal_transformers(name, load):
  arrays, backbone = load(name)
  mask, types = arrays['mask'], arrays.get('token_types')
  logits = jax.jit(heads.mlm_logits, static_argnums=0)(
    backbone.config,
    backbone.heads['mlm'].params,
    backbone.params['embeddings']['word']['embedding'],
    jnp.asarray(arrays['plain/hidden']),
  )
  np.testing.assert_allclose(logits[mask], arrays['logits'][mask], rtol=0, atol=1e-5)
  fresh = jax.eval_shape(lambda: heads.init_mlm_head(backbone.config, jax.random.key(0)))
  assert jax.tree.map(np.shape, fresh) == jax.tree.map(np.shape, backbone.heads['mlm'].params)
  arrays, backbone = load(name, 'classifier')
  head = backbone.heads['classifier'].params
  scores = jax.jit(heads.score_pairs, static_argnums=0)(
    backbone.config, backbone.params, head, arrays['tokens'], mask, types
  )
  np.testing.assert_allclose(scores, arrays['scores'][:, 0], rtol=0, atol=1e-5)
  fresh = jax.eval_shape(lambda: heads.init_classifier(backbone.config, jax.random.key(0)))
  assert jax.tree.map(np.shape, fresh) == jax.tree.map(np.shape, head)


@pytest.mark.parametrize('name', QUICK + SLOW)
def test_its_folder_round_trips(name, load, tmp_path):
  arrays, backbone = load(name)
  model_folders.save_backbone(
    tmp_path / 'saved', backbone.config, backbone.params, heads=backbone.heads
  )
  saved = hub.load_backbone(tmp_path / 'saved', heads=tuple(backbone.heads))
  assert saved.config == backbone.config and saved.sha256 == backbone.sha256
  for key, leaf in tree.flatten(backbone.params).items():
    np.testing.assert_array_equal(tree.flatten(saved.params)[key], leaf, err_msg=key)
  with safetensors.safe_open(tmp_path / 'saved' / 'model.safetensors', 'np') as file:
    names = set(file.keys())
  assert names == {key.removeprefix('weights/') for key in arrays if key.startswith('weights/')}


@pytest.mark.slow
@pytest.mark.parametrize('name', QUICK + SLOW)
def test_transformers_loads_what_was_saved(name, load, tmp_path, torch):
  import transformers

  arrays, backbone = load(name)
  model_folders.save_backbone(tmp_path / 'saved', backbone.config, backbone.params)
  kind = transformers.T5EncoderModel if name.startswith('t5') else transformers.AutoModel
  mask, types = arrays['mask'], arrays.get('token_types')
  more = {} if types is None else {'token_type_ids': torch.from_numpy(types).long()}
  hidden = []
  for folder in (backbone.path, tmp_path / 'saved'):
    model = kind.from_pretrained(folder, attn_implementation='eager')
    with torch.no_grad():
      states = model(
        torch.from_numpy(arrays['tokens']).long(), torch.from_numpy(mask).long(), **more
      ).last_hidden_state.numpy()
    hidden.append(states[mask])
  np.testing.assert_array_equal(*hidden)
  # The rounding of PyTorch in float32 is up to 3e-6 (MPNet, beside float64).
  np.testing.assert_allclose(hidden[1], arrays['plain/hidden'][mask], rtol=0, atol=5e-6)


@pytest.mark.parametrize('name', [f'family_{name}' for name in QUICK + SLOW] + [*LLAMAS])
def test_fresh_parameters_are_those_of_the_checkpoint(name, golden):
  config, family = shape_of(golden(name))
  devices = meshes.make_mesh({'data': 2, 'fsdp': 2, 'model': 2})
  for shape in (family.read_config(config),):
    params = tree.flatten(
      jax.eval_shape(lambda key, shape=shape: scratch.init_encoder(shape, key), jax.random.key(0))
    )
    stored = {}
    for tensor in family.tensors(shape):
      rows = tensor.shape[0] // len(tensor.paths), *tensor.shape[1:]
      size = rows[::-1] if tensor.kernel else rows
      count = () if tensor.layer is None else (tensor.num_layers,)
      stored |= {'/'.join(path): (*count, *size) for path in tensor.paths}
    assert {name: leaf.shape for name, leaf in params.items()} == stored
    sharded = {f'backbone/{name}': leaf for name, leaf in params.items()}
    found = meshes.param_shardings(devices, sharded, family.sharding)
    for key, sharding in found.items():
      if key.endswith('kernel') and '/layers/' in key:
        assert 'fsdp' in sharding.spec, key


def test_modernbert_is_read_from_old_keys(golden):
  config, family = shape_of(golden('family_modernbert'))
  new = config | {
    'layer_types': ['full_attention', *['sliding_attention'] * 2, 'full_attention'],
  }
  old = {key: value for key, value in config.items() if key != 'rope_parameters'} | {
    'global_attn_every_n_layers': 3,
    'global_rope_theta': 1000.0,
    'local_rope_theta': 30.0,
  }
  assert family.read_config(old) == family.read_config(new)
  shape = family.read_config(old)
  assert shape.reach == 3 and shape.windowed == (False, True, True, False)
  assert (shape.rope, shape.window_rope) == (Rope(1000.0), Rope(30.0))


def test_nomic_is_read_from_the_keys_of_its_remote_code(golden):
  config, family = shape_of(golden('family_nomic'))
  old = {
    'model_type': 'nomic_bert',
    'auto_map': {'AutoModel': 'modeling_hf_nomic_bert.NomicBertModel'},
    'vocab_size': 41,
    'n_embd': 24,
    'n_layer': 2,
    'n_head': 3,
    'n_inner': 37,
    'n_positions': 30,
    'layer_norm_epsilon': 1e-12,
    'activation_function': 'swiglu',
    'rotary_emb_base': 50,
    'rotary_emb_fraction': 1.0,
    'rotary_emb_interleaved': False,
    'prenorm': False,
    'type_vocab_size': 2,
    'qkv_proj_bias': False,
  }
  assert family.read_config(old) == family.read_config(config)
  # Beyond the trained positions its base would grow with the text.
  scaled = old | {'rotary_scaling_factor': 2.0, 'max_trained_positions': 20}
  assert family.read_config(scaled).max_tokens == 20


@pytest.mark.parametrize(
  ('name', 'change', 'match'),
  [
    ('modernbert', {'tie_word_embeddings': False}, 'tie_word_embeddings'),
    ('nomic', {'moe_every_n_layers': 2}, 'moe_every_n_layers'),
    ('gte', {'logn_attention_scale': True}, 'logn_attention_scale'),
    ('t5', {'feed_forward_proj': 'gated-snake'}, 'feed_forward_proj'),
    ('distilbert', {'dim': 25}, '25'),
  ],
)
def test_what_is_not_supported_is_named(name, change, match, golden, tmp_path):
  config, _ = shape_of(golden(f'family_{name}'))
  (tmp_path / 'config.json').write_text(json.dumps(config | change))
  with refused(f'{tmp_path}/config.json', match):
    hub.read_shape(tmp_path)


def test_condensers_head_is_refused_where_last_states_are_normed(golden):
  for name, supported in (('modernbert', False), ('t5', False), ('nomic', True), ('mpnet', True)):
    config, family = shape_of(golden(f'family_{name}'))
    shape = family.read_config(config)
    if supported:
      init = functools.partial(heads.init_condenser_head, shape)
      assert jax.eval_shape(init, jax.random.key(0))
      continue
    with refused('head_layers'):
      heads.init_condenser_head(shape, jax.random.key(0))


@pytest.mark.slow
@pytest.mark.parametrize(
  'name',
  [
    *(f'family_{name}' for name in QUICK + SLOW if name != 'mpnet'),
    *LLAMAS,
  ],
)
def test_a_folder_of_sentence_transformers_puts_a_prompt_in_front(name, write_golden, torch):
  """Its attention function, in transformers' classes that take no prompt or lose it in a window."""
  pytest.importorskip('sentence_transformers', reason='pip install sentence-transformers')
  import transformers

  code: dict[str, Any] = {}
  exec((pathlib.Path(encoder.__file__).parent / f'{prompt_folders.CODE}.txt').read_text(), code)
  arrays, folder = write_golden(name)
  kind = transformers.T5EncoderModel if 't5' in name else transformers.AutoModel
  model = kind.from_pretrained(folder).eval().double()  # float32 differs between processors
  model.set_attn_implementation('dprjax')
  tokens, mask = (torch.from_numpy(arrays[key]).long() for key in ('tokens', 'mask'))
  more = {}
  if 't5' not in name:
    counted = model.config.model_type in code['COUNTED']
    more['position_ids'] = (
      torch.arange(mask.shape[1]).expand(mask.shape) if counted else (mask.cumsum(1) - 1).clamp(0)
    )
  if 'token_types' in arrays:
    more['token_type_ids'] = torch.from_numpy(arrays['token_types']).long()
  # [L, 2, P, N, D] -> of each layer keys and values [B, N, P, D].
  layers = torch.from_numpy(arrays['prompt'].astype(np.float64)).transpose(2, 3)[:, :, None]
  code['RUNNING'].layers = iter(layers.expand(-1, -1, len(tokens), -1, -1, -1))
  with torch.no_grad():
    hidden = model(input_ids=tokens, attention_mask=mask, **more).last_hidden_state.numpy()
  there = arrays['mask']
  np.testing.assert_allclose(hidden[there], arrays['prefix/hidden'][there], rtol=0, atol=2e-6)


@pytest.mark.parametrize('name', ['modernbert', pytest.param('t5-gated', marks=pytest.mark.slow)])
def test_bfloat16_is_as_near_as_in_transformers(name, load):
  arrays, backbone = load(name)
  mask = arrays['mask']
  found = encode(
    backbone.config,
    jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), backbone.params),
    arrays['tokens'],
    mask,
    token_types=arrays.get('token_types'),
    options=EncoderOptions(dtype=jnp.bfloat16),
  )
  exact = arrays['plain/hidden'][mask]
  ours, theirs = (
    np.sqrt(np.mean(np.square(states[mask] - exact)))
    for states in (np.asarray(found), arrays['bfloat16/hidden'])
  )
  assert ours < 1.5 * theirs
