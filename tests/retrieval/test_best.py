import numpy as np
import pytest

from dprjax.retrieval import best


def loops(scores, k):
  """By falling score, then row."""
  rows = [sorted(range(len(row)), key=lambda i, row=row: (-row[i], i))[:k] for row in scores]
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


@pytest.mark.parametrize(
  'kind', ['random', 'ties', 'equal', 'rising', 'falling', 'one query has all']
)
@pytest.mark.parametrize('k', [1, 7, 300])
def test_equals_loops(kind, k):
  # Pieces of 1,024 columns and more, whole and cut; blocks of other sizes.
  scores = draw(kind, 3, 9000)
  rows, values = loops(scores, k)
  for block in (9000, 4096, 1000):
    found = best.Best(3, k)
    for start in range(0, 9000, block):
      found.add(scores[:, start : start + block], start)
    np.testing.assert_array_equal(found.ranked()[1], rows)
    np.testing.assert_array_equal(found.ranked()[0], values)


def test_fewer_rows_than_k():
  found = best.Best(2, 4)
  found.add(np.array([[1, 3], [2, 2]], np.float32), 5)
  scores, rows = found.ranked()
  assert rows.tolist() == [[6, 5, -1, -1], [5, 6, -1, -1]]
  assert scores.tolist() == [[3, 1, -np.inf, -np.inf], [2, 2, -np.inf, -np.inf]]
  assert (scores.dtype, rows.dtype) == (np.float32, np.int32)


def test_the_best_of_several_vectors_as_by_loops():
  rng = np.random.default_rng(5)
  rows = np.stack([rng.permutation(9)[:4] for _ in range(6)]).astype(np.int32)
  scores = -np.sort(-rng.integers(0, 5, (6, 4)), axis=1).astype(np.float32)
  rows[4, 2:], scores[4, 2:] = -1, -np.inf  # as an index that finds fewer
  found = best.best_of(best.TopK(scores, rows), 3)
  for query in range(2):
    top = {}
    for part in (query, query + 2, query + 4):
      for row, score in zip(rows[part].tolist(), scores[part].tolist(), strict=True):
        if row >= 0:
          top[row] = max(top.get(row, -np.inf), score)
    ranked = sorted(top.items(), key=lambda item: (-item[1], item[0]))[:4]
    assert list(zip(found.rows[query], found.scores[query], strict=True)) == ranked


def test_rescoring():
  rng = np.random.default_rng(5)
  queries, corpus = (rng.standard_normal((count, 8), np.float32) for count in (7, 50))
  rows = np.stack([rng.choice(50, 12, replace=False) for _ in queries]).astype(np.int32)
  rows[2, -3:] = -1
  everything = queries.astype(np.float64) @ corpus.T
  for block_bytes in (1, 1 << 26):
    scores = best.rescore(queries, rows, lambda wanted: corpus[wanted], block_bytes)
    found = best.order(best.TopK(scores, rows), 5)
    for query, (ordered, products) in enumerate(zip(found.rows, everything, strict=True)):
      candidates = rows[query][rows[query] >= 0]
      expected = candidates[np.argsort(-products[candidates])][:5]
      np.testing.assert_array_equal(ordered, expected)
      np.testing.assert_allclose(found.scores[query], products[expected], rtol=1e-5)
