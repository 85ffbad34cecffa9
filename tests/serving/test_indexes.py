"""A prompt of pairs as a served reranker."""

import numpy as np
import pytest

from dprjax import PromptReranker
from dprjax.serving.indexes import Reranker


@pytest.mark.slow
def test_a_prompt_of_pairs_gives_probabilities_and_compiles_first(templates):
  paths = templates / 'backbone', templates / 'pairs.npz'
  served = Reranker('qa', paths[0], prompt=paths[1])
  served.compile()
  programs = served._model._embedder._embed._cache_size()
  assert programs == 2  # pairs of up to 16 tokens, and of up to 23
  documents = ['oak', '', 'fir elm oak larch pine yew ash']
  for query in ('oak', 'oak fir elm yew pine ash'):
    logits = PromptReranker.load(*paths, batch_size=16).score([(query, one) for one in documents])
    expected = 1 / (1 + np.exp(-logits))
    np.testing.assert_allclose(served.score(query, documents), expected, rtol=0, atol=1e-5)
  assert served._model._embedder._embed._cache_size() == programs
