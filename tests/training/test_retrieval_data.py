"""Queries and passages as the training loop gets them, and the measures of the dev split against
ranks worked out by hand.
"""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from dprjax.training import retrieval_data as retrieval
from dprjax.training.method import Folds
from tests import beir
from tests.refusals import refused
from tests.training.conftest import WORDS, assert_goes_on

PASSAGES = {
  f'd{i}': f'{a} {b} {a}'
  for i, (a, b) in enumerate(itertools.islice(itertools.combinations(WORDS, 2), 24))
}
QUERIES = {f'q{i}': ' '.join(PASSAGES[f'd{2 * i}'].split()[:2]) for i in range(10)}
WEIGHTS = {'query/weight': jnp.float32(2), 'passage/weight': jnp.float32(1)}


@pytest.fixture
def folder(tmp_path):
  """A BEIR folder: query i is about passage 2 i; in dev, oak is about e1, which has it most, and
  yew about e3, which e2 excels.
  """
  # The word comes once in training passages, which come after.
  dev = {'e0': 'elm elm', 'e1': 'oak oak', 'e2': 'yew yew yew', 'e3': 'yew yew'}
  return beir.write(
    tmp_path / 'beir',
    PASSAGES | dev,
    QUERIES | {'oak': 'oak', 'yew': 'yew'},
    train={f'q{i}': [f'd{2 * i}'] for i in range(10)},
    dev={'oak': ['e1'], 'yew': ['e3']},
  )


@pytest.fixture
def find(tmp_path, devices):
  """``find(config)`` -> the located data."""
  run = tmp_path / 'run'
  return lambda config: retrieval.find_splits(config.data, config, run, devices).texts()


@pytest.fixture
def start(folder, find, settings, tokenizer, model):
  """``start(option=value)`` -> the data, on the folder above."""

  def run(**changes):
    options = {
      'data__dir': str(folder),
      'data__format': 'beir',
      'batch_size': 4,
      'negatives': 2,
      'data__query_max_length': 8,
      'data__passage_max_length': 16,
      'data__query_buckets': (4, 8),
      'data__passage_buckets': (8, 16),
    } | changes
    return find(settings(**options)).open(tokenizer, model)

  return run


def test_what_the_loop_is_given(start, words_of, tmp_path, batches_of):
  data = start()
  iterator = batches_of(data)
  assert (len(data.batches), data.unit, data.evaluation) == (
    2,
    'pairs',
    None,
  )  # ten queries, four an update
  assert data.description == (
    '10 training queries, 28 passages; up to 11 negatives a query, where chance is a loss of 2.48'
  )
  batch = next(iterator)
  assert {key: (value.dtype.name, value.shape) for key, value in batch.items()} == {
    'negative_source': ('int8', (4, 2)),
    'query_tokens': ('int32', (4, 4)),
    'query_mask': ('bool', (4, 4)),
    'passage_tokens': ('int32', (4, 3, 8)),
    'passage_mask': ('bool', (4, 3, 8)),
    'query_index': ('int32', (4,)),
    'passage_index': ('int32', (4, 3)),
    'relevant': ('int32', (4, 1)),
  }
  # Names and texts are those of one another.
  queries, positives = (
    part.split(', ') for part in data.ids(batch).removeprefix('queries ').split(', positives ')
  )
  assert [words_of(row) for row in batch['query_tokens']] == [
    QUERIES[name].split() for name in queries
  ]
  assert [words_of(row) for row in batch['passage_tokens'][:, 0]] == [
    PASSAGES[name].split() for name in positives
  ]
  assert [int(name[1:]) for name in positives] == [2 * int(name[1:]) for name in queries]
  assert (tmp_path / 'run' / 'token_cache' / 'train').is_dir()


def test_goes_on_where_it_stopped(start, batches_of):
  assert_goes_on(start, batches_of, 3, 3)


def test_a_teachers_scores_come_with_the_batch(start, find, batches_of, tmp_path, settings):
  run = tmp_path / 'run.trec'
  run.write_text(''.join(f'q{i} Q0 d{j} 1 {i - j} ce\n' for i in range(10) for j in range(20)))
  distillation = {'distillation__loss': 'kl', 'distillation__scores': str(run)}
  batch = next(batches_of(start(**distillation)))
  assert batch['teacher_scores'].shape == batch['passage_index'].shape == (4, 3)
  # Passages are rows in the order of the file; those of dev, from the twentieth on, have no scores.
  expected = batch['query_index'][:, None] - batch['passage_index'].astype(np.float32)
  known = batch['passage_index'] < 20
  np.testing.assert_array_equal(batch['teacher_scores'], np.where(known, expected, np.nan))

  def files(**changes):
    given = {'data__dir': str(tmp_path / 'beir'), 'data__format': 'beir'} | distillation | changes
    return find(settings(**given)).files

  assert files()['teacher scores'] == run
  for scores, named in (('', 'config.distillation.scores'), ('lost.trec', 'lost.trec')):
    with refused(named):
      files(distillation__scores=scores)


@pytest.mark.slow
@pytest.mark.parametrize('limit', [0, 2])
def test_the_dev_split_is_measured(start, bag, tmp_path, limit):
  data = start(data__dev_split='dev', eval__measure='P@1', eval__corpus_limit=limit)
  found = data.evaluation(bag)(WEIGHTS).means
  if limit:
    # Only relevant passages are searched: e2 is not there.
    assert found == {'P@1': 1.0, 'nDCG@10': 1.0, 'RR@10': 1.0, 'R@100': 1.0}
  else:
    # e1 is the first for oak, e3 the second for yew.
    assert found == pytest.approx(
      {'P@1': 0.5, 'nDCG@10': (1 + 1 / math.log2(3)) / 2, 'RR@10': 0.75, 'R@100': 1.0}
    )
  assert (
    tmp_path / 'run' / 'dev.tsv'
  ).read_text() == 'query-id\tcorpus-id\tscore\noak\te1\t1\nyew\te3\t1\n'


def test_a_batch_is_no_larger_than_the_queries(start):
  with refused('config.batch_size', '11', '10'):
    start(batch_size=11)


@pytest.mark.parametrize(
  ('judged', 'changes', 'fails'),
  [
    ('q0\td0\t1\n', {'batch_size': 1}, True),  # one query
    ('q0\td0\t1\nq1\td0\t1\n', {'batch_size': 2}, True),  # one passage
    ('q0\td0\t1\nq1\td0\t1\n', {'batch_size': 2, 'negatives': 1}, False),
    ('q0\td0\t1\nq1\td0\t1\nq2\td1\t1\n', {'batch_size': 2}, False),
  ],
)
def test_judgements_that_leave_no_negative_are_refused(start, folder, judged, changes, fails):
  (folder / 'qrels' / 'train.tsv').write_text('query-id\tcorpus-id\tscore\n' + judged)
  if fails:
    with refused('token_cache/train', 'config.negatives'):
      start(**{'negatives': 0} | changes)
  else:
    start(**{'negatives': 0} | changes)


def test_few_queries_are_held_out_in_turns(start, find, bag, folder, tmp_path, settings):
  few = {'data__hold_out': 0.5, 'data__folds': 2, 'batch_size': 2}
  data = start(**few, data__folds_below=10)  # as many as there are
  assert data.evaluation is not None and not data.description.startswith('10 ')
  data = start(**few, data__folds_below=11)
  assert data.evaluation is None and data.description.startswith('10 training queries')
  config = settings(data__dir=str(folder), data__format='beir', **few)
  assert find(config).folds == Folds(2, 5)
  held_out = []
  for fold in (1, 2):
    data = start(**few, data__fold=fold)
    assert data.description.startswith('5 training queries')
    data.evaluation(bag)
    rows = (tmp_path / 'run' / 'dev.tsv').read_text().splitlines()[1:]
    held_out.append({row.split('\t')[0] for row in rows})
  assert held_out[0] | held_out[1] == {f'q{i}' for i in range(10)}
  assert len(held_out[0]) == len(held_out[1]) == 5
