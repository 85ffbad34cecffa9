import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dprjax.base.errors import InputError
from dprjax.models import hub
from dprjax.models.artifact import check_prompt, load_prompt
from dprjax.models.encoder_config import EncoderConfig
from dprjax.papers.nir_prompt.learned_tokens import (
  LearnedTokens,
  check_head,
  check_template,
  spec,
  vectors,
)
from dprjax.papers.nir_prompt.task_templates import FORMS
from dprjax.text.vector_spec import SIDES
from tests.models.test_artifact import CONFIG, TOKENIZER, write  # noqa: F401
from tests.models.test_encoder import encode, golden_loss
from tests.models.test_families import shape_of
from tests.refusals import refused

VECTORS = {f'slots/{side}/P1': np.ones((6, 24), np.float32) for side in SIDES}


TEMPLATE = {
  'kind': 'template',
  'template': {side: FORMS[side] for side in SIDES},
  'words': dict.fromkeys(('query/P2', 'passage/P2'), 'A text:'),
  'fixed_layers': 1,
  'pooling': 'mask',
}


PAIR = TEMPLATE | {
  'template': {'pair': FORMS['pair']},
  'words': {f'pair/P{place}': 'Do these two sentences match?' for place in (1, 2, 3)},
  'verbalizer': ['yes', 'no'],
  'score': 'logit',
  'head_sha256': 'e' * 64,
}


def test_templates(write):  # noqa: F811
  prompt = load_prompt(write(VECTORS, **TEMPLATE))
  check_prompt(prompt, CONFIG, 'a' * 64, TOKENIZER)
  check_template(prompt, SIDES)
  assert spec(prompt) == (SIDES, TEMPLATE['words'], {'query/P1': 6, 'passage/P1': 6})
  np.testing.assert_array_equal(vectors(prompt)['query/P1'], VECTORS['slots/query/P1'])
  other = EncoderConfig('bert', 50, 32, 2, 4, 40)
  with refused('slots/query/P1', '[6, 24]', '[P, H]'):
    check_prompt(prompt, other, 'a' * 64, TOKENIZER)
  words = load_prompt(write({}, **PAIR))  # a template with only words has no arrays
  assert spec(words).lengths == {} and vectors(words) == {}
  check_prompt(words, CONFIG, 'a' * 64, TOKENIZER)
  check_template(words, ('pair',))
  check_head(words, 'e' * 64)
  with refused('e' * 64):
    check_head(words, 'f' * 64)
  with refused('prompt.npz', 'template'):
    check_template(words, SIDES)
  with refused('prefix', 'template'):
    check_template(load_prompt(write()), ('pair',))


@pytest.mark.parametrize(
  ('arrays', 'change', 'message'),
  [
    (VECTORS, TEMPLATE | {'template': {'query': 'text'}}, ('prompt.npz', 'template')),
    (
      VECTORS | {'slots/query/P1': np.ones((6, 2, 24), np.float32)},
      TEMPLATE,
      ('slots/query/P1', '[P, H]', '[6, 2, 24]'),
    ),
    ({}, PAIR | {'drop': ['head_sha256']}, 'head_sha256'),
  ],
)
def test_bad_templates(write, arrays, change, message):  # noqa: F811
  with refused(message):
    load_prompt(write(arrays, **change))


@pytest.mark.slow
@pytest.mark.parametrize(('model_type', 'fixed_layers'), [('bert', 0), ('roberta', 2)])
def test_vectors_in_place_of_words_equal_transformers(
  model_type, fixed_layers, golden, write_checkpoint
):
  arrays, stored = golden(f'vectors_{model_type}'), golden(model_type)
  backbone = hub.load_backbone(write_checkpoint(model_type, 3))
  mask, types = stored['mask'], stored['token_types']

  def loss(vectors, tokens=arrays['tokens']):
    hidden = encode(
      backbone.config,
      backbone.params,
      tokens,
      mask,
      token_types=types,
      adapter=LearnedTokens(vectors, fixed_layers),
    )
    return golden_loss(hidden, mask), hidden

  vectors = arrays['vectors'].astype(np.float32)
  gradient, hidden = jax.grad(loss, has_aux=True)(vectors)
  np.testing.assert_allclose(
    hidden[mask], arrays[f'{fixed_layers}/hidden'][mask], rtol=0, atol=2e-5
  )
  expected = arrays[f'{fixed_layers}/gradient']
  np.testing.assert_allclose(gradient, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
  # The golden cases differ by far more than the tolerance.
  others = [arrays[f'{n}/hidden'] for n in range(3) if n != fixed_layers]
  assert min(np.abs(hidden - other)[mask].max() for other in others) > 0.1


def test_vectors_among_the_tokens_need_the_width_of_embeddings(golden):
  config, family = shape_of(golden('family_electra'))
  shape, tokens = family.read_config(config), jnp.full((1, 2), 41)
  LearnedTokens(jnp.zeros((2, 16))).at(shape, tokens)
  with pytest.raises(InputError, match='electra'):
    LearnedTokens(jnp.zeros((2, 24))).at(shape, tokens)
