"""Cross-encoders: pairs as the tokenizer makes them, loss and gradients as numpy has them, on any
mesh and in any chunks.
"""

import jax
import numpy as np
import pytest

from dprjax.base import mesh as meshes
from dprjax.base import tree
from dprjax.models.encoder_config import EncoderConfig
from dprjax.models.head_specs import Head
from dprjax.text import tokenizing, vocabularies
from dprjax.training import cross_encoder
from dprjax.training.method import Parts
from tests import gradients, reference, starts
from tests.options import with_options
from tests.refusals import refused

ROWS, CANDIDATES = 16, 3
CHUNKED = {'grad_cache': 2}
WORDS = ['json', 'decodes', 'a', 'string', 'into', 'objects', 'and', 'raises', 'errors']


@pytest.fixture(scope='session')
def tokenizer(tmp_path_factory):
  return vocabularies.train_wordpiece([' '.join(WORDS)], 90, tmp_path_factory.mktemp('words'))


@pytest.fixture(scope='session')
def model(tokenizer):
  return EncoderConfig('bert', tokenizer.vocab_size, 8, 2, 2, 16, max_positions=24)


@pytest.fixture(scope='session')
def parts(model):
  """A backbone with a pooler, and no classifier."""
  rng = np.random.default_rng(2)
  backbone = starts.draw_params(model, rng, 0.5)
  pooler = {
    'dense': {
      'kernel': 0.3 * rng.standard_normal((8, 8)).astype(np.float32),
      'bias': 0.1 * rng.standard_normal(8).astype(np.float32),
    }
  }
  return Parts(backbone, {'classifier': Head(pooler, {})})


def make_config(**changes):
  return with_options(
    **{
      'method': 'cross_encoder',
      'trainable': ('backbone/.*', 'head/.*'),
      'backbone__dropout': 0.0,
      'negatives': CANDIDATES - 1,
      'batch_size': ROWS,
      'data__query_max_length': 7,
      'data__passage_max_length': 10,
    }
    | changes
  )


@pytest.fixture(scope='session')
def batch(tokenizer):
  rng = np.random.default_rng(1)

  def texts(shape, longest, length):
    rows = [
      ' '.join(rng.choice(WORDS, rng.integers(0, longest + 1))) for _ in range(np.prod(shape))
    ]
    tokens, mask = tokenizing.pad_batch(tokenizer.encode(rows, length)[0], length, tokenizer.pad_id)
    return tokens.reshape(*shape, length), mask.reshape(*shape, length), rows

  q, p = texts((ROWS,), 5, 7), texts((ROWS, CANDIDATES), 8, 10)
  return {
    'query_tokens': q[0],
    'query_mask': q[1],
    'passage_tokens': p[0],
    'passage_mask': p[1],
    'teacher_scores': starts.draw_teacher(rng, (ROWS, CANDIDATES)),
  }


def make_params(method, parts):
  params = method.init(parts, jax.random.key(3))
  kernel = params['head']['classifier']['output']['kernel']
  params['head']['classifier']['output']['kernel'] = (
    np.asarray(kernel) * 50
  )  # so that scores differ
  return {name: np.asarray(leaf) for name, leaf in tree.flatten(params).items()}


def reference_scores(config, model, tokenizer, params, batch):
  """[B, C] in float64, a pair at a time, as the tokenizer makes it."""
  params = tree.unflatten({name: np.asarray(leaf, np.float64) for name, leaf in params.items()})

  def bare(tokens, mask):
    return tokens[mask][1:-1]

  scores = np.zeros((ROWS, CANDIDATES))
  for i, j in np.ndindex(scores.shape):
    query = bare(batch['query_tokens'][i], batch['query_mask'][i])
    passage = bare(batch['passage_tokens'][i, j], batch['passage_mask'][i, j])
    row = reference.pair_row(tokenizer.pair_format, query, passage, 24)
    assert len(row[0]) == len(query) + len(passage) + 3
    scores[i, j] = reference.pair_score(
      model, params['backbone'], params['head']['classifier'], *row
    )
  return scores


def reference_loss(config, scores, batch):
  """Of the labels and of the teacher."""
  value, settings = reference.ranking_loss(scores, config.cross_encoder.loss), config.distillation
  if settings.loss == 'none':
    return value
  teacher = np.float64(batch['teacher_scores']) / settings.temperature
  distilled = reference.distillation_loss(scores, teacher, settings.loss)
  return settings.weight * distilled + (1 - settings.weight) * value


@pytest.mark.slow
@pytest.mark.parametrize(
  ('sizes', 'settings'),
  [
    ({'data': 1}, {}),
    ({'data': 8}, CHUNKED),
    ({'data': 1}, {'grad_cache': 4}),
    ({'data': 4, 'model': 2}, {'grad_cache': 2}),
    ({'data': 1}, {'cross_encoder__loss': 'pointwise', 'cross_encoder__labels': 2}),
    ({'data': 1}, {'cross_encoder__labels': 2, 'backbone__remat': True, 'backbone__unroll': 0}),
    ({'data': 1}, {'distillation__loss': 'margin_mse', 'distillation__weight': 0.75}),
    ({'data': 8}, {'distillation__loss': 'kl', 'distillation__temperature': 2.0} | CHUNKED),
  ],
  ids=str,
)
def test_loss_and_gradient_equal_numpy(model, tokenizer, parts, batch, sizes, settings):
  config = make_config(**settings)
  mesh = gradients.make_mesh(sizes)
  method = cross_encoder.build(config, model, mesh, tokenizer)
  params = make_params(method, parts)
  value, metrics, gradient = gradients.value_and_gradient(method, params, ('.*',), mesh, batch)
  scores = reference_scores(config, model, tokenizer, params, batch)
  assert scores.std() > 0.1
  np.testing.assert_allclose(value, reference_loss(config, scores, batch), rtol=2e-5)
  np.testing.assert_allclose(
    metrics['accuracy'], np.mean(scores[:, 0] > scores[:, 1:].max(1)), rtol=1e-6
  )
  assert gradient.keys() == params.keys()

  def loss(params):
    return reference_loss(config, reference_scores(config, model, tokenizer, params, batch), batch)

  # In all parameters together, and in those of the head alone, which are few.
  head = {name: leaf for name, leaf in gradient.items() if name.startswith('head/')}
  for some in (gradient, head):
    gradients.assert_slope(loss, params, some, 1e-4)


def test_where_the_head_comes_from(model, tokenizer, parts):
  mesh = meshes.make_mesh({'data': 1}, jax.devices()[:1])
  method = cross_encoder.build(make_config(cross_encoder__labels=2), model, mesh, tokenizer)
  head = method.init(parts, jax.random.key(0))['head']['classifier']
  np.testing.assert_array_equal(
    head['dense']['kernel'], parts.heads['classifier'].params['dense']['kernel']
  )  # the pooler
  assert (
    head['output']['kernel'].shape == (8, 2) and abs(head['output']['kernel'].std() - 0.02) < 0.02
  )
  fresh = method.init(parts._replace(heads={}), jax.random.key(0))['head']['classifier']
  assert np.abs(fresh['dense']['kernel'] - head['dense']['kernel']).max() > 0.1
  # The head of a cross-encoder has its own number of labels.
  own = {
    **parts.heads['classifier'].params,
    'output': {'kernel': np.ones((8, 1), np.float32), 'bias': np.ones(1, np.float32)},
  }
  whole = parts._replace(heads={'classifier': Head(own, {})})
  again = method.init(whole, jax.random.key(0))['head']['classifier']
  jax.tree.map(np.testing.assert_array_equal, again, own)
  # A random layer that nothing trains would spoil all.
  frozen = cross_encoder.build(make_config(trainable=('backbone/.*',)), model, mesh, tokenizer)
  frozen.init(whole, jax.random.key(0))
  with refused('config.trainable', 'head/'):
    frozen.init(parts, jax.random.key(0))


def test_losses_by_hand():
  scores = np.array([[0.0, 0.0, np.log(2.0)], [3.0, -1.0, 2.0]], np.float32)
  np.testing.assert_allclose(cross_encoder.listwise(scores)[0], np.log(4), rtol=1e-6)
  np.testing.assert_allclose(
    cross_encoder.pointwise(scores)[0], (np.log(2) + np.log(2) + np.log(3)) / 3, rtol=1e-6
  )
  for kind in ('listwise', 'pointwise'):
    np.testing.assert_allclose(
      np.mean(getattr(cross_encoder, kind)(scores)),
      reference.ranking_loss(scores.astype(np.float64), kind),
      rtol=1e-6,
    )
