"""A sample of passages: all subjects in proportion, without near-duplicates.

Vectors of hashed words and word pairs measure similarity. k-means on them finds clusters, and each
gives its share of the sample.
"""

import heapq
import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import scipy.sparse
from jaxtyping import Float

from dprjax.base import draws, words
from dprjax.data import topic_models
from dprjax.formats.read_report import ReadReport
from dprjax.formats.texts import PassageRecord

NEAR = 0.8
"""Passages with at least this cosine of words and word pairs are near-duplicates."""

_POOL = 8  # candidates for each sampled passage
_SHORT = 8  # words; shorter passages are not asked about
_FEATURES = 1 << 16  # places of words and pairs
_WIDTH = 128  # width of their random projection, for clusters
_STEPS = 20  # of k-means
_MOST_CLUSTERS = 64


class Sample(NamedTuple):
  """Passages in the order of their lots, and the number of their clusters."""

  passages: list[PassageRecord]
  clusters: int


def sample(passages: Iterable[PassageRecord], count: int, seed: int, report: ReadReport) -> Sample:
  """At most ``count`` passages, from each cluster in proportion.

  A hash of the ids selects candidates, so memory does not grow with the corpus. The same corpus,
  count and seed give the same sample on the same kind of CPU.

  Args:
    passages: the corpus, as a stream.
    count: passages wanted.
    seed: of the lots.
    report: counts passages, short ones and near-duplicates.
  """
  pool = _draw(passages, _POOL * count, seed, report)
  if not pool:
    return Sample([], 0)
  found = features([passage.joined for passage in pool])
  rng = np.random.default_rng(seed)
  signs = rng.choice(np.array([-1, 1], np.float32), (_FEATURES, _WIDTH))
  projected = np.asarray(found @ signs, np.float64)
  clusters = min(max(round(count**0.5), 1), _MOST_CLUSTERS, len(pool))
  own = topic_models.cluster(projected, clusters, seed, _STEPS)
  chosen: list[int] = []
  near = _Near(found)
  for number in _in_turn(own.tolist()):
    if len(chosen) == count:
      break
    if near.add(number):
      chosen.append(number)
    else:
      report.count('near-duplicates of passages in the sample: left out', pool[number].id)
  kinds = len({int(own[number]) for number in chosen})
  return Sample([pool[number] for number in chosen], kinds)


def features(texts: Sequence[str]) -> scipy.sparse.csr_matrix:
  """Unit vectors ``[n, places]`` of the hashed words and pairs of words of each text.

  The weight is the root of the count times the inverse document frequency among the texts.
  """
  places: list[int] = []
  values: list[float] = []
  ends = [0]
  for text in texts:
    own = words.words(text)
    counts: dict[int, float] = {}
    for word in (*own, *map(' '.join, itertools.pairwise(own))):
      place = zlib.crc32(word.encode()) % _FEATURES
      counts[place] = counts.get(place, 0.0) + 1
    places += counts
    values += counts.values()
    ends.append(len(places))
  shape = len(texts), _FEATURES
  found = scipy.sparse.csr_matrix(
    (np.sqrt(np.array(values)), np.array(places, np.int32), np.array(ends)), shape
  )
  spread = np.bincount(found.indices, minlength=_FEATURES)
  idf = np.log((1 + len(texts)) / (1 + spread)) + 1
  found = found @ scipy.sparse.diags(idf)
  lengths = np.sqrt(np.asarray(found.multiply(found).sum(axis=1)).ravel())
  return scipy.sparse.csr_matrix(scipy.sparse.diags(1 / np.maximum(lengths, 1e-9)) @ found)


class _Near:
  """Remembers rows and refuses their near-duplicates."""

  def __init__(self, found: scipy.sparse.csr_matrix):
    self._found = found
    self._known: dict[int, list[int]] = {}  # rows by their heaviest places

  def add(self, number: int) -> bool:
    row = self._found[number]
    # Near-duplicates share most of their heaviest words.
    heavy = row.indices[np.argsort(-row.data, kind='stable')[:16]].tolist()
    others = sorted({other for place in heavy for other in self._known.get(place, ())})
    if others and self._cosines(others, row).max() >= NEAR:
      return False
    for place in heavy:
      self._known.setdefault(place, []).append(number)
    return True

  def _cosines(
    self, others: Sequence[int], row: scipy.sparse.csr_matrix
  ) -> Float[np.ndarray, ' n']:
    return np.asarray((self._found[others] @ row.T).todense()).ravel()


def _draw(
  passages: Iterable[PassageRecord], most: int, seed: int, report: ReadReport
) -> list[PassageRecord]:
  """At most ``count`` long passages, by their lots."""
  heap: list[tuple[int, int, PassageRecord]] = []
  for number, passage in enumerate(passages):
    report.count('passages')
    if len(passage.text.split()) < _SHORT and len(words.words(passage.text)) < _SHORT:
      report.count(f'passages below {_SHORT} words: not asked about', passage.id)
      continue
    lot = int.from_bytes(draws.draw(passage.id, seed, 'asking')[:8])
    # The largest lot kept is the first to go.
    entry = -lot, -number, passage
    if len(heap) < most:
      heapq.heappush(heap, entry)
    else:
      heapq.heappushpop(heap, entry)
  return [passage for _, _, passage in sorted(heap, reverse=True)]


def _in_turn(own: Sequence[int]) -> Iterator[int]:
  """Interleaves rows so that every prefix has each cluster in proportion, in order."""
  sizes: dict[int, int] = {}
  for cluster in own:
    sizes[cluster] = sizes.get(cluster, 0) + 1
  ranks: dict[int, int] = {}
  places = []
  for number, cluster in enumerate(own):
    ranks[cluster] = rank = ranks.get(cluster, 0) + 1
    places.append(((rank - 0.5) / sizes[cluster], number))
  yield from (number for _, number in sorted(places))
