"""Batches: content, order, and that any process makes the same at any time."""

import collections
import dataclasses
import hashlib
import json
import logging

import grain
import numpy as np
import pytest
from etils import epath

from dprjax.text import batches, table, token_cache
from dprjax.text.token_cache import TokenCache
from tests.refusals import refused

QUERIES, PASSAGES, BATCH, HARD = 26, 60, 8, 3
STEPS = QUERIES // BATCH  # an epoch
BUCKETS = {'query_buckets': [6, 8, 10], 'passage_buckets': [12, 16, 20]}
COLUMNS = ('tokens', 'positives', 'relevant', 'negatives', 'sources')


def test_vectors_come_in_place_of_tokens(made):
  def vectors(rows):
    return np.stack([rows, -rows], axis=-1).astype(np.float32)

  def make(**options):
    return batches.make_batches(
      made[0],
      batch_size=BATCH,
      negatives=1,
      seed=3,
      **BUCKETS,
      **options,
    )

  whole, halves = (
    [make(vectors=vectors, sample=6, process_index=i, process_count=n)[4] for i in range(n)]
    for n in (1, 2)
  )
  (batch,), plain = whole, make()[4]
  # The same queries and passages as without.
  shared = plain.keys() & batch.keys()
  assert shared == plain.keys() - {'passage_tokens', 'passage_mask'}
  for name in shared:
    np.testing.assert_array_equal(batch[name], plain[name])
  np.testing.assert_array_equal(batch['passage_vectors'], vectors(batch['passage_index']))
  np.testing.assert_array_equal(batch['corpus_vectors'], vectors(batch['corpus_index']))
  assert not np.isin(batch['corpus_index'], batch['passage_index']).any()
  for name, rows in batch.items():
    np.testing.assert_array_equal(np.concatenate([half[name] for half in halves]), rows)
  other = make(vectors=vectors, sample=6)[5]
  assert set(other['corpus_index']) != set(batch['corpus_index'])
  with refused('config.corpus_negatives', '45', '44', '-1'):
    make(vectors=vectors, sample=45)


def write_queries(folder, rows):
  with table.TableWriter(folder / 'queries', 'queries', COLUMNS) as writer:
    for i, row in enumerate(rows):
      writer.write(f'q{i}', {name: np.asarray(row[name], np.int32) for name in COLUMNS})
  return table.Table(folder / 'queries', 'queries')


@pytest.fixture(scope='module')
def made(tmp_path_factory):
  """A cache written row by row: token j of query i is 1000 + i, of passage i is 2000 + i.

  Query i has 1 to 3 positives and i % 9 negatives. The first, third, ... of these are in both
  pools, the second, sixth, ... only in the un-denoised, the rest only denoised.
  """
  rng = np.random.default_rng(1)
  path = epath.Path(tmp_path_factory.mktemp('made'))
  query_lengths = rng.integers(3, 11, QUERIES).astype(np.int32)
  passage_lengths = rng.integers(5, 21, PASSAGES).astype(np.int32)
  rows = []
  for i, length in enumerate(query_lengths):
    passages = rng.permutation(PASSAGES)
    relevant = passages[: 1 + i % 3 + (i % 2)]
    lists = {
      'positives': relevant[: 1 + i % 3],
      'relevant': relevant,
      'negatives': passages[10 : 10 + i % 9],
      'sources': np.array([3, 1, 3, 2, 3, 1, 3, 2])[: i % 9],
    }
    rows.append({'tokens': [1000 + i] * length} | {k: v.tolist() for k, v in lists.items()})
  with table.TableWriter(path / 'passages', 'passages', ('tokens',)) as writer:
    for i, length in enumerate(passage_lengths):
      writer.write(f'p{i}', {'tokens': np.full(length, 2000 + i, np.int32)})

  def count(column, bit=~0):
    return np.array([sum(bool(value & bit) for value in row[column]) for row in rows], np.int32)

  opened = TokenCache(
    path=path,
    settings={},
    pad_id=0,
    query_lengths=query_lengths,
    passage_lengths=passage_lengths,
    negative_counts=count('sources'),
    relevant_counts=np.array([len(row['relevant']) for row in rows], np.int32),
    undenoised_counts=count('sources', token_cache.UNDENOISED),
    denoised_counts=count('sources', token_cache.DENOISED),
    canonical=np.arange(PASSAGES, dtype=np.int32),
    comparable=True,
    queries=write_queries(path, rows),
    passages=table.Table(path / 'passages', 'passages'),
  )
  return opened, rows


def make(opened, **changes):
  options = {'batch_size': BATCH, 'negatives': HARD, 'seed': 0} | BUCKETS | changes
  return batches.make_batches(opened, **options)


def take(opened, count, **changes):
  dataset = make(opened, **changes)
  return [dataset[step] for step in range(count)]


def same(left, right):
  return left.keys() == right.keys() and all(
    np.array_equal(left[key], right[key]) and left[key].dtype == right[key].dtype for key in left
  )


def queries_of(found):
  """(query, its passages, where each negative is from) of every row."""
  for batch in found:
    drawn = batch.get('negative_source', batch['passage_index'][:, :0])
    for query, passages, sources in zip(
      batch['query_index'].tolist(), batch['passage_index'].tolist(), drawn.tolist(), strict=True
    ):
      yield query, passages, [batches.NEGATIVE_SOURCES[source] for source in sources]


def test_a_batch_is_as_the_architecture_says(made):
  opened, rows = made
  for batch in take(opened, 6):
    assert {key: (value.dtype.name, value.ndim) for key, value in batch.items()} == {
      'query_tokens': ('int32', 2),
      'query_mask': ('bool', 2),
      'passage_tokens': ('int32', 3),
      'passage_mask': ('bool', 3),
      'query_index': ('int32', 1),
      'passage_index': ('int32', 2),
      'relevant': ('int32', 2),
    }
    assert batch['passage_tokens'].shape[:2] == batch['passage_index'].shape == (BATCH, 1 + HARD)
    assert batch['relevant'].shape == (BATCH, opened.max_relevant)
    for side, first, lengths in (
      ('query', 1000, opened.query_lengths),
      ('passage', 2000, opened.passage_lengths),
    ):
      index = batch[f'{side}_index'].ravel()
      tokens, mask = (
        batch[f'{side}_{what}'].reshape(len(index), -1) for what in ('tokens', 'mask')
      )
      # The smallest bucket that holds everything.
      width = min(size for size in BUCKETS[f'{side}_buckets'] if size >= lengths[index].max())
      assert tokens.shape == mask.shape == (len(index), width)
      assert (mask == (np.arange(width) < lengths[index][:, None])).all()
      assert (tokens == np.where(mask, first + index[:, None], 0)).all()
    for query, relevant in zip(batch['query_index'], batch['relevant'], strict=True):
      assert sorted(relevant[relevant >= 0]) == sorted(rows[query]['relevant'])


def test_categories_are_those_of_the_positive(made):
  rng = np.random.default_rng(3)
  of_passage = [rng.permutation(9)[: rng.integers(1, 5)] for _ in range(PASSAGES)]
  lists = table.Lists(
    np.concatenate(of_passage).astype(np.int32), np.array(list(map(len, of_passage)), np.int32)
  )
  labelled = dataclasses.replace(
    made[0], categories=lists, category_names=tuple(f'c{i}' for i in range(9))
  )
  widest = max(map(len, of_passage))
  plain, found = take(made[0], 9), take(labelled, 9)
  parts = [take(labelled, 9, process_index=i, process_count=2) for i in range(2)]
  for step, batch in enumerate(found):
    categories = batch.pop('categories')
    assert categories.dtype == np.int32 and categories.shape == (BATCH, widest)
    for row, passage in zip(categories.tolist(), batch['passage_index'][:, 0], strict=True):
      own = of_passage[passage].tolist()
      assert row == own + [-1] * (widest - len(own))
    halves = [part[step]['categories'] for part in parts]
    np.testing.assert_array_equal(np.concatenate(halves), categories)
  assert digest(found) == digest(plain)


def test_positives_are_positive_and_negatives_are_not(made):
  opened, rows = made
  for query, (positive, *negatives), _ in queries_of(take(opened, 30)):
    row = rows[query]
    assert positive in row['positives']
    assert len(set(negatives)) == HARD and not set(negatives) & set(row['relevant'])
    # Its own before random ones.
    assert len(set(row['negatives']) & set(negatives)) >= min(HARD, len(row['negatives']))


def test_epochs_shuffle_every_query_once_and_differ(made):
  opened, _ = made
  found = take(opened, 3 * STEPS)
  epochs = [
    np.concatenate([batch['query_index'] for batch in found[i : i + STEPS]]).tolist()
    for i in range(0, 3 * STEPS, STEPS)
  ]
  assert all(len(set(epoch)) == STEPS * BATCH for epoch in epochs)
  assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != sorted(epochs[0])
  # The queries that do not fill a batch are others each time.
  assert set(epochs[0]) != set(epochs[1])
  assert not same(take(opened, 1, seed=1)[0], found[0])
  assert all(same(*pair) for pair in zip(take(opened, 3 * STEPS), found, strict=True))


@pytest.mark.parametrize('options', [{}, {'negatives': 5, 'mix': batches.Mix(0.5, 0.3, 0.2)}])
def test_processes_divide_the_global_batch(made, options):
  opened, _ = made
  whole = take(opened, 12, **options)
  parts = [take(opened, 12, process_index=i, process_count=4, **options) for i in range(4)]
  for step, batch in enumerate(whole):
    for key in batch:
      assert np.array_equal(np.concatenate([part[step][key] for part in parts]), batch[key]), key
  # Hosts whose own rows are short still pad to the bucket of the global batch.
  assert any(
    opened.passage_lengths[part['passage_index']].max() <= 16 < part['passage_tokens'].shape[2]
    for found in parts
    for part in found
  )
  assert not same(take(opened, 1, seed=5, **options)[0], whole[0])


@pytest.mark.parametrize(('threads', 'mixed'), [(0, False), (2, True)])
def test_resumes_exactly(made, threads, mixed):
  opened, _ = made
  dataset = make(opened, seed=3)
  assert len(dataset) == STEPS
  expected = [dataset[step] for step in range(12)]
  if mixed:  # two batches of the second for one of the first, each in its own order
    other = make(opened, seed=4, negatives=1).map(lambda batch: batch | {'second': np.ones(1)})
    expected = [dataset[0], other[0], other[1], dataset[1], other[2], other[3], dataset[2]]
    expected += [other[4], other[5], dataset[3], other[6], other[7]]
    dataset = grain.MapDataset.mix([dataset, other], [1, 2])
  iterator = batches.open_batches(dataset, threads)
  for step in range(4):  # into the second epoch
    assert same(next(iterator), expected[step])
  state = iterator.get_state()
  assert state == {'next_index': 4}  # the format of existing checkpoints
  for step in range(4, 7):
    assert same(next(iterator), expected[step])
  # Back, in the same iterator.
  iterator.set_state(state)
  assert all(same(next(iterator), expected[step]) for step in range(4, 12))
  iterator.close()
  # In a new one, as after a restart; the state went through a file.
  fresh = batches.open_batches(dataset, threads)
  fresh.set_state(json.loads(json.dumps(state)))
  assert all(same(next(fresh), expected[step]) for step in range(4, 12))
  fresh.close()


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'batch_size': 27}, ('config.batch_size', '27', '26')),
    ({'passage_buckets': [12, 16]}, ('passage_buckets', '[12, 16]', '20')),
    ({'negatives': 58}, ('config.negatives', '58', '60')),
    ({'mix': batches.Mix(0.5, 0.6, 0.0)}, ('config.mix', '0.5', '0.6')),
  ],
)
def test_impossible_sizes(made, change, message):
  with refused(message):
    make(made[0], **change)


def test_no_hard_negatives(made):
  for options in ({}, {'mix': batches.Mix()}):
    (batch,) = take(made[0], 1, negatives=0, **options)
    assert batch['passage_index'].shape == (BATCH, 1) and 'negative_source' not in batch


def test_a_mix_of_denoised_ones_where_there_are_none(made):
  none = dataclasses.replace(made[0], denoised_counts=np.zeros(QUERIES, np.int32))
  with refused('config.mix.denoised', '0.5'):
    make(none, mix=batches.Mix(0.5, 0.5))


def digest(found):
  total = hashlib.sha256()
  for batch in found:
    for key in sorted(batch):
      total.update(f'{key}{batch[key].dtype}{batch[key].shape}'.encode() + batch[key].tobytes())
  return total.hexdigest()


def mined_from(row, bit):
  return {name for name, bits in zip(row['negatives'], row['sources'], strict=True) if bits & bit}


def test_what_stands_in_where_a_source_has_run_out(made, caplog):
  opened, rows = made
  caplog.set_level(logging.INFO)
  mix = batches.Mix(denoised=0.5, undenoised=0.5)
  short = collections.Counter()
  seen = set()
  found = take(opened, 10, negatives=6, mix=mix, batch_size=QUERIES)
  for number, (query, (_, *negatives), sources) in enumerate(queries_of(found)):
    row = rows[query]
    assert len(set(negatives)) == 6 and not set(negatives) & set(row['relevant'])
    drawn = {source: set() for source in batches.NEGATIVE_SOURCES}
    for passage, source in zip(negatives, sources, strict=True):
      drawn[source].add(passage)
    asked = collections.Counter(source.rpartition('_for_')[2] for source in sources)
    denoised, undenoised = (
      mined_from(row, token_cache.DENOISED),
      mined_from(row, token_cache.UNDENOISED),
    )
    lacking = asked['undenoised'] - len(drawn['undenoised'])
    for source, members, count in (
      ('denoised', denoised, asked['denoised']),
      ('undenoised', undenoised - drawn['denoised'], asked['undenoised']),
      ('denoised_for_undenoised', denoised - drawn['denoised'] - drawn['undenoised'], lacking),
    ):
      assert drawn[source] <= members and len(drawn[source]) == min(count, len(members)), source
    seen |= set(sources)
    if number < QUERIES:  # the first epoch, which the log is about
      short['denoised'] += asked['denoised'] > len(denoised)
      short['un-denoised'] += asked['undenoised'] > len(undenoised)
      short['random'] += sum(source.startswith('random_for') for source in sources)
  assert seen == set(batches.NEGATIVE_SOURCES) - {'random'}
  assert 'of 6 a query 3 denoised, 3 un-denoised, 0 random' in caplog.text
  for source in ('denoised', 'un-denoised'):
    assert f'{short[source]} of {QUERIES} queries have fewer {source} negatives' in caplog.text
  assert f'random passages replace {short["random"]} in the first epoch' in caplog.text
