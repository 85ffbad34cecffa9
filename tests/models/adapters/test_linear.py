import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dprjax.models import artifact, embed
from dprjax.models.adapter import stack
from dprjax.models.adapters import linear
from dprjax.models.adapters.linear import Linear
from dprjax.text.vector_spec import VectorSpec
from dprjax.training import dual_encoder
from dprjax.training.method import Parts
from tests.models.adapters.test_lora import META, batch
from tests.options import with_options
from tests.refusals import refused

SPEC = VectorSpec('mean', True)
embed_text = jax.jit(embed.embed_text, static_argnums=(0, 4))


def vectors(model, adapter):
  return np.asarray(embed_text(*model, *batch(), SPEC, adapter=adapter))


@pytest.mark.slow
def test_equals_numpy_shared_merged_and_in_a_bank(small):
  change = np.random.default_rng(0).standard_normal((2, 32, 32)).astype(np.float32)
  given = [Linear(change[0]), None, Linear(change[1])]
  mixed = vectors(small, stack(given).choose(jnp.arange(3)))
  for row, adapter in enumerate(given):
    own = vectors(small, None).astype(np.float64)
    if adapter is not None:
      own = own @ (np.eye(32) + adapter.change)
      own /= np.linalg.norm(own, axis=1, keepdims=True)
      np.testing.assert_allclose(vectors(small, adapter), own, atol=2e-6)
      np.testing.assert_allclose(vectors(linear.merge(*small, adapter), None), own, atol=2e-6)
    np.testing.assert_allclose(mixed[row], own[row], atol=2e-6)


@pytest.mark.slow
def test_training_begins_at_the_identity_and_leaves_passages(small):
  config = with_options(prompt__kind='linear', prompt__length=1, prompt__sides='query')
  params = dual_encoder.init_adapter(config, small[0], Parts({}), jax.random.key(0))
  found = dual_encoder.expand(config, small[0], params)
  assert found['passage'] is None and not found['query'].change.any()
  np.testing.assert_array_equal(vectors(small, found['query']), vectors(small, None))


def test_a_map_of_other_vectors(small):
  prompt = artifact.Prompt(
    META | {'kind': 'linear'}, {'change': np.ones((24, 24), np.float32)}, 'x.npz'
  )
  artifact.check_content(prompt)
  with refused('x.npz', 'change', '[24, 24]', '[32, 32]'):
    artifact.check_prompt(prompt, small[0], 'a' * 64, 'b' * 64)
