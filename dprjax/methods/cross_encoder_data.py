"""Queries and passages to train a cross-encoder on: those of a dual encoder, which the loss puts
together in pairs.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import ml_collections
import numpy as np
from etils import epath
from jax.sharding import Mesh

from dprjax.base.errors import InputError
from dprjax.data import batches, sources, store
from dprjax.data.text import Tokenizer
from dprjax.formats import trec
from dprjax.inference.embedder import Embedder
from dprjax.methods import retrieval_data as retrieval
from dprjax.methods.feed import Batch, Feed, Text
from dprjax.methods.method import System
from dprjax.models.encoder import EncoderConfig
from dprjax.retrieval import measures
from dprjax.runtime import mesh, tree


def find(config: ml_collections.FrozenConfigDict, workdir: epath.Path, devices: Mesh) -> Text:
  """The text that ``config.data`` names: a split to train on and, if any, a split whose candidates
  are re-ranked on the way.

  Raises:
    InputError: there is none such.
  """
  train, dev = retrieval.find_splits(config, workdir)
  if dev is not None and dev.held_out:
    dev = dataclasses.replace(
      dev, negatives=train.negatives
    )  # the held-out queries were mined for too
  return Text(
    functools.partial(retrieval.read_passages, train),
    functools.partial(_open, config, workdir, devices, train, dev),
  )


def _open(
  config: ml_collections.FrozenConfigDict,
  workdir: epath.Path,
  devices: Mesh,
  train: sources.Source,
  dev: sources.Source | None,
  tokenizer: Tokenizer,
  model: EncoderConfig,
) -> Feed:
  knobs = config.data
  longest = tokenizer.pair_length(knobs.query_max_length, knobs.passage_max_length)
  if longest > model.max_tokens:
    raise InputError(
      f'config.data.query_max_length, config.data.passage_max_length: {knobs.query_max_length} and '
      f'{knobs.passage_max_length} make '
      f'pairs of {longest} tokens, more than the {model.max_tokens} positions of '
      f'{config.backbone.path}'
    )
  for name in ('query_prefix', 'passage_prefix'):
    if knobs[name]:
      raise InputError(
        f'config.data.{name}: a cross-encoder takes the texts as they are; leave it empty'
      )
  tokens = retrieval.open_store(config, workdir, 'train', train, tokenizer)
  update = config.batch_size * config.accumulate
  # Random passages stand in where a query has too few negatives; make_batches says how often.
  share, shares = mesh.batch_rank(devices)
  dataset = batches.make_batches(
    tokens,
    batch_size=update,
    negatives=config.negatives,
    query_buckets=knobs.query_buckets,
    passage_buckets=knobs.passage_buckets,
    seed=config.seed,
    process_index=share,
    process_count=shares,
    max_relevant=knobs.max_relevant,
  )

  def ids(batch: Batch) -> str:
    queries = tokens.query_ids(batch['query_index'][:8])
    return f'queries {", ".join(queries)}{"..." if len(batch["query_index"]) > 8 else ""}'

  def shape(batch: Batch) -> str:
    return (
      f'{batch["passage_tokens"].shape[1]} pairs a query, of {batch["query_tokens"].shape[1]} '
      f'and {batch["passage_tokens"].shape[2]} tokens'
    )

  return Feed(
    loader=batches.open_batches(dataset, config.data.threads),
    epoch=len(dataset),
    unit='queries',
    ids=ids,
    shape=shape,
    said=f'{tokens.num_queries} training queries, {tokens.num_passages} passages; '
    f'{config.negatives} negatives a query',
    evaluation=functools.partial(_evaluation, config, workdir, dev, tokenizer, devices, longest)
    if dev
    else None,
  )


def candidates(tokens: store.Store, queries: np.ndarray, count: int, seed: int) -> list[np.ndarray]:
  """The passages to re-rank for each of these queries: its relevant ones, its first ``count``
  negatives, then random passages in their place.

  Random ones are drawn with replacement and each taken once, so that a small corpus gives fewer;
  none of them is relevant to the query.
  """
  chosen = []
  for query, row in zip(queries.tolist(), tokens.query_rows(queries), strict=True):
    negatives = row.negatives[:count]
    if len(negatives) < count:
      drawn = np.random.default_rng([seed, query]).integers(
        0, tokens.num_passages, 2 * count + len(row.relevant), dtype=np.int32
      )
      drawn = drawn[~np.isin(drawn, np.concatenate([row.relevant, negatives]))]
      _, first = np.unique(drawn, return_index=True)
      negatives = np.concatenate([negatives, drawn[np.sort(first)][: count - len(negatives)]])
    chosen.append(np.concatenate([row.relevant, negatives]))
  return chosen


def _evaluation(
  config: ml_collections.FrozenConfigDict,
  workdir: epath.Path,
  source: sources.Source,
  tokenizer: Tokenizer,
  devices: Mesh,
  longest: int,
  system: System,
) -> Callable[[dict[str, jax.Array]], dict[str, float]]:
  """``{name: array} -> {measure: value}``: the dev queries' candidates, re-ranked."""
  knobs = config.cross_encoder
  # A name of its own: the dual encoder's dev store has no negatives.
  tokens = retrieval.open_store(config, workdir, 'dev_candidates', source, tokenizer)
  judged = retrieval.dev_judgements(workdir, source)
  queries = np.arange(min(tokens.num_queries, knobs.dev_queries or tokens.num_queries))
  records = tokens.query_rows(queries)
  chosen = candidates(tokens, queries, knobs.candidates, config.seed)
  flat = np.concatenate(chosen)
  query_ids, passage_ids = tokens.query_ids(queries), tokens.passage_ids(flat)
  counts = [len(rows) for rows in chosen]
  ends = list(itertools.accumulate(counts))
  ids = [passage_ids[end - count : end] for count, end in zip(counts, ends, strict=True)]
  names = dict(zip(flat.tolist(), passage_ids, strict=True))
  qrels = {
    query: retrieval.graded(judged, query, [names[passage] for passage in row.relevant.tolist()])
    for query, row in zip(query_ids, records, strict=True)
  }
  opening, closing = len(tokenizer.pair_format.opening), len(tokenizer.closing)

  def bare(row: np.ndarray) -> np.ndarray:
    return row[opening : len(row) - closing]

  pairs = tokenizer.join_pairs(
    [bare(row.tokens) for row, count in zip(records, counts, strict=True) for _ in range(count)],
    [bare(row) for row in tokens.passage_tokens(flat)],
    longest,
  )
  wanted = list(dict.fromkeys([config.eval.measure, 'nDCG@10', 'RR@10']))

  def embed(params: dict[str, jax.Array], *batch: jax.Array) -> jax.Array:
    return system.embed(tree.unflatten(params), 'pair', *batch)

  embedder = Embedder(embed, devices, config.eval.batch_size, longest, tokenizer.pad_id)

  def evaluate(params: dict[str, jax.Array]) -> dict[str, float]:
    scores = embedder(params, pairs.rows, columns=(pairs.starts,))[:, 0]
    rankings = {
      query: dict(zip(found, scores[end - count : end].tolist(), strict=True))
      for query, found, count, end in zip(query_ids, ids, counts, ends, strict=True)
    }
    return measures.measure(trec.run_from_dict(rankings), qrels, wanted)['mean']

  return evaluate
