"""Reranker-Prompt: loss, gradients and scores as numpy has them by loops, on any mesh and in any
chunks; heads and label words that do not fit.
"""

import jax
import numpy as np
import pytest

from dprjax.base import tree
from dprjax.models import head_specs
from dprjax.papers.nir_prompt import nir_prompt, nir_reranker
from tests import reference
from tests.papers.nir_prompt import nir
from tests.refusals import refused
from tests.training.conftest import WORDS

ROWS = 16
TRAINED = ('prompt/.*', 'backbone/(?!embeddings/word/).*', 'head/.*')


@pytest.fixture(scope='module')
def batch(tokenizer):
  rng = np.random.default_rng(1)
  first = nir.texts(rng, ROWS, 5, 7, tokenizer, WORDS)
  second = nir.texts(rng, ROWS, 7, 9, tokenizer, WORDS)
  return {
    'first_tokens': first[0],
    'first_mask': first[1],
    'second_tokens': second[0],
    'second_mask': second[1],
    'label': rng.integers(0, 2, ROWS).astype(np.int32),
    'task': rng.integers(0, 2, ROWS).astype(np.int32),
  }


def reference_logits(config, shape, tokenizer, params, batch):
  """The logits [B, V] at [MASK], an example at a time."""
  params = tree.unflatten({name: np.asarray(leaf, np.float64) for name, leaf in params.items()})
  names = sorted(config.tasks)
  fixed = config.template.fixed_layers if config.template.fixed_layers >= 0 else 2
  found = []
  for place, number in enumerate(batch['task']):
    p1, p2, p3 = (
      nir.slot(config, params, tokenizer, names[number], f'pair/P{i}') for i in (1, 2, 3)
    )
    first, second = (
      nir.bare(batch[f'{side}_tokens'][place], batch[f'{side}_mask'][place])
      for side in ('first', 'second')
    )
    sep = tokenizer.closing[0]
    row = [tokenizer.opening[0], *p1, *first, sep, *p2, *second, sep, *p3, tokenizer.mask_id, sep]
    state = reference.encode_template(shape, params['backbone'], row, fixed)[-2]
    words = params['backbone']['embeddings']['word']['embedding']
    found.append(reference.mlm_logits(shape, params['head']['mlm'], words, state))
  return np.array(found)


def answers(tokenizer):
  """The ids of the words for no and yes."""
  yes, no = (tokenizer.encode([word], 8)[0][0][1] for word in ('oak', 'elm'))
  return no, yes


def reference_loss(config, shape, tokenizer, params, batch):
  logits = reference_logits(config, shape, tokenizer, params, batch)
  no, yes = answers(tokenizer)
  total, right, mass = 0.0, 0, 0.0
  for row, label in zip(logits, batch['label'], strict=True):
    each = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
    total -= np.log(each[(no, yes)[label]])
    right += (each[yes] > each[no]) == (label == 1)
    mass += each[yes] + each[no]
  return total / ROWS, right / ROWS, mass / ROWS


@pytest.mark.slow
@pytest.mark.parametrize(
  ('changes', 'sizes'),
  [
    ({'template__lengths': (2, 3, 1), 'grad_cache': 2}, {'data': 1}),
    (
      {
        'grad_cache': 2,
        'template__fixed_layers': 0,
        'template__kind': 'hybrid',
      },
      {'data': 1},
    ),
    # Without prompt encoders, which take seconds to compile.
    ({'template__kind': 'manual', 'trainable': TRAINED[1:], 'grad_cache': 2}, {'data': 8}),
    ({'template__kind': 'manual', 'trainable': TRAINED[1:]}, {'data': 1}),
  ],
)
def test_loss_and_gradient_equal_loops_in_float64(changes, sizes, tokenizer, shape, parts, batch):
  config = nir.make_config('nir_reranker', **({'trainable': TRAINED} | changes))
  params, value, metrics, gradient = nir.value_and_gradient(
    nir_reranker.build, config, shape, tokenizer, parts, batch, sizes
  )
  assert 'backbone/embeddings/word/embedding' not in gradient

  def loss(params):
    return reference_loss(config, shape, tokenizer, params, batch)

  np.testing.assert_allclose(
    [value, metrics['accuracy'], metrics['yes_or_no']], loss(params), rtol=2e-5
  )
  nir.assert_slope(lambda params: loss(params)[0], params, gradient)


@pytest.mark.slow
def test_scores_of_packed_pairs(tokenizer, shape, parts, batch, devices):
  config = nir.make_config('nir_reranker', trainable=TRAINED)
  scores = {}
  for kind in ('logit', 'probability'):
    config.template.score = kind
    method = nir_reranker.build(config, shape, devices, tokenizer)
    if not scores:
      params = method.init(parts, jax.random.key(3))
    (template, _) = nir_prompt.make_templates(
      config, ('pair',), nir_prompt.read_files(config), tokenizer, shape.vocab_size
    ).templates['pair']
    texts = [
      [
        np.array(nir.bare(*row), np.int32)
        for row in zip(batch[f'{side}_tokens'], batch[f'{side}_mask'], strict=True)
      ]
      for side in ('first', 'second')
    ]
    pairs = template.pack(texts, shape.max_tokens, tokenizer.pad_id)
    length = max(map(len, pairs.rows)) + 3
    rows = np.array([np.pad(row, (0, length - len(row))) for row in pairs.rows])
    scores[kind] = np.asarray(
      jax.jit(method.embed, static_argnums=1)(
        params, 'pair', rows, rows > -1, pairs.lengths, batch['task']
      )
    )
    assert scores[kind].shape == (ROWS, 1)
  flat = {name: np.asarray(leaf) for name, leaf in tree.flatten(params).items()}
  logits = reference_logits(config, shape, tokenizer, flat, batch)
  no, yes = answers(tokenizer)
  each = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
  expected = logits[:, yes] - logits[:, no]
  np.testing.assert_allclose(scores['logit'][:, 0], expected, rtol=2e-4, atol=2e-4)
  np.testing.assert_allclose(
    scores['probability'][:, 0], each[:, yes] - each[:, no], rtol=2e-4, atol=2e-5
  )
  # The baseline: the backbone and its head in the template, without a prompt.
  bare = tree.unflatten(method.baseline(flat))
  found = method.embed(bare, 'pair', rows, rows > -1, pairs.lengths, batch['task'])
  config.template.kind, config.template.score = 'none', 'logit'
  logits = reference_logits(config, shape, tokenizer, flat, batch)
  each = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
  np.testing.assert_allclose(found[:, 0], each[:, yes] - each[:, no], rtol=2e-4, atol=2e-5)


def init(config, tokenizer, shape, parts, devices):
  return nir_reranker.build(config, shape, devices, tokenizer).init(parts, jax.random.key(0))


def test_backbones_without_the_head_that_answers(tokenizer, shape, parts, devices, tmp_path):
  config = nir.make_config('nir_reranker', trainable=TRAINED)
  with refused('BACKBONE', 'configs/condenser.py:mlm'):
    init(config, tokenizer, shape, parts._replace(heads={}), devices)
  config = nir.make_config('nir_reranker', tasks=('qa',), trainable=TRAINED[1:])
  config.tasks.qa.prompt = str(tmp_path / 'qa.npz')
  digest = head_specs.sha256('mlm', shape, parts.heads['mlm'])
  nir.write_prompt(tmp_path / 'qa.npz', shape, tokenizer, config, ('pair',), head_sha256=digest)
  init(config, tokenizer, shape, parts, devices)
  nir.write_prompt(tmp_path / 'qa.npz', shape, tokenizer, config, ('pair',))
  with refused('b' * 64):
    init(config, tokenizer, shape, parts, devices)
