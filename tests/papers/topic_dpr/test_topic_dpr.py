"""The losses of Topic-DPR against plain loops, on any mesh, with and without gradient cache."""

import jax
import numpy as np
import pytest
from etils import epath

from dprjax.base import mesh as meshes
from dprjax.base import tree
from dprjax.models.encoder_config import EncoderConfig
from dprjax.papers.topic_dpr import topic, topic_dpr, topic_losses
from dprjax.papers.topic_dpr.topic_models import Topics
from dprjax.text import table
from dprjax.text.qrels import write_dataset
from dprjax.training import retrieval_data
from dprjax.training.method import Parts
from tests import gradients, reference, starts
from tests.options import check_options, with_options
from tests.refusals import refused
from tests.training.conftest import WORDS

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
  passages = list(zip(batch['passage_tokens'][:, 0], batch['passage_mask'][:, 0], strict=True))
  q = [
    embed(*row, k)
    for *row, k in zip(batch['query_tokens'], batch['query_mask'], topic, strict=True)
  ]
  p = [embed(*row, k) for row, k in zip(passages, topic, strict=True)]
  sets = [{c for c in row if c >= 0} for row in batch['categories'].tolist()]
  alpha, under = config.topics.alpha, []
  n = config.topics.batch or ROWS
  if alpha and len(prefixes) > 1 and config.topics.topic_topic:
    chosen = passages[:: ROWS // n]
    under = [[embed(*row, k) for row in chosen] for k in range(len(prefixes))]

  qp, qq, tt = loop_losses(np.array(q), np.array(p), sets, [np.array(x) for x in under], n)
  return (1 - 2 * alpha) * qp + alpha * qq + alpha * tt


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


@pytest.mark.slow
@pytest.mark.parametrize(
  ('devices', 'categories', 'changes'),
  [
    (1, 'some', {}),
    (8, 'some', {'topics__batch': 8}),
    (8, 'some', {'grad_cache': 2}),
    (1, 'none shared', {'topics__batch': 4, 'grad_cache': 4}),
    (8, 'none shared', {}),
    (1, 'all shared', {}),
    (1, 'some', {'topics__keep': 1, 'grad_cache': 2}),
    (8, 'some', {'topics__topic_topic': False}),
    (8, 'some', {'topics__path': '', 'prompt__length': 0}),
  ],
)
def test_loss_and_gradient_equal_loops(shape, tokenizer, found, devices, categories, changes):
  config = make_config(**changes)
  mesh = meshes.make_mesh({'data': devices}, jax.devices()[:devices])
  batch = make_batch(shape.vocab_size, categories)
  kept = topic_dpr.keep(found, config.topics.keep)
  trainable = ('prompt/.*',) if config.prompt.length else ('backbone/.*',)
  model = topic_dpr.build(config, shape, mesh, tokenizer)
  params = make_params(model, shape, kept)
  value, metrics, gradient = gradients.value_and_gradient(model, params, trainable, mesh, batch)
  assert np.isclose(value, expected(config, shape, params, batch), rtol=2e-5)
  several = config.topics.path and config.topics.topic_topic and len(kept) > 1
  assert (metrics['topic_topic'] > 0) == bool(several)
  assert (metrics['query_query'] > 0) == (categories == 'some')
  gradients.assert_slope(
    lambda params: expected(config, shape, params, batch), params, gradient, 2e-3, 1e-5
  )


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


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'prompt__length': 0}, ('config.topics.path', 'topics.npz')),
    ({'topics__batch': 5}, ('config.topics.batch', '5', '16')),
  ],
)
def test_options_that_do_not_go_together(shape, tokenizer, changes, message):
  with refused(message):
    config = make_config(**changes)
    check_options(config)
    topic_dpr.build(config, shape, meshes.make_mesh({'data': 8}), tokenizer)


@pytest.mark.parametrize(
  ('categories', 'fails'),
  [
    ([[0, 1], [1, 2], [0, 2]], True),
    ([[0], []], True),
    ([[0], [0, 1], [1]], False),
  ],
)
def test_documents_of_one_category_have_no_negatives(categories, fails):
  class Tokens:
    path = 'token_cache'

  Tokens.categories = table.Lists(
    np.array([n for row in categories for n in row], np.int32),
    np.array([len(row) for row in categories], np.int32),
  )
  if fails:
    with refused('token_cache'):
      topic_dpr.TopicData.check_negatives(None, Tokens())
  else:
    topic_dpr.TopicData.check_negatives(None, Tokens())


@pytest.mark.slow
def test_words_stand_behind_the_first_token_of_both_texts(shape, tokenizer, found):
  config = make_config(topics__words=LENGTH, prompt__length=0, data__query_max_length=4,
                       data__passage_max_length=6)  # fmt: skip
  mesh = meshes.make_mesh({'data': 8})
  batch = make_batch(shape.vocab_size)
  words = topic_dpr.word_tokens(found, tokenizer, LENGTH)
  own = words[batch['passage_number']]
  rows = {'query': own[:, 0], 'passage': own}
  params = make_params(topic_dpr.build(config, shape, mesh, tokenizer), shape, found)
  assert {name.split('/')[0] for name in params} == {'backbone'}

  def value(config, batch):
    model = topic_dpr.build(config, shape, mesh, tokenizer)
    placed = meshes.put_batch(mesh, batch)
    return float(jax.jit(lambda p, b: model.loss(p, b, None)[0])(tree.unflatten(params), placed))

  before = value(config, batch | {f'{side}_number': row for side, row in rows.items()})
  # As if the texts began with the words: no topics, and longer texts.
  longer = dict(batch)
  for side, row in rows.items():
    for name, inserted in (('tokens', row), ('mask', np.ones(row.shape, bool))):
      old = batch[f'{side}_{name}']
      longer[f'{side}_{name}'] = np.concatenate([old[..., :1], inserted, old[..., 1:]], axis=-1)
  plain = make_config(topics__path='', prompt__length=0)
  assert np.isclose(before, value(plain, longer), 1e-6)
  assert not np.isclose(before, value(plain, batch), 1e-3)


def test_random_words_and_topics_follow_from_the_id(tokenizer, found):
  ids = [f'paper {i}' for i in range(3000)]
  words = topic_dpr.random_words(found, tokenizer, LENGTH, ids[:50], 0)
  known = [tokenizer.encode_bare([word])[word][0] for word in WORDS]
  assert words.shape == (50, LENGTH) and set(words.ravel().tolist()) == set(known)
  assert all(len(set(row)) == LENGTH for row in words.tolist())
  assert (topic_dpr.random_words(found, tokenizer, LENGTH, ids[7:8], 0) == words[7]).all()
  assert (topic_dpr.random_words(found, tokenizer, LENGTH, ids[:50], 1) != words).any()
  topics = topic_dpr.random_topics(found, ids, 0)
  # Sizes are 3, 2 and 1.
  assert np.allclose(np.bincount(topics) / 3000, [3 / 6, 2 / 6, 1 / 6], atol=0.03)
  assert topic_dpr.random_topics(found, ids[::-1], 0).tolist() == topics[::-1].tolist()


@pytest.mark.parametrize(
  ('qrels', 'expected'),
  [
    # Only own abstracts, as in the training split of dprjax.papers.
    ({'p0': ['p0'], 'p1': ['p1'], 'p3': ['p3']}, ['p0 p1', 'p0 p1 p2', 'p3']),
    # Its dev split, by category already: p0 does not get p1's other category.
    ({'p0': ['p0', 'p1'], 'p2': ['p1', 'p2']}, ['p0 p1', 'p1 p2']),
    # Other ids: the only judged passage is the document; of two nobody knows which.
    ({'q0': ['p2'], 'q1': ['p0', 'p3']}, ['p1 p2', 'p0 p3']),
  ],
)
def test_on_the_dev_split_a_common_category_is_relevant(tokenizer, tmp_path, qrels, expected):
  make_folder(tmp_path, 'dev', qrels)
  config = make_config(data__dir=str(tmp_path), data__dev_split='dev', data__train_split='dev')
  splits = retrieval_data.find_splits(
    config.data, config, epath.Path(tmp_path), None, kind=topic_dpr.TopicData
  )
  tokens = splits.open_cache('dev', splits.dev, tokenizer)

  def relevant(passages):
    queries = np.arange(tokens.num_queries)
    names = dict(zip(passages, tokens.passage_ids(np.array(passages)), strict=True))
    made = splits.make_qrels(tokens.query_ids(queries), tokens.query_rows(queries), names)
    return [' '.join(sorted(grades)) for grades in made.values()]

  assert relevant(range(5)) == expected
  if 'p1' in qrels:  # where fewer passages are searched, no others are relevant
    assert relevant([0, 1, 3]) == ['p0 p1', 'p0 p1', 'p3']


def make_folder(folder, split, qrels):
  """Five documents with categories, and a BEIR folder of them for a split."""
  of = {'p0': ['a'], 'p1': ['a', 'b'], 'p2': ['b'], 'p3': ['c'], 'p4': []}
  corpus = [
    {'_id': id_, 'title': '', 'text': f'oak elm {word}', 'categories': categories}
    for (id_, categories), word in zip(of.items(), WORDS, strict=False)
  ]
  queries = [{'_id': id_, 'text': f'fir {word}'} for id_, word in zip(qrels, WORDS, strict=False)]
  judged = {query: dict.fromkeys(ids, 1) for query, ids in qrels.items()}
  write_dataset(folder / split, corpus, queries, {split: judged})
