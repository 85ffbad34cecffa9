import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dprjax.models import encoder, hub
from dprjax.models.template import bare, fill
from dprjax.papers.nir_prompt import learned_tokens, task_templates
from dprjax.papers.nir_prompt.learned_tokens import LearnedTokens
from dprjax.papers.nir_prompt.task_templates import Spec, TaskTemplates
from tests.papers.nir_prompt.test_learned_tokens import from_torch, stored
from tests.refusals import refused

VOCABULARY = 41
WORDS = {'a query:': (20, 21), 'what is it?': (22, 23, 24), '': ()}


def tokenizer(opening=1, middle=(2, 2), words=WORDS, mask_id=4):
  return types.SimpleNamespace(
    opening=(opening,),
    around_pair=types.SimpleNamespace(middle=middle),
    closing=(2,),
    mask_id=mask_id,
    pad_id=0,
    special_ids=(0, 3),
    encode_bare=lambda texts: {text: np.array(words[text], np.int32) for text in texts},
  )


def rows_of(*texts):
  """Stored texts, ``[CLS] text [SEP]``, padded."""
  rows = [[1, *text, 2] for text in texts]
  length = max(map(len, rows))
  tokens = np.array([row + [0] * (length - len(row)) for row in rows], np.int32)
  return tokens, np.array([[1] * len(row) + [0] * (length - len(row)) for row in rows], bool)


def test_a_tokenizer_without_a_mask():
  with refused('[MASK]'):
    TaskTemplates.make([Spec(('query',), {}, {})], tokenizer(mask_id=None), VOCABULARY)


@pytest.mark.parametrize(
  ('words', 'message'),
  [
    (('yes', 'perhaps'), 'perhaps'),
    (('yes', 'zzz'), 'zzz'),
    (('yes', 'yes'), 'yes'),
  ],
)
def test_label_words(words, message):
  ids = {'yes': [7], 'no': [8], 'perhaps': [9, 10], 'zzz': [3]}
  assert task_templates.label_ids(('no', 'yes'), tokenizer(words=ids), 'here') == (8, 7)
  with refused(message):
    task_templates.label_ids(words, tokenizer(words=ids), 'config.template.verbalizer')


@pytest.mark.slow
@pytest.mark.parametrize('fixed_layers', range(3))
@pytest.mark.parametrize('model_type', ['bert', 'roberta'])
def test_two_tasks_in_a_batch_equal_pytorch(model_type, fixed_layers, golden, write_checkpoint):
  arrays = golden('prompt_templates')
  backbone = hub.load_backbone(write_checkpoint(model_type, 3))
  config = backbone.config
  names = {'dialogue': ('P1', 'P2'), 'qa': ('P1', 'P2')}
  params = {
    task: {f'query/{part}': from_torch(stored(arrays, f'weights/{task}/{part}/')) for part in parts}
    for task, parts in names.items()
  }
  made = TaskTemplates.make(
    [
      Spec(('query',), {}, {name: len(leaf['embedding']) for name, leaf in of.items()})
      for of in params.values()
    ],
    tokenizer(5, (2,)),
    config.vocab_size,
  )
  tokens, mask = rows_of((7, 8, 4, 9), (10, 11, 12), (13,), (14, 7))
  text = bare(jnp.asarray(tokens), jnp.asarray(mask), 1, 1)
  numbers = jnp.array([0, 1, 1, 0], jnp.int32)
  expected = arrays[f'{model_type}/mask']
  filled = fill(made.templates['query'], [text], expected.shape[1], made.pad_id, numbers)
  np.testing.assert_array_equal(filled.mask, expected)

  @jax.jit
  def loss(params):
    found = learned_tokens.encode_prompts(
      {f'{task}/{name}': leaf for task, of in params.items() for name, leaf in of.items()}
    )
    vectors = [{name: found[f'{task}/{name}'] for name in of} for task, of in params.items()]
    hidden = encoder.encode(
      config,
      backbone.params,
      filled.tokens,
      filled.mask,
      token_types=filled.token_types,
      adapter=LearnedTokens(made.table(vectors), fixed_layers),
    )
    weights = jnp.cos(jnp.arange(hidden.size, dtype=jnp.float32)).reshape(hidden.shape)
    return jnp.sum(hidden * weights * expected[:, :, None].astype(np.float32)), hidden

  gradients, hidden = jax.grad(loss, has_aux=True)(params)
  case = f'{model_type}/{fixed_layers}'
  np.testing.assert_allclose(
    hidden[expected], arrays[f'{case}/hidden'][expected], rtol=0, atol=2e-5
  )
  checked = 0
  for task, parts in names.items():
    for part in parts:
      gradient = gradients[task][f'query/{part}']
      theirs = stored(arrays, f'{case}/gradient/{task}/{part}/')
      scale = 2e-5 * max(1, *(np.abs(leaf).max() for leaf in theirs.values()))
      if len(theirs) > 1:
        # The two biases of PyTorch have one gradient; from_torch adds them.
        theirs = {
          name: leaf / 2 if '.bias' in name and name.startswith('lstm') else leaf
          for name, leaf in theirs.items()
        }
        for ours, other in zip(
          jax.tree.leaves(gradient), jax.tree.leaves(from_torch(theirs)), strict=True
        ):
          np.testing.assert_allclose(ours, other, rtol=0, atol=scale)
        checked += 1
      else:
        np.testing.assert_allclose(
          gradient['embedding'], theirs['embedding.weight'], rtol=0, atol=scale
        )
  assert checked == (fixed_layers == 1)
  # The cases differ by far more than the tolerance.
  others = [arrays[f'{model_type}/{n}/hidden'] for n in range(3) if n != fixed_layers]
  assert min(np.abs(hidden - other)[expected].max() for other in others) > 0.1
