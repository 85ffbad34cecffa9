"""Cross-encoders: classifiers of (query, passage) pairs.

- pointwise: binary cross-entropy of each pair, relevant or not (monoBERT: Nogueira and Cho 2019,
  Eq. 1)
- listwise: softmax cross-entropy of the positive among its own negatives (LCE: Gao, Dai and Callan
  2021, Eq. 5)

With ``config.distillation`` they also learn the scores of a teacher (distillation.py).

There are no in-batch negatives, so the loss is a mean over queries, and ``grad_cache``
averages over chunks.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32
from ml_collections import ConfigDict

from dprjax.base import tree
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.encoding.embedder import Embedder
from dprjax.losses import distillation
from dprjax.losses.grad_cache import map_chunks
from dprjax.losses.types import Batch, Loss, Params
from dprjax.models import heads, hub
from dprjax.models.encoder_config import EncoderConfig
from dprjax.models.template import Packed, Template, bare, fill, unpack
from dprjax.retrieval import measures
from dprjax.text import token_cache, tokenizing, trec
from dprjax.text.tokenizing import Tokenizer
from dprjax.text.vector_spec import SIDES
from dprjax.training import dev_ranking, dual_encoder, retrieval_data
from dprjax.training.dev_ranking import of_queries
from dprjax.training.method import (
  BatchShapes,
  DataSource,
  Evaluate,
  Method,
  Model,
  Parts,
  Product,
  Scores,
  TrainingData,
)
from dprjax.training.options import SET
from dprjax.training.retrieval_data import Retrieval, shorten


class Classifier(NamedTuple):
  """The functions of a cross-encoder; ``init`` and ``embed`` as in ``Model``.

  Attributes:
    score: ``(params, (query tokens, query mask [B, T], passage tokens, passage mask [B, C, T]),
      key or None) -> [B, C]``.
  """

  init: Callable[[Parts, Array], dict[str, Any]]
  embed: Callable[[Params, str, Array, Array, Array], Float[Array, 'B 1']]
  score: Callable[[Params, Sequence[Array], Array | None], Float[Array, 'B C']]


def build(config: ConfigDict, model: EncoderConfig, devices: Mesh, tokenizer: Tokenizer) -> Model:
  of_pairs = build_classifier(config, model, devices, tokenizer)
  settings = config.cross_encoder

  def loss(params: Params, batch: Batch, key: Array | None) -> Loss:
    rows = [batch[f'{side}_{what}'] for side in SIDES for what in ('tokens', 'mask')]
    scores = of_pairs.score(params, rows, key)
    value = jnp.mean(listwise(scores) if settings.loss == 'listwise' else pointwise(scores))
    losses = distillation.add(config, settings.loss, value, scores, batch)
    right = scores[:, 0] > jnp.max(scores[:, 1:], axis=1)
    return losses['loss'], losses | {'accuracy': jnp.mean(right.astype(jnp.float32))}

  shown = {'accuracy': 'positive first'} | distillation.shown(config)
  return Model(of_pairs.init, loss, of_pairs.embed, shown)


def build_classifier(
  config: ConfigDict, model: EncoderConfig, devices: Mesh, tokenizer: Tokenizer
) -> Classifier:
  settings = config.cross_encoder
  if model.family.classifier_tensors is None:
    raise InputError(
      f'config.backbone.path: a cross-encoder needs a classification head, and {model.model_type} '
      'models here have none; choose another backbone'
    )
  (template,) = templates(tokenizer)['pair']
  around = len(tokenizer.opening), len(tokenizer.closing)
  options = dual_encoder.encoder_options(config, devices)
  longest = tokenizer.pair_length(config.data.query_max_length, config.data.passage_max_length)
  chunks = config.grad_cache

  def init(parts: Parts, key: Array) -> dict[str, Any]:
    stored = parts.heads['classifier'].params if 'classifier' in parts.heads else {}
    labels = stored['output']['bias'].shape[0] if 'output' in stored else settings.labels
    # Without a classifier in the checkpoint, the BERT head starts from the pooler.
    head = {**heads.init_classifier(model, key, labels), **stored}
    params = {'backbone': parts.encoder, 'head': {'classifier': head}}
    fresh = tree.flatten(
      {'head': {'classifier': {k: v for k, v in head.items() if k not in stored}}}
    )
    dual_encoder.check_fresh(config, params, fresh)
    return params

  def embed(
    params: Params, side: str, rows: Array, mask: Array, lengths: Array
  ) -> Float[Array, 'B 1']:
    del side, mask  # only pairs, of packed texts
    pair = fill([template], unpack(rows, lengths), rows.shape[1], tokenizer.pad_id)
    return heads.score_pairs(
      model, params['backbone'], params['head']['classifier'], *pair[:3], options=options
    )[:, None]

  def score_chunked(
    params: Params, rows: Sequence[Array], key: Array | None
  ) -> Float[Array, 'B C']:
    def score(rows: Any, key: Array | None) -> tuple[Float[Array, 'B C'], tuple[()]]:
      size, candidates, width = rows[2].shape
      query = (jnp.repeat(x, candidates, axis=0) for x in rows[:2])
      passage = (x.reshape(size * candidates, width) for x in rows[2:])
      texts = [bare(tokens, mask, *around) for tokens, mask in (tuple(query), tuple(passage))]
      length = tokenizer.pair_length(rows[0].shape[1], width)
      pair = fill([template], texts, min(length, longest), tokenizer.pad_id)
      scores = heads.score_pairs(
        model,
        params['backbone'],
        params['head']['classifier'],
        *pair[:3],
        options=options,
        dropout_key=key,
      )
      return scores.reshape(size, candidates), ()

    return map_chunks(score, tuple(rows), key, chunks, devices)[0]

  return Classifier(init, embed, score_chunked)


def listwise(scores: Float[Array, 'B C']) -> Float[Array, ' B']:
  """Negative log-likelihood of the positive, column 0, among the passages of each query."""
  return jax.nn.logsumexp(scores, axis=1) - scores[:, 0]


def pointwise(scores: Float[Array, 'B C']) -> Float[Array, ' B']:
  """Mean binary cross-entropy of the pairs of each query; column 0 is relevant.

  With 2 labels this is their cross-entropy, since the score is the difference of logits.
  """
  return jnp.mean(
    jnp.concatenate([jax.nn.softplus(-scores[:, :1]), jax.nn.softplus(scores[:, 1:])], axis=1),
    axis=1,
  )


def find_data(
  section: ConfigDict, config: ConfigDict, workdir: epath.Path, devices: Mesh
) -> DataSource:
  """The data of a dual encoder; evaluation re-ranks candidates of the dev split."""
  data = retrieval_data.find_splits(section, config, workdir, devices, kind=Candidates)
  return with_negatives(data).texts()


def templates(tokenizer: Tokenizer) -> dict[str, list[Template]]:
  return {'pair': [Template.pair(*tokenizer.pair_format)]}


class Candidates(Retrieval):
  """Queries and passages, read as pairs."""

  def open(self, tokenizer: Tokenizer, model: EncoderConfig) -> TrainingData:
    settings = self.section
    longest = tokenizer.pair_length(settings.query_max_length, settings.passage_max_length)
    options = 'config.data.query_max_length, config.data.passage_max_length'
    dual_encoder.check_length(self.config, model, options, longest)
    tokens = self.open_cache('train', self.train, tokenizer)

    def evaluation(built: Model) -> Evaluate:
      (template,) = templates(tokenizer)['pair']
      scorer = Scorer(built, self.config, self.devices, tokenizer, template, longest)
      wanted = dev_ranking.measure_names(self.config, 'nDCG@10', 'RR@10')
      return ranking(self, scorer, tokenizer, wanted)

    return TrainingData(
      # make_batches counts random replacements of missing negatives.
      batches=self.make_batches(tokens),
      unit='queries',
      description=f'{counted(tokens.num_queries, "training queries")}, '
      f'{counted(tokens.num_passages, "passages")}; '
      f'{counted(self.config.negatives, "negatives")} a query',
      ids=lambda batch: f'queries {shorten(tokens.query_ids(batch["query_index"]))}',
      evaluation=evaluation if self.dev else None,
    )


class Scorer:
  """Scores pairs of tokenised texts in a template of at most ``longest`` tokens."""

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
  """Passages to re-rank for each query: relevant ones, ``count`` negatives, then random ones."""
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
    report = measures.measure(trec.run_from_dict(rankings), qrels, wanted)
    return Scores(report['mean'], of_queries(report, wanted[0]))

  return evaluate


def export(
  config: ConfigDict, _: epath.Path, backbone: hub.Backbone, trained: Mapping[str, np.ndarray]
) -> Product:
  """The encoder with its classifier, even if only the head was trained.

  It has no sentence-transformers files, since those describe a model of vectors.
  """
  pair = config.data.query_max_length, config.data.passage_max_length
  checkpoint = {
    'params': dual_encoder.encoder_params(backbone, trained),
    'heads': dual_encoder.export_heads(backbone, trained, {}),
    'max_length': tokenizing.load_tokenizer(backbone.path).pair_length(*pair),
  }
  return Product({'': checkpoint}, {}, {}, noun='a cross-encoder')


def shapes(config: ConfigDict, model: EncoderConfig, tokenizer: Tokenizer) -> BatchShapes:
  batch = retrieval_data.batch_shapes(config, model, tokenizer)
  queries, candidates = batch.arrays['passage_index'].shape
  settings = config.data
  longest = tokenizer.pair_length(settings.query_max_length, settings.passage_max_length)
  padded = (batch.arrays[f'{side}_tokens'].shape[-1] for side in ('query', 'passage'))
  pairs = queries * candidates
  return batch._replace(
    arrays={name: leaf for name, leaf in batch.arrays.items() if name != 'negative_source'},
    calls=((pairs, min(tokenizer.pair_length(*padded), longest)),),
    texts={'queries': queries, 'pairs': pairs},
    longest=longest,
    columns=((np.int32, 2),),
  )


METHOD = Method(
  build,
  find_data,
  export,
  parts=('classifier',),
  options={build: ('grad_cache', 'distillation.loss'), find_data: ('data.folds',)},
  # There are no in-batch negatives.
  requires={'negatives': SET, 'data.query_prefix': '', 'data.passage_prefix': ''},
  shapes=shapes,
)
