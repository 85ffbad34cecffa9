import numpy as np
import pytest

import nudging


def unit(x):
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(('bound', 'spherical'), [(0.5, True), (1.4, False)])
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
