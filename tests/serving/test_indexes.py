"""Served indexes of smaller vectors, and a prompt of pairs as a served reranker."""

import numpy as np
import pytest

import dprjax
from dprjax.encoding import codes
from dprjax.retrieval import exact
from dprjax.serving import turns
from dprjax.serving.indexes import ServedIndex, ServedReranker, probabilities


def search(index, queries, texts, k):
  return turns.finish(index.rank(turns.finish(index.find(queries)), texts, k))


def scores(served, query, documents):
  return probabilities(turns.finish(served.logits(turns.finish(served.pack(query, documents)))))


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


@pytest.mark.slow
def test_a_prompt_of_pairs_gives_probabilities_and_compiles_first(templates):
  paths = templates / 'backbone', templates / 'pairs.npz'
  served = ServedReranker('qa', paths[0], prompt=paths[1])
  served.compile()
  programs = served._model._embedder._embed._cache_size()
  assert 2 <= programs <= 4  # pairs of up to 16 and 23 tokens, one or as many as fit into a slice
  documents = ['oak', '', 'fir elm oak larch pine yew ash']
  assert served.estimate('', ['']).seconds > 0  # no shorter than the template
  for query in ('oak', 'oak fir elm yew pine ash'):
    logits = dprjax.PromptReranker.load(*paths, batch_size=16).score(
      [(query, one) for one in documents]
    )
    expected = 1 / (1 + np.exp(-logits))
    np.testing.assert_allclose(scores(served, query, documents), expected, rtol=0, atol=1e-5)
  assert served._model._embedder._embed._cache_size() == programs
