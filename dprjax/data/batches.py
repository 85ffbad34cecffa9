"""Batches: what a training step sees, in an order that the seed decides.

Step t of epoch e takes the queries that a shuffle by the seed and e puts there. Every process works
out the whole global batch (which queries, which passages, how long) and reads the tokens of its own
rows only. So all processes agree on the shapes without communication.

    dataset = make_batches(
      store, batch_size=64, negatives=3, query_buckets=[32], passage_buckets=[64, 128], seed=0
    )
    batches = open_batches(dataset)
    batch = next(batches)
    state = batches.get_state()    # JSON; set_state(state) continues with the batch after this one

A data set of batches is indexed by the step and is as long as an epoch, so that
`grain.MapDataset.mix` and `.map` work on it. Steps beyond its length are in later epochs.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import grain
import jaxtyping as jt
import numpy as np
from etils import epath

from dprjax.base import outofcore
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.data import table
from dprjax.data.store import DENOISED, UNDENOISED, Store
from dprjax.data.table import Integers, Lists
from dprjax.data.text import pad_flat

Batch = dict[str, np.ndarray]

SLOT_SOURCES = (
  'random',
  'undenoised',
  'denoised',
  'denoised_for_undenoised',
  'random_for_undenoised',
  'random_for_denoised',
)
"""Where a hard negative is from: its slot's pool or, from `STAND_INS` on, what stands in for it."""
STAND_INS = 3

# What a random number is for, so that no two uses share a stream.
_SHUFFLE, _RANDOM, _ORDER, _MIX, _SAMPLE = range(5)
_log = logging.getLogger(__name__)


Vectors = Callable[[jt.Int32[np.ndarray, '*n']], jt.Float32[np.ndarray, '*n H']]
"""Rows of a store's passages -> their vectors."""


class Mix(NamedTuple):
  """The shares of the pools in a query's hard negatives (DPTDR section 3.3). They add up to 1.

  Attributes:
    denoised: negatives that a reranker passed; random passages stand in where there are too few.
    undenoised: negatives as they were mined; denoised ones stand in, then random passages.
    random: passages drawn anew in each epoch.
  """

  denoised: float = 0.0
  undenoised: float = 1.0
  random: float = 0.0


def make_batches(
  store: Store,
  *,
  batch_size: int,
  negatives: int,
  query_buckets: Sequence[int],
  passage_buckets: Sequence[int],
  seed: int,
  mix: Mix | None = None,
  positive: str = 'rotate',
  process_index: int = 0,
  process_count: int = 1,
  max_relevant: int | None = None,
  vectors: Vectors | None = None,
  sample: int = 0,
) -> grain.MapDataset[Batch]:
  """This process's rows of the global batch of any step (keys: docs/architecture.md, 'A batch').

  Each epoch shuffles the queries anew and leaves out those that do not fill a batch. A query's
  positives take turns, one an epoch, unless ``positive`` says otherwise. Its hard negatives have an
  order that the seed decides: an epoch takes the next ones, and none comes again before all have
  been taken. A query with fewer than ``negatives`` gets all it has and, for the rest, random
  passages that are not relevant to it.

  With a ``mix``, each of a query's slots for hard negatives draws a pool in each epoch, and each
  pool has its own order. Negatives that are in both pools are taken once a row, so the next one of
  the un-denoised may come again early. Batches then have one more key, `negative_pool` ``[B, C -
  1]`` int8, indices of `SLOT_SOURCES`. Where the store has categories, they have `categories` ``[B,
  G]`` int32.

  Args:
    batch_size: queries of the global batch; process i has the i-th of ``process_count`` equal
      blocks.
    negatives: hard negatives a query, so ``C = 1 + negatives``.
    mix: the pools that they are drawn from; by default from any.
    positive: 'rotate', or 'first' for the first one of the data in every epoch.
    query_buckets, passage_buckets: the lengths that a batch may have. The smallest that holds the
      whole global batch is taken.
    max_relevant: the largest R of `relevant`; by default what the store's queries need. If a query
      has more, those in the global batch come first: they must not be taken for negatives.
    vectors: gives the passages' vectors, which a batch then has in place of their tokens:
      `passage_vectors` ``[B, C, H]``.
    sample: passages besides, which are drawn for each batch from all that it does not hold:
      `corpus_vectors` ``[S, H]`` and `corpus_index` ``[S]``. It needs ``vectors``.

  Raises:
    InputError: sizes that the store, the buckets or the processes do not allow.
  """
  own = process_rows(batch_size, process_index, process_count, 'queries')
  if batch_size > store.num_queries:
    raise InputError(
      f'config.batch_size: an update of {counted(batch_size, "queries")} is more than '
      f'{store.path} has, {counted(store.num_queries, "training queries")}; lower '
      'config.batch_size (or config.accumulate)'
    )
  feed = Feed(
    store,
    negatives=negatives,
    query_buckets=query_buckets,
    passage_buckets=passage_buckets,
    seed=seed,
    mix=mix,
    positive=positive,
    max_relevant=max_relevant,
    vectors=vectors,
  )
  own_sample = process_rows(sample, process_index, process_count, 'passages')
  distinct = store.distinct_passages()
  most = len(distinct) - batch_size * (1 + negatives)
  if sample > max(most, 0):
    raise InputError(
      f'config.corpus_negatives: {sample:,} passages cannot be drawn beside those of a batch: '
      f'{store.path} holds {len(distinct):,}; use at most {max(most, 0):,}, or -1 for all'
    )
  rows_of = shuffle_rows(np.arange(store.num_queries, dtype=np.int32), batch_size, [seed, _SHUFFLE])
  rows = np.arange(batch_size)[own]

  def make(step: int, _: Any = None) -> Batch:
    epoch, queries = rows_of(step)
    drawn = feed.draw(queries, epoch, random_passages(seed, step))
    buckets = zip(feed.lengths(drawn), (query_buckets, passage_buckets), strict=True)
    batch = feed.read(drawn, rows, *(smallest_bucket(*both) for both in buckets))
    if sample:
      random = np.random.default_rng([seed, _SAMPLE, step])
      held = np.searchsorted(distinct, drawn.passages)
      index = distinct[sample_others(held, len(distinct), sample, random)[own_sample]]
      assert vectors is not None
      batch |= {'corpus_index': index, 'corpus_vectors': vectors(index)}
    return batch

  return grain.MapDataset.range(store.num_queries // batch_size).map_with_index(make)


class Drawn(NamedTuple):
  """Queries of a global batch, with their passages.

  Attributes:
    queries, passages: canonical rows of the store; column 0 is the positive.
    sources: what filled each slot, indices of `SLOT_SOURCES`; None without hard negatives.
    tokens, relevant: columns of the queries, as the store keeps them.
  """

  queries: jt.Int32[np.ndarray, ' B']
  passages: jt.Int32[np.ndarray, 'B C']
  sources: jt.Int8[np.ndarray, 'B C-1'] | None
  tokens: Sequence[bytes]
  relevant: Sequence[bytes]


class Feed:
  """Draws the passages of queries and reads their tokens; the arguments are `make_batches`'.

  Attributes:
    size: the number of queries.
    counts: how many rows there are to name, by the key of a batch that names them.
    negatives: hard negatives a query.
    max_relevant: R of `relevant`.

  Raises:
    InputError: sizes that the store or the buckets do not allow.
  """

  def __init__(
    self,
    store: Store,
    *,
    negatives: int,
    query_buckets: Sequence[int],
    passage_buckets: Sequence[int],
    seed: int,
    mix: Mix | None = None,
    positive: str = 'rotate',
    max_relevant: int | None = None,
    vectors: Vectors | None = None,
  ):
    self._distinct = store.distinct_passages()
    if negatives + store.max_relevant > len(self._distinct):
      raise InputError(
        f'config.negatives: {negatives} a query are too many: {store.path} holds '
        f'{counted(len(self._distinct), "passages of different text")}, and up to '
        f'{store.max_relevant:,} are relevant to one query'
      )
    for kind, buckets, lengths in (
      ('query', query_buckets, store.query_lengths),
      ('passage', passage_buckets, store.passage_lengths),
    ):
      check_buckets(buckets, lengths, kind, store.path)
    if negatives:
      _check_mix(store, mix, negatives, seed)
    elif mix not in (None, Mix()):
      raise InputError(
        'config.mix says what the hard negatives are, but config.negatives is 0: there are none'
      )
    self._store, self._seed, self._mix, self._positive = store, seed, mix, positive
    self._vectors = vectors
    self.negatives, self.size = negatives, store.num_queries
    self.counts = {
      'query_index': store.num_queries,
      'passage_index': store.num_passages,
      'relevant': store.num_passages,
    }
    self.max_relevant = min(max_relevant or store.max_relevant, store.max_relevant)
    categories = store.categories
    self._most_categories = 0 if categories is None else int(categories.counts.max())

  def draw(
    self,
    queries: jt.Int32[np.ndarray, ' B'],
    epochs: int | jt.Int64[np.ndarray, ' B'],
    random: np.random.Generator,
  ) -> Drawn:
    """The passages of queries, each in its epoch; ``random`` draws random passages."""
    store, negatives = self._store, self.negatives
    tokens, *columns = store.queries.read(
      queries, ('tokens', 'positives', 'relevant', 'negatives', 'pools')
    )
    positives, relevant, hard, pools = map(table.lists, columns)
    relevant = relevant._replace(flat=store.canonical[relevant.flat])
    passages = np.empty((len(queries), 1 + negatives), np.int32)
    turn = 0 if self._positive == 'first' else epochs % positives.counts
    passages[:, 0] = positives.flat[positives.starts + turn]
    sources = None
    if negatives:
      bits = pools if self._mix else Lists(np.full_like(pools.flat, UNDENOISED), pools.counts)
      sources = np.empty((len(queries), negatives), np.int8)
      each = np.broadcast_to(np.asarray(epochs), len(queries))
      for epoch in np.unique(each).tolist():
        where = np.flatnonzero(each == epoch)
        passages[where, 1:], sources[where] = _pick_negatives(
          queries[where],
          hard.take(where),
          bits.take(where).flat,
          self._mix or Mix(),
          negatives,
          self._seed,
          epoch,
        )
      _fill_randomly(passages[:, 1:], relevant, self._distinct, random)
    return Drawn(queries, passages, sources, tokens, columns[1])

  def lengths(self, drawn: Drawn) -> tuple[jt.Int32[np.ndarray, ' B'], jt.Int32[np.ndarray, 'B C']]:
    """Tokens of the queries and of their passages."""
    return self._store.query_lengths[drawn.queries], self._store.passage_lengths[drawn.passages]

  def names(self, batch: Batch) -> list[str]:
    """What queries and positives are called in messages."""
    return [
      f'{query} with {passage}'
      for query, passage in zip(
        self._store.query_ids(batch['query_index']),
        self._store.passage_ids(batch['passage_index'][:, 0]),
        strict=True,
      )
    ]

  def read(
    self, drawn: Drawn, rows: jt.Int[np.ndarray, ' own'], query_length: int, passage_length: int
  ) -> Batch:
    """Some rows of a batch, padded to these lengths."""
    store, passages = self._store, drawn.passages[rows]
    query_tokens, query_mask = pad_flat(
      *table.lists([drawn.tokens[row] for row in rows]), query_length, store.pad_id
    )
    if self._vectors is not None:
      texts = {'passage_vectors': self._vectors(passages)}
    else:
      passage_tokens, passage_mask = pad_flat(
        *table.lists(store.passages.read(passages.ravel(), ('tokens',))[0]),
        passage_length,
        store.pad_id,
      )
      shape = (*passages.shape, passage_length)
      texts = {
        'passage_tokens': passage_tokens.reshape(shape),
        'passage_mask': passage_mask.reshape(shape),
      }
    relevant = table.lists([drawn.relevant[row] for row in rows])
    relevant = relevant._replace(flat=store.canonical[relevant.flat])
    batch = {
      'query_tokens': query_tokens,
      'query_mask': query_mask,
      **texts,
      'query_index': drawn.queries[rows],
      'passage_index': passages,
      'relevant': _list_relevant(relevant, drawn.passages, self.max_relevant),
    }
    if self._mix is not None and drawn.sources is not None:
      batch['negative_pool'] = drawn.sources[rows]
    if store.categories is not None:
      batch['categories'] = pad_flat(
        *store.categories.take(passages[:, 0]), self._most_categories, -1
      )[0]
    return batch


def random_passages(seed: int, *numbers: int) -> np.random.Generator:
  """What draws random passages: of a step, or of a step and a task."""
  return np.random.default_rng([seed, _RANDOM, *numbers])


def sample_others(
  passages: jt.Int32[np.ndarray, 'B C'], total: int, count: int, random: np.random.Generator
) -> jt.Int32[np.ndarray, ' count']:
  """Distinct rows of a store of ``total`` passages, none of them in the batch."""
  held = np.unique(passages)
  drawn = random.choice(total - len(held), count, replace=False, shuffle=False)
  # The n-th row that is not held: as many held ones come before it as have at most n others first.
  free_before = held - np.arange(len(held))
  return (drawn + np.searchsorted(free_before, drawn, side='right')).astype(np.int32)


def check_buckets(
  buckets: Sequence[int], lengths: jt.Int32[np.ndarray, ' rows'], kind: str, path: epath.Path
) -> None:
  """Raises InputError where a text of a store is longer than all padded lengths."""
  if not buckets or max(buckets) < lengths.max():
    raise InputError(
      f'{kind}_buckets {list(buckets)}: the longest {kind} of {path} has {lengths.max()} '
      'tokens; add a bucket that holds it'
    )


def open_batches(
  dataset: grain.MapDataset[Batch], threads: int = 2, prefetch: int = 4
) -> grain.DatasetIterator[Batch]:
  """An endless iterator over batches, with ``get_state`` and ``set_state`` (JSON) and ``close``.

  Threads make up to ``prefetch`` batches ahead. Without any, each is made when it is asked for.
  """
  options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=prefetch)
  return iter(dataset.repeat(None).to_iter_dataset(options))


def process_rows(batch_size: int, process_index: int, process_count: int, unit: str) -> slice:
  """The rows of a global batch that are this process's.

  Raises InputError where the processes cannot have equal parts.
  """
  if batch_size % process_count:
    raise InputError(
      f'a batch of {batch_size} {unit} cannot be divided among {process_count} processes'
    )
  count = batch_size // process_count
  return slice(process_index * count, (process_index + 1) * count)


def shuffle_rows(
  rows: Integers, batch_size: int, seed: Sequence[int]
) -> Callable[[int], tuple[int, Integers]]:
  """A function from the number of a step to its epoch and the rows of its global batch.

  Each epoch shuffles the rows anew and leaves out those that do not fill a batch.
  """
  steps = len(rows) // batch_size

  # Grain's own shuffle takes some 5 us a row; one permutation an epoch costs next to nothing.
  @functools.lru_cache(maxsize=2)
  def shuffled(epoch: int) -> Integers:
    return np.random.default_rng([*seed, epoch]).permutation(rows)

  def rows_of(step: int) -> tuple[int, Integers]:
    epoch, place = divmod(step, steps)
    return epoch, shuffled(epoch)[place * batch_size : (place + 1) * batch_size]

  return rows_of


def smallest_bucket(lengths: jt.Int[np.ndarray, '...'], buckets: Sequence[int]) -> int:
  """The smallest bucket that holds all lengths."""
  return min(length for length in buckets if length >= lengths.max())


def longest_bucket(length: int, buckets: Sequence[int], knob: str) -> int:
  """The padded length of texts of at most ``length`` tokens, the longest that a batch can have.

  Raises InputError, naming the knob, where there is no bucket for it.
  """
  if length > max(buckets):
    raise InputError(
      f'{knob} {list(buckets)}: a text may have {length} tokens; add a bucket that holds it'
    )
  return smallest_bucket(np.array([length]), buckets)


def length_buckets(
  lengths: jt.Int[np.ndarray, ' rows'], buckets: Mapping[int, int]
) -> list[tuple[jt.Int[np.ndarray, ' rows'], int]]:
  """Groups rows of similar length for encoding: (row numbers, padded length).

  ``buckets`` are the padded lengths, each with the rows of a group.

  The shortest come first, and every row is in one group. The last group of a bucket is filled up by
  repeating its last row, which keeps one shape a bucket: ``embeddings[rows] = encode(...)`` writes
  the same values again.

  Raises:
    InputError: a row is longer than the longest bucket.
  """
  ends = np.array(sorted(buckets))
  if len(lengths) and (len(ends) == 0 or lengths.max() > ends[-1]):
    raise InputError(f'a text of {lengths.max()} tokens fits none of the buckets {list(buckets)}')
  order = np.argsort(lengths, kind='stable')
  groups = []
  borders = np.searchsorted(lengths[order], ends, side='right')
  for start, stop, end in zip([0, *borders], borders, ends, strict=False):
    size = buckets[int(end)]
    for i in range(start, stop, size):
      rows = order[i : min(i + size, stop)]
      groups.append((np.pad(rows, (0, size - len(rows)), mode='edge'), int(end)))
  return groups


def _pick_negatives(
  queries: jt.Int32[np.ndarray, ' B'],
  negatives: Lists,
  pools: Integers,
  mix: Mix,
  wanted: int,
  seed: int,
  epoch: int,
) -> tuple[jt.Int32[np.ndarray, 'B wanted'], jt.Int8[np.ndarray, 'B wanted']]:
  """Hard negatives of each query, -1 where a random passage is due, and their `SLOT_SOURCES`."""
  owners = negatives.owners
  # The seed, the query and the passage decide the order of a query's negatives.
  order = np.lexsort((_random_bits(seed, _ORDER, queries[owners], negatives.flat), owners))
  slots, past = _count_slots(queries, mix, wanted, seed, epoch)
  denoised, undenoised = (
    _walk(negatives.flat[order][member], owners[member], slots[pool], past[pool], wanted)
    for pool, member in enumerate(pools[order] & bit > 0 for bit in (DENOISED, UNDENOISED))
  )
  # In the order in which slots take them. The denoised come first, because there are usually fewer
  # of them and some are un-denoised as well.
  own = np.where(np.arange(wanted) < slots[0][:, None], denoised, -1)
  candidates = np.concatenate([own, undenoised, denoised], axis=1)
  sources = np.repeat(
    [SLOT_SOURCES.index(name) for name in ('denoised', 'undenoised', 'denoised_for_undenoised')],
    wanted,
  )
  taken = (candidates >= 0) & ~_repeats(candidates)
  taken[:, wanted:] &= np.cumsum(taken[:, wanted:], axis=1) <= slots[1][:, None]
  columns = np.argsort(~taken, axis=1, kind='stable')[:, :wanted]
  filled = np.take_along_axis(taken, columns, axis=1)
  # The rest is random: for the denoised, then for the un-denoised, then because it was drawn.
  number = np.cumsum(~filled, axis=1)
  for_denoised = slots[0] - np.count_nonzero(taken[:, :wanted], axis=1)
  for_both = slots.sum(axis=0) - np.count_nonzero(taken, axis=1)
  random = np.select(
    [number <= for_denoised[:, None], number <= for_both[:, None]],
    [SLOT_SOURCES.index('random_for_denoised'), SLOT_SOURCES.index('random_for_undenoised')],
    SLOT_SOURCES.index('random'),
  )
  return (
    np.where(filled, np.take_along_axis(candidates, columns, axis=1), -1),
    np.where(filled, sources[columns], random).astype(np.int8),
  )


def _count_slots(
  queries: jt.Int32[np.ndarray, ' B'], mix: Mix, wanted: int, seed: int, epoch: int
) -> tuple[jt.Int64[np.ndarray, '2 B'], jt.Int64[np.ndarray, '2 B']]:
  """How many slots draw the denoised and the un-denoised pool, in this epoch and in those before.

  What a slot draws follows from the seed, the query, the epoch and the slot alone.
  """
  # Decimal shares are not exact in binary.
  bounds = np.round([0.0, mix.denoised, mix.denoised + mix.undenoised], 9)
  if np.isin(bounds, (0.0, 1.0)).all():  # nothing to draw
    whole = np.diff(bounds)[:, None].astype(np.int64) * np.full(len(queries), wanted)
    return whole, whole * epoch
  past = epoch * wanted
  bits = _random_bits(seed, _MIX, queries[:, None], np.arange(past + wanted)[None, :])
  lots = (bits >> np.uint64(11)) / np.float64(2**53)
  drawn = np.stack([(low <= lots) & (lots < high) for low, high in itertools.pairwise(bounds)])
  return drawn[..., past:].sum(axis=2), drawn[..., :past].sum(axis=2)


def _walk(
  flat: Integers,
  owners: jt.Int64[np.ndarray, ' _'],
  slots: jt.Int64[np.ndarray, ' B'],
  past: jt.Int64[np.ndarray, ' B'],
  width: int,
) -> jt.Int32[np.ndarray, 'B width']:
  """The next members of each query's pool, -1 where it has fewer.

  A pool that has enough for the epoch's slots goes on after those of the past. Of any other, all
  members are taken in each epoch.
  """
  members = Lists(flat, np.bincount(owners, minlength=len(slots)))
  first = np.where(members.counts >= slots, past, 0)[:, None]
  counts, place = members.counts[:, None], np.arange(width)
  at = members.starts[:, None] + (first + place) % np.maximum(counts, 1)
  return np.where(place < counts, np.append(flat, np.int32(-1))[at], -1)


def _fill_randomly(
  passages: jt.Int32[np.ndarray, 'B wanted'],
  relevant: Lists,
  distinct: jt.Int32[np.ndarray, ' distinct'],
  random: np.random.Generator,
) -> None:
  """Replaces -1 by random ones of the ``distinct`` passages, none of them twice in a row.

  None is relevant to the query.
  """
  num_passages = int(distinct[-1]) + 1
  # Pairs of (row of the batch, passage), one number each, so that one sorted search compares all.
  rows = np.arange(len(passages))[:, None]
  forbidden = np.unique(relevant.owners * num_passages + relevant.flat)
  missing = passages < 0
  again = missing
  while again.any():
    count = np.count_nonzero(again)
    passages[again] = distinct[random.integers(0, len(distinct), size=count, dtype=np.int32)]
    pairs = rows * num_passages + passages
    again = missing & (np.isin(pairs, forbidden) | _repeats(passages))


def _check_mix(store: Store, mix: Mix | None, negatives: int, seed: int) -> None:
  """Logs how many queries are short of negatives. Raises InputError for an impossible mix."""
  shares = mix or Mix()
  if min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
    raise InputError(
      f'config.mix: denoised {shares.denoised:g}, undenoised {shares.undenoised:g} and random '
      f'{shares.random:g}; shares must not be negative, and must add up to 1'
    )
  if shares.denoised and not store.denoised_counts.any():
    raise InputError(
      f'config.mix.denoised: {shares.denoised:g}, but no negative of {store.path} is denoised; '
      'mine with a reranker (python -m dprjax.mine --reranker or --reranked), and name its file '
      'with config.data.mined_negatives'
    )
  # In blocks, because each slot of each query is a random number.
  queries = np.arange(store.num_queries, dtype=np.int32)
  slots = np.concatenate(
    [
      _count_slots(queries[start : start + 2**16], shares, negatives, seed, epoch=0)[0]
      for start in range(0, len(queries), 2**16)
    ],
    axis=1,
  )
  denoised = np.minimum(slots[0], store.denoised_counts)
  # Negatives that are left, of either pool, stand in for un-denoised ones.
  random = slots[0] - denoised + np.maximum(slots[1] - (store.negative_counts - denoised), 0)
  if shares != Mix():
    _log.info(
      'negatives: of %d a query %g denoised, %g un-denoised, %g random on average',
      negatives,
      *(round(negatives * share, 2) for share in shares),
    )
  undenoised = store.negative_counts if mix is None else store.undenoised_counts
  for name, asked, counts in (
    ('denoised ', slots[0], store.denoised_counts),
    ('' if mix is None else 'un-denoised ', slots[1], undenoised),
  ):
    if short := np.count_nonzero(counts < asked):
      _log.info(
        'negatives: %s of %s have fewer %snegatives than the first epoch asks for',
        f'{short:,}',
        counted(store.num_queries, 'queries'),
        name,
      )
  if random.any():
    _log.info('negatives: random passages stand in for %s in the first epoch', f'{random.sum():,}')


def _repeats(rows: jt.Int[np.ndarray, 'B n']) -> jt.Bool[np.ndarray, 'B n']:
  """True where the same number stands further left in a row."""
  order = np.argsort(rows, axis=1, kind='stable')
  ordered = np.take_along_axis(rows, order, axis=1)
  repeated = np.zeros(rows.shape, bool)
  np.put_along_axis(repeated, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
  return repeated


def _random_bits(
  seed: int, use: int, first: jt.Int[np.ndarray, '*#n'], second: jt.Int[np.ndarray, '*#n']
) -> jt.UInt64[np.ndarray, '*n']:
  """64 random bits for each pair of numbers, which follow from the seed."""
  bits = (first.astype(np.uint64) << np.uint64(32)) | second.astype(np.uint64)
  offset = np.random.default_rng([seed, use]).integers(0, 2**63, dtype=np.uint64)
  return outofcore.mix(bits + offset)


def _list_relevant(
  relevant: Lists, passages: jt.Int32[np.ndarray, 'global C'], width: int
) -> jt.Int32[np.ndarray, 'B R']:
  """Relevant passages of each query, -1 where unused; where they are too many, those of the global
  batch first.
  """
  flat, counts = relevant
  if len(counts) and counts.max() > width:
    rows = np.split(flat, relevant.starts[1:])
    rows = [row[np.argsort(~np.isin(row, passages), kind='stable')][:width] for row in rows]
    flat, counts = np.concatenate(rows), np.minimum(counts, width)
  return pad_flat(flat, counts, width, -1)[0]
