"""The losses of Topic-DPR against plain loops, on any mesh, with and without gradient cache."""

import jax
import numpy as np
import pytest

from dprjax.data.topic_models import Topics
from dprjax.methods import topic_dpr, topic_losses
from dprjax.methods.method import Parts
from dprjax.models.adapters import topic
from dprjax.models.encoder_config import EncoderConfig
from dprjax.runtime import mesh as meshes
from dprjax.runtime import tree
from tests import reference, starts
from tests.methods.conftest import WORDS
from tests.options import check_options, with_options
from tests.refusals import refused

ROWS, LENGTH, TOPICS = 16, 3, 3
NAMES = [WORDS[:5], WORDS[5:9], WORDS[9:14]]
TEMPERATURE, ALPHA, MARGIN = 0.2, 0.2, 0.3


@pytest.fixture(scope='module')
def shape(tokenizer):
  return EncoderConfig('bert', tokenizer.vocab_size, 8, 2, 2, 16, max_positions=12)


@pytest.fixture(scope='module')
def found():
  vocabulary = sorted(WORDS)
  distributions = np.full((1 + TOPICS, len(vocabulary)), 1 / len(vocabulary), np.float32)
  return Topics({}, NAMES, np.array([3, 2, 1]), vocabulary, distributions)


def make_config(**changes):
  base = {
    'method': 'topic_dpr',
    'prompt__length': LENGTH,
    'prompt__dropout': 0.0,
    'backbone__dropout': 0.0,
    'batch_size': ROWS,
    'negatives': 0,
    'pooling': 'mean',
    'normalize': True,
    'temperature': TEMPERATURE,
    'data__categories': True,
    'topics__path': 'topics.npz',
    'topics__alpha': ALPHA,
    'topics__margin': MARGIN,
  }
  return with_options(**(base | changes))


CATEGORIES = {
  'some': lambda rng: np.where(
    np.arange(3) < rng.integers(1, 4, (ROWS, 1)),
    np.argsort(rng.random((ROWS, 6)), axis=1)[:, :3],
    -1,
  ),
  'none shared': lambda rng: np.stack([np.arange(ROWS), np.full(ROWS, -1)], axis=1),
  'all shared': lambda rng: np.full((ROWS, 1), 7),
}


def make_batch(vocabulary, categories='some', seed=1):
  rng = np.random.default_rng(seed)

  def tokens(*shape):
    mask = np.arange(shape[-1]) < rng.integers(2, shape[-1] + 1, size=shape[:-1])[..., None]
    return np.where(mask, rng.integers(1, vocabulary, size=shape), 0).astype(np.int32), mask

  (q, q_mask), (p, p_mask) = tokens(ROWS, 4), tokens(ROWS, 1, 6)
  numbers = np.arange(ROWS, dtype=np.int32)
  return {
    'query_tokens': q,
    'query_mask': q_mask,
    'passage_tokens': p,
    'passage_mask': p_mask,
    'query_index': numbers,
    'passage_index': numbers[:, None],
    'relevant': numbers[:, None],
    'query_number': rng.integers(0, TOPICS, ROWS).astype(np.int32),
    'passage_number': rng.integers(0, TOPICS, (ROWS, 1)).astype(np.int32),
    'categories': CATEGORIES[categories](rng).astype(np.int32),
  }


def make_params(model, shape, found):
  params = model.init(Parts(starts.init_params(shape, 0), {}, None, {'topics': found}),
                      jax.random.key(9))  # fmt: skip
  # Larger weights than the initial ones, so that prompts matter.
  return {
    name: np.asarray(leaf)
    * (20.0 if name.endswith(('kernel', 'embedding')) or name == 'topics/words' else 1.0)
    for name, leaf in tree.flatten(params).items()
  }


def expected(config, shape, params, batch):
  """Eqs. 3 to 7 by loops, in float64; ``params`` is the flat tree."""
  params = tree.unflatten({name: np.asarray(leaf, np.float64) for name, leaf in params.items()})
  prefixes = [None]
  if config.topics.path:
    p = params['prompt']
    prefixes = []
    for words in params['topics']['words']:
      rows = []
      for e in words:
        hidden = np.maximum(e @ p['hidden']['kernel'] + p['hidden']['bias'], 0)
        v = e + hidden @ p['residual']['kernel'] + p['residual']['bias']
        rows.append((v @ p['matrix']['kernel']).reshape(shape.num_layers, 2, shape.num_heads, -1))
      prefixes.append(np.stack(rows, axis=2))

  def embed(tokens, mask, topic):
    prefix = prefixes[topic if len(prefixes) > 1 else 0]
    hidden = reference.encode(shape, params['backbone'], tokens[None], mask[None], prefix)
    return reference.pool(hidden, mask[None], 'mean', True)[0]

  topic = batch['passage_number'][:, 0]
  query_topic = topic if config.topics.query == 'document' else batch['query_number']
  passages = list(zip(batch['passage_tokens'][:, 0], batch['passage_mask'][:, 0], strict=True))
  q = [
    embed(*row, k)
    for *row, k in zip(batch['query_tokens'], batch['query_mask'], query_topic, strict=True)
  ]
  p = [embed(*row, k) for row, k in zip(passages, topic, strict=True)]
  sets = [{c for c in row if c >= 0} for row in batch['categories'].tolist()]
  alpha, under = config.topics.alpha, []
  n = config.topics.batch or ROWS
  if alpha and len(prefixes) > 1:
    chosen = passages[:: ROWS // n]
    under = [[embed(*row, k) for row in chosen] for k in range(len(prefixes))]

  def losses(q, p, *under):
    qp, qq, tt = loop_losses(q, p, sets, under, n)
    return (1 - 2 * alpha) * qp + alpha * qq + alpha * tt

  stacked = [np.array(vectors) for vectors in (q, p, *under)]
  return reference.over_lengths(losses, config.matryoshka, True, *stacked)


def loop_losses(q, p, sets, under, n):
  """The three losses of unit vectors; ``under`` has those of ``n`` passages under each prompt."""
  qp = qq = 0.0
  for i in range(ROWS):
    rho = [1.0 if i == j else len(sets[i] & sets[j]) / len(sets[i] | sets[j]) for j in range(ROWS)]
    for others, itself in ((p, True), (q, False)):
      e = [np.exp(q[i] @ other / TEMPERATURE) for other in others]
      positives = [z for z in range(ROWS) if rho[z] > 0 and (itself or z != i)]
      against = sum(e[j] for j in range(ROWS) if rho[j] == 0)
      terms = [-rho[z] * np.log(e[z] / (e[z] + against)) for z in positives]
      value = sum(terms) / len(terms) if terms else 0.0
      qp, qq = (qp + value / ROWS, qq) if itself else (qp, qq + value / ROWS)
  tt, count = 0.0, len(under)
  for k in range(count):
    for z in range(count):
      for i in range(n):
        for j in range(n):
          if z != k:
            own, other = under[k][i] @ under[k][j], under[k][i] @ under[z][j]
            tt += max(MARGIN - own + other, 0) / ((count - 1) * n**2) / count
  return qp, qq, tt


def value_and_gradient(config, shape, mesh, batch, tokenizer, found, trainable=('prompt/.*',)):
  model = topic_dpr.build(config, shape, mesh, tokenizer)
  params = make_params(model, shape, found)
  names = tree.trainable_names(trainable, list(params))
  placed = meshes.put(params, meshes.param_shardings(mesh, params))

  def loss(trained, frozen, batch):
    return model.loss(tree.unflatten({**frozen, **trained}), batch, None)

  (value, metrics), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(
    {name: leaf for name, leaf in placed.items() if name in names},
    {name: leaf for name, leaf in placed.items() if name not in names},
    meshes.put_batch(mesh, batch),
  )
  return params, float(value), metrics, {n: np.asarray(g) for n, g in gradient.items()}


def slow(*values):
  return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
  ('devices', 'categories', 'changes'),
  [
    slow(1, 'some', {}),
    slow(8, 'some', {'topics__batch': 8, 'matryoshka': (5,)}),
    slow(8, 'some', {'grad_cache': 2, 'loss_rows': 1}),
    slow(1, 'none shared', {'topics__batch': 4, 'grad_cache': 4, 'matryoshka': (6, 4)}),
    slow(8, 'none shared', {'topics__query': 'own'}),
    slow(1, 'all shared', {}),
    slow(1, 'some', {'topics__keep': 1, 'accumulate': 2, 'batch_size': ROWS // 2}),
    slow(8, 'some', {'topics__path': '', 'prompt__length': 0}),
  ],
)
def test_loss_and_gradient_equal_loops(shape, tokenizer, found, devices, categories, changes):
  config = make_config(**changes)
  mesh = meshes.make_mesh({'data': devices}, jax.devices()[:devices])
  batch = make_batch(shape.vocab_size, categories)
  kept = topic_dpr.keep(found, config.topics.keep)
  trainable = ('prompt/.*',) if config.prompt.length else ('backbone/.*',)
  params, value, metrics, gradient = value_and_gradient(
    config, shape, mesh, batch, tokenizer, kept, trainable
  )
  assert np.isclose(value, expected(config, shape, params, batch), rtol=2e-5)
  several = config.topics.path and len(kept) > 1
  assert (float(metrics['topic_topic']) > 0) == bool(several)
  assert (float(metrics['query_query']) > 0) == (categories == 'some')
  # The slope along the gradient, by central differences in float64.
  norm = np.sqrt(sum(float(np.sum(g.astype(np.float64) ** 2)) for g in gradient.values()))
  assert norm > 1e-4 and all(np.isfinite(g).all() for g in gradient.values())

  def at(t):
    moved = {
      name: leaf + t * gradient[name].astype(np.float64) / norm if name in gradient else leaf
      for name, leaf in params.items()
    }
    return expected(config, shape, moved, batch)

  assert np.isclose((at(1e-5) - at(-1e-5)) / 2e-5, norm, rtol=2e-3)


@pytest.mark.slow
def test_a_document_relevant_to_a_query_is_not_its_negative():
  # Documents 0 and 1 have one title, so the abstract of each is relevant to both; 2 is another.
  rng = np.random.default_rng(0)
  vectors = rng.normal(size=(2, 3, 4)).astype(np.float32)
  q, p = vectors / np.linalg.norm(vectors, axis=2, keepdims=True)
  q[1] = q[0]
  categories = np.array([[0], [1], [2]], np.int32)
  relevant = np.array([[0, 1], [0, 1], [2, -1]], np.int32)
  mesh = meshes.make_mesh({'data': 1}, jax.devices()[:1])
  qp, _, _ = topic_losses.document_losses(
    q, p, categories, np.arange(3, dtype=np.int32)[:, None], relevant, mesh, rows=3, temperature=0.5
  )
  e = np.exp(q.astype(np.float64) @ p.T / 0.5)
  expected = [
    -np.log(e[0, 0] / (e[0, 0] + e[0, 2])),
    -np.log(e[1, 1] / (e[1, 1] + e[1, 2])),
    -np.log(e[2, 2] / e[2].sum()),
  ]
  np.testing.assert_allclose(qp, expected, rtol=1e-5)


def test_weights_are_jaccard_overlaps():
  sets = np.array([[1, 2, -1], [2, 3, 4], [-1, -1, -1], [5, -1, -1]], np.int32)
  found = np.asarray(topic_losses.jaccard(sets, sets))
  assert np.allclose(found, [[1, 1 / 4, 0, 0], [1 / 4, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]])


@pytest.mark.slow
def test_a_prompt_is_of_its_topics_words(shape, tokenizer, found):
  rows = topic_dpr.word_tokens(found, tokenizer, LENGTH)
  ids = [[tokenizer.encode([word], 8)[0][0][1] for word in names[:LENGTH]] for names in NAMES]
  assert rows.tolist() == ids
  with refused('config.prompt.length', '1', '4', '5'):
    topic_dpr.word_tokens(found, tokenizer, 5)
  model = topic_dpr.build(
    make_config(), shape, meshes.make_mesh({'data': 1}, jax.devices()[:1]), tokenizer
  )
  params = tree.unflatten(make_params(model, shape, found))
  prefixes = topic.expand(shape, params['prompt'], params['topics']['words'])
  assert prefixes.shape == (2, TOPICS, 2, LENGTH, 2, 4)


@pytest.mark.slow
def test_without_the_topic_topic_loss(shape, tokenizer, found):
  mesh = meshes.make_mesh({'data': 8})
  batch = make_batch(shape.vocab_size)

  def metrics(**changes):
    return value_and_gradient(make_config(**changes), shape, mesh, batch, tokenizer, found)[2]

  without = metrics(topics__topic_topic=False)
  assert float(without['topic_topic']) == 0
  alpha, qp, qq = ALPHA, float(without['query_passage']), float(without['query_query'])
  assert np.isclose(float(without['loss']), (1 - 2 * alpha) * qp + alpha * qq, 1e-6)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'data__categories': False}, 'config.data.categories'),
    ({'negatives': 1}, 'config.negatives'),
    ({'prompt__length': 0}, ('config.topics.path', 'topics.npz')),
    ({'topics__batch': 5}, ('config.topics.batch', '5', '16')),
    ({'topics__words': 4}, ('config.topics.words', 'config.prompt.length')),
  ],
)
def test_options_that_do_not_go_together(shape, tokenizer, changes, message):
  with refused(message):
    config = make_config(**changes)
    check_options(config)
    topic_dpr.build(config, shape, meshes.make_mesh({'data': 8}), tokenizer)
