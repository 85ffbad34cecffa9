"""Batches: what a training step sees, in an order that a seed decides, the same for any number of processes.

Step t of epoch e takes the queries that a shuffle of the seed and e puts there. Every process works out the whole
global batch (which queries, which passages, how long) and reads the tokens of its own rows alone, so that all agree on
the shapes without a word between them.

    batches = make_batches(store, batch_size=64, negatives=3, query_buckets=[32], passage_buckets=[64, 128], seed=0)
    batch = next(batches)
    state = batches.get_state()       # JSON; set_state(state) goes on with the batch after this one, here or in a new process
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any

import grain
import jaxtyping as jt
import numpy as np

from dprjax.data import records
from dprjax.data.store import Store
from dprjax.data.text import pad_flat
from dprjax.errors import InputError

Batch = dict[str, np.ndarray]

_SHUFFLE, _RANDOM, _ORDER = range(3)  # what a random number is for, so that no two uses share a stream
_log = logging.getLogger(__name__)


def make_batches(
    store: Store, *, batch_size: int, negatives: int, query_buckets: Sequence[int], passage_buckets: Sequence[int], seed: int,
    process_index: int = 0, process_count: int = 1, max_relevant: int | None = None, threads: int = 2, prefetch: int = 4,
) -> grain.DatasetIterator[Batch]:
  """An endless iterator over this process's rows of each global batch (keys: docs/architecture.md, 'A batch').

  Each epoch is shuffled anew and leaves out what does not fill a batch. Its number chooses the positive (in turn) and the
  hard negatives (the next ones of the query's own, in an order the seed decides). A query with fewer than ``negatives``
  gets all it has and, for the rest, random passages that are not relevant to it, new ones in each epoch.

  Args:
    batch_size: queries of the global batch; process i has the i-th of ``process_count`` equal blocks.
    negatives: hard negatives a query, so ``C = 1 + negatives``.
    query_buckets, passage_buckets: the lengths a batch may have; the smallest that holds the whole global batch is taken.
    max_relevant: the R of `relevant`, at most; by default what the store's queries need. If a query has more, those in the
      global batch come first: they are the ones that must not be taken for negatives.
    threads, prefetch: batches are made ahead by so many threads, so many at a time.

  Raises:
    InputError: sizes that the store, the buckets or the processes do not allow.
  """
  if batch_size > store.num_queries:
    raise InputError(f'a batch of {batch_size:,} queries is more than the {store.num_queries:,} training queries of {store.path}')
  if batch_size % process_count:
    raise InputError(f'a batch of {batch_size} queries cannot be divided among {process_count} processes')
  if negatives + store.max_relevant > store.num_passages:
    raise InputError(f'{negatives} negatives a query cannot be had: {store.path} holds {store.num_passages:,} passages, '
                     f'and up to {store.max_relevant:,} are relevant to one query')
  for what, buckets, lengths in (('query', query_buckets, store.query_lengths), ('passage', passage_buckets, store.passage_lengths)):
    if not buckets or max(buckets) < lengths.max():
      raise InputError(f'{what}_buckets {list(buckets)}: the longest {what} of {store.path} has {lengths.max()} tokens; add a bucket that holds it')
  lacking = np.maximum(negatives - store.negative_counts, 0)
  if lacking.any():
    _log.info('negatives: %s of %s queries have fewer than %d; random passages stand in for %s an epoch',
              f'{np.count_nonzero(lacking):,}', f'{store.num_queries:,}', negatives, f'{lacking.sum():,}')
  plan = _Plan(store, batch_size, negatives, sorted(query_buckets), sorted(passage_buckets), seed, process_index, process_count,
               min(max_relevant or store.max_relevant, store.max_relevant))
  steps = grain.MapDataset.range(store.num_queries // batch_size).repeat(None).map_with_index(plan.batch)
  return iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=prefetch)))


def batch_ids(store: Store, batch: Batch) -> list[str]:
  """The query ids of a batch, for a message to a person."""
  return store.query_ids(batch['query_index'])


def length_buckets(
    lengths: jt.Int[np.ndarray, 'rows'], buckets: Sequence[int], batch_size: int,
) -> list[tuple[jt.Int[np.ndarray, 'rows'], int]]:
  """Groups rows of like length for encoding: (``batch_size`` row numbers, padded length), the shortest first.

  Every row is in one group. The last group of a bucket is filled up by naming its last row again, which keeps one shape
  a bucket: ``embeddings[rows] = encode(...)`` writes the same values once more.

  Raises:
    InputError: a row is longer than the longest bucket.
  """
  ends = np.sort(np.asarray(buckets))
  if len(lengths) and (len(ends) == 0 or lengths.max() > ends[-1]):
    raise InputError(f'a text of {lengths.max()} tokens fits none of the buckets {list(buckets)}')
  order = np.argsort(lengths, kind='stable')
  groups = []
  borders = np.searchsorted(lengths[order], ends, side='right')
  for start, stop, end in zip([0, *borders], borders, ends, strict=False):
    for i in range(start, stop, batch_size):
      rows = order[i:min(i + batch_size, stop)]
      groups.append((np.pad(rows, (0, batch_size - len(rows)), mode='edge'), int(end)))
  return groups


class _Plan:
  """Makes the batch of any step. It holds no state that changes: step, seed and store decide everything."""

  def __init__(self, store: Store, batch_size: int, negatives: int, query_buckets: list[int], passage_buckets: list[int], seed: int,
               process_index: int, process_count: int, relevant: int):
    self._store, self._batch_size, self._negatives, self._seed, self._relevant = store, batch_size, negatives, seed, relevant
    self._query_buckets, self._passage_buckets = query_buckets, passage_buckets
    rows = batch_size // process_count
    self._mine = slice(process_index * rows, (process_index + 1) * rows)
    self._steps = store.num_queries // batch_size
    # Grain's own shuffle takes some 5 us a query; one permutation an epoch costs nothing to speak of.
    self._epoch = functools.lru_cache(maxsize=2)(self._shuffled)

  def batch(self, step: int, _: Any = None) -> Batch:
    store, mine = self._store, self._mine
    epoch, place = divmod(step, self._steps)
    queries = self._epoch(epoch)[place * self._batch_size:(place + 1) * self._batch_size]
    tokens, positives, relevant, negatives = store.queries.read(queries, ('tokens', 'positives', 'relevant', 'negatives'))
    known, known_counts = records.integers(relevant)
    passages = np.empty((len(queries), 1 + self._negatives), np.int32)
    passages[:, 0] = _in_turn(*records.integers(positives), epoch)
    if self._negatives:
      passages[:, 1:] = self._pick_negatives(*records.integers(negatives), known, known_counts, queries, epoch, step)
    local = passages[mine]
    query_tokens, query_mask = pad_flat(
        *records.integers(tokens[mine]), _bucket(store.query_lengths[queries], self._query_buckets), store.pad_id)
    passage_tokens, passage_mask = pad_flat(
        *records.integers(store.passages.read(local.ravel(), ('tokens',))[0]),
        _bucket(store.passage_lengths[passages], self._passage_buckets), store.pad_id)
    return {
        'query_tokens': query_tokens, 'query_mask': query_mask,
        'passage_tokens': passage_tokens.reshape(*local.shape, -1), 'passage_mask': passage_mask.reshape(*local.shape, -1),
        'query_index': queries[mine], 'passage_index': local,
        'relevant': _list_relevant(*records.integers(relevant[mine]), passages, self._relevant),
    }

  def _shuffled(self, epoch: int) -> jt.Int32[np.ndarray, 'queries']:
    return np.random.default_rng([self._seed, _SHUFFLE, epoch]).permutation(self._store.num_queries).astype(np.int32)

  def _pick_negatives(
      self, flat: records.Integers, counts: records.Integers, known: records.Integers, known_counts: records.Integers,
      queries: jt.Int32[np.ndarray, 'B'], epoch: int, step: int) -> jt.Int32[np.ndarray, 'B negatives']:
    """The hard negatives whose turn it is in this epoch; random passages where there are too few."""
    wanted = self._negatives
    starts = np.cumsum(counts) - counts
    owner = np.repeat(np.arange(len(queries)), counts)
    # A fixed order of each query's own negatives: by a number drawn from the seed, the query and the passage.
    order = np.lexsort((_draw(self._seed, _ORDER, queries[owner], flat), owner))
    shuffled = flat[order]
    turn = np.arange(wanted)[None, :]
    own = turn < counts[:, None]
    # Whoever has enough goes on where the last epoch stopped; whoever has not takes all, every time.
    offset = np.where(counts >= wanted, epoch * wanted, 0)[:, None]
    places = starts[:, None] + (offset + turn) % np.maximum(counts, 1)[:, None]
    picked = np.full((len(queries), wanted), -1, np.int32)
    picked[own] = shuffled[places[own]]
    missing = ~own
    if missing.any():
      random = np.random.default_rng([self._seed, _RANDOM, step])
      # Pairs (query of the batch, passage) as one number each, which a sorted search tells apart in one go.
      rows, span = np.arange(len(queries))[:, None], np.int64(self._store.num_passages)
      forbidden = np.unique(np.repeat(rows[:, 0], known_counts) * span + known)
      again = missing
      while again.any():
        picked[again] = random.integers(0, self._store.num_passages, size=np.count_nonzero(again), dtype=np.int32)
        pairs = rows * span + picked
        again = missing & (np.isin(pairs, forbidden) | _repeats(pairs))
    return picked


def _in_turn(flat: records.Integers, counts: records.Integers, epoch: int) -> records.Integers:
  """The epoch-th entry of every list, from the start again after the last."""
  return flat[np.cumsum(counts) - counts + epoch % counts]


def _repeats(pairs: jt.Int64[np.ndarray, 'B n']) -> jt.Bool[np.ndarray, 'B n']:
  """True where the same number stands further left."""
  order = np.argsort(pairs, axis=1, kind='stable')
  ordered = np.take_along_axis(pairs, order, axis=1)
  repeated = np.zeros(pairs.shape, bool)
  np.put_along_axis(repeated, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
  return repeated


def _draw(seed: int, use: int, first: jt.Int[np.ndarray, 'n'], second: jt.Int[np.ndarray, 'n']) -> jt.UInt64[np.ndarray, 'n']:
  """A well-mixed 64-bit number of each pair: the finalizer of splitmix64 (Steele et al., 2014) over the pair and the seed."""
  with np.errstate(over='ignore'):
    bits = (first.astype(np.uint64) << np.uint64(32)) | second.astype(np.uint64)
    bits = bits + np.random.default_rng([seed, use]).integers(0, 2**63, dtype=np.uint64)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _list_relevant(
    flat: records.Integers, counts: records.Integers, passages: jt.Int32[np.ndarray, 'global C'], width: int) -> jt.Int32[np.ndarray, 'B R']:
  """Relevant passages of each query, -1 where unused; of those that are too many, those in the global batch first."""
  if len(counts) and counts.max() > width:
    rows = np.split(flat, np.cumsum(counts)[:-1])
    rows = [row[np.argsort(~np.isin(row, passages), kind='stable')][:width] for row in rows]
    flat, counts = np.concatenate(rows), np.minimum(counts, width)
  return pad_flat(flat, counts, width, -1)[0]


def _bucket(lengths: jt.Int32[np.ndarray, '...'], buckets: list[int]) -> int:
  return next(length for length in buckets if length >= lengths.max())
