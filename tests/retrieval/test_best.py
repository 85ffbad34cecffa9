import numpy as np
import pytest

from dprjax.retrieval import best


def loops(scores, k):
  """By falling score, then falling id, which is the row number as text."""
  rows = [
    sorted(range(len(row)), key=lambda i, row=row: (row[i], str(i)), reverse=True)[:k]
    for row in scores
  ]
  return np.array(rows), np.take_along_axis(scores, np.array(rows), axis=1)


def draw(kind, queries, n):
  rng = np.random.default_rng(n)
  scores = rng.standard_normal((queries, n), np.float32)
  if kind == 'ties':
    return np.round(scores)
  if kind == 'equal':
    return np.full((queries, n), -3.0, np.float32)
  if kind == 'rising':  # every score is better than all before it
    return np.sort(scores, axis=1)
  if kind == 'falling':
    return -np.sort(-scores, axis=1)
  if kind == 'one query has all':
    scores[0] += np.arange(n, dtype=np.float32)
  return scores


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
  'kind', ['random', 'ties', 'equal', 'rising', 'falling', 'one query has all']
)
@pytest.mark.parametrize(('k', 'tied'), [(7, 20), (300, best._TIED)])
def test_equals_loops(kind, k, tied, monkeypatch):
  monkeypatch.setattr(best, '_TIED', tied)
  # Pieces of 1,024 columns and more, whole and cut; blocks of other sizes.
  scores = draw(kind, 3, 9000)
  rows, values = loops(scores, k)
  for block in (9000, 4096, 1000):
    found = best.Best(3, k)
    for start in range(0, 9000, block):
      found.add(scores[:, start : start + block], start)
    np.testing.assert_array_equal(found.ranked()[1], rows)
    np.testing.assert_array_equal(found.ranked()[0], values)


def test_the_best_of_several_vectors_as_by_loops():
  rng = np.random.default_rng(5)
  rows = np.stack([rng.permutation(9)[:4] for _ in range(6)]).astype(np.int32)
  scores = -np.sort(-rng.integers(0, 5, (6, 4)), axis=1).astype(np.float32)
  rows[4, 2:], scores[4, 2:] = -1, -np.inf  # as an index that finds fewer
  found = best.best_of(best.TopK(scores, rows), 3, 4, best.numbers)
  for query in range(2):
    top = {}
    for part in (query, query + 2, query + 4):
      for row, score in zip(rows[part].tolist(), scores[part].tolist(), strict=True):
        if row >= 0:
          top[row] = max(top.get(row, -np.inf), score)
    ranked = sorted(top.items(), key=lambda item: (item[1], str(item[0])), reverse=True)[:4]
    assert list(zip(found.rows[query], found.scores[query], strict=True)) == ranked


def test_rescoring():
  rng = np.random.default_rng(5)
  queries, corpus = (rng.standard_normal((count, 8), np.float32) for count in (7, 50))
  rows = np.stack([rng.choice(50, 12, replace=False) for _ in queries]).astype(np.int32)
  rows[2, -3:] = -1
  everything = queries.astype(np.float64) @ corpus.T
  for block_bytes in (1, 1 << 26):
    scores = best.rescore(queries, rows, lambda wanted: corpus[wanted], block_bytes)
    found = best.order(best.TopK(scores, rows), 5, best.numbers)
    for query, (ordered, products) in enumerate(zip(found.rows, everything, strict=True)):
      candidates = rows[query][rows[query] >= 0]
      expected = candidates[np.argsort(-products[candidates])][:5]
      np.testing.assert_array_equal(ordered, expected)
      np.testing.assert_allclose(found.scores[query], products[expected], rtol=1e-5)


@pytest.mark.parametrize('k', [1, 12, 40])
def test_an_order_by_ids(k):
  rng = np.random.default_rng(k)
  ids = [f'{"dé"[i % 2]}{i}' for i in range(40)]
  rows = np.stack([rng.permutation(40)[:25] for _ in range(9)]).astype(np.int32)
  scores = rng.integers(-2, 3, (9, 25)).astype(np.float32)
  rows[3, 7:], scores[3, 7:] = -1, -np.inf
  found = best.order(best.TopK(scores, rows), k, best.ids_of(ids))
  for query in range(9):
    some = [(s, ids[r], r) for s, r in zip(scores[query], rows[query], strict=True) if r >= 0]
    ranked = sorted(some, key=lambda one: one[:2], reverse=True)[:k]
    assert found.rows[query, : len(ranked)].tolist() == [row for _, _, row in ranked]
    assert found.scores[query, : len(ranked)].tolist() == [score for score, _, _ in ranked]
    assert (found.rows[query, len(ranked) :] == -1).all()


def test_whole_ties_of_an_index_that_cuts_them():
  scores = draw('ties', 6, 700)
  rows, values = loops(scores, 30)
  asked = []

  def search(queries, n):
    asked.append((len(queries), n))
    first = np.argsort(-scores[queries], axis=1, kind='stable')[:, :n].astype(np.int32)
    return best.TopK(np.take_along_axis(scores[queries], first, 1), first)

  found = best.whole_ties(search, 6, 30, 700, best.numbers)
  np.testing.assert_array_equal(found.rows, rows)
  np.testing.assert_array_equal(found.scores, values)
  assert asked[0] == (6, 31) and len(asked) > 1 and asked[-1][1] <= 700
  # No more than the index can give, and no more than it has.
  assert best.whole_ties(search, 6, 30, 35, best.numbers).rows.shape == (6, 30)
  assert asked[-1][1] == 35
