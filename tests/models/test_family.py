"""A family of backbones of one's own, in one file outside the package."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dprjax import encode, load_backbone
from dprjax.base import extensions, tree
from dprjax.base import mesh as meshes
from dprjax.encoding.embeddings import load_embeddings
from dprjax.models import encoder, model_folders, scratch
from dprjax.models.adapters.prefix import Prefix
from dprjax.models.encoder_config import EncoderOptions
from dprjax.text.texts import read_texts
from dprjax.text.vector_spec import same_length
from tests.refusals import refused
from tests.resuming import export_to, served, train_and_resume, train_small
from tests.toys import rms

TOYS = 'tests.toys.rms,tests.toys.spread'
# Heads of 6 numbers, where the hidden size over the heads is 4.
SHAPE = rms.Config(50, 16, 3, 4, 2, 6, 24)
encode_tokens = jax.jit(encoder.encode, static_argnames=('config', 'options'))


@pytest.fixture(autouse=True)
def extension(monkeypatch):
  monkeypatch.setenv(extensions.VARIABLE, TOYS)


def draw(config, seed=0):
  rng = np.random.default_rng(seed)
  shapes = jax.eval_shape(lambda key: scratch.init_encoder(config, key), jax.random.key(0))
  return jax.tree.map(
    lambda leaf: (0.4 * rng.standard_normal(leaf.shape) + (leaf.ndim == 1)).astype(np.float32),
    shapes,
  )


def reference(config, params, tokens, prefix=None):
  """The states of one text, in float64, from the definitions."""

  def norm(x, scale):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config.layer_norm_eps) * scale

  def turn(x):  # [T, n, D]
    half = config.head_dim // 2
    angle = np.outer(np.arange(len(x)), 100.0 ** -(np.arange(half) / half))
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)

  x = params['embeddings']['word']['embedding'].astype(np.float64)[tokens]
  share = config.num_heads // config.num_kv_heads
  for number in range(config.num_layers):
    layer = jax.tree.map(
      lambda leaf, number=number: leaf[number].astype(np.float64), params['layers']
    )

    def dense(x, part, name, layer=layer):
      return x @ layer[part][name]['kernel'] + layer[part][name]['bias']

    y = norm(x, layer['before_attention']['scale'])
    q, k, v = (
      dense(y, 'attention', name).reshape(len(tokens), -1, config.head_dim)
      for name in ('query', 'key', 'value')
    )
    q, k = turn(q), turn(k)
    out = np.zeros_like(q)
    for t in range(len(tokens)):
      seen = slice(max(0, t - rms.WINDOW + 1), t + 1)
      for head in range(config.num_heads):
        keys, values = k[seen, head // share], v[seen, head // share]
        if prefix is not None:
          keys = np.concatenate([prefix[number, 0, :, head // share], keys])
          values = np.concatenate([prefix[number, 1, :, head // share], values])
        scores = keys @ q[t, head] / np.sqrt(config.head_dim)
        weights = np.exp(scores - scores.max())
        out[t, head] = weights @ values / weights.sum()
    x = x + dense(out.reshape(len(tokens), -1), 'attention', 'output')
    y = norm(x, layer['before_mlp']['scale'])
    gate, up = dense(y, 'mlp', 'gating'), dense(y, 'mlp', 'up')
    x = x + dense(gate / (1 + np.exp(-gate)) * up, 'mlp', 'down')
  return norm(x, params['final']['scale'])


@pytest.mark.slow_but_first
@pytest.mark.parametrize('length', [0, 3])
@pytest.mark.parametrize('left', [False, True])
def test_states_equal_numpy(length, left):
  params = draw(SHAPE)
  rng = np.random.default_rng(1)
  lengths, width = (11, 4, 1), 12
  prefix = rng.standard_normal((3, 2, length, 2, 6)).astype(np.float32)
  tokens = rng.integers(1, 50, (3, width)).astype(np.int32)
  mask = np.arange(width)[None] < np.array(lengths)[:, None]
  mask = mask[:, ::-1] if left else mask
  found = encode_tokens(
    SHAPE,
    params,
    jnp.asarray(tokens),
    jnp.asarray(mask),
    adapter=Prefix(jnp.asarray(prefix)),
    options=EncoderOptions(attention='fused'),  # which has no kernel for such heads
  )
  for row, there, states in zip(tokens, mask, np.asarray(found), strict=True):
    expected = reference(SHAPE, params, row[there], prefix)
    np.testing.assert_allclose(states[there], expected, atol=2e-5)


def test_a_kernel_that_no_rule_names_is_an_error():
  devices = meshes.make_mesh({'data': 2, 'fsdp': 2, 'model': 2})
  flat = tree.flatten({'backbone': draw(SHAPE)})
  with refused('mlp/gating/kernel'):
    meshes.param_shardings(devices, flat)
  found = meshes.param_shardings(devices, flat, SHAPE.family.sharding)
  assert found['backbone/layers/mlp/gating/kernel'].spec == P(None, 'fsdp', 'model')


@pytest.mark.slow
def test_it_and_a_pooling_of_ones_own_are_trained_exported_and_served(trained, tmp_path, command):
  config, pooling = rms.Config(0, 16, 2, 4, 2, 6, 24), 'spread'
  vocab_size = load_backbone(trained / 'backbone').config.vocab_size
  config = dataclasses.replace(config, vocab_size=vocab_size)
  backbone = tmp_path / 'backbone'
  model_folders.save_backbone(
    backbone,
    config,
    scratch.init_params(config, jax.random.key(0)),
    source=trained / 'backbone',
    spec=same_length(32, 'mean', True),
  )

  def run(workdir):
    own = f'--config.pooling={pooling}', '--config.mesh.fsdp=2'
    return train_small(command, trained, backbone, tmp_path / workdir, *own)

  before = load_backbone(backbone).sha256
  _, whole = train_and_resume(run, tmp_path)
  assert whole['prompt/prefix'].shape[:2] == (2, 2) and whole['prompt/prefix'].shape[3:] == (2, 6)
  prompt = tmp_path / 'prompts' / 'toy.npz'
  export_to(command, tmp_path / 'whole', prompt)
  assert load_backbone(backbone).sha256 == before
  corpus = trained / 'data' / 'corpus.jsonl'
  status, log = command(
    encode,
    *(f'--backbone={backbone}', f'--prompt={prompt}', '--side=passage', '--batch_size=8'),
    *(f'--input={corpus}', f'--out={tmp_path / "embeddings"}'),
  )
  assert status == 0, log
  stored = load_embeddings(tmp_path / 'embeddings')
  assert stored.meta.pooling == pooling
  texts = {passage.id: passage.text for passage in read_texts(corpus, 'passage')}
  vectors = served(backbone, prompt, 'passage', [texts[id_] for id_ in stored.ids[:5]])
  np.testing.assert_allclose(vectors, stored.vectors()[:5], atol=1e-5)
