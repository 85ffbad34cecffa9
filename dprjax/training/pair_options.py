"""Options of rerankers; each positive is compared with ``config.negatives`` passages."""

import types

import ml_collections

from dprjax.training.options import choice, whole


def local(c: ml_collections.ConfigDict) -> None:
  c.cross_encoder.candidates, c.cross_encoder.dev_queries = 5, 32


def table() -> types.SimpleNamespace:
  c = types.SimpleNamespace()
  c.cross_encoder = types.SimpleNamespace()
  # 'listwise': softmax cross-entropy of the positive; 'pointwise': binary, of each pair
  c.cross_encoder.loss = choice('listwise', 'pointwise')
  # labels of a new head: 1 (relevance) or 2 (irrelevant, relevant); an existing head keeps its
  # labels
  c.cross_encoder.labels = whole(1, least=1, most=2)
  # passages re-ranked for a dev query: its relevant ones, its negatives, then random ones
  c.cross_encoder.candidates = whole(20, least=1, most=10**6)
  # only the first queries of the dev split; 0: all
  c.cross_encoder.dev_queries = whole(500, least=0, most=10**9)
  return c
