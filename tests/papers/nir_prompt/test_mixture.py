"""Batches of several data sets, against their arrangements worked out by hand and by loops."""

import collections
import itertools
import json

import numpy as np
import pytest
from ml_collections import ConfigDict

from dprjax.papers.nir_prompt import mixture, pairs
from dprjax.text import batches, sources, token_cache, vocabularies
from tests import beir
from tests.refusals import refused
from tests.training.conftest import WORDS

BUCKETS = ((8, 16), (8, 16))
ARRANGEMENTS = ('alternate', 'random_task', 'balanced', 'random')


class Numbers:
  """A data set of ``size`` examples, whose tokens are their numbers."""

  def __init__(self, size):
    self.size, self.counts = size, {'x_index': size}

  def draw(self, rows, epochs, random):
    return np.stack([rows, epochs.astype(np.int32), random.integers(0, 99, len(rows), np.int32)], 1)

  def lengths(self, drawn):
    return drawn[:, 0] % 5 + 1, drawn[:, 0] % 3 + 1

  def read(self, drawn, rows, first_length, second_length):
    padded = np.full((len(rows), first_length + second_length), -1, np.int32)
    padded[:, :3] = drawn[rows]
    return {'x_index': drawn[rows, 0], 'tokens': padded}

  def names(self, batch):
    return [str(row) for row in batch['x_index']]


def make(tasks, **changes):
  options = {
    'arrangement': 'random',
    'batch_size': 8,
    'per_task': 0,
    'buckets': BUCKETS,
    'seed': 3,
  } | changes
  return mixture.make_batches(tasks, **options)


def examples(tasks, batch):
  """(task, number of its example) of each row."""
  offsets = np.cumsum([0, *(task.size for task in tasks)])
  return [
    (int(task), int(row - offsets[task]))
    for task, row in zip(batch['task'], batch['x_index'], strict=True)
  ]


@pytest.mark.parametrize('arrangement', ARRANGEMENTS)
def test_a_step_number_alone_decides_its_batch_and_every_share(arrangement):
  tasks = [Numbers(size) for size in (40, 16, 9, 100)]
  options = {'arrangement': arrangement, 'batch_size': 16, 'per_task': 20}
  whole = make(tasks, **options)
  steps = [0, len(whole) - 1, 3 * len(whole) + 1]
  for step in steps:
    batch = whole[step] if step < len(whole) else whole.repeat(None)[step]
    again = make(tasks, **options).repeat(None)[step]  # nothing was asked for before
    assert batch['task'].dtype == batch['x_index'].dtype == np.int32
    shares = {
      count: [
        make(tasks, **options, process_index=index, process_count=count).repeat(None)[step]
        for index in range(count)
      ]
      for count in (2, 8)
    }
    for key in batch:
      np.testing.assert_array_equal(batch[key], again[key])
      for parts in shares.values():
        np.testing.assert_array_equal(np.concatenate([part[key] for part in parts]), batch[key])
    offsets = np.cumsum([0, 40, 16, 9])
    np.testing.assert_array_equal(batch['tokens'][:, 0] + offsets[batch['task']], batch['x_index'])


@pytest.mark.parametrize('arrangement', ARRANGEMENTS)
def test_every_task_has_its_share_and_goes_through_its_examples(arrangement):
  sizes = (40, 16, 5)
  tasks = [Numbers(size) for size in sizes]
  made = make(tasks, arrangement=arrangement, batch_size=12, per_task=24)
  drawn = [list(examples(tasks, made.repeat(None)[step])) for step in range(5 * len(made))]
  assert len(made) == 6
  # Two batches of each task an epoch.
  for epoch in range(5):
    rows = itertools.chain.from_iterable(drawn[6 * epoch : 6 * epoch + 6])
    assert collections.Counter(task for task, _ in rows) == {0: 24, 1: 24, 2: 24}
  for number, size in enumerate(sizes):
    seen = [row for batch in drawn for task, row in batch if task == number]
    counts = collections.Counter(seen)
    # 120 of each: all as often as one another, for a stream takes all before any comes again.
    assert len(counts) == size
    if arrangement != 'random':  # in which the rows of an epoch are shuffled
      for start in range(0, 120 - size, size):
        assert sorted(seen[start : start + size]) == list(range(size))
    assert max(counts.values()) - min(counts.values()) <= 1
  if arrangement in ('alternate', 'random_task'):
    of_batch = [{task for task, _ in batch} for batch in drawn]
    assert all(len(tasks) == 1 for tasks in of_batch)
    order = [tasks.pop() for tasks in of_batch]
    turns = [order[start : start + 6] for start in range(0, 30, 6)]
    if arrangement == 'alternate':
      assert order == [0, 1, 2] * 10
    else:
      assert len({tuple(turn) for turn in turns}) > 1 and [0, 1, 2] * 2 not in turns[:1]
  elif arrangement == 'balanced':
    assert all([task for task, _ in batch] == [0, 1, 2] * 4 for batch in drawn)
  else:
    shares = [collections.Counter(task for task, _ in batch) for batch in drawn]
    assert len({tuple(sorted(share.items())) for share in shares}) > 5


def test_examples_of_a_task_fill_their_batches():
  with refused('config.per_task', '3'):
    make([Numbers(20)] * 3, arrangement='balanced', per_task=3, batch_size=12)


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
  return vocabularies.train_wordpiece(
    [f'{word} {other}.' for word in WORDS for other in WORDS], 200, tmp_path_factory.mktemp('words')
  )


@pytest.fixture(scope='module')
def caches(tmp_path_factory, tokenizer):
  """Two data sets with the same row numbers. In the first, query i is about passages i and i + 1;
  in the second about i alone, and passage i + 4 was mined as a negative.
  """
  folder = tmp_path_factory.mktemp('two')
  built = []
  for name, count in (('a', 9), ('b', 14)):
    corpus = {f'{name}{i}': f'{WORDS[i]} {name} {WORDS[-i]}' for i in range(count)}
    queries = {f'q{name}{i}': WORDS[i] for i in range(count - 2)}
    judged = {
      f'q{name}{i}': [f'{name}{i}', f'{name}{i + 1}'][: 2 if name == 'a' else 1]
      for i in range(count - 2)
    }
    path = beir.write(folder / name, corpus, queries, train=judged)
    if name == 'b':
      mined = {query: f'b{(i + 4) % 14}' for i, query in enumerate(queries)}
      (path / 'mined.jsonl').write_text(
        ''.join(
          json.dumps(
            {
              'query_id': query,
              'query': queries[query],
              'negative_passages': [{'docid': row, 'text': corpus[row]}],
            }
          )
          + '\n'
          for query, row in mined.items()
        )
      )
    source = sources.Source(
      str(path), 'beir', negatives=str(path / 'mined.jsonl') if name == 'b' else None
    )
    built.append(
      token_cache.build_cache(
        source, tokenizer, folder / 'token_cache' / name, query_max_length=8, passage_max_length=8
      )
    )
  return built


def feeds_of(caches, negatives):
  feeds = [
    batches.Feed(
      one,
      negatives=negatives,
      query_buckets=BUCKETS[0],
      passage_buckets=BUCKETS[1],
      seed=0,
      mix=batches.Mix(),
    )
    for one in caches
  ]
  for feed in feeds:
    feed.max_relevant = 2
  return feeds


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
  ('arrangement', 'negatives'),
  [('balanced', 1), ('random', 2), ('alternate', 0), ('random_task', 1)],
)
def test_a_row_of_one_set_is_never_one_of_another(caches, arrangement, negatives):
  feeds = feeds_of(caches, negatives)
  made = make(feeds, arrangement=arrangement, batch_size=6, per_task=12)
  mixed = 0
  for step in range(2 * len(made)):
    batch = made.repeat(None)[step]
    assert batch['relevant'].shape == (6, 2)
    mixed += len(set(batch['task'].tolist())) > 1
    for row, (task, query) in enumerate(zip(batch['task'], batch['query_index'], strict=True)):
      own = caches[task]
      query -= task * caches[0].num_queries
      assert 0 <= query < own.num_queries
      np.testing.assert_array_equal(
        batch['query_tokens'][row][batch['query_mask'][row]], own.query_rows([query])[0].tokens
      )
      known = own.query_rows([query])[0].relevant + task * caches[0].num_passages
      assert sorted(batch['relevant'][row][batch['relevant'][row] >= 0]) == sorted(known)
      # Which passages of the whole batch are false negatives: those of this set that are relevant.
      for other, passages in enumerate(batch['passage_index']):
        for column, passage in enumerate(passages):
          number = passage - batch['task'][other] * caches[0].num_passages
          name = caches[batch['task'][other]].passage_ids([number])[0]
          place = int(own.query_ids([query])[0][2:])
          relevant = name in ({f'a{place}', f'a{place + 1}'} if task == 0 else {f'b{place}'})
          assert (passage in batch['relevant'][row]) == relevant
          if other == row:
            assert relevant == (column == 0)
            np.testing.assert_array_equal(
              batch['passage_tokens'][other, column][batch['passage_mask'][other, column]],
              own.passage_tokens([number])[0],
            )
    if negatives:
      own = np.flatnonzero(batch['task'] == 1)
      mined = caches[1].query_rows(batch['query_index'][own] - caches[0].num_queries)
      for row, columns in zip(own, mined, strict=True):  # the mined one first, then random ones
        assert batch['passage_index'][row, 1] == columns.negatives[0] + caches[0].num_passages
  assert (mixed > 0) == (arrangement in ('balanced', 'random'))
  names = mixture.split_rows(feeds, batch)
  assert sum(len(rows['query_index']) for rows in names.values()) == 6
  for task, rows in names.items():
    assert all(name.startswith('q' + 'ab'[task]) for name in feeds[task].names(rows))


def test_queries_as_pairs(caches, tokenizer, tmp_path):
  (tmp_path / 'train.tsv').write_text(
    ''.join(f'{WORDS[i]}\t{WORDS[-i]}\t{i % 2}\n' for i in range(10))
  )
  lengths = {f'{side}_max_length': 8 for side in ('query', 'passage')}
  settings = ConfigDict(lengths | {'query_prefix': '', 'passage_prefix': ''})
  labelled = pairs.tokenise(pairs.PairSource(str(tmp_path)), tokenizer, settings)
  feeds = [
    pairs.QueryPairFeed(feeds_of(caches, 2)[1]),
    pairs.PairFeed(labelled, {'query_buckets': BUCKETS[0], 'passage_buckets': BUCKETS[1]}),
  ]
  assert feeds[0].size == 12 * 3
  made = make(feeds, arrangement='balanced', batch_size=6, per_task=36)
  assert len(made) == 12
  seen = []
  for step in range(12):
    batch = made[step]
    assert batch['task'].tolist() == [0, 1] * 3
    for row in range(6):
      first, second = (
        batch[f'{view}_tokens'][row][batch[f'{view}_mask'][row]] for view in ('first', 'second')
      )
      one, other, label = (int(batch[key][row]) for key in ('first_index', 'second_index', 'label'))
      if batch['task'][row] == 0:
        columns = caches[1].query_rows([one])[0]
        np.testing.assert_array_equal(first, columns.tokens)
        np.testing.assert_array_equal(second, caches[1].passage_tokens([other])[0])
        assert label == (other in columns.relevant)
        seen.append((one, label))
      else:
        line = one - caches[1].num_queries
        assert line == other - caches[1].num_passages and label == line % 2
        expected = [tokenizer.encode([word], 8)[0][0] for word in (WORDS[line], WORDS[-line])]
        np.testing.assert_array_equal(first, expected[0])
        np.testing.assert_array_equal(second, expected[1])
  # In an epoch each query comes with its positive and with two negatives.
  assert collections.Counter(seen) == {(i, 1): 1 for i in range(12)} | {
    (i, 0): 2 for i in range(12)
  }
  names = mixture.split_rows(feeds, made[0])
  assert all(name.startswith('qb') for name in feeds[0].names(names[0]))
  assert all(name.startswith('line ') for name in feeds[1].names(names[1]))
