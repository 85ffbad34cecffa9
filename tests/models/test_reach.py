"""Attention over long texts in blocks of queries, beside attention in one piece."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dprjax.models import encoder, reach, scratch
from dprjax.models import family as families
from dprjax.models.adapters.prefix import Prefix
from dprjax.models.encoder_config import EncoderConfig, EncoderOptions

# Windows in some layers, causal or not; none; a bias by distance.
ALL = (
  'llama_embeddinggemma',
  'llama_qwen3',
  'llama_gemma3',
  'family_modernbert',
  'family_t5-gated',
  'family_distilbert',
)


@pytest.fixture
def run(golden):
  """Runs the shape of a golden file with other weights: a loss, its gradients, and the states."""

  def run(name, attention='plain', **rates):
    settings = json.loads(golden(name)['config'].item())
    config = families.find(settings['model_type']).read_config(settings)
    config = dataclasses.replace(config, initializer_range=0.3, **rates)
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, config.vocab_size, (3, 19)).astype(np.int32)
    mask = np.arange(19) < np.array([[19], [12], [0]])  # the last row is all padding
    width = (config.num_layers, 3, 2, 5, config.num_kv_heads, config.head_dim)
    vectors = rng.standard_normal(width).astype(np.float32)

    def loss(params, vectors):
      hidden = encoder.encode(
        config,
        params,
        tokens,
        mask,
        adapter=Prefix(vectors, jnp.array([5, 2, 0], jnp.int32)),
        options=EncoderOptions(attention=attention),
        dropout_key=jax.random.key(0) if rates else None,
      )
      return jnp.sum(jnp.sin(hidden) * mask[:, :, None].astype(np.float32)), hidden

    params = scratch.init_encoder(config, jax.random.key(1))
    (_, hidden), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(
      params, vectors
    )
    return hidden[mask], gradients

  return run


@pytest.fixture
def shorten(monkeypatch):
  """Makes blocks of four tokens."""

  def shorten():
    monkeypatch.setattr(reach, 'LONG', 4)
    monkeypatch.setattr(reach, 'BLOCK', 4)

  return shorten


@pytest.mark.slow
@pytest.mark.parametrize('name', ALL)
def test_blocks_give_the_numbers_of_one_piece(name, run, shorten):
  expected = run(name)
  shorten()
  for attention in ('plain', 'library'):
    states, gradients = run(name, attention)
    np.testing.assert_allclose(states, expected[0], rtol=0, atol=1e-5)
    for found, wanted in zip(*map(jax.tree.leaves, (gradients, expected[1])), strict=True):
      np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.slow
def test_blocks_drop_weights_at_the_rate(run, shorten):
  whole, _ = run('llama_mistral')
  dropped, _ = run('llama_mistral', attention_dropout=0.3)
  shorten()
  in_blocks, gradients = run('llama_mistral', attention_dropout=0.3)
  again, _ = run('llama_mistral', attention_dropout=0.3)
  np.testing.assert_array_equal(in_blocks, again)
  size = np.std(dropped - whole)
  assert 0.8 * size < np.std(in_blocks - whole) < 1.25 * size
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


@pytest.mark.slow
def test_a_gradient_needs_no_scores_of_all_pairs():
  config = EncoderConfig('bert', 50, 32, 1, 8, 32, max_positions=2048)

  def loss(params, tokens):
    return jnp.sum(encoder.encode(config, params, tokens, tokens > 0))

  shapes = jax.eval_shape(lambda key: scratch.init_encoder(config, key), jax.random.key(0))
  tokens = jax.ShapeDtypeStruct((1, 2048), jnp.int32)
  compiled = jax.jit(jax.grad(loss)).lower(shapes, tokens).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < 4 * config.num_heads * 2048**2 / 2
