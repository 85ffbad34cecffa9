"""Served indexes of smaller vectors, and a prompt of pairs as a served reranker."""

import json

import numpy as np
import pytest

import dprjax
from dprjax.encoding import codes
from dprjax.retrieval import bm25_index, exact, folder, fusion
from dprjax.serving import turns
from dprjax.serving.indexes import ServedIndex, ServedReranker, probabilities
from dprjax.text.texts import Text


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
  scores = [[hit.score for hit in hits] for hits in found]
  np.testing.assert_allclose(scores, best.scores, rtol=1e-5)
  if dtype != 'binary':  # whose scores tie
    assert [[hit.id for hit in hits] for hits in found] == [
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
    assert [hit.id for hit in hits] == ['9', '8', '7', '6', '5', '4', '3'][:k]


@pytest.mark.slow
def test_a_hybrid_index_is_fused_with_bm25(tmp_path, write_embeddings):
  ids, texts = ['a', 'b', 'c'], ['red apples', 'green pears', 'green apples']
  how = fusion.Fusion(weights={'bm25': 1, 'dense': 1}, depth=2)
  (tmp_path / 'x').mkdir()
  folder.describe(tmp_path / 'x', 'backbone', 'b' * 64, name='x', how=how)
  passages = [Text(*one) for one in zip(ids, texts, strict=True)]
  write_embeddings(folder.vectors_of(tmp_path / 'x'), ids, np.eye(3, dtype=np.float32))
  bm25_index.save(bm25_index.build(ids, texts), tmp_path / 'x' / 'index' / 'bm25', 'fingerprint')
  lines = [json.dumps({'id': one.id, 'text': one.text}) for one in passages]
  folder.passages_of(tmp_path / 'x').write_text('\n'.join(lines))
  index = ServedIndex('x', tmp_path / 'x')
  index.compile()
  # By the vectors a, b; c, a. By only the word b; none.
  vectors = np.array([[2, 1, 0], [1, 0, 2]], np.float32)
  found = search(index, vectors, ['pear', 'plums'], 2)
  assert [[hit.id for hit in hits] for hits in found] == [['b', 'a'], ['c', 'a']]
  assert [hit.score for hit in found[0]] == pytest.approx([1 / 61 + 1 / 62, 1 / 61])
  assert found[0][0].text == 'green pears'


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
