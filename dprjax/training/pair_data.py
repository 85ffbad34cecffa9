"""Evaluation data of pair models: candidates of dev queries."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32
from ml_collections import ConfigDict

from dprjax.base import tree
from dprjax.encoding.embedder import Embedder
from dprjax.models.template import Packed, Template
from dprjax.retrieval import measures
from dprjax.text import token_cache, trec
from dprjax.text.tokenizing import Tokenizer
from dprjax.training.dev_ranking import of_queries
from dprjax.training.method import Evaluate, Model, Scores
from dprjax.training.retrieval_data import Retrieval


class Scorer:
  """Scores pairs of tokenised texts; ``longest`` counts tokens of a filled template."""

  def __init__(
    self,
    model: Model,
    config: ConfigDict,
    devices: Mesh,
    tokenizer: Tokenizer,
    template: Template,
    longest: int,
  ):
    def embed(params: Any, *batch: Array) -> Array:
      return model.embed(tree.unflatten(params), 'pair', *batch)

    self._template, self._longest, self._pad_id = template, longest, tokenizer.pad_id
    self._opening, self._closing = len(tokenizer.opening), len(tokenizer.closing)
    self._embedder = Embedder(embed, devices, config.eval.batch_size, longest, tokenizer.pad_id)

  def pack(
    self, first: Sequence[Int32[np.ndarray, ' _']], second: Sequence[Int32[np.ndarray, ' _']]
  ) -> Packed:
    """Packs the texts of each pair into one row."""

    def bare(row: np.ndarray) -> np.ndarray:
      return row[self._opening : len(row) - self._closing]

    texts = ([bare(row) for row in rows] for rows in (first, second))
    return self._template.pack(list(texts), self._longest, self._pad_id)

  def __call__(
    self, params: Mapping[str, jax.Array], packed: Packed, number: int | None = None
  ) -> Float[np.ndarray, ' n']:
    """The scores of pairs; ``number`` is their task, if the model takes one."""
    columns = [packed.lengths]
    if number is not None:
      columns.append(np.full(len(packed.lengths), number, np.int32))
    return self._embedder(params, packed.rows, columns=columns)[:, 0]


def with_negatives(data: Retrieval) -> Retrieval:
  """The same data, where held-out queries keep their mined negatives as candidates."""
  if data.dev is None or not data.dev.held_out:
    return data
  return dataclasses.replace(
    data, dev=dataclasses.replace(data.dev, negatives=data.train.negatives)
  )


def candidates(
  tokens: token_cache.TokenCache, queries: np.ndarray, count: int, seed: int
) -> list[np.ndarray]:
  """The passages to re-rank for each query.

  These are its relevant passages and its first ``count`` negatives; random passages that are not
  relevant fill gaps. A small corpus may give fewer.
  """
  chosen = []
  for query, row in zip(queries.tolist(), tokens.query_rows(queries), strict=True):
    negatives = row.negatives[:count]
    if len(negatives) < count:
      drawn = np.random.default_rng([seed, query]).integers(
        0, tokens.num_passages, 2 * count + len(row.relevant), dtype=np.int32
      )
      drawn = tokens.canonical[drawn]
      taken = tokens.canonical[np.concatenate([row.relevant, negatives])]
      drawn = drawn[~np.isin(drawn, taken)]
      _, first = np.unique(drawn, return_index=True)
      negatives = np.concatenate([negatives, drawn[np.sort(first)][: count - len(negatives)]])
    chosen.append(np.concatenate([row.relevant, negatives]))
  return chosen


def ranking(
  data: Retrieval,
  scorer: Scorer,
  tokenizer: Tokenizer,
  wanted: Sequence[str],
  number: int | None = None,
) -> Evaluate:
  """Evaluates re-ranked candidates of dev queries."""
  settings = data.config.cross_encoder
  assert data.dev is not None
  # The dev cache of a dual encoder has no negatives.
  tokens = data.open_cache('dev_candidates', data.dev, tokenizer)
  queries = np.arange(min(tokens.num_queries, settings.dev_queries or tokens.num_queries))
  rows = tokens.query_rows(queries)
  chosen = candidates(tokens, queries, settings.candidates, data.config.seed)
  flat = np.concatenate(chosen)
  query_ids, passage_ids = tokens.query_ids(queries), tokens.passage_ids(flat)
  counts = [len(passages) for passages in chosen]
  ends = list(itertools.accumulate(counts))
  qrels = data.make_qrels(query_ids, rows, dict(zip(flat.tolist(), passage_ids, strict=True)))
  packed = scorer.pack(
    [row.tokens for row, count in zip(rows, counts, strict=True) for _ in range(count)],
    tokens.passage_tokens(flat),
  )

  def evaluate(params: Mapping[str, Array]) -> Scores:
    scores = scorer(params, packed, number).tolist()
    rankings = {
      query: dict(zip(passage_ids[end - count : end], scores[end - count : end], strict=True))
      for query, count, end in zip(query_ids, counts, ends, strict=True)
    }
    found = measures.measure(trec.run_from_dict(rankings), qrels, wanted)
    return Scores(found['mean'], of_queries(found, wanted[0]))

  return evaluate
