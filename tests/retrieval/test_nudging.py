import numpy as np
import pytest

from dprjax.formats.trec import run_from_dict
from dprjax.retrieval import measures, nudging


def unit(x):
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.slow_but_first
@pytest.mark.parametrize('bound', [0.05, 0.5, 1.4])
@pytest.mark.parametrize('spherical', [True, False])
def test_no_vector_within_the_bound_is_better(bound, spherical):
  draw = np.random.default_rng(0)
  old = draw.standard_normal((5, 6))
  old = unit(old) if spherical else old
  goal = draw.standard_normal((5, 6))
  new = nudging.move(old.astype(np.float32), goal, bound, spherical)
  assert (np.linalg.norm(new - old, axis=1) <= bound + 1e-5).all()
  if spherical:
    np.testing.assert_allclose(np.linalg.norm(new, axis=1), 1, atol=1e-6)
  others = old + bound * unit(draw.standard_normal((200_000, 1, 6)))
  if spherical:
    others = unit(others)
    inside = np.linalg.norm(others - old, axis=2) <= bound
  else:
    inside = np.ones(others.shape[:2], bool)
  best = np.where(inside, (others * goal).sum(axis=2), -np.inf).max(axis=0)
  found = (new * goal).sum(axis=1)
  assert (found >= best - 1e-5).all()
  assert (found <= np.linalg.norm(goal, axis=1) * (1 if spherical else np.inf) + 1e-5).all()


def test_what_nothing_pulls_stays():
  old = unit(np.random.default_rng(0).standard_normal((2, 4))).astype(np.float32)
  for spherical in (True, False):
    np.testing.assert_array_equal(nudging.move(old, np.zeros((2, 4)), 0.5, spherical), old)
  np.testing.assert_allclose(nudging.move(old, 3 * old, 0.5, True), old, atol=1e-6)
  np.testing.assert_allclose(nudging.move(old, old[::-1], 0.0, True), old, atol=1e-6)


def test_cross_validation_equals_searches_of_moved_corpora():
  """Only queries of other folds move passages."""
  draw = np.random.default_rng(1)
  corpus = unit(draw.standard_normal((60, 5))).astype(np.float32)
  queries = unit(draw.standard_normal((20, 5))).astype(np.float32)
  judged = [{int(row): int(row) % 2 + 1 for row in draw.integers(0, 25, 2)} for _ in queries]
  folds, bounds = np.arange(20) % 3, (0.0, 0.3, 0.9)
  rows, _ = nudging.towards(queries, judged)
  assert rows.tolist() == sorted({row for own in judged for row in own})
  blocks = (corpus[start : start + 16] for start in range(0, 60, 16))
  found = nudging.cross_validate(queries, blocks, corpus[rows], judged, folds, bounds, True)
  for number, query in enumerate(queries):
    others = [other for other in range(20) if folds[other] != folds[number]]
    for column, bound in enumerate(bounds):
      moved = corpus.copy()
      for row in {row for other in others for row in judged[other]}:
        goal = sum(queries[other] for other in others if row in judged[other])
        moved[row] = nudging.move(corpus[[row]], goal[None], bound, True)[0]
      run = run_from_dict({'q': dict(zip(map(str, range(60)), moved @ query, strict=True))})
      grades = {'q': {str(row): grade for row, grade in judged[number].items()}}
      expected = measures.measure(run, grades, ['nDCG@10'])['mean']['nDCG@10']
      assert found.by_bound[number, column] == pytest.approx(expected, abs=1e-6)
    known = any(row in judged[other] for other in others for row in judged[number])
    assert found.known[number] == known
  assert 0 <= found.best() < 3 and found.held_out().shape == (20,)
