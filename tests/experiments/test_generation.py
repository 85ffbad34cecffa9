"""The cache of the decoder of experiments/generation.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import generation
from dprjax.models import encoder, scratch
from dprjax.models.family import find


@pytest.fixture(scope='module')
def decoder():
  """A tiny random Llama: its shape and parameters."""
  config = find('llama').read_config(
    {
      'model_type': 'llama',
      'vocab_size': 40,
      'hidden_size': 16,
      'num_hidden_layers': 2,
      'num_attention_heads': 4,
      'num_key_value_heads': 2,
      'intermediate_size': 24,
      'max_position_embeddings': 128,
      'initializer_range': 0.5,
    }
  )
  return config, jax.tree.map(jnp.asarray, scratch.init_params(config, jax.random.key(1)))


@pytest.mark.slow
def test_the_cache_gives_what_reading_everything_again_gives(decoder):
  config, params = decoder
  prompts = [[3, 5, 7, 9], [11], [2, 4, 8, 16, 32, 6, 1]]
  found = generation.generate(config, params, prompts, 6)
  words = params['embeddings']['word']['embedding']
  encode = jax.jit(encoder.encode, static_argnames='config')
  for prompt, new in zip(prompts, found, strict=True):
    whole = np.zeros((1, 16), np.int32)
    tokens = [*prompt, *new]
    whole[0, : len(tokens)] = tokens
    states = encode(
      config, params, jnp.asarray(whole), jnp.asarray(np.arange(16) < len(tokens))[None]
    )
    likeliest = np.argmax(states[0] @ words.T, axis=1)
    assert likeliest[len(prompt) - 1 : len(tokens) - 1].tolist() == new
  assert len({tuple(new) for new in found}) > 1
  # A row ends at its token, the others go on.
  end = found[0][2]
  ended = generation.generate(config, params, prompts, 6, end)
  assert ended[0] == found[0][: found[0].index(end)]
  assert [len(new) for new in ended[1:]] == [
    new.index(end) if end in new else 6 for new in found[1:]
  ]
