"""Batches for training steps, in an order decided by the seed.

The seed and the epoch shuffle the queries, and step t takes the t-th batch of them. Every process
works out the whole global batch (queries, passages, lengths) but reads only the tokens of its own
rows, so processes agree on shapes without communication.

    dataset = make_batches(
      cache, batch_size=64, negatives=3, query_buckets=[32], passage_buckets=[64, 128], seed=0
    )
    batches = open_batches(dataset)
    batch = next(batches)
    state = batches.get_state()    # JSON; set_state(state) continues with the batch after this one

A data set is indexed by step and is one epoch long, so `grain.MapDataset.mix` and `.map` work on
it. Steps beyond its length belong to later epochs.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grain
import jaxtyping as jt
import numpy as np

from dprjax.base import hashes
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.text import table
from dprjax.text.table import Integers, Lists
from dprjax.text.token_cache import DENOISED, UNDENOISED, TokenCache
from dprjax.text.tokenizing import pad_flat

Batch = dict[str, np.ndarray]

NEGATIVE_SOURCES = (
  'random',
  'undenoised',
  'denoised',
  'denoised_for_undenoised',
  'random_for_undenoised',
  'random_for_denoised',
)
"""Sources of a hard negative. Sources from `STAND_INS` on replace another source."""
STAND_INS = 3

# One stream of random numbers for each use.
_SHUFFLE, _RANDOM, _ORDER, _MIX, _SAMPLE = range(5)
_log = logging.getLogger(__name__)

VectorLookup = Callable[[jt.Int32[np.ndarray, '*n']], jt.Float32[np.ndarray, '*n H']]
"""Maps rows of passages in a cache to vectors."""


class Mix(NamedTuple):
  """Shares of the sources in the hard negatives of a query (DPTDR section 3.3); they add up to 1.

  Attributes:
    denoised: negatives that a reranker passed; if there are too few, random passages replace them.
    undenoised: negatives as mined; replaced by denoised ones, then random passages.
    random: passages drawn anew in each epoch.
  """

  denoised: float = 0.0
  undenoised: float = 1.0
  random: float = 0.0


def make_batches(
  cache: TokenCache,
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
  vectors: VectorLookup | None = None,
  sample: int = 0,
) -> grain.MapDataset[Batch]:
  """A data set of the rows of this process (keys: docs/architecture.md, 'A batch').

  Each epoch shuffles the queries anew and drops those that do not fill a batch. The seed orders the
  hard negatives of a query; each epoch takes the next ones, and none repeats before all were taken.
  Random passages that are not relevant fill the gaps.

  With a ``mix``, each negative draws its source anew in each epoch, and each source has its own
  order. Batches then have `negative_source` ``[B, C - 1]`` int8, indices of `NEGATIVE_SOURCES`. If
  the cache has categories, batches have `categories` ``[B, G]`` int32.

  Args:
    batch_size: queries of the global batch; process i has the i-th of ``process_count`` equal
      blocks.
    negatives: hard negatives a query, so ``C = 1 + negatives``.
    mix: shares of the sources; by default any negative.
    positive: 'rotate', the next positive in each epoch, or 'first'.
    query_buckets, passage_buckets: padded lengths; a batch takes the smallest that holds it.
    vectors: gives passage vectors, which replace passage tokens: `passage_vectors` ``[B, C, H]``.
    sample: passages drawn for each batch from those outside it: `corpus_vectors` ``[S, H]`` and
      `corpus_index` ``[S]``. Needs ``vectors``.
  """
  rows = np.arange(batch_size)[process_rows(batch_size, process_index, process_count)]
  if batch_size > cache.num_queries:
    raise InputError(
      f'config.batch_size: {counted(batch_size, "queries")} an update, but {cache.path} has '
      f'{cache.num_queries:,}; lower config.batch_size'
    )
  feed = Feed(
    cache,
    negatives=negatives,
    query_buckets=query_buckets,
    passage_buckets=passage_buckets,
    seed=seed,
    mix=mix,
    positive=positive,
    vectors=vectors,
  )
  own_sample = process_rows(sample, process_index, process_count)
  distinct = cache.distinct_passages()
  most = len(distinct) - batch_size * (1 + negatives)
  if sample > max(most, 0):
    raise InputError(
      f'config.corpus_negatives: {sample:,} cannot be drawn, {cache.path} has {len(distinct):,} '
      f'passages; use at most {max(most, 0):,}, or -1 for all'
    )
  every = np.arange(cache.num_queries, dtype=np.int32)
  rows_of = shuffle_rows(every, batch_size, [seed, _SHUFFLE])

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

  return grain.MapDataset.range(cache.num_queries // batch_size).map_with_index(make)


class DrawnQueries(NamedTuple):
  """Queries of a global batch with their passages.

  Attributes:
    queries, passages: canonical rows in the cache; column 0 of the passages is the positive.
    sources: indices of `NEGATIVE_SOURCES`, one a hard negative; None without hard negatives.
    tokens, relevant: stored columns of the queries.
  """

  queries: jt.Int32[np.ndarray, ' B']
  passages: jt.Int32[np.ndarray, 'B C']
  sources: jt.Int8[np.ndarray, 'B C-1'] | None
  tokens: Sequence[bytes]
  relevant: Sequence[bytes]


class Feed:
  """Draws the passages of queries and reads their tokens; arguments as in `make_batches`.

  Attributes:
    counts: for each key of indices, the number of rows that it refers to.
    max_relevant: R of `relevant`.
  """

  def __init__(
    self,
    cache: TokenCache,
    *,
    negatives: int,
    query_buckets: Sequence[int],
    passage_buckets: Sequence[int],
    seed: int,
    mix: Mix | None = None,
    positive: str = 'rotate',
    vectors: VectorLookup | None = None,
  ):
    self._distinct = cache.distinct_passages()
    if negatives + cache.max_relevant > len(self._distinct):
      raise InputError(
        f'config.negatives: {negatives} a query are too many: {cache.path} has '
        f'{counted(len(self._distinct), "different passages")}, with up to {cache.max_relevant:,} '
        'relevant to one query'
      )
    longest_bucket(cache.query_lengths.max(), query_buckets, 'query_buckets')
    longest_bucket(cache.passage_lengths.max(), passage_buckets, 'passage_buckets')
    if negatives:
      _check_mix(cache, mix, negatives, seed)
    self._cache, self._seed, self._mix, self._positive = cache, seed, mix, positive
    self._vectors = vectors
    self.negatives, self.size = negatives, cache.num_queries
    self.counts = {
      'query_index': cache.num_queries,
      'passage_index': cache.num_passages,
      'relevant': cache.num_passages,
    }
    self.max_relevant = cache.max_relevant
    categories = cache.categories
    self._most_categories = 0 if categories is None else int(categories.counts.max())

  def draw(
    self,
    queries: jt.Int32[np.ndarray, ' B'],
    epochs: int | jt.Int64[np.ndarray, ' B'],
    random: np.random.Generator,
  ) -> DrawnQueries:
    """Draws the passages of queries, each for its epoch; ``random`` draws random passages."""
    cache, negatives = self._cache, self.negatives
    tokens, *columns = cache.queries.read(
      queries, ('tokens', 'positives', 'relevant', 'negatives', 'sources')
    )
    positives, relevant, hard, mined = map(table.lists, columns)
    relevant = relevant._replace(flat=cache.canonical[relevant.flat])
    passages = np.empty((len(queries), 1 + negatives), np.int32)
    turn = 0 if self._positive == 'first' else epochs % positives.counts
    passages[:, 0] = positives.flat[positives.starts + turn]
    sources = None
    if negatives:
      bits = mined if self._mix else Lists(np.full_like(mined.flat, UNDENOISED), mined.counts)
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
    return DrawnQueries(queries, passages, sources, tokens, columns[1])

  def lengths(
    self, drawn: DrawnQueries
  ) -> tuple[jt.Int32[np.ndarray, ' B'], jt.Int32[np.ndarray, 'B C']]:
    """Tokens of the queries and of their passages."""
    return self._cache.query_lengths[drawn.queries], self._cache.passage_lengths[drawn.passages]

  def names(self, batch: Batch) -> list[str]:
    return [
      f'{query} with {passage}'
      for query, passage in zip(
        self._cache.query_ids(batch['query_index']),
        self._cache.passage_ids(batch['passage_index'][:, 0]),
        strict=True,
      )
    ]

  def read(
    self,
    drawn: DrawnQueries,
    rows: jt.Int[np.ndarray, ' own'],
    query_length: int,
    passage_length: int,
  ) -> Batch:
    """Reads rows of a batch, padded to these lengths."""
    cache, passages = self._cache, drawn.passages[rows]
    query_tokens, query_mask = pad_flat(
      *table.lists([drawn.tokens[row] for row in rows]), query_length, cache.pad_id
    )
    if self._vectors is not None:
      texts = {'passage_vectors': self._vectors(passages)}
    else:
      passage_tokens, passage_mask = pad_flat(
        *table.lists(cache.passages.read(passages.ravel(), ('tokens',))[0]),
        passage_length,
        cache.pad_id,
      )
      shape = (*passages.shape, passage_length)
      texts = {
        'passage_tokens': passage_tokens.reshape(shape),
        'passage_mask': passage_mask.reshape(shape),
      }
    relevant = table.lists([drawn.relevant[row] for row in rows])
    relevant = relevant._replace(flat=cache.canonical[relevant.flat])
    batch = {
      'query_tokens': query_tokens,
      'query_mask': query_mask,
      **texts,
      'query_index': drawn.queries[rows],
      'passage_index': passages,
      'relevant': pad_flat(*relevant, self.max_relevant, -1)[0],
    }
    if self._mix is not None and drawn.sources is not None:
      batch['negative_source'] = drawn.sources[rows]
    if cache.categories is not None:
      batch['categories'] = pad_flat(
        *cache.categories.take(passages[:, 0]), self._most_categories, -1
      )[0]
    return batch


def random_passages(seed: int, *numbers: int) -> np.random.Generator:
  """The generator of random passages for a step, or for a step and a task."""
  return np.random.default_rng([seed, _RANDOM, *numbers])


def sample_others(
  passages: jt.Int32[np.ndarray, 'B C'], total: int, count: int, random: np.random.Generator
) -> jt.Int32[np.ndarray, ' count']:
  """Distinct rows of a cache of ``total`` passages that are not in the batch."""
  held = np.unique(passages)
  drawn = random.choice(total - len(held), count, replace=False, shuffle=False)
  # The n-th free row follows every held row that has at most n free rows before it.
  free_before = held - np.arange(len(held))
  return (drawn + np.searchsorted(free_before, drawn, side='right')).astype(np.int32)


def open_batches(
  dataset: grain.MapDataset[Batch], threads: int = 2
) -> grain.DatasetIterator[Batch]:
  """An endless iterator over batches with ``get_state``, ``set_state`` (JSON) and ``close``.

  ``threads`` threads prepare up to 4 batches ahead; 0 threads prepare none.
  """
  options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=4)
  return iter(dataset.repeat(None).to_iter_dataset(options))


def process_rows(batch_size: int, process_index: int, process_count: int) -> slice:
  """The rows of this process in a global batch."""
  count = batch_size // process_count
  return slice(process_index * count, (process_index + 1) * count)


def shuffle_rows(
  rows: Integers,
  batch_size: int,
  seed: Sequence[int],
) -> Callable[[int], tuple[int, Integers]]:
  """Maps a step to its epoch and the rows of its global batch.

  Each epoch shuffles the rows anew and drops those that do not fill a batch.
  """
  steps = len(rows) // batch_size

  # The Grain shuffle takes 5 us a row; one permutation an epoch costs almost nothing.
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


def longest_bucket(length: int, buckets: Sequence[int], option: str) -> int:
  """The padded length for texts of ``length`` tokens; InputError if no bucket holds them."""
  if length > max(buckets, default=0):
    raise InputError(
      f'{option} {list(buckets)}: a text may have {length} tokens; add a longer bucket'
    )
  return smallest_bucket(np.array([length]), buckets)


def _pick_negatives(
  queries: jt.Int32[np.ndarray, ' B'],
  negatives: Lists,
  bits: Integers,
  mix: Mix,
  wanted: int,
  seed: int,
  epoch: int,
) -> tuple[jt.Int32[np.ndarray, 'B wanted'], jt.Int8[np.ndarray, 'B wanted']]:
  """Hard negatives of each query, -1 for a random passage, and their `NEGATIVE_SOURCES`."""
  owners = negatives.owners
  order = np.lexsort((_random_bits(seed, _ORDER, queries[owners], negatives.flat), owners))
  quotas, past = _draw_quotas(queries, mix, wanted, seed, epoch)
  denoised, undenoised = (
    _walk(negatives.flat[order][member], owners[member], quotas[source], past[source], wanted)
    for source, member in enumerate(bits[order] & bit > 0 for bit in (DENOISED, UNDENOISED))
  )
  # In the order of drawing: denoised first, since they are fewer and some are of both sources.
  within_quota = np.where(np.arange(wanted) < quotas[0][:, None], denoised, -1)
  candidates = np.concatenate([within_quota, undenoised, denoised], axis=1)
  sources = np.repeat(
    [
      NEGATIVE_SOURCES.index(name) for name in ('denoised', 'undenoised', 'denoised_for_undenoised')
    ],
    wanted,
  )
  taken = (candidates >= 0) & ~_repeats(candidates)
  taken[:, wanted:] &= np.cumsum(taken[:, wanted:], axis=1) <= quotas[1][:, None]
  columns = np.argsort(~taken, axis=1, kind='stable')[:, :wanted]
  filled = np.take_along_axis(taken, columns, axis=1)
  # Random passages fill the rest: first for denoised, then for un-denoised, then those drawn.
  number = np.cumsum(~filled, axis=1)
  for_denoised = quotas[0] - np.count_nonzero(taken[:, :wanted], axis=1)
  for_both = quotas.sum(axis=0) - np.count_nonzero(taken, axis=1)
  random = np.select(
    [number <= for_denoised[:, None], number <= for_both[:, None]],
    [
      NEGATIVE_SOURCES.index('random_for_denoised'),
      NEGATIVE_SOURCES.index('random_for_undenoised'),
    ],
    NEGATIVE_SOURCES.index('random'),
  )
  return (
    np.where(filled, np.take_along_axis(candidates, columns, axis=1), -1),
    np.where(filled, sources[columns], random).astype(np.int8),
  )


def _draw_quotas(
  queries: jt.Int32[np.ndarray, ' B'], mix: Mix, wanted: int, seed: int, epoch: int
) -> tuple[jt.Int64[np.ndarray, '2 B'], jt.Int64[np.ndarray, '2 B']]:
  """How many negatives are drawn denoised and un-denoised, in this epoch and in those before."""
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
  quotas: jt.Int64[np.ndarray, ' B'],
  past: jt.Int64[np.ndarray, ' B'],
  width: int,
) -> jt.Int32[np.ndarray, 'B width']:
  """The next negatives of a source for each query, -1 where it has fewer.

  A source with enough negatives for the quota continues after those of past epochs; a smaller
  source gives all its negatives in each epoch.
  """
  members = Lists(flat, np.bincount(owners, minlength=len(quotas)))
  first = np.where(members.counts >= quotas, past, 0)[:, None]
  counts, place = members.counts[:, None], np.arange(width)
  at = members.starts[:, None] + (first + place) % np.maximum(counts, 1)
  return np.where(place < counts, np.append(flat, np.int32(-1))[at], -1)


def _fill_randomly(
  passages: jt.Int32[np.ndarray, 'B wanted'],
  relevant: Lists,
  distinct: jt.Int32[np.ndarray, ' distinct'],
  random: np.random.Generator,
) -> None:
  """Replaces -1 by random ``distinct`` passages that are not relevant and not yet in the row."""
  num_passages = int(distinct[-1]) + 1
  # One number for each pair (row of the batch, passage), so one sorted search compares all.
  rows = np.arange(len(passages))[:, None]
  forbidden = np.unique(relevant.owners * num_passages + relevant.flat)
  missing = passages < 0
  again = missing
  while again.any():
    count = np.count_nonzero(again)
    passages[again] = distinct[random.integers(0, len(distinct), size=count, dtype=np.int32)]
    pairs = rows * num_passages + passages
    again = missing & (np.isin(pairs, forbidden) | _repeats(passages))


def _check_mix(cache: TokenCache, mix: Mix | None, negatives: int, seed: int) -> None:
  """Logs how many queries lack negatives; raises InputError for an impossible mix."""
  shares = mix or Mix()
  if min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
    raise InputError(
      f'config.mix: denoised {shares.denoised:g}, undenoised {shares.undenoised:g}, random '
      f'{shares.random:g}; shares must not be negative and must add up to 1'
    )
  if shares.denoised and not cache.denoised_counts.any():
    raise InputError(
      f'config.mix.denoised is {shares.denoised:g}, but {cache.path} has no denoised negatives: '
      'mine with a reranker for config.data.mined_negatives; if it found none below the threshold, '
      'raise that (--threshold; --config.threshold of dprjax.pipeline)'
    )
  # In blocks, since every negative of every query takes a random number.
  queries = np.arange(cache.num_queries, dtype=np.int32)
  quotas = np.concatenate(
    [
      _draw_quotas(queries[start : start + 2**16], shares, negatives, seed, epoch=0)[0]
      for start in range(0, len(queries), 2**16)
    ],
    axis=1,
  )
  denoised = np.minimum(quotas[0], cache.denoised_counts)
  # Unused negatives of either source replace missing un-denoised ones.
  random = quotas[0] - denoised + np.maximum(quotas[1] - (cache.negative_counts - denoised), 0)
  if shares != Mix():
    _log.info(
      'negatives: of %d a query %g denoised, %g un-denoised, %g random on average',
      negatives,
      *(round(negatives * share, 2) for share in shares),
    )
  undenoised = cache.negative_counts if mix is None else cache.undenoised_counts
  for name, quota, counts in (
    ('denoised ', quotas[0], cache.denoised_counts),
    ('' if mix is None else 'un-denoised ', quotas[1], undenoised),
  ):
    if short := np.count_nonzero(counts < quota):
      _log.info(
        'negatives: %s of %s have fewer %snegatives than the first epoch needs',
        f'{short:,}',
        counted(cache.num_queries, 'queries'),
        name,
      )
  if random.any():
    _log.info('negatives: random passages replace %s in the first epoch', f'{random.sum():,}')


def _repeats(rows: jt.Int[np.ndarray, 'B n']) -> jt.Bool[np.ndarray, 'B n']:
  """True where the same number is further left in a row."""
  order = np.argsort(rows, axis=1, kind='stable')
  ordered = np.take_along_axis(rows, order, axis=1)
  repeated = np.zeros(rows.shape, bool)
  np.put_along_axis(repeated, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
  return repeated


def _random_bits(
  seed: int, use: int, first: jt.Int[np.ndarray, '*#n'], second: jt.Int[np.ndarray, '*#n']
) -> jt.UInt64[np.ndarray, '*n']:
  """64 random bits for each pair of numbers, given by the seed."""
  bits = (first.astype(np.uint64) << np.uint64(32)) | second.astype(np.uint64)
  offset = np.random.default_rng([seed, use]).integers(0, 2**63, dtype=np.uint64)
  return hashes.mix(bits + offset)
