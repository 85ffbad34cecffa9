"""Batches: what a training step sees, in an order that a seed decides, the same for any number of
processes.

Step t of epoch e takes the queries that a shuffle of the seed and e puts there. Every process works
out the whole global batch (which queries, which passages, how long) and reads the tokens of its own
rows alone, so that all agree on the shapes without a word between them.

    dataset = make_batches(
      store, batch_size=64, negatives=3, query_buckets=[32], passage_buckets=[64, 128], seed=0
    )
    batches = open_batches(dataset)
    batch = next(batches)
    state = batches.get_state()    # JSON; set_state(state) continues with the batch after this one

A data set of batches is indexed by the step and as long as an epoch, so that
`grain.MapDataset.mix` and `.map` apply to it. Steps beyond its length are later epochs.
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import grain
import jaxtyping as jt
import numpy as np

from dprjax.base import outofcore
from dprjax.base.errors import InputError
from dprjax.data import records
from dprjax.data.store import DENOISED, UNDENOISED, Store
from dprjax.data.text import pad_flat

Batch = dict[str, np.ndarray]

KINDS = (
  'random',
  'undenoised',
  'denoised',
  'denoised_for_undenoised',
  'random_for_undenoised',
  'random_for_denoised',
)
"""What a negative can be: of its slot's pool, or, from `STAND_INS` on, in place of that pool."""
STAND_INS = 3

_SHUFFLE, _RANDOM, _ORDER, _MIX = range(
  4
)  # what a random number is for, so that no two uses share a stream
_log = logging.getLogger(__name__)


class Mix(NamedTuple):
  """The shares of a query's hard negatives (DPTDR section 3.3); they add up to 1.

  Attributes:
    denoised: of those that a reranker passed; random passages stand in where there are too few.
    undenoised: of those as they were mined; denoised ones stand in, then random ones.
    random: of passages drawn anew in each epoch.
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
  process_index: int = 0,
  process_count: int = 1,
  max_relevant: int | None = None,
) -> grain.MapDataset[Batch]:
  """This process's rows of the global batch of any step (keys: docs/architecture.md, 'A batch').

  Each epoch is shuffled anew and leaves out what does not fill a batch. Its number chooses the
  positive (in turn) and the hard negatives (the next ones of the query's own, in an order the seed
  decides). A query with fewer than ``negatives`` gets all it has and, for the rest, random passages
  that are not relevant to it, new ones in each epoch.

  With a ``mix`` the two pools of a query are gone through each in its own order. Where a share of
  ``negatives`` is no whole number, the number of an epoch is the one below or the one above, such
  that over the epochs the shares come out. Batches then have a further key, `negative_pool` ``[B, C
  - 1]`` int8, places in `KINDS`.

  Args:
    batch_size: queries of the global batch; process i has the i-th of ``process_count`` equal
      blocks.
    negatives: hard negatives a query, so ``C = 1 + negatives``.
    mix: of which pools they are; by default of any.
    query_buckets, passage_buckets: the lengths a batch may have; the smallest that holds the whole
      global batch is taken.
    max_relevant: the R of `relevant`, at most; by default what the store's queries need. If a query
      has more, those in the global batch come first: they are the ones that must not be taken for
      negatives.

  Raises:
    InputError: sizes that the store, the buckets or the processes do not allow.
  """
  if batch_size > store.num_queries:
    raise InputError(
      f'a batch of {batch_size:,} queries is more than the {store.num_queries:,} training queries '
      f'of {store.path}'
    )
  if batch_size % process_count:
    raise InputError(
      f'a batch of {batch_size} queries cannot be divided among {process_count} processes'
    )
  if negatives + store.max_relevant > store.num_passages:
    raise InputError(
      f'{negatives} negatives a query cannot be had: {store.path} holds {store.num_passages:,} '
      'passages, '
      f'and up to {store.max_relevant:,} are relevant to one query'
    )
  for what, buckets, lengths in (
    ('query', query_buckets, store.query_lengths),
    ('passage', passage_buckets, store.passage_lengths),
  ):
    if not buckets or max(buckets) < lengths.max():
      raise InputError(
        f'{what}_buckets {list(buckets)}: the longest {what} of {store.path} has {lengths.max()} '
        'tokens; add a bucket that holds it'
      )
  if not negatives:
    if mix not in (None, Mix()):
      raise InputError(
        'config.mix says what the hard negatives are to be, and config.negatives is 0: there are '
        'none'
      )
    mix = None
  if mix is None:
    lacking = np.maximum(negatives - store.negative_counts, 0)
    if lacking.any():
      _log.info(
        'negatives: %s of %s queries have fewer than %d; random passages stand in for %s an epoch',
        f'{np.count_nonzero(lacking):,}',
        f'{store.num_queries:,}',
        negatives,
        f'{lacking.sum():,}',
      )
  else:
    _check_mix(store, mix, negatives, seed)
  plan = _Plan(
    store,
    batch_size,
    negatives,
    mix,
    sorted(query_buckets),
    sorted(passage_buckets),
    seed,
    process_index,
    process_count,
    min(max_relevant or store.max_relevant, store.max_relevant),
  )
  return grain.MapDataset.range(store.num_queries // batch_size).map_with_index(plan.batch)


def open_batches(
  dataset: grain.MapDataset[Batch], threads: int = 2, prefetch: int = 4
) -> grain.DatasetIterator[Batch]:
  """An endless iterator over batches, with ``get_state`` and ``set_state`` (JSON) and ``close``.

  Threads make up to ``prefetch`` batches ahead. Without any, each is made when it is asked for.
  """
  options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=prefetch)
  return iter(dataset.repeat(None).to_iter_dataset(options))


def batch_ids(store: Store, batch: Batch) -> list[str]:
  """The query ids of a batch, for a message to a person."""
  return store.query_ids(batch['query_index'])


def length_buckets(
  lengths: jt.Int[np.ndarray, 'rows'],
  buckets: Sequence[int],
  batch_size: int,
) -> list[tuple[jt.Int[np.ndarray, 'rows'], int]]:
  """Groups rows of like length for encoding: (``batch_size`` row numbers, padded length), the
  shortest first.

  Every row is in one group. The last group of a bucket is filled up by naming its last row again,
  which keeps one shape a bucket: ``embeddings[rows] = encode(...)`` writes the same values once
  more.

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
      rows = order[i : min(i + batch_size, stop)]
      groups.append((np.pad(rows, (0, batch_size - len(rows)), mode='edge'), int(end)))
  return groups


class _Plan:
  """Makes the batch of any step.

  It holds no state that changes: step, seed and store decide everything.
  """

  def __init__(
    self,
    store: Store,
    batch_size: int,
    negatives: int,
    mix: Mix | None,
    query_buckets: list[int],
    passage_buckets: list[int],
    seed: int,
    process_index: int,
    process_count: int,
    relevant: int,
  ):
    self._store, self._batch_size, self._negatives, self._seed, self._relevant = (
      store,
      batch_size,
      negatives,
      seed,
      relevant,
    )
    self._query_buckets, self._passage_buckets, self._mix = query_buckets, passage_buckets, mix
    rows = batch_size // process_count
    self._mine = slice(process_index * rows, (process_index + 1) * rows)
    self._steps = store.num_queries // batch_size
    # Grain's own shuffle takes some 5 us a query; one permutation an epoch costs nothing to speak
    # of.
    self._epoch = functools.lru_cache(maxsize=2)(self._shuffled)

  def batch(self, step: int, _: Any = None) -> Batch:
    store, mine = self._store, self._mine
    epoch, place = divmod(step, self._steps)
    queries = self._epoch(epoch)[place * self._batch_size : (place + 1) * self._batch_size]
    columns = (
      'tokens',
      'positives',
      'relevant',
      'negatives',
      *(() if self._mix is None else ('pools',)),
    )
    tokens, positives, relevant, negatives, *pools = store.queries.read(queries, columns)
    known, known_counts = records.integers(relevant)
    passages = np.empty((len(queries), 1 + self._negatives), np.int32)
    passages[:, 0] = _in_turn(*records.integers(positives), epoch)
    kinds = None
    if self._negatives:
      bits = records.integers(pools[0])[0] if pools else None
      passages[:, 1:], kinds = self._pick_negatives(
        *records.integers(negatives), bits, known, known_counts, queries, epoch, step
      )
    local = passages[mine]
    query_tokens, query_mask = pad_flat(
      *records.integers(tokens[mine]),
      _bucket(store.query_lengths[queries], self._query_buckets),
      store.pad_id,
    )
    passage_tokens, passage_mask = pad_flat(
      *records.integers(store.passages.read(local.ravel(), ('tokens',))[0]),
      _bucket(store.passage_lengths[passages], self._passage_buckets),
      store.pad_id,
    )
    return {
      'query_tokens': query_tokens,
      'query_mask': query_mask,
      'passage_tokens': passage_tokens.reshape(*local.shape, -1),
      'passage_mask': passage_mask.reshape(*local.shape, -1),
      'query_index': queries[mine],
      'passage_index': local,
      'relevant': _list_relevant(*records.integers(relevant[mine]), passages, self._relevant),
    } | ({} if kinds is None else {'negative_pool': kinds[mine]})

  def _shuffled(self, epoch: int) -> jt.Int32[np.ndarray, 'queries']:
    return (
      np.random.default_rng([self._seed, _SHUFFLE, epoch])
      .permutation(self._store.num_queries)
      .astype(np.int32)
    )

  def _pick_negatives(
    self,
    flat: records.Integers,
    counts: records.Integers,
    bits: records.Integers | None,
    known: records.Integers,
    known_counts: records.Integers,
    queries: jt.Int32[np.ndarray, 'B'],
    epoch: int,
    step: int,
  ) -> tuple[jt.Int32[np.ndarray, 'B negatives'], jt.Int8[np.ndarray, 'B negatives'] | None]:
    """The hard negatives whose turn it is in this epoch, random passages where there are too few;
    and, with a mix, their kinds.
    """
    size, wanted = len(queries), self._negatives
    owner = np.repeat(np.arange(size), counts)
    # A fixed order of each query's own negatives: by a number drawn from the seed, the query and
    # the passage.
    order = np.lexsort((_draw(self._seed, _ORDER, queries[owner], flat), owner))
    picks = _Picks(owner, flat[order], size, wanted)
    if self._mix is None or bits is None:
      everything = np.ones(len(flat), bool)
      picks.take(
        _turns(owner, everything, np.full(size, wanted), np.full(size, epoch * wanted)),
        np.full(size, wanted),
        KINDS.index('undenoised'),
      )
    else:
      denoised, undenoised = ((bits[order] & bit).astype(bool) for bit in (DENOISED, UNDENOISED))
      now, before = _numbers(self._mix, wanted, self._seed, queries, epoch)
      # The denoised come first: as a rule they are the fewer, and some of them are among the
      # un-denoised as well.
      turns = _turns(owner, denoised, now[0], before[0])
      lack_denoised = picks.take(turns, now[0], KINDS.index('denoised'))
      lack = picks.take(
        _turns(owner, undenoised, now[1], before[1]), now[1], KINDS.index('undenoised')
      )
      lack = picks.take(turns, lack, KINDS.index('denoised_for_undenoised'))
      picks.name_rest(lack_denoised, lack)
    picked, missing = picks.passages, picks.passages < 0
    if missing.any():
      random = np.random.default_rng([self._seed, _RANDOM, step])
      # Pairs (query of the batch, passage) as one number each, which a sorted search tells apart in
      # one go.
      rows, span = np.arange(size)[:, None], np.int64(self._store.num_passages)
      forbidden = np.unique(np.repeat(rows[:, 0], known_counts) * span + known)
      again = missing
      while again.any():
        picked[again] = random.integers(
          0, self._store.num_passages, size=np.count_nonzero(again), dtype=np.int32
        )
        pairs = rows * span + picked
        again = missing & (np.isin(pairs, forbidden) | _repeats(pairs))
    return picked, None if self._mix is None else picks.kinds


class _Picks:
  """The negatives of a batch while they are picked, from the left; -1 and kind 0 where none is."""

  def __init__(
    self, owner: jt.Int64[np.ndarray, 'n'], flat: records.Integers, size: int, wanted: int
  ):
    """``flat`` are all negatives of the batch's queries, ``owner`` whose they are."""
    self._owner, self._flat, self._free = owner, flat, np.ones(len(flat), bool)
    self._filled = np.zeros(size, np.int64)
    self.passages = np.full((size, wanted), -1, np.int32)
    self.kinds = np.zeros((size, wanted), np.int8)

  def take(
    self, turns: jt.Int64[np.ndarray, 'n'], wanted: jt.Int64[np.ndarray, 'B'], kind: int
  ) -> jt.Int64[np.ndarray, 'B']:
    """Takes so many of those with a turn (0 or more) that are free, the lowest first; returns how
    many are lacking.
    """
    at = np.flatnonzero(self._free & (turns >= 0))
    at = at[np.lexsort((turns[at], self._owner[at]))]
    owner = self._owner[at]
    place = _places(owner, len(wanted))
    at, owner, place = (column[place < wanted[owner]] for column in (at, owner, place))
    self.passages[owner, self._filled[owner] + place] = self._flat[at]
    self.kinds[owner, self._filled[owner] + place] = kind
    self._free[at] = False
    taken = np.bincount(owner, minlength=len(wanted))
    self._filled += taken
    return wanted - taken

  def name_rest(
    self, lack_denoised: jt.Int64[np.ndarray, 'B'], lack_undenoised: jt.Int64[np.ndarray, 'B']
  ) -> None:
    """Says of the places that are left what random passages will be in them: stand-ins first, and
    then those that were asked for.
    """
    place = np.arange(self.passages.shape[1])[None, :] - self._filled[:, None]
    left = place >= 0
    self.kinds[left & (place < (lack_denoised + lack_undenoised)[:, None])] = KINDS.index(
      'random_for_undenoised'
    )
    self.kinds[left & (place < lack_denoised[:, None])] = KINDS.index('random_for_denoised')


def _turns(
  owner: jt.Int64[np.ndarray, 'n'],
  member: jt.Bool[np.ndarray, 'n'],
  wanted: jt.Int64[np.ndarray, 'B'],
  before: jt.Int64[np.ndarray, 'B'],
) -> jt.Int64[np.ndarray, 'n']:
  """When it is each member's turn in this epoch, from 0; -1 for those that are no members.

  Whoever has enough goes on where the last epoch stopped, after ``before``; whoever has not takes
  all, every time.
  """
  turns = np.full(len(owner), -1, np.int64)
  whose = owner[member]
  counts = np.bincount(whose, minlength=len(wanted))
  offset = np.where(counts >= wanted, before, 0)
  turns[member] = (_places(whose, len(wanted)) - offset[whose]) % counts[whose]
  return turns


def _places(groups: jt.Int64[np.ndarray, 'n'], size: int) -> jt.Int64[np.ndarray, 'n']:
  """The place of each entry within its group; ``groups`` ascend, and are below ``size``."""
  counts = np.bincount(groups, minlength=size)
  return np.arange(len(groups)) - (np.cumsum(counts) - counts)[groups]


def _numbers(
  mix: Mix,
  wanted: int,
  seed: int,
  queries: jt.Int32[np.ndarray, 'B'],
  epoch: int,
) -> tuple[jt.Int64[np.ndarray, '3 B'], jt.Int64[np.ndarray, '3 B']]:
  """How many denoised, un-denoised and random negatives each query has in an epoch, and has had in
  those before.

  The three shares of ``wanted`` are laid end to end and shifted by a number in [0, 1): a share has
  the whole numbers that lie in it. A query's shifts fill [0, 1) evenly over the epochs, so that
  each share has, on the whole, just what it should.
  """
  # Decimal shares are not exact in binary: without rounding 10 * (0.1 + 0.2) were a little more
  # than 3.
  borders = np.round(wanted * np.array([0.0, mix.denoised, mix.denoised + mix.undenoised, 1.0]), 9)
  phase = _draw(seed, _MIX, queries, np.zeros_like(queries))
  shift = (
    (phase[:, None] + np.arange(epoch + 1, dtype=np.uint64) * outofcore.GOLDEN) >> np.uint64(11)
  ) / np.float64(2**53)
  numbers = np.diff(np.floor(borders[:, None, None] + shift), axis=0).astype(np.int64)
  return numbers[:, :, epoch], numbers[:, :, :epoch].sum(axis=2)


def _check_mix(store: Store, mix: Mix, negatives: int, seed: int) -> None:
  """Raises InputError for shares that cannot be; tells who is short of what."""
  if min(mix) < 0 or abs(sum(mix) - 1) > 1e-6:
    raise InputError(
      f'config.mix: denoised {mix.denoised:g}, undenoised {mix.undenoised:g} and random '
      f'{mix.random:g}; '
      'shares must not be negative, and must add up to 1'
    )
  if mix.denoised and not store.denoised_counts.any():
    raise InputError(
      f'config.mix.denoised: {mix.denoised:g}, but no negative of {store.path} is denoised; mine '
      'with a reranker '
      '(python -m dprjax.mine --reranker or --reranked), and name its file with config.data.train'
    )
  wanted, _ = _numbers(mix, negatives, seed, np.arange(store.num_queries, dtype=np.int32), 0)
  taken = np.minimum(wanted[0], store.denoised_counts)
  # What is in neither pool's picks stands in for the un-denoised, whatever pool it is of: their
  # number is exact.
  random = np.maximum(wanted[1] - (store.negative_counts - taken), 0) + wanted[0] - taken
  if mix != Mix():
    _log.info(
      'negatives: of %d a query %g denoised, %g un-denoised, %g random',
      negatives,
      *(round(negatives * share, 2) for share in mix),
    )
  for name, number, counts in (
    ('denoised', wanted[0], store.denoised_counts),
    ('un-denoised', wanted[1], store.undenoised_counts),
  ):
    if short := np.count_nonzero(counts < number):
      _log.info(
        'negatives: %s of %s queries have fewer %s ones than an epoch asks for',
        f'{short:,}',
        f'{store.num_queries:,}',
        name,
      )
  if random.any():
    _log.info('negatives: random passages stand in for %s an epoch', f'{random.sum():,}')


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


def _draw(
  seed: int, use: int, first: jt.Int[np.ndarray, 'n'], second: jt.Int[np.ndarray, 'n']
) -> jt.UInt64[np.ndarray, 'n']:
  """A well-mixed 64-bit number of each pair and the seed."""
  bits = (first.astype(np.uint64) << np.uint64(32)) | second.astype(np.uint64)
  return outofcore.mix(
    bits + np.random.default_rng([seed, use]).integers(0, 2**63, dtype=np.uint64)
  )


def _list_relevant(
  flat: records.Integers,
  counts: records.Integers,
  passages: jt.Int32[np.ndarray, 'global C'],
  width: int,
) -> jt.Int32[np.ndarray, 'B R']:
  """Relevant passages of each query, -1 where unused; of those that are too many, those in the
  global batch first.
  """
  if len(counts) and counts.max() > width:
    rows = np.split(flat, np.cumsum(counts)[:-1])
    rows = [row[np.argsort(~np.isin(row, passages), kind='stable')][:width] for row in rows]
    flat, counts = np.concatenate(rows), np.minimum(counts, width)
  return pad_flat(flat, counts, width, -1)[0]


def _bucket(lengths: jt.Int32[np.ndarray, '...'], buckets: list[int]) -> int:
  return next(length for length in buckets if length >= lengths.max())
