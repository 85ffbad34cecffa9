"""Pools by hand on a few rows; test_negatives.py compares whole files with a plain miner."""

import numpy as np
import pytest

from dprjax.base.outofcore import keys_of
from dprjax.mining import pools


def rows(*values):
  """The key of a document is the place of its id too, and its id is the key as text."""
  given = [(query, rank, score, doc, doc) for query, rank, score, doc in values]
  return np.array(given, pools.ROW)


def rank_rows(rows, depth):
  return pools.rank_rows(rows, depth, lambda places: [b'%d' % place for place in places])


def test_the_score_decides_and_the_id_among_equal_scores():
  given = rows((1, 2, 5.0, 9), (0, 3, 1.0, 7), (0, 1, 3.0, 8), (1, 1, 5.0, 4), (0, 2, 1.0, 6))
  ranked = rank_rows(given, 2)
  assert ranked.rows[['query', 'rank', 'doc']].tolist() == [
    (0, 1, 8),
    (0, 2, 7),
    (1, 1, 9),
    (1, 2, 4),
  ]
  assert not len(ranked.tied) and not len(ranked.contrary) and not len(ranked.repeated)
  # Scores that are the same as float32; 10 comes before 9 as text, so after it in a ranking.
  close = rank_rows(rows((0, 1, 1.00000002, 10), (0, 2, 1.00000001, 9), (0, 3, 1.0, 8)), 2)
  assert close.rows['doc'].tolist() == [9, 8] and not len(close.contrary)
  # Ranks from 0, or with gaps, become places.
  assert rank_rows(rows((0, 0, 2.0, 1), (0, 10, 1.0, 2)), 5).rows['rank'].tolist() == [1, 2]


@pytest.mark.parametrize('seed', range(5))
def test_the_order_of_the_lines_does_not_matter(seed):
  rng = np.random.default_rng(seed)
  given = rows(
    *((query, rank, -rank // 2, 100 * query + rank) for query in range(5) for rank in range(20))
  )
  ranked, shuffled = (rank_rows(part, 7).rows for part in (given, rng.permutation(given)))
  assert np.array_equal(ranked, shuffled)


def test_errors_of_a_run():
  ranked = rank_rows(rows((0, 1, 3.0, 1), (0, 1, 2.0, 2), (1, 1, 1.0, 1)), 5)
  assert ranked.tied['doc'].tolist() == [2] and not len(ranked.contrary) and len(ranked.rows) == 3
  distances = rank_rows(rows((0, 1, 0.1, 1), (0, 2, 0.9, 2)), 5)
  assert len(distances.contrary) == 1
  twice = rank_rows(rows((0, 1, 3.0, 1), (0, 2, 2.0, 2), (0, 3, 1.0, 1), (1, 1, 1.0, 1)), 5)
  assert twice.repeated[['query', 'doc']].tolist() == [(0, 1)]


def test_a_part_of_a_run_is_cut_only_where_that_is_safe():
  queries = np.array([1, 1, 1, 1, 2, 2], np.uint64)

  def shallow(*scores):
    return pools.shallow(queries[: len(scores)], np.array(scores), 2).astype(int).tolist()

  assert shallow(4.0, 3.0, 2.0, 1.0, 9.0, 8.0) == [1, 1, 0, 0, 1, 1]
  assert shallow(4.0, 3.0, 3.0, 1.0, 9.0, 8.0) == [1, 1, 1, 0, 1, 1]  # a tie at the edge
  assert shallow(1.0, 2.0, 3.0, 4.0, 9.0, 8.0) == [1] * 6  # not in order
  assert shallow() == []


def pool_of(runs, texts, positives=(), seed=0):
  ranked = [rank_rows(run, 100).rows for run in runs]
  run = np.repeat(np.arange(len(runs)), [len(part) for part in ranked])
  joined = np.concatenate(ranked)
  codes = np.array([texts.get(doc, -1) for doc in joined['doc'].tolist()], np.int64)
  query, text = np.array(list(positives), np.int64).reshape(-1, 2).T
  return pools.make_pool(joined, run, codes, query, text, keys_of(['q0', 'q1', 'q2']), seed)


def listed(pool):
  """{(query, doc): [(run, rank, score), ...]}"""
  origins = (pool.run, pool.rows['rank'], pool.rows['score'])
  origins = list(zip(*(column.tolist() for column in origins), strict=True))
  columns = (column.tolist() for column in (pool.query, pool.doc, pool.start, pool.stop))
  return {
    (query, doc): origins[start:stop] for query, doc, start, stop in zip(*columns, strict=True)
  }


def test_union_less_the_positives_one_candidate_a_text():
  first = rows((0, 1, 9.0, 10), (0, 2, 8.0, 11), (0, 3, 7.0, 12), (1, 1, 5.0, 10))
  second = rows((0, 1, 0.9, 12), (0, 2, 0.8, 13), (0, 3, 0.7, 10), (0, 4, 0.6, 14), (2, 1, 0.5, 99))
  # 13 has the text of 11, and 14 that of 12; 10 is query 1's positive; 99 is not in the corpus.
  texts = {10: 0, 11: 1, 12: 2, 13: 1, 14: 2}
  pool = pool_of([first, second], texts, [(1, 0)])
  assert listed(pool) == {
    (0, 10): [(0, 1, 9.0), (1, 3, 0.7)],
    # At equal ranks, the document of the first run represents the text.
    (0, 11): [(0, 2, 8.0), (1, 2, 0.8)],
    # 14, the same text further down in the same run, is left out.
    (0, 12): [(1, 1, 0.9), (0, 3, 7.0)],
  }
  assert pool.positives == 1 and pool.copies == 1
  assert pool.place.tolist() == [0, 1, 2]
  assert pool.text.tolist() == [texts[doc] for doc in pool.doc.tolist()]


def test_lots_depend_only_on_seed_query_and_document():
  run = rows(*((query, rank, -rank, 1000 + rank) for query in range(3) for rank in range(50)))
  texts = {1000 + rank: rank for rank in range(50)}
  order = {
    query: [doc for q, doc in listed(pool_of([run], texts)) if q == query] for query in range(3)
  }
  assert order[0] != order[1] != order[2] and all(
    sorted(docs) == list(range(1000, 1050)) for docs in order.values()
  )
  assert [doc for _, doc in listed(pool_of([run], texts, seed=1))][:50] != order[0]
  # Fewer rows, other codes, another retriever beside it: the rest keeps its order.
  fewer = run[run['doc'] % 2 == 0]
  other = pool_of([fewer, rows((1, 1, 1.0, 1001))], {doc: 70 - code for doc, code in texts.items()})
  assert [doc for query, doc in listed(other) if query == 0] == [
    doc for doc in order[0] if doc % 2 == 0
  ]


@pytest.mark.slow
def test_samples_are_fair():
  run = rows(*((0, rank, -rank, 1000 + rank) for rank in range(20)))
  texts = {1000 + rank: rank for rank in range(20)}
  first = np.array(
    [next(iter(listed(pool_of([run], texts, seed=seed))))[1] for seed in range(2000)]
  )
  counts = np.bincount(first - 1000, minlength=20)
  # 100 each, within 4 standard deviations.
  assert counts.sum() == 2000 and counts.min() > 60 and counts.max() < 145


def test_selection():
  pool = pool_of(
    [rows(*((query, rank, -rank, 1000 + rank) for query in (0, 2) for rank in range(6)))],
    {1000 + rank: rank for rank in range(6)},
  )
  nan = np.nan
  probability = np.array([0.5, 0.05, 0.5, 0.01, 0.02, 0.03, 0.2, 0.1, nan, 0.09, nan, 0.9])
  undenoised, denoised, kept = (
    column.astype(int).tolist() for column in pools.select(pool, probability, 2, 0.1)
  )
  assert undenoised == [1, 1, 0, 0, 0, 0] * 2
  assert denoised == [0, 1, 0, 1, 1, 1, 0, 0, 0, 1, 0, 0]  # 0.1 is not below 0.1
  assert kept == [1, 1, 0, 1, 0, 0, 1, 1, 0, 1, 0, 0]


def test_scores_of_a_reranked_run_are_joined_by_text():
  pool = pool_of(
    [rows((0, 1, 9.0, 10), (0, 2, 8.0, 11), (0, 3, 7.0, 12), (2, 1, 5.0, 10))],
    {10: 0, 11: 1, 12: 2},
  )
  reranked = rows(
    (0, 1, 2.0, 10), (0, 2, -1.0, 13), (0, 3, -3.0, 11), (1, 1, 4.0, 12), (0, 4, -9.0, 50)
  )
  # 13 has the text of 11; 50 is unknown.
  scores = pools.join_scores(pool.query, pool.text, reranked, np.array([0, 1, 1, 2, -1]))
  joined = dict(zip(listed(pool), scores.tolist(), strict=True))
  assert joined[0, 10] == 2.0 and joined[0, 11] == -1.0
  assert np.isnan(joined[0, 12]) and np.isnan(joined[2, 10])
  assert np.isnan(
    pools.join_scores(pool.query, pool.text, reranked[:0], np.empty(0, np.int64))
  ).all()


def test_nothing_at_all():
  pool = pool_of([rows()], {})
  assert not len(pool.query) and not pools.select(pool, np.empty(0), 3, 0.1).kept.any()
