"""Prompts for queries only: the loss, the source of passage vectors, and refusals."""

import jax
import numpy as np
import pytest

from dprjax.base import tree
from dprjax.encoding import embeddings
from dprjax.losses import contrastive
from dprjax.models import artifact
from dprjax.training import dpr, query_only
from dprjax.training.method import Parts
from tests import gradients, reference, starts
from tests.options import check_options, with_options
from tests.refusals import refused
from tests.training import test_dpr as shared

ROWS, TOTAL, WIDTH = 16, 64, 8
CORPUS = np.random.default_rng(0).normal(size=(TOTAL, WIDTH)).astype(np.float32)


def make_config(**changes):
  return shared.make_config(
    **{'prompt__sides': 'query', 'batch_size': ROWS, 'temperature': 0.5} | changes
  )


def make_batch(candidates, sample):
  """Passages are rows of CORPUS; the sample has none of the batch, but some relevant ones."""
  batch = shared.make_batch(ROWS, candidates)
  index = np.random.default_rng(2).integers(0, 48, size=(ROWS, candidates)).astype(np.int32)
  relevant = np.stack([index[:, 0], np.arange(ROWS) + 44], axis=1).astype(np.int32)
  batch |= {'passage_index': index, 'relevant': relevant, 'passage_vectors': CORPUS[index]}
  if sample:
    rows = np.arange(48, 48 + sample, dtype=np.int32)
    batch |= {'corpus_index': rows, 'corpus_vectors': CORPUS[rows]}
  del batch['passage_tokens'], batch['passage_mask']
  return batch


def expected(config, params, batch):
  """The loss in float64 numpy."""
  params = tree.unflatten({name: np.asarray(leaf, np.float64) for name, leaf in params.items()})
  hidden = reference.encode(
    shared.MODEL,
    params['backbone'],
    batch['query_tokens'],
    batch['query_mask'],
    params['prompt']['query']['prefix'],
  )
  q = reference.pool(hidden, batch['query_mask'], config.pooling, config.normalize)
  more, whole = ((), ()), config.corpus_negatives < 0
  if 'corpus_index' in batch:
    more = batch['corpus_vectors'].astype(np.float64), batch['corpus_index']
  elif whole:
    more = CORPUS.astype(np.float64), range(TOTAL)
  bare, to = None, config.prompt.regularization_on
  if config.prompt.regularization and contrastive.FROZEN in batch:
    bare = batch[contrastive.FROZEN].astype(np.float64)
  elif config.prompt.regularization:
    bare = reference.encode(
      shared.MODEL, params['backbone'], batch['query_tokens'], batch['query_mask'], None
    )
    bare = reference.pool(bare, batch['query_mask'], config.pooling, config.normalize)
  p = batch['passage_vectors'].astype(np.float64)
  known = batch['passage_index'], batch['relevant']
  rest = config.temperature, config.in_batch and not whole, more
  loss, accuracy, negatives = reference.loss(q, p, *known, *rest)
  apart = 0.0
  if bare is not None and to == 'scores':
    lists = (reference.candidate_scores(some, p, *known, *rest)[0] for some in (bare, q))
    apart = reference.divergence(*lists)
  elif bare is not None:
    apart = np.mean(np.sum((q - bare) ** 2, axis=1))
  return loss + config.prompt.regularization * apart, accuracy, negatives


SCORES = {'prompt__regularization': 0.5, 'prompt__regularization_on': 'scores'}


WHOLE = {'negatives': 0, 'corpus_negatives': -1}


@pytest.mark.slow
@pytest.mark.parametrize(
  # Whether the vectors of the frozen encoder come with the batch.
  ('devices', 'settings', 'known'),
  [
    (8, SCORES | {'negatives': 1, 'corpus_negatives': 16, 'grad_cache': 2}, False),
    (1, WHOLE | {'prompt__regularization': 0.5}, False),
    (1, WHOLE | {'prompt__regularization': 0.5}, True),
    (1, {'negatives': 1, 'corpus_negatives': 16, 'grad_cache': 2}, False),
    (8, SCORES | {'negatives': 1, 'corpus_negatives': 8}, True),
    (1, WHOLE | SCORES | {'grad_cache': 2}, True),
    (1, {'negatives': 1, 'corpus_negatives': 8, 'in_batch': False}, False),
  ],
  ids=str,
)
def test_loss_and_gradient_equal_numpy(devices, settings, known):
  config = make_config(**settings)
  mesh = gradients.make_mesh({'data': devices})
  method = dpr.build(config, shared.MODEL, mesh)
  params = shared.make_params(method)
  assert [name for name in params if name.startswith('prompt/')] == ['prompt/query/prefix']
  batch = make_batch(1 + config.negatives, max(config.corpus_negatives, 0))
  if known:
    vectors = np.random.default_rng(2).normal(size=(len(batch['query_index']), WIDTH))
    batch[contrastive.FROZEN] = vectors.astype(np.float32)
  whole = {'corpus/vectors': CORPUS, 'corpus/rows': np.arange(TOTAL, dtype=np.int32)}
  value, metrics, gradient = gradients.value_and_gradient(
    *(method, params, ('prompt/.*',), mesh, batch),
    constants={} if config.corpus_negatives >= 0 else whole,
  )
  want, accuracy, negatives = expected(config, params, batch)
  assert value == pytest.approx(want, rel=1e-5)
  assert metrics['negatives'] == pytest.approx(negatives)
  assert metrics['accuracy'] == pytest.approx(accuracy)
  gradients.assert_slope(lambda p: expected(config, p, batch)[0], params, gradient, 1e-4, 1e-5)


@pytest.mark.slow
def test_the_backbone_stays_frozen():
  config = make_config(trainable=('prompt/.*', 'backbone/.*'))
  method = dpr.build(config, shared.MODEL, gradients.make_mesh({'data': 1}))
  start = starts.init_params(shared.MODEL, 0)
  with refused('config.trainable'):
    method.init(Parts(start), jax.random.key(0))


def test_vectors_are_found_by_id(tmp_path, write_embeddings):
  ids = [f'p{i}' for i in range(TOTAL)]
  write_embeddings(tmp_path / 'passages', ids, CORPUS, shard_rows=10, dtype='float16')
  found = embeddings.load_embeddings(tmp_path / 'passages')
  order = np.random.default_rng(3).permutation(TOTAL)[:40]
  passages = query_only.DiskVectors(found, [ids[i] for i in order])
  rows = np.array([[0, 39, 3], [3, 5, 7]])
  half = CORPUS.astype(np.float16).astype(np.float32)
  np.testing.assert_array_equal(passages.take(rows), half[order][rows])
  np.testing.assert_array_equal(passages.of_ids(['p63', 'p0']), half[[63, 0]])
  with refused('q'):
    query_only.DiskVectors(found, ['p1', 'q'])


@pytest.mark.parametrize(
  'settings, message',
  [
    ({'prompt__length': 0}, ('config.prompt.sides', 'config.prompt.length')),
    (
      {'corpus_negatives': -1, 'negatives': 2},
      ('2', 'config.negatives=0'),
    ),
    ({'corpus_negatives': 12}, ('config.corpus_negatives', '12')),
  ],
  ids=str,
)
def test_options_that_do_not_go_together(settings, message):
  config = with_options(**{'prompt__sides': 'query', 'prompt__length': 3} | settings)
  with refused(message):
    check_options(config)
    query_only.check_corpus_negatives(config, gradients.make_mesh({'data': 8}))


@pytest.mark.slow
def test_it_starts_from_any_prompt_and_no_other_from_it():
  """``config.prompt.init_from``: the prompt for queries is taken."""
  shape = (2, 2, 3, 2, 4)
  arrays = {
    f'{kind}/prefix': np.full(shape, value, np.float32)
    for kind, value in (('query', 1), ('passage', 2))
  }
  both = artifact.Prompt({'kind': 'prefix'}, arrays)
  alone = artifact.Prompt(
    {'kind': 'prefix', 'sides': 'query'}, {'query/prefix': arrays['query/prefix']}
  )
  start = starts.init_params(shared.MODEL, 0)

  def init(prompt, **settings):
    config = shared.make_config(**settings)
    method = dpr.build(config, shared.MODEL, gradients.make_mesh({'data': 1}))
    return tree.flatten(method.init(Parts(start, prompt=prompt), jax.random.key(0))['prompt'])

  for prompt in (both, alone):
    ((name, array),) = init(prompt, prompt__sides='query').items()
    assert name == 'query/prefix'
    np.testing.assert_array_equal(array, arrays['query/prefix'])
  np.testing.assert_array_equal(init(alone)['prefix'], arrays['query/prefix'])
  with refused('config.prompt.init_from', 'passage/prefix'):
    init(alone, prompt__tied=False, prompt__init_from='alone.npz')


def test_all_passages_as_negatives():
  class Passages:
    width = WIDTH

    def take(self, rows):
      return CORPUS[rows]

  config = make_config(negatives=0, corpus_negatives=-1)
  assert (
    query_only.arrays(config, Passages(), np.arange(TOTAL))['corpus/vectors'].shape == CORPUS.shape
  )
