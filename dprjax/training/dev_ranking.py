"""Retrieval quality on a dev split: which passages dev queries find, and how a model ranks them."""

import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh
from jaxtyping import Float
from ml_collections import ConfigDict

from dprjax.base import arrays, distributed, tree
from dprjax.base.counts import counted
from dprjax.encoding import manifest
from dprjax.encoding import text_encoder as inference
from dprjax.encoding.embedder import Embedder, EmbedFn
from dprjax.models import hub
from dprjax.retrieval import best, exact, measures
from dprjax.text import sources, token_cache, trec, vector_spec
from dprjax.text.tokenizing import Tokenizer
from dprjax.text.vector_spec import SIDES
from dprjax.training import workdir as workdirs
from dprjax.training.method import Evaluate, Scores

logger = logging.getLogger('dprjax')

FROZEN = 'frozen'  # folder in the workdir
_MOST_KEPT = 100_000  # texts


def texts_cut(tokens: token_cache.TokenCache) -> dict[str, tuple[int, int]]:
  """By side, (number of cut texts, number of texts)."""
  sizes = {'query': tokens.num_queries, 'passage': tokens.num_passages}
  return {side: (tokens.cut[side], size) for side, size in sizes.items()}


def measure_names(config: ConfigDict, *others: str) -> list[str]:
  measures.check_name(config.eval.measure, 'config.eval.measure')  # before the training
  return list(dict.fromkeys([config.eval.measure, *others]))


def of_queries(metrics: measures.Metrics, measure: str) -> dict[str, np.ndarray]:
  return {'': np.array(list(metrics['per_query'][measure].values()))}


def make_embedders(
  section: ConfigDict, config: ConfigDict, devices: Mesh, tokenizer: Tokenizer, embed: EmbedFn
) -> dict[str, Embedder]:
  """Embedders of texts by side, for flat parameters, by ``Model.embed``, for evaluations."""

  def embed_flat(side: str, params: Any, *batch: jax.Array) -> jax.Array:
    return embed(tree.unflatten(params), side, *batch)

  return {
    side: Embedder(
      functools.partial(embed_flat, side),
      devices,
      config.eval.batch_size,
      section[f'{side}_max_length'],
      tokenizer.pad_id,
    )
    for side in SIDES
  }


def bare_encoder(
  config: ConfigDict, path: str, tokenizer: Tokenizer, spec: vector_spec.VectorSpec
) -> inference.Encoder:
  """The backbone at ``path`` as in `dprjax.encode` without a prompt."""
  return inference.Encoder(
    dict.fromkeys(SIDES, hub.load_backbone(path, on_disk=True)),
    tokenizer,
    {inference.UNNAMED: inference.BankEntry(None, spec)},
    batch_size=config.eval.batch_size,
    dtype=config.backbone.dtype,
  )


class Frozen:
  """The baseline of a run: its encoder as `dprjax.encode` runs it without a prompt.

  Lengths, pooling, normalisation and prefixes are those of the backbone folder, not of the
  experiment. So all alternatives and folds of a run are compared with the same baseline: the scores
  that a user has without training. They are the attribute ``spec``.
  """

  def __init__(self, config: ConfigDict, workdir: epath.Path, tokenizer: Tokenizer):
    self._config, self._tokenizer = config, tokenizer
    self._path = workdirs.backbone_path(config, workdir)
    self._folder = workdirs.top(workdir) / FROZEN
    self.spec = hub.load_spec(self._path)

  def differs(self, side: str) -> bool:
    """Whether the experiment makes the vectors of a side with other settings than the baseline."""
    return self.spec.of_side(side) != vector_spec.of_config(self._config).of_side(side)

  def describe(self, cut: dict[str, tuple[int, int]]) -> list[str]:
    """Log lines about settings in which training differs; ``cut`` is (cut, all) texts by side."""
    theirs, ours = self.spec, vector_spec.of_config(self._config)
    lines = []
    for side, plural in zip(SIDES, ('queries', 'passages'), strict=True):
      count, of = cut[side]
      length, longer = ours.max_length(side), theirs.max_length(side)
      if count and length < longer:
        lines.append(
          f'{count:,} of {counted(of, plural)} cut at {length} tokens '
          f'(config.data.{side}_max_length); the baseline reads {longer}'
        )
    for name in ('pooling', 'normalize', *(f'{side}_prefix' for side in SIDES)):
      our, their = getattr(ours, name), getattr(theirs, name)
      if our != their:
        option = f'data.{name}' if name.endswith('_prefix') else name
        lines.append(
          f'config.{option} is {our!r}; the baseline has {their!r}, as dprjax encode without a '
          'prompt'
        )
    return lines

  def vectors(
    self, side: str, texts: Sequence[str], fixed: Float[np.ndarray, 'n H'] | None = None
  ) -> Float[np.ndarray, 'n H']:
    """Vectors of the texts, ``fixed`` if given. Up to 100,000 are kept in the workdir."""
    if len(texts) > _MOST_KEPT:
      return self._encoder.encode(texts, side) if fixed is None else fixed
    path = self._folder / f'{side}.npz'
    # Everything that decides a vector, except the text.
    settings = manifest.describe(self._encoder, side, 'float32', '')
    meta = json.dumps(dataclasses.asdict(settings), sort_keys=True)
    known: dict[bytes, np.ndarray] = {}
    if path.exists():
      stored = arrays.read_arrays(path, 'frozen vectors', remedy='remove it to make it again')
      if str(stored.get('meta')) == meta:
        known = dict(zip(map(bytes, stored['texts']), stored['vectors'], strict=True))
    keys = [hashlib.sha256(text.encode()).digest()[:16] for text in texts]
    places = {key: place for place, key in enumerate(keys) if key not in known}
    if places:
      rows = [*places.values()]
      new = self._encoder.encode([texts[i] for i in rows], side) if fixed is None else fixed[rows]
      known |= dict(zip(places, new, strict=True))
      self._folder.mkdir(exist_ok=True)
      content = {
        'meta': np.array(meta),
        'texts': np.array([list(key) for key in known], np.uint8),
        'vectors': np.stack([*known.values()]),
      }
      arrays.write_arrays(path, content)
    return np.stack([known[key] for key in keys])

  @functools.cached_property
  def _encoder(self) -> inference.Encoder:
    return bare_encoder(self._config, self._path, self._tokenizer, self.spec)


class DevRanking:
  """The dev queries and the passages searched for them.

  ``rows`` are tokens by side, ``total`` counts the passages in the corpus, and ``cut`` is
  `texts_cut` of the split.
  """

  def __init__(
    self,
    data: Any,
    tokenizer: Tokenizer,
    wanted: Sequence[str],
    number: int | None = None,
    known: Any = None,
  ):
    """Opens the dev split or, with folds, all training queries.

    Args:
      data: a `retrieval_data.Retrieval`.
      wanted: measures; the first gives the values of single queries.
      number: of the task, if ``Model.embed`` takes it.
      known: with a prompt for queries only, the `query_only.DiskVectors` of training passages.
    """
    self.data, self.tokenizer, self._wanted, config = data, tokenizer, wanted, data.config
    self._number, self._known = number, known
    self._source = data.dev or data.train
    name = 'train' if data.dev is None else 'dev'
    self._tokens = tokens = data.open_cache(name, self._source, tokenizer)
    queries, self.total = np.arange(tokens.num_queries), tokens.num_passages
    self.cut = texts_cut(tokens)
    query_rows = tokens.query_rows(queries)
    passages = np.arange(tokens.num_passages)
    if 0 < config.eval.corpus_limit < len(passages):
      # The passages of dev queries (which may exceed the limit) and a random sample.
      relevant = np.unique(np.concatenate([row.relevant for row in query_rows]))
      drawn = np.random.default_rng(config.seed).choice(
        np.setdiff1d(passages, relevant),
        max(config.eval.corpus_limit - len(relevant), 0),
        replace=False,
      )
      passages = np.sort(np.concatenate([relevant, drawn]))
    self._passages = passages
    self.query_ids, self.passage_ids = tokens.query_ids(queries), tokens.passage_ids(passages)
    names = dict(zip(passages.tolist(), self.passage_ids, strict=True))
    self._answers = {
      id_: {names[number] for number in row.relevant.tolist()}
      for id_, row in zip(self.query_ids, query_rows, strict=True)
    }
    self._qrels = data.make_qrels(self.query_ids, query_rows, names)
    self.rows = {
      'query': [row.tokens for row in query_rows],
      'passage': tokens.passage_tokens(passages),
    }

  def texts(self) -> dict[str, list[str]]:
    dataset = sources.load_dataset(self._source)
    wanted = set(self.passage_ids)
    queries = {query.id: query.text for query in dataset.queries}
    passages = {text.id: text.text for text in dataset.passages if text.id in wanted}
    return {
      'query': [queries[id_] for id_ in self.query_ids],
      'passage': [passages[id_] for id_ in self.passage_ids],
    }

  @functools.cached_property
  def columns(self) -> dict[str, tuple[np.ndarray, ...]]:
    if self._number is not None:
      sizes = {'query': len(self.query_ids), 'passage': len(self.passage_ids)}
      return {side: (np.full(size, self._number, np.int32),) for side, size in sizes.items()}
    numbers = self.data.assign(self._source, self._tokens, self.tokenizer)
    if numbers is None:
      return dict.fromkeys(SIDES, ())
    return {'query': (numbers['query'],), 'passage': (numbers['passage'][self._passages],)}

  @functools.cached_property
  def _new(self) -> dict[str, bool]:
    """By dev query, whether none of its relevant passages is relevant to a training query."""
    if self.data.dev is None:
      return {}
    judged = sources.load_dataset(self.data.train).qrels.values()
    known = {id_ for grades in judged for id_, grade in grades.items() if grade > 0}
    return {id_: known.isdisjoint(answers) for id_, answers in self._answers.items()}

  @functools.cached_property
  def _with_words(self) -> Callable[..., Float[np.ndarray, 'queries weights']] | None:
    if not self.data.config.eval.choose:
      return None
    from dprjax.training import choice  # imports BM25

    return choice.fuser(self.texts(), self.query_ids, self.passage_ids, self._qrels)

  @functools.cached_property
  def fixed(self) -> dict[str, np.ndarray]:
    corpus = sources.locate(self._source)['corpus']
    if self._known is None or sources.locate(self.data.train)['corpus'] != corpus:
      return {}
    return {'passage': self._known.of_ids(self.passage_ids)}

  def embed(
    self, embedders: Mapping[str, Embedder], params: Mapping[str, jax.Array]
  ) -> dict[str, np.ndarray]:
    return dict(self.fixed) | {
      side: embedders[side](params, self.rows[side], columns=self.columns[side])
      for side in SIDES
      if side not in self.fixed
    }

  def evaluation(self, embedders: Mapping[str, Embedder]) -> Evaluate:
    """Exact search for the dev queries in the corpus, or in a sample of it."""
    if len(self.passage_ids) < self.total and jax.process_index() == 0:
      logger.info(
        'dev scores rank %s of %s passages (config.eval.corpus_limit): those of the dev queries '
        'and a sample; scores in the whole corpus are lower',
        f'{len(self.passage_ids):,}',
        f'{self.total:,}',
      )

    def evaluate(params: Mapping[str, jax.Array]) -> Scores:
      vectors = self.embed(embedders, params)
      if self._known is not None:
        self.fixed['passage'] = vectors['passage']
      return self.measure(vectors)

    return evaluate

  def frozen(self) -> Scores:
    """Scores of `Frozen`, which process 0 measures; only it has the values of single queries."""
    scores = Scores({}, {})
    if jax.process_index() == 0:
      encoder = Frozen(self.data.config, self.data.workdir, self.tokenizer)
      texts = self.texts()
      fixed = {} if encoder.differs('passage') else self.fixed
      scores = self.measure(
        {side: encoder.vectors(side, texts[side], fixed.get(side)) for side in SIDES}
      )
    return scores._replace(means=distributed.agree(dict(scores.means)))

  def measure(self, vectors: Mapping[str, np.ndarray]) -> Scores:
    k, ids_at = min(100, len(self.passage_ids)), best.ids_of(self.passage_ids)
    top = exact.search(vectors['query'], vectors['passage'], k, ids_at=ids_at)
    run = trec.run_from_rows(self.query_ids, self.passage_ids, top.rows, top.scores)
    report = measures.measure(run, self._qrels, self._wanted)
    measured = report['per_query'][self._wanted[0]]
    new = {'': np.array([self._new[id_] for id_ in measured])} if self._new else {}
    fuse = self._with_words
    fused = {} if fuse is None else {'': fuse(vectors, [*measured])}
    return Scores(report['mean'], of_queries(report, self._wanted[0]), new, fused)
