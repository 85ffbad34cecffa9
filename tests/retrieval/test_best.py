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
