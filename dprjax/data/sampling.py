"""Decides which queries of an epoch share an update.

Duplicate positives (``config.duplicates``): an in-batch negative that repeats the positive teaches
little, and one that answers the query misleads. Every loss already treats equal texts as one
passage; `spread` also puts queries whose positives are equal or near duplicates into different
updates.

Token budgets (``config.batch_tokens``): `fill` puts queries whose texts have the same padded length
into one update, so that short texts are not padded to the length of a long one.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
import scipy.sparse.csgraph
from jaxtyping import Int, UInt64

from dprjax.data import table
from dprjax.data.token_cache import TokenCache

NEAR = 0.8  # Jaccard similarity of 3-grams of tokens
_HASHES, _BAND = 64, 4  # pairs of similarity `NEAR` share a band of 4 with probability .9998
_PRIME = np.uint64((1 << 61) - 1)
_ROWS = 4096  # passages at a time


def groups(cache: TokenCache, near: bool) -> Int[np.ndarray, ' queries']:
  """A group number for each query; queries of a group share a positive.

  Args:
    cache: the training split.
    near: also group near duplicates, and chains of them.
  """
  positives, queries = [], []
  for start in range(0, cache.num_queries, _ROWS):
    rows = np.arange(start, min(start + _ROWS, cache.num_queries), dtype=np.int32)
    lists = table.lists(cache.queries.read(rows, ('positives',))[0])
    positives.append(cache.canonical[lists.flat])
    queries.append(np.repeat(rows, lists.counts))
  flat, of_query = np.concatenate(positives), np.concatenate(queries)
  passages, place = np.unique(flat, return_inverse=True)
  offset = cache.num_queries
  links = [np.stack([of_query, place.ravel() + offset])]
  if near:
    pairs = near_duplicates(signatures(cache, passages))
    links.append(np.array(pairs, np.int64).reshape(-1, 2).T + offset)
  ends = np.concatenate(links, axis=1)
  nodes = offset + len(passages)
  graph = scipy.sparse.coo_array((np.ones(ends.shape[1], bool), ends), (nodes, nodes))
  return scipy.sparse.csgraph.connected_components(graph, directed=False)[1][:offset]


def signatures(
  cache: TokenCache, passages: Int[np.ndarray, ' n']
) -> UInt64[np.ndarray, 'n hashes']:
  """MinHash signatures of passages, over their 3-grams of tokens (Broder 1997)."""
  random = np.random.default_rng(0)
  scale, shift = random.integers(1, 1 << 31, (2, _HASHES), dtype=np.uint64)
  found = np.empty((len(passages), _HASHES), np.uint64)
  for start in range(0, len(passages), _ROWS):
    texts = table.lists(cache.passages.read(passages[start : start + _ROWS], ('tokens',))[0])
    for row, (first, count) in enumerate(zip(texts.starts, texts.counts, strict=True), start):
      tokens = texts.flat[first : first + count].astype(np.uint64)
      grams = tokens if count < 3 else (tokens[:-2] << 40) ^ (tokens[1:-1] << 20) ^ tokens[2:]
      grams = np.unique(grams % np.uint64((1 << 31) - 1))
      found[row] = ((grams[:, None] * scale + shift) % _PRIME).min(axis=0)
  return found


def near_duplicates(found: UInt64[np.ndarray, 'n hashes']) -> list[tuple[int, int]]:
  """Pairs of rows whose signatures agree in `NEAR` of their hashes; a chain for equal bands."""
  pairs = []
  for band in range(0, _HASHES, _BAND):
    _, first, place = np.unique(
      found[:, band : band + _BAND], axis=0, return_index=True, return_inverse=True
    )
    others = first[place.ravel()]
    rows = np.flatnonzero(others != np.arange(len(found)))
    alike = (found[rows] == found[others[rows]]).mean(axis=1) >= NEAR
    pairs += list(zip(rows[alike].tolist(), others[rows[alike]].tolist(), strict=True))
  return sorted(set(pairs))


def spread(
  order: Int[np.ndarray, ' n'], group: Int[np.ndarray, ' queries'], size: int
) -> Int[np.ndarray, ' n']:
  """Reorders ``order`` so that no batch of ``size`` has two rows of a group.

  A second row of a group waits for the next batch. The last batches may repeat a group if no other
  rows are left.
  """
  waiting: deque[int] = deque()
  rest = deque(order.tolist())
  found: list[int] = []
  while rest or waiting:
    taken: set[int] = set()
    batch: list[int] = []
    passed: list[int] = []
    while len(batch) < size and (waiting or rest):
      row = waiting.popleft() if waiting else rest.popleft()
      if int(group[row]) in taken:
        passed.append(row)
      else:
        taken.add(int(group[row]))
        batch.append(row)
    while len(batch) < size and passed:
      batch.append(passed.pop(0))
    waiting.extendleft(reversed(passed))
    found += batch
  return np.array(found, order.dtype)


def fill(
  order: Int[np.ndarray, ' n'],
  kind: Int[np.ndarray, ' queries'],
  sizes: Sequence[int],
  group: Int[np.ndarray, ' queries'] | None = None,
) -> list[Int[np.ndarray, ' size']]:
  """The rows of full batches, kind by kind.

  Rows that do not fill a batch of their kind join the next kind, whose padded length holds them.
  Those that do not fill a batch of the last kind are left out.

  Args:
    order: rows of the queries.
    kind: of each query, an index into ``sizes``; shorter texts have lower numbers.
    sizes: queries of a batch of each kind.
    group: of each query, see `spread`.
  """
  found = []
  rest = order[:0]
  kinds = kind[order]
  for number, size in enumerate(sizes):
    rows = np.concatenate([rest, order[kinds == number]])
    if group is not None:
      rows = spread(rows, group, size)
    whole = len(rows) // size * size
    found += [*rows[:whole].reshape(-1, size)]
    rest = rows[whole:]
  return found
