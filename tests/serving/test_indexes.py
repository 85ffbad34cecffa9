"""Served indexes of smaller vectors."""

import numpy as np
import pytest

from dprjax.encoding import codes
from dprjax.retrieval import exact
from dprjax.serving import turns
from dprjax.serving.indexes import ServedIndex


def search(index, queries, texts, k):
  return turns.finish(index.rank(turns.finish(index.find(queries)), texts, k))


@pytest.mark.slow_but_first
@pytest.mark.parametrize('dtype', ['float32', 'int8', 'binary'])
def test_queries_are_cut_to_what_an_index_has(tmp_path, write_embeddings, dtype):
  rng = np.random.default_rng(0)
  passages, queries = (rng.standard_normal((count, 12), np.float32) for count in (40, 3))
  short = codes.cut(passages, 9, True)
  write_embeddings(tmp_path / 'x', [f'd{i}' for i in range(40)], short, dtype=dtype)
  index = ServedIndex('x', tmp_path / 'x', most=5)
  index.compile()
  if dtype != 'float32':
    code = codes.Code(dtype, codes.calibrate(short, dtype))
    short = codes.decode(codes.encode(short, code), code)
  best = exact.search(codes.cut(queries, 9, True), short, 4)
  found = search(index, queries, [''] * 3, 4)
  scores = [[hit['score'] for hit in hits] for hits in found]
  np.testing.assert_allclose(scores, best.scores, rtol=1e-5)
  if dtype != 'binary':  # whose scores tie
    assert [[hit['id'] for hit in hits] for hits in found] == [
      [f'd{row}' for row in rows] for rows in best.rows
    ]


@pytest.mark.slow
def test_equal_scores_go_by_falling_id(tmp_path, write_embeddings):
  ids = [str(i) for i in range(30)]
  write_embeddings(tmp_path / 'x', ids, np.ones((30, 4), np.float32))
  index = ServedIndex('x', tmp_path / 'x', most=7)
  index.compile()
  for k in (1, 5, 7):
    (hits,) = search(index, np.ones((1, 4), np.float32), [''], k)
    assert [hit['id'] for hit in hits] == ['9', '8', '7', '6', '5', '4', '3'][:k]
