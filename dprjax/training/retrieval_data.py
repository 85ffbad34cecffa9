"""Queries and passages for training."""

import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grain
import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh
from jaxtyping import Int32
from ml_collections import ConfigDict

from dprjax.base import files, mesh
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.losses import contrastive, distillation
from dprjax.models.encoder_config import EncoderConfig
from dprjax.text import batches, docstrings, seen, sources, token_cache
from dprjax.text.qrels import Qrels, write_qrels
from dprjax.text.tokenizing import Tokenizer
from dprjax.text.vector_spec import SIDES
from dprjax.training import dev_ranking, dual_encoder
from dprjax.training.method import BatchShapes, DataSource, Folds, Scores, TrainingData

logger = logging.getLogger('dprjax')

_MEASURES = ('nDCG@10', 'RR@10', 'R@100')  # on a dev split
_MOST_RELEVANT = 32  # passages of a query in a plan, which knows no data


@dataclasses.dataclass(frozen=True)
class Retrieval:
  """Queries and passages of a data set in a run.

  Methods with other data override `assign`, `relate` or `check_negatives`.

  Attributes:
    section: ``config.data``, or the section of a task.
    config, workdir, devices: as in ``Method.data``.
    train, dev: the splits; ``dev`` may be None.
    task: its name, if the run has several.
    folds: the cross-validation in place of a dev split.
  """

  section: ConfigDict
  config: ConfigDict
  workdir: epath.Path
  devices: Mesh
  train: sources.Source
  dev: sources.Source | None
  task: str = ''
  folds: Folds | None = None

  def assign(
    self, source: sources.Source, tokens: token_cache.TokenCache, tokenizer: Tokenizer
  ) -> Mapping[str, Int32[np.ndarray, 'n ...']] | None:
    """Numbers of the texts in a split by side, one or several a row; or None.

    Batches have them as `query_number` ``[B, ...]`` and `passage_number` ``[B, C, ...]``;
    ``Model.embed`` takes them after the mask.
    """
    del source, tokens, tokenizer
    return None

  def relate(self, judged: Qrels, relevant: Qrels, passage_ids: Sequence[str]) -> Qrels:
    """The relevant passages on the dev split.

    ``judged`` are its judgements, ``relevant`` the positives among the searched ``passage_ids``.
    """
    del judged, passage_ids
    return relevant

  def check_negatives(self, tokens: token_cache.TokenCache) -> None:
    """Raises InputError if the training split has no negatives to learn from."""
    check_comparable(self.config, tokens)

  def texts(self, parts: Mapping[str, Any] | None = None) -> DataSource:
    if self.dev is not None or self.folds is not None:
      dev_ranking.measure_names(self.config)
    return DataSource(self.read_passages, self.open, self.files(), parts or {}, self.folds)

  def read_passages(self) -> Iterator[str]:
    return (passage.text for passage in sources.load_dataset(self.train).passages)

  def files(self) -> dict[str, epath.Path]:
    paths = sources.locate(self.train)
    dev = sources.locate(self.dev) if self.dev is not None else {}
    # Each file is listed once.
    paths |= {f'dev {role}': path for role, path in dev.items() if path != paths.get(role)}
    if self.config.distillation.loss != 'none':
      paths['teacher scores'] = distillation.scores_file(self.section, self.config)
    if path := self.config.data.passage_embeddings:
      from dprjax.encoding import embeddings, manifest

      folder = embeddings.load_embeddings(path, verify=False).folder
      paths['passage embeddings'] = folder / manifest.MANIFEST
    return paths

  def open_cache(
    self, name: str, source: sources.Source, tokenizer: Tokenizer
  ) -> token_cache.TokenCache:
    """The token cache of a split, 'train', 'dev' or 'dev_...', built on first use.

    The export needs hashes of its queries.
    """
    folder = cache_folder(self.section, self.workdir) / self.task / name
    settings = ('query_max_length', 'passage_max_length', 'query_prefix', 'passage_prefix')
    options = {option: self.section[option] for option in settings}
    cache = token_cache.build_cache(
      source, tokenizer, folder, process_index=jax.process_index(), **options
    )
    path = self.workdir / (f'queries-{self.task}.npz' if self.task else seen.FILE)
    role = name.partition('_')[0]
    if jax.process_index() == 0 and role not in (known := seen.read(path)):
      texts = (query.text for query in sources.load_dataset(source).queries)
      seen.write(path, known | {role: seen.hashes(texts)})
    return cache

  def make_batches(self, tokens: token_cache.TokenCache, **kwargs: Any) -> grain.MapDataset:
    """``batches.make_batches`` for this process, with teacher scores if it learns them."""
    config = self.config
    rank, count = mesh.batch_rank(self.devices)
    dataset = batches.make_batches(
      tokens,
      batch_size=config.batch_size,
      process_index=rank,
      process_count=count,
      **self.feed_options(),
      **kwargs,
    )
    if config.distillation.loss == 'none':
      return dataset
    from dprjax.text import teacher

    known = teacher.Teacher(distillation.scores_file(self.section, config), tokens)
    return dataset.map(
      lambda batch: (
        batch | {distillation.KEY: known.scores(batch['query_index'], batch['passage_index'])}
      )
    )

  def feed_options(self) -> dict[str, Any]:
    config = self.config
    return {
      'negatives': config.negatives,
      'positive': config.positive,
      'seed': config.seed,
      **{option: self.section[option] for option in ('query_buckets', 'passage_buckets')},
    }

  def read_judgements(self) -> Qrels:
    """Grades of the dev split by query and passage id; with folds, of all training queries.

    Also writes ``dev.tsv``, since only the training knows the held-out queries.
    """
    if self.dev is None:
      return sources.load_dataset(self.train).qrels
    judged = sources.load_dataset(self.dev).qrels
    path = self.workdir / (f'dev-{self.task}.tsv' if self.task else 'dev.tsv')
    if jax.process_index() == 0:
      files.clear(path)  # left by a killed run
      write_qrels(path, judged)
    return judged

  def make_qrels(
    self, query_ids: Sequence[str], rows: Sequence[Any], names: Mapping[int, str]
  ) -> Qrels:
    """Grades of the relevant passages of dev queries.

    The cache ``rows`` know which passages are relevant, the judgements know the grades. Passages
    relevant only by their text (judged under another id, or for an equal query) get grade 1.
    ``names`` are passage ids by row.
    """
    judged = self.read_judgements()
    grades = {
      query: {
        passage: max(judged[query].get(passage, 1), 1)
        for passage in (names[number] for number in row.relevant.tolist())
      }
      for query, row in zip(query_ids, rows, strict=True)
    }
    return self.relate(judged, grades, list(names.values()))

  def open(self, tokenizer: Tokenizer, model: EncoderConfig) -> TrainingData:
    """The batches and evaluation of a dual encoder; see ``DataSource.open``."""
    section, config = self.section, self.config
    for side in SIDES:
      option = f'{side}_max_length'
      dual_encoder.check_length(config, model, f'config.data.{option}', section[option])
    tokens = self.open_cache('train', self.train, tokenizer)
    self.check_negatives(tokens)
    passages, distinct, constant = None, tokens.distinct_passages(), {}
    if config.prompt.sides == 'query':
      from dprjax.training import query_only  # imports the folders of embeddings

      passages = query_only.open_passages(self.train, tokens, config, self.workdir, tokenizer)
      constant = query_only.arrays(config, passages, distinct)
    dataset = self.make_batches(
      tokens,
      mix=batches.Mix(**config.mix),
      vectors=None if passages is None else passages.take,
      sample=max(config.corpus_negatives, 0),
    )
    if (numbers := self.assign(self.train, tokens, tokenizer)) is not None:
      dataset = dataset.map(
        lambda batch: (
          batch | {f'{side}_number': numbers[side][batch[f'{side}_index']] for side in SIDES}
        )
      )
    if passages is not None and config.prompt.regularization:
      anchors = query_only.open_queries(self.train, tokens, config, self.workdir, tokenizer)
      dataset = dataset.map(
        lambda batch: batch | {contrastive.FROZEN: anchors.take(batch['query_index'])}
      )

    def ids(batch: Mapping[str, np.ndarray]) -> str:
      queries = shorten(tokens.query_ids(batch['query_index']))
      positives = shorten(tokens.passage_ids(batch['passage_index'][:, 0]))
      return f'queries {queries}, positives {positives}'

    as_encoder = config.eval.baseline == 'encoder'
    others = config.batch_size * (1 + config.negatives) - 1 if config.in_batch else config.negatives
    others += config.corpus_negatives
    if config.corpus_negatives < 0:
      others = len(distinct) - 1
    # Cached: the evaluations of a model share its compiled programs.
    embedders = functools.cache(
      functools.partial(dev_ranking.make_embedders, section, config, self.devices, tokenizer)
    )

    def ranking() -> dev_ranking.DevRanking:
      names = dev_ranking.measure_names(config, *_MEASURES)
      return dev_ranking.DevRanking(self, tokenizer, names, known=passages)

    cut = dev_ranking.texts_cut(tokens)

    encoder = functools.partial(dev_ranking.Frozen, config, self.workdir, tokenizer)

    def frozen() -> Scores:
      if jax.process_index() == 0 and not section.fold:
        for line in encoder().describe(cut):
          logger.info('%s', line)
      return ranking().frozen()

    def shorter() -> bool:
      spec = encoder().spec
      return as_encoder and any(
        cut[side][0] and section[f'{side}_max_length'] < spec.max_length(side) for side in SIDES
      )

    return TrainingData(
      batches=dataset,
      unit='pairs',
      description=f'{counted(tokens.num_queries, "training queries")}, '
      f'{counted(tokens.num_passages, "passages")}; {chance(others, "query")}',
      ids=ids,
      evaluation=(lambda built: ranking().evaluation(embedders(built.embed))) if self.dev else None,
      frozen=frozen if as_encoder and (self.dev or self.folds) else None,
      shorter=shorter,
      arrays=constant,
    )


def chance(negatives: int, unit: str) -> str:
  """The most negatives, and the loss of a model that cannot tell them apart."""
  return (
    f'up to {counted(negatives, "negatives")} a {unit}, where chance is a loss of '
    f'{np.log1p(negatives):.2f}'
  )


def cache_folder(section: ConfigDict, workdir: epath.Path) -> epath.Path:
  return epath.Path(section.token_cache) if section.token_cache else workdir / 'token_cache'


def find_splits(
  section: ConfigDict,
  config: ConfigDict,
  workdir: epath.Path,
  devices: Mesh,
  task: str = '',
  kind: type[Retrieval] = Retrieval,
  categories: bool = False,
) -> Any:
  """The splits of a data set, as an instance of ``kind``.

  Arguments as in ``Method.data``; ``task`` is a name, if the run has several; ``categories``, read
  those of passages.
  """
  seed = config.seed
  path, format = section.dir, section.format
  known = ('auto', 'docstrings', *sources.FORMATS)
  where = f'config.tasks.{task}.data' if task else 'config.data'
  if format not in known:
    raise InputError(f'{where}.format: expected one of {", ".join(known)}, not {format!r}')
  if format == 'docstrings':
    path, format = str(workdir / 'data' / task), 'beir'
    if not epath.Path(path).exists():
      docstrings.build(path, section.dir.split(','), categories=categories)
  elif files.is_hub_name(path):
    from dprjax.text import hub_data

    splits = [split for split in (section.train_split, section.dev_split) if split]
    path = str(hub_data.folder_of(path, workdir / 'data' / task, splits))
  hold_out = (section.hold_out, seed) if section.hold_out and not section.dev_split else None
  train = sources.Source(
    path,
    format,
    section.train_split,
    negatives=section.mined_negatives or None,
    max_queries=section.max_queries or None,
    categories=categories,
    columns=section.columns,
  )
  fold = folds = None
  if section.folds and not section.dev_split and not task:
    if section.fold:
      hold_out, fold = None, (section.fold - 1, section.folds, seed)
    else:
      queries = len(sources.load_dataset(dataclasses.replace(train, negatives=None)).queries)
      if section.folds <= queries < section.folds_below:
        hold_out, folds = None, Folds(section.folds, queries - -(-queries // section.folds))
  train = dataclasses.replace(train, hold_out=hold_out, fold=fold)
  dev = None
  if section.dev_split:
    dev = dataclasses.replace(train, split=section.dev_split, negatives=None, max_queries=None)
  elif hold_out:
    dev = dataclasses.replace(train, negatives=None, held_out=True, max_queries=None)
  elif fold:  # a part of the selected queries
    dev = dataclasses.replace(train, negatives=None, held_out=True)
  return kind(section, config, workdir, devices, train, dev, task, folds)


def check_comparable(
  config: ConfigDict, tokens: token_cache.TokenCache, alone: bool = True
) -> None:
  """Raises InputError if no query can have a negative in any update.

  ``alone`` tells whether batches have only queries of this data set.
  """
  distinct = len(tokens.distinct_passages())
  if config.corpus_negatives < 0 and distinct > tokens.relevant_counts.min():
    return
  if config.negatives or config.corpus_negatives > 0:  # checked when batches are made
    return
  if config.corpus_negatives < 0 or (alone and not tokens.comparable):
    raise InputError(
      f'{tokens.path}: no query has a negative '
      f'({counted(tokens.num_queries, "training queries")}, '
      f'{counted(distinct, "passages of different text")}); judge other queries and passages too, '
      'or set config.negatives=1 or more'
    )


def batch_shapes(config: ConfigDict, model: EncoderConfig, _: Tokenizer | None) -> BatchShapes:
  if config.corpus_negatives < 0:
    raise InputError(
      'config.corpus_negatives: -1 puts the corpus on every device; a plan needs its number of '
      'passages'
    )
  section = config.data
  size, candidates = config.batch_size, 1 + config.negatives
  lengths = {
    side: batches.longest_bucket(
      section[f'{side}_max_length'], section[f'{side}_buckets'], f'config.data.{side}_buckets'
    )
    for side in SIDES
  }

  def rows(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size, *shape), dtype)

  arrays = {
    'query_tokens': rows(np.int32, lengths['query']),
    'query_mask': rows(np.bool_, lengths['query']),
    'query_index': rows(np.int32),
    'passage_index': rows(np.int32, candidates),
    'relevant': rows(np.int32, _MOST_RELEVANT),
  }
  calls, texts = [(size, lengths['query'])], {'queries': size}
  if config.prompt.sides == 'query':
    arrays['passage_vectors'] = rows(np.float32, candidates, model.vector_size)
    if config.prompt.regularization:
      arrays[contrastive.FROZEN] = rows(np.float32, model.vector_size)
  else:
    arrays['passage_tokens'] = rows(np.int32, candidates, lengths['passage'])
    arrays['passage_mask'] = rows(np.bool_, candidates, lengths['passage'])
    calls.append((size * candidates, lengths['passage']))
    texts['passages'] = size * candidates
  if config.negatives:
    arrays['negative_source'] = rows(np.int8, config.negatives)
  if config.distillation.loss != 'none':
    arrays[distillation.KEY] = rows(np.float32, candidates)
  if drawn := config.corpus_negatives:
    arrays['corpus_vectors'] = jax.ShapeDtypeStruct((drawn, model.vector_size), np.float32)
    arrays['corpus_index'] = jax.ShapeDtypeStruct((drawn,), np.int32)
  programs = 1
  for side in SIDES if len(calls) > 1 else SIDES[:1]:
    programs *= sum(length <= lengths[side] for length in section[f'{side}_buckets'])
  return BatchShapes(arrays, tuple(calls), texts, programs, section.passage_max_length)


def shorten(ids: Sequence[str]) -> str:
  return ', '.join(ids[:8]) + ('...' if len(ids) > 8 else '')
