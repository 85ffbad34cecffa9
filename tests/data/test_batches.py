"""Batches: what is in them, in which order, and that any process at any time would make the same
ones.
"""

import collections
import dataclasses
import hashlib
import json
import logging

import grain
import numpy as np
import pytest
from etils import epath

from dprjax.base.errors import InputError
from dprjax.data import batches, store, table
from dprjax.data.store import Store

QUERIES, PASSAGES, BATCH, HARD = 26, 60, 8, 3
BUCKETS = {'query_buckets': [6, 8, 10], 'passage_buckets': [12, 16, 20]}


@pytest.fixture(scope='module')
def made(tmp_path_factory):
  """A store written row by row: token j of query i is 1000 + i, of passage i is 2000 + i.

  Query i has 1 to 3 positives and 0 to 8 negatives.
  """
  rng = np.random.default_rng(1)
  path = tmp_path_factory.mktemp('made')
  lengths = {
    'query_lengths': rng.integers(3, 11, QUERIES),
    'passage_lengths': rng.integers(5, 21, PASSAGES),
  }
  lists = []
  for i in range(QUERIES):
    rows = rng.permutation(PASSAGES)
    relevant = rows[: 1 + i % 3 + (i % 2)]
    # The first, third, ... of the negatives are in both pools, the second, sixth, ... in the
    # un-denoised alone, the rest in the denoised alone.
    pools = np.array([3, 1, 3, 2, 3, 1, 3, 2])[: i % 9]
    lists.append(
      {
        'positives': relevant[: 1 + i % 3],
        'relevant': relevant,
        'negatives': rows[10 : 10 + i % 9],
        'pools': pools,
      }
    )
  with table.TableWriter(path / 'passages', 'passages', ('tokens',)) as writer:
    for i, length in enumerate(lengths['passage_lengths']):
      writer.write(f'p{i}', {'tokens': np.full(length, 2000 + i, np.int32)})
  with table.TableWriter(
    path / 'queries', 'queries', ('tokens', 'positives', 'relevant', 'negatives', 'pools')
  ) as writer:
    for i, length in enumerate(lengths['query_lengths']):
      writer.write(
        f'q{i}',
        {'tokens': np.full(length, 1000 + i, np.int32)}
        | {name: rows.astype(np.int32) for name, rows in lists[i].items()},
      )
  counts = {
    f'{name[:-1]}_counts': np.array([len(row[name]) for row in lists]) for name in ('negatives',)
  } | {
    'relevant_counts': np.array([len(row['relevant']) for row in lists]),
    'undenoised_counts': np.array([sum(row['pools'] & 1) for row in lists]),
    'denoised_counts': np.array([sum(row['pools'] & 2) // 2 for row in lists]),
  }
  arrays = {name: values.astype(np.int32) for name, values in (lengths | counts).items()}
  opened = Store(
    path=path,
    settings={},
    pad_id=0,
    queries=table.Table(path / 'queries', 'queries'),
    passages=table.Table(path / 'passages', 'passages'),
    **arrays,
  )
  return opened, [{name: rows.tolist() for name, rows in row.items()} for row in lists]


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


def test_a_batch_is_as_the_architecture_says(made):
  opened, lists = made
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
    for row, query in enumerate(batch['query_index']):
      tokens = batch['query_tokens'][row]
      assert (
        tokens[batch['query_mask'][row]].tolist() == [1000 + query] * opened.query_lengths[query]
      )
      assert not tokens[~batch['query_mask'][row]].any()
      assert sorted(batch['relevant'][row][batch['relevant'][row] >= 0]) == sorted(
        lists[query]['relevant']
      )
      for column, passage in enumerate(batch['passage_index'][row]):
        tokens, mask = batch['passage_tokens'][row, column], batch['passage_mask'][row, column]
        assert tokens[mask].tolist() == [2000 + passage] * opened.passage_lengths[passage]
        assert not tokens[~mask].any()
    # The smallest bucket that holds everything.
    assert batch['query_tokens'].shape[1] == min(
      b for b in BUCKETS['query_buckets'] if b >= opened.query_lengths[batch['query_index']].max()
    )
    longest = opened.passage_lengths[batch['passage_index']].max()
    assert batch['passage_tokens'].shape[2] == min(
      b for b in BUCKETS['passage_buckets'] if b >= longest
    )


def test_positives_are_positive_and_negatives_are_not(made):
  opened, lists = made
  for batch in take(opened, 30):
    for query, passages in zip(batch['query_index'], batch['passage_index'].tolist(), strict=True):
      assert passages[0] in lists[query]['positives']
      negatives = passages[1:]
      assert len(set(negatives)) == HARD and not set(negatives) & set(lists[query]['relevant'])
      # Its own before random ones.
      own = set(lists[query]['negatives'])
      assert len(own & set(negatives)) >= min(HARD, len(own))


def test_epochs_shuffle_every_query_once_and_differ(made):
  opened, _ = made
  steps = QUERIES // BATCH
  found = take(opened, 3 * steps)
  epochs = [
    np.concatenate([batch['query_index'] for batch in found[i * steps : (i + 1) * steps]]).tolist()
    for i in range(3)
  ]
  assert all(len(set(epoch)) == steps * BATCH for epoch in epochs)
  assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != sorted(epochs[0])
  assert set(epochs[0]) != set(
    epochs[1]
  )  # what a short last batch leaves out is another two queries each time
  assert not same(take(opened, 1, seed=1)[0], found[0])
  assert all(same(*pair) for pair in zip(take(opened, 3 * steps), found, strict=True))


def test_epochs_rotate_positives_and_negatives(made):
  opened, lists = made
  steps, epochs = QUERIES // BATCH, 24
  seen = collections.defaultdict(dict)
  for step, batch in enumerate(take(opened, steps * epochs)):
    for query, passages in zip(batch['query_index'], batch['passage_index'].tolist(), strict=True):
      seen[query][step // steps] = passages
  checked = 0
  for query, by_epoch in seen.items():
    own = lists[query]
    for epoch, (positive, *negatives) in by_epoch.items():
      assert positive == own['positives'][epoch % len(own['positives'])]
      if len(own['negatives']) >= 2 * HARD and epoch + 1 in by_epoch:
        # Enough for two epochs: the next takes none of this one's.
        assert set(negatives) <= set(own['negatives']) and not set(negatives) & set(
          by_epoch[epoch + 1][1:]
        )
        checked += 1
    if len(own['negatives']) >= HARD:
      assert {name for row in by_epoch.values() for name in row[1:]} == set(own['negatives'])
    if not own['negatives']:
      assert (
        len({name for row in by_epoch.values() for name in row[1:]}) > 3 * HARD
      )  # random ones are new in each epoch
  assert checked > 50


def test_processes_share_out_the_global_batch(made):
  opened, _ = made
  whole = take(opened, 5)
  parts = [take(opened, 5, process_index=i, process_count=4) for i in range(4)]
  for step, batch in enumerate(whole):
    for key in batch:
      assert np.array_equal(np.concatenate([part[step][key] for part in parts]), batch[key]), key
  # Hosts whose own rows are short still pad to the global batch's bucket.
  assert any(
    opened.passage_lengths[part['passage_index']].max() <= 16 < part['passage_tokens'].shape[2]
    for rows in parts
    for part in rows
  )


@pytest.mark.parametrize('threads', [0, 2])
@pytest.mark.parametrize('mixed', [False, True])
def test_resumes_exactly(made, threads, mixed):
  opened, _ = made
  dataset = make(opened, seed=3)
  if mixed:  # two parts of the second for one of the first, each in its own order
    other = make(opened, seed=4, negatives=1).map(lambda batch: batch | {'second': np.ones(1)})
    expected = [dataset[0], other[0], other[1], dataset[1], other[2], other[3], dataset[2]]
    expected += [other[4], other[5], dataset[3], other[6], other[7]]
    dataset = grain.MapDataset.mix([dataset, other], [1, 2])
  else:
    assert len(dataset) == QUERIES // BATCH == 3
    expected = [dataset[step] for step in range(12)]
  iterator = batches.open_batches(dataset, threads)
  for step in range(4):  # into the second epoch
    assert same(next(iterator), expected[step])
  state = iterator.get_state()
  assert state == {'next_index': 4}  # as in the checkpoints that runs have
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


def test_orbax_saves_and_restores_the_position(made, tmp_path):
  import grain.checkpoint
  import orbax.checkpoint as ocp

  dataset = make(made[0])
  iterator = batches.open_batches(dataset)
  for _ in range(5):
    next(iterator)
  with ocp.CheckpointManager(tmp_path / 'saved') as manager:
    manager.save(5, args=ocp.args.Composite(data=grain.checkpoint.CheckpointSave(iterator)))
    manager.wait_until_finished()
    fresh = batches.open_batches(dataset)
    manager.restore(5, args=ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(fresh)))
  assert all(same(next(fresh), dataset[step]) for step in range(5, 8))
  fresh.close()
  iterator.close()


def test_no_hard_negatives(made):
  opened, _ = made
  (batch,) = take(opened, 1, negatives=0)
  assert batch['passage_index'].shape == (BATCH, 1)


def test_queries_short_of_negatives_are_counted(made, caplog):
  opened, lists = made
  caplog.set_level(logging.INFO)
  take(opened, 1)
  missing = [HARD - len(row['negatives']) for row in lists if len(row['negatives']) < HARD]
  assert (
    f'{len(missing)} of {QUERIES} queries have fewer negatives than the first epoch' in caplog.text
  )
  assert f'random passages stand in for {sum(missing)} in the first epoch' in caplog.text


def test_relevant_passages_in_the_batch_come_first_when_there_is_no_room_for_all(made):
  opened, lists = made
  displaced = 0
  for batch in take(opened, 40, max_relevant=2):
    assert batch['relevant'].shape == (BATCH, 2)
    present = set(batch['passage_index'].ravel().tolist())
    for query, row in zip(batch['query_index'], batch['relevant'].tolist(), strict=True):
      relevant = lists[query]['relevant']
      assert set(row) - {-1} <= set(relevant) and len(set(row) - {-1}) == min(2, len(relevant))
      assert len(present & set(row)) == min(2, len(present & set(relevant)))
      displaced += bool(set(row) - {-1} - set(relevant[:2]))
  assert displaced


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'batch_size': 27}, r'a batch of 27 queries is more than the 26 training queries of '),
    ({'process_count': 3}, r'a batch of 8 queries cannot be divided among 3 processes'),
    (
      {'passage_buckets': [12, 16]},
      r'passage_buckets \[12, 16\]: the longest passage of .* has 20 tokens',
    ),
    ({'query_buckets': []}, r'query_buckets \[\]: the longest query of .* has 10 tokens'),
    (
      {'negatives': 58},
      r'58 negatives a query are too many: .* holds 60 passages, and up to 4 are relevant',
    ),
  ],
)
def test_impossible_sizes(made, change, message):
  with pytest.raises(InputError, match=message):
    take(made[0], 1, **change)


def test_as_many_negatives_as_there_are_passages(made):
  opened, lists = made
  (batch,) = take(opened, 1, negatives=56)
  for query, passages in zip(batch['query_index'], batch['passage_index'].tolist(), strict=True):
    assert len(set(passages[1:])) == 56 and not set(passages[1:]) & set(lists[query]['relevant'])


def test_length_buckets():
  lengths = np.array([5, 9, 3, 10, 4, 17, 2])
  groups = [
    (rows.tolist(), length) for rows, length in batches.length_buckets(lengths, [10, 4, 20], 2)
  ]
  assert groups == [([6, 2], 4), ([4, 4], 4), ([0, 1], 10), ([3, 3], 10), ([5, 5], 20)]
  assert batches.length_buckets(np.array([], np.int32), [4], 2) == []
  with pytest.raises(InputError, match=r'17 tokens fits none of the buckets \[4, 10\]'):
    batches.length_buckets(lengths, [4, 10], 2)


def test_length_buckets_hold_every_row_once():
  lengths = np.random.default_rng(0).integers(1, 257, 1000)
  groups = batches.length_buckets(lengths, [32, 64, 128, 256], 48)
  assert all(len(rows) == 48 and lengths[rows].max() <= length for rows, length in groups)
  assert sorted(row for rows, _ in groups for row in dict.fromkeys(rows.tolist())) == list(
    range(1000)
  )


def test_the_stores_own_reader_is_safe_from_threads(made):
  dataset = make(made[0])
  iterator = batches.open_batches(dataset, threads=8, prefetch=16)
  assert all(same(next(iterator), dataset[step]) for step in range(40))
  iterator.close()


@pytest.mark.slow
def test_real_scifact(data_dir, minilm, tmp_path):
  from dprjax.data.sources import Source, load_dataset
  from dprjax.data.text import load_tokenizer

  source = Source(str(data_dir / 'scifact'))
  opened = store.build_store(
    source, load_tokenizer(minilm), tmp_path / 'store', query_max_length=64, passage_max_length=128
  )
  data = load_dataset(source)
  found = take(opened, 50, batch_size=16, query_buckets=[32, 64], passage_buckets=[64, 128])
  for batch in found:
    names = np.array(opened.passage_ids(batch['passage_index'].ravel())).reshape(
      batch['passage_index'].shape
    )
    for query, row in zip(opened.query_ids(batch['query_index']), names.tolist(), strict=True):
      assert row[0] in data.positives(query) and not set(row[1:]) & set(data.positives(query))


# The mix of pools. The negatives of query i are i % 9 in number, of which so many are in each pool.


def digest(found):
  total = hashlib.sha256()
  for batch in found:
    for key in sorted(batch):
      total.update(f'{key}{batch[key].dtype}{batch[key].shape}'.encode() + batch[key].tobytes())
  return total.hexdigest()


def pools_of(row, bit):
  return {name for name, pools in zip(row['negatives'], row['pools'], strict=True) if pools & bit}


def unnamed(opened, folder):
  """The same store with every negative in the un-denoised pool alone, as of a file that names no
  pools.
  """
  columns = ('tokens', 'positives', 'relevant', 'negatives')
  rows = np.arange(opened.num_queries)
  with table.TableWriter(folder / 'queries', 'queries', (*columns, 'pools')) as writer:
    for number, values in enumerate(zip(*opened.queries.read(rows, columns), strict=True)):
      row = {
        name: np.frombuffer(value, np.int32) for name, value in zip(columns, values, strict=True)
      }
      writer.write(f'q{number}', row | {'pools': np.ones(len(row['negatives']), np.int32)})
  return dataclasses.replace(
    opened,
    queries=table.Table(folder / 'queries', 'queries'),
    undenoised_counts=opened.negative_counts,
    denoised_counts=np.zeros_like(opened.negative_counts),
  )


def test_without_pools_batches_are_what_they_were_before_there_were_pools(made, tmp_path):
  opened, _ = made
  before = take(opened, 60)
  # Of the last version that knew of no pools.
  assert digest(before) == '728ffd01578cd70b633ec8a14c8821146cef544a56950490dc9748dd6d2bc789'
  after = take(unnamed(opened, epath.Path(tmp_path)), 60, mix=batches.Mix())
  assert {'negative_pool'} == {key for batch in after for key in batch} - {
    key for batch in before for key in batch
  }
  assert digest(
    {key: batch[key] for key in batch if key != 'negative_pool'} for batch in after
  ) == digest(before)


def rows_of(found):
  """(query, its negatives, where each is from) of every row."""
  for batch in found:
    for query, passages, sources in zip(
      batch['query_index'].tolist(),
      batch['passage_index'][:, 1:].tolist(),
      batch['negative_pool'].tolist(),
      strict=True,
    ):
      yield query, passages, [batches.SLOT_SOURCES[source] for source in sources]


@pytest.mark.parametrize('mix', [(0.5, 0.3, 0.2), (0.9, 0.0, 0.1), (1 / 3, 1 / 3, 1 / 3)])
def test_shares_come_out_within_sampling_error(made, mix):
  drawn = collections.defaultdict(collections.Counter)
  for query, _, sources in rows_of(take(made[0], 300, negatives=7, mix=batches.Mix(*mix))):
    # Of a stand-in, the pool whose place it takes.
    drawn[query].update(source.rpartition('_for_')[2] for source in sources)
  totals = [sum(drawn.values(), collections.Counter()), *drawn.values()]
  assert len(totals) == 1 + QUERIES and totals[0].total() == 300 * BATCH * 7
  for counts in totals:  # of all queries and of each
    for pool, share in zip(('denoised', 'undenoised', 'random'), mix, strict=True):
      expected = counts.total() * share
      assert abs(counts[pool] - expected) <= 4 * np.sqrt(expected * (1 - share)), pool


@pytest.mark.parametrize(
  ('mix', 'pool', 'bit'),
  [
    ((0.0, 1.0, 0.0), 'undenoised', store.UNDENOISED),
    ((0.0, 0.4, 0.6), 'undenoised', store.UNDENOISED),
    ((0.7, 0.0, 0.3), 'denoised', store.DENOISED),
  ],
)
def test_no_negative_comes_again_before_its_pool_is_exhausted(made, mix, pool, bit):
  opened, lists = made
  walks = collections.defaultdict(list)
  for query, passages, sources in rows_of(
    take(opened, 40, batch_size=QUERIES, mix=batches.Mix(*mix))
  ):
    walks[query] += [name for name, source in zip(passages, sources, strict=True) if source == pool]
  orders = []
  for query, walk in walks.items():
    members = pools_of(lists[query], bit)
    if len(members) >= HARD:  # enough for any epoch
      rounds = [walk[i : i + len(members)] for i in range(0, len(walk), len(members))]
      assert set(rounds[0]) == members and len(rounds) > 5
      assert all(row == rounds[0][: len(row)] for row in rounds)
      orders.append(rounds[0] == sorted(rounds[0]))
  assert len(orders) > 5 and not all(orders)


def test_what_stands_in_where_a_pool_has_run_out(made, caplog):
  opened, lists = made
  caplog.set_level(logging.INFO)
  mix = batches.Mix(denoised=0.5, undenoised=0.5)
  found = take(opened, 10, negatives=6, mix=mix, batch_size=QUERIES)
  slots = collections.Counter()
  seen = set()
  for number, (query, passages, sources) in enumerate(rows_of(found)):
    row = lists[query]
    assert len(set(passages)) == 6 and not set(passages) & set(row['relevant'])
    by_source = collections.defaultdict(set)
    for passage, source in zip(passages, sources, strict=True):
      by_source[source].add(passage)
    count = {source: len(names) for source, names in by_source.items()}
    asked = collections.Counter(source.rpartition('_for_')[2] for source in sources)
    denoised, undenoised = pools_of(row, store.DENOISED), pools_of(row, store.UNDENOISED)
    assert by_source['denoised'] <= denoised
    assert count.get('denoised', 0) == min(asked['denoised'], len(denoised))
    undenoised -= by_source['denoised']
    assert by_source['undenoised'] <= undenoised
    assert count.get('undenoised', 0) == min(asked['undenoised'], len(undenoised))
    left = denoised - by_source['denoised'] - by_source['undenoised']
    lacking = asked['undenoised'] - len(by_source['undenoised'])
    assert by_source['denoised_for_undenoised'] <= left
    assert count.get('denoised_for_undenoised', 0) == min(lacking, len(left))
    seen |= set(sources)
    if number < QUERIES:  # the first epoch, which is what the log tells
      slots['denoised'] += asked['denoised'] > len(denoised)
      slots['un-denoised'] += asked['undenoised'] > len(pools_of(row, store.UNDENOISED))
      slots['random'] += sum(source.startswith('random_for') for source in sources)
  assert seen == set(batches.SLOT_SOURCES) - {'random'}
  assert 'of 6 a query 3 denoised, 3 un-denoised, 0 random' in caplog.text
  for pool in ('denoised', 'un-denoised'):
    assert f'{slots[pool]} of {QUERIES} queries have fewer {pool} negatives' in caplog.text
  assert f'random passages stand in for {slots["random"]} in the first epoch' in caplog.text


def test_a_mix_is_the_same_for_any_number_of_processes(made):
  opened, _ = made
  options = {'negatives': 5, 'mix': batches.Mix(0.5, 0.3, 0.2), 'seed': 4}
  whole = take(opened, 12, **options)
  parts = [take(opened, 12, process_index=i, process_count=4, **options) for i in range(4)]
  for step, batch in enumerate(whole):
    for key in ('passage_index', 'negative_pool'):
      assert np.array_equal(np.concatenate([part[step][key] for part in parts]), batch[key]), key
  assert not same(take(opened, 1, **(options | {'seed': 5}))[0], whole[0])


@pytest.mark.parametrize(
  ('mix', 'message'),
  [
    (
      (0.5, 0.6, 0.0),
      r'config\.mix: denoised 0\.5, undenoised 0\.6 and random 0; shares must not be negative, and '
      r'must add up to 1',
    ),
    ((1.5, -0.5, 0.0), 'must not be negative'),
  ],
)
def test_impossible_mixes(made, mix, message):
  with pytest.raises(InputError, match=message):
    take(made[0], 1, mix=batches.Mix(*mix))


def test_a_mix_of_nothing(made):
  (batch,) = take(made[0], 1, negatives=0, mix=batches.Mix())
  assert 'negative_pool' not in batch
  with pytest.raises(InputError, match=r'config\.mix says .* config\.negatives is 0'):
    take(made[0], 1, negatives=0, mix=batches.Mix(0.0, 0.5, 0.5))


def test_a_mix_of_denoised_ones_where_there_are_none(made, tmp_path):
  with pytest.raises(
    InputError,
    match=r'config\.mix\.denoised: 0\.5, but no negative of .* is denoised; mine with a reranker',
  ):
    take(unnamed(made[0], epath.Path(tmp_path)), 1, mix=batches.Mix(0.5, 0.5))
