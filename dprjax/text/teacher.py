"""Teacher scores of queries and passages, for batches from a cache.

They come from a TREC run, or from the `reranker_score` in a jsonl of dprjax.mine.
"""

import logging
from collections.abc import Iterator

import jaxtyping as jt
import numpy as np
from etils import epath

from dprjax.base import hashes
from dprjax.base.errors import InputError
from dprjax.text import examples, records, runs
from dprjax.text.token_cache import TokenCache

_ROWS = 1 << 16  # rows whose ids are in memory at a time
_log = logging.getLogger(__name__)

_Pairs = tuple[
  jt.UInt64[np.ndarray, ' n'], jt.UInt64[np.ndarray, ' n'], jt.Float64[np.ndarray, ' n']
]


class Teacher:
  """Scores by query and passage, both as rows of a cache."""

  def __init__(self, path: epath.Path, cache: TokenCache):
    """Reads the scores for pairs of queries and passages in the cache."""
    queries, passages = (
      _Ids(read, count)
      for read, count in (
        (cache.query_ids, cache.num_queries),
        (cache.passage_ids, cache.num_passages),
      )
    )
    pairs, values = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
    for query_keys, passage_keys, scores in _read(path):
      rows, columns = queries.rows(query_keys), passages.rows(passage_keys)
      there = (rows >= 0) & (columns >= 0)
      columns = cache.canonical[columns]
      pairs.append(rows[there] << 32 | columns[there])
      values.append(scores[there].astype(np.float32))
    # The first score of a repeated pair counts.
    self._pairs, first = np.unique(np.concatenate(pairs), return_index=True)
    self._scores = np.concatenate(values)[first]
    _, counts = np.unique(self._pairs >> 32, return_counts=True)
    usable = int(np.count_nonzero(counts > 1))
    _log.info(
      '%s: teacher scores of %s pairs; %s of %s training queries have two or more',
      path,
      f'{len(self._pairs):,}',
      f'{usable:,}',
      f'{cache.num_queries:,}',
    )
    if not usable:
      raise InputError(
        f'{path}: no training query has scores of two passages in {cache.path}; use a run '
        'of such queries, or mine with --reranker or --reranked and --score_positives=true'
      )

  def scores(
    self, queries: jt.Int32[np.ndarray, ' B'], passages: jt.Int32[np.ndarray, 'B C']
  ) -> jt.Float32[np.ndarray, 'B C']:
    """The scores of the passages of each query; NaN if there is none."""
    wanted = queries[:, None].astype(np.int64) << 32 | passages
    places = hashes.positions(self._pairs, wanted.ravel()).reshape(wanted.shape)
    return np.where(places >= 0, self._scores[places], np.float32(np.nan))


class _Ids:
  """Rows of a cache by the keys of their ids."""

  def __init__(self, read, count: int):
    keys = np.concatenate(
      [
        hashes.keys_of(read(np.arange(start, min(start + _ROWS, count))))
        for start in range(0, count, _ROWS)
      ]
    )
    self._order = np.argsort(keys, kind='stable')
    self._keys = keys[self._order]

  def rows(self, keys: jt.UInt64[np.ndarray, ' n']) -> jt.Int64[np.ndarray, ' n']:
    """The row of each key; -1 for an unknown key."""
    places = hashes.positions(self._keys, keys)
    return np.where(places >= 0, self._order[places], -1)


def _read(path: epath.Path) -> Iterator[_Pairs]:
  if not records.is_json(path):
    for block in runs.read_blocks(path, ranks=False):
      yield runs.keys(block.query_ids), runs.keys(block.doc_ids), block.scores
    return
  for query, scores in examples.read_reranker_scores(path):
    keys = hashes.keys_of([query, *(passage for passage, _ in scores)])
    yield np.repeat(keys[:1], len(scores)), keys[1:], np.array([one for _, one in scores], float)
