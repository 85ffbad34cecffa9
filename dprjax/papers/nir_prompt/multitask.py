"""Several data sets in one run, each an entry of ``config.tasks`` (NIR-Prompt).

A retriever takes queries and passages of each task. A pair model takes labelled pairs, or the
queries of a retrieval task with their positives and negatives. Each task has its own files, splits,
token cache and dev measure; the mean over tasks picks the checkpoint. Lengths, negatives and the
seed come from the config.
"""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict, FrozenConfigDict

from dprjax.base import mesh
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.models.encoder_config import EncoderConfig
from dprjax.models.template import Piece, Template
from dprjax.papers.nir_prompt import mixture, pairs
from dprjax.papers.nir_prompt.pairs import LabelledPairs
from dprjax.retrieval import measures
from dprjax.text import batches, sources
from dprjax.text.tokenizing import Tokenizer
from dprjax.text.vector_spec import SIDES
from dprjax.training import cross_encoder, dev_ranking, dual_encoder, retrieval_data
from dprjax.training.method import BatchShapes, DataSource, Evaluate, Model, Scores, TrainingData
from dprjax.training.retrieval_data import Retrieval

logger = logging.getLogger('dprjax')

MEAN = 'mean'  # of the dev measures of tasks
CLASSIFICATION = ('accuracy', 'F1')

Templates = Callable[[Tokenizer], Mapping[str, Sequence[Template]]]
"""Templates around texts by kind of input: 'query' and 'passage', or 'pair'."""


class Task(NamedTuple):
  name: str
  number: int  # in sorted order
  measure: str
  data: Retrieval | LabelledPairs


def find_tasks(
  section: ConfigDict,
  config: ConfigDict,
  workdir: epath.Path,
  devices: Mesh,
  form: str = 'retrieval',
  templates: Templates | None = None,
  numbered: bool = True,
) -> DataSource:
  """The data of all tasks; see ``Method.data``.

  A batch has the key `task` ``[B]`` and the keys of a dual encoder or, for ``form='pairs'``, of
  `pairs.PairFeed`. Row numbers are offset by task.

  Args:
    numbered: whether ``Model.embed`` takes the task of each row as its last argument.
  """
  if not config.tasks:
    raise InputError(
      "config.tasks is empty; add c.tasks.NAME = options.task(dir='DIR') to the config file"
    )
  tasks = [
    Task(
      name,
      number,
      config.tasks[name].measure,
      _find_task(name, section, config, workdir, devices, form),
    )
    for number, name in enumerate(sorted(config.tasks))
  ]
  bare = [task.name for task in tasks if task.data.dev is None]
  if len(bare) < len(tasks) and (bare or config.eval.measure != MEAN):
    raise InputError(
      f'config.eval.measure: it is {MEAN!r} of config.tasks.NAME.measure for several tasks, which '
      f'all need config.tasks.NAME.data.dev_split or hold_out; not {config.eval.measure!r}, and '
      f'without dev queries: {", ".join(bare) or "none"}'
    )
  opened = _Tasks(tasks, section, config, devices, form, templates or _plain_templates, numbered)
  return DataSource(
    lambda: itertools.chain.from_iterable(task.data.read_passages() for task in tasks),
    opened.open,
    {f'{task.name} {role}': path for task in tasks for role, path in task.data.files().items()},
  )


def batch_shapes(
  config: ConfigDict,
  model: EncoderConfig,
  tokenizer: Tokenizer,
  form: str = 'retrieval',
  around: Mapping[str, int] | None = None,
  numbered: bool = True,
) -> BatchShapes:
  """See ``Method.shapes``. ``around`` has the tokens of the longest template by kind of input; by
  default only special tokens.
  """
  if around is None:
    plain = _plain_templates(tokenizer)
    around = {kind: template.num_tokens for kind, (template,) in plain.items()}
  shapes = retrieval_data.batch_shapes(config, model, tokenizer)
  specials = tokenizer.num_specials
  longest = _check_lengths(config.data, config, form, around, tokenizer, model)
  size = config.batch_size
  task = {'task': jax.ShapeDtypeStruct((size,), np.int32)}
  number = ((np.int32,),) if numbered else ()
  if form == 'retrieval':
    inner = zip(shapes.calls, SIDES, strict=True)
    return shapes._replace(
      arrays={**shapes.arrays, **task},
      calls=tuple((rows, length - specials + around[side]) for (rows, length), side in inner),
      columns=number,
    )
  padded = [shapes.arrays[f'{side}_tokens'].shape[-1] for side in SIDES]
  arrays = {name: jax.ShapeDtypeStruct((size,), np.int32) for name in pairs.COLUMNS}
  for view, length in zip(pairs.VIEWS, padded, strict=True):
    arrays[f'{view}_tokens'] = jax.ShapeDtypeStruct((size, length), np.int32)
    arrays[f'{view}_mask'] = jax.ShapeDtypeStruct((size, length), np.bool_)
  return shapes._replace(
    arrays={**arrays, **task},
    calls=((size, sum(padded) - 2 * specials + around['pair']),),
    texts={'pairs': size},
    longest=longest,
    columns=((np.int32, 2), *number),
  )


def _find_task(
  name: str, shared: ConfigDict, config: ConfigDict, workdir: epath.Path, devices: Mesh, form: str
) -> Retrieval | LabelledPairs:
  entry, key = config.tasks[name], f'config.tasks.{name}'
  section = FrozenConfigDict({**shared.to_dict(), **entry.data.to_dict()})
  if entry.form == 'retrieval':
    measures.check_name(entry.measure, f'{key}.measure')  # before training
    splits = _limit_dev(retrieval_data.find_splits(section, config, workdir, devices, name))
    if form == 'retrieval':
      return splits
    if not config.negatives:
      raise InputError(f'config.negatives: {name} needs pairs that do not match; use 1 or more')
    return cross_encoder.with_negatives(splits)
  if form == 'retrieval' or entry.measure not in CLASSIFICATION:
    raise InputError(
      f'{key}.form: labelled pairs are for re-rankers, not for {config.method!r}, and '
      f'{key}.measure is then {" or ".join(CLASSIFICATION)}, not {entry.measure!r:.60}'
    )
  return pairs.find_pairs(section, workdir, config.seed, name)


def _limit_dev(splits: Retrieval) -> Retrieval:
  """A few-shot task has as few dev queries as training queries."""
  train, dev = splits.train, splits.dev
  if dev is None or train.max_queries is None:
    return splits
  size = len(sources.load_dataset(dataclasses.replace(train, negatives=None)).queries)
  return dataclasses.replace(splits, dev=dataclasses.replace(dev, max_queries=size))


def _plain_templates(tokenizer: Tokenizer) -> dict[str, list[Template]]:
  alone = Template((Piece(tokenizer.opening), Piece(None), Piece(tokenizer.closing)))
  return {'query': [alone], 'passage': [alone], 'pair': [Template.pair(*tokenizer.around_pair)]}


@dataclasses.dataclass(frozen=True)
class _Tasks:
  """The arguments of `find_tasks`."""

  tasks: list[Task]
  section: ConfigDict
  config: ConfigDict
  devices: Mesh
  form: str
  templates: Templates
  numbered: bool

  def open(self, tokenizer: Tokenizer, model: EncoderConfig) -> TrainingData:
    config, section, form, tasks = self.config, self.section, self.form, self.tasks
    # The longest template for each kind of input; all texts use it.
    around = {
      kind: max(of_kind, key=lambda template: template.num_tokens)
      for kind, of_kind in self.templates(tokenizer).items()
    }
    extra = {kind: template.num_tokens for kind, template in around.items()}
    longest = _check_lengths(section, config, form, extra, tokenizer, model)
    feeds = [_open_feed(task, config, form, tokenizer) for task in tasks]
    # `relevant` has one width in all batches: one program for all tasks.
    listed = [feed for feed in feeds if isinstance(feed, batches.Feed)]
    for feed in listed:
      feed.max_relevant = max(one.max_relevant for one in listed)
    rank, count = mesh.batch_rank(self.devices)
    dataset = mixture.make_batches(
      feeds,
      arrangement=config.arrangement,
      batch_size=config.batch_size,
      per_task=config.per_task,
      buckets=(section.query_buckets, section.passage_buckets),
      seed=config.seed,
      process_index=rank,
      process_count=count,
    )

    def ids(batch: Mapping[str, np.ndarray]) -> str:
      return '; '.join(
        f'{tasks[number].name}: {retrieval_data.shorten(feeds[number].names(rows))}'
        for number, rows in mixture.split_rows(feeds, batch).items()
      )

    def evaluation(built: Model) -> Evaluate:
      # Shared, so that each length compiles once.
      shared: Any
      if form == 'retrieval':
        shared = dev_ranking.make_embedders(section, config, self.devices, tokenizer, built.embed)
      else:
        shared = cross_encoder.Scorer(
          built, config, self.devices, tokenizer, around['pair'], longest
        )
      each = [self._evaluation(task, shared, tokenizer) for task in tasks]
      return lambda params: self._mean([evaluate(params) for evaluate in each])

    sizes = ', '.join(f'{task.name} {feed.size:,}' for task, feed in zip(tasks, feeds, strict=True))
    unit = 'queries' if form == 'retrieval' else 'pairs'
    dev = tasks[0].data.dev is not None
    as_encoder = dev and form == 'retrieval' and config.eval.baseline == 'encoder'
    return TrainingData(
      batches=dataset,
      unit=unit,
      description=f'{counted(len(tasks), "tasks")}, {config.arrangement}; training {unit}: {sizes}',
      ids=ids,
      evaluation=evaluation if dev else None,
      frozen=functools.partial(self._frozen, tokenizer) if as_encoder else None,
      floor=self._floor,
    )

  def _evaluation(self, task: Task, shared: Any, tokenizer: Tokenizer) -> Evaluate:
    data, number = task.data, task.number if self.numbered else None
    if isinstance(data, LabelledPairs):
      return data.evaluation(shared, tokenizer, task.measure, number)
    if self.form == 'pairs':
      return cross_encoder.ranking(data, shared, tokenizer, [task.measure], number)
    ranking = dev_ranking.DevRanking(data, tokenizer, [task.measure], number=number)
    return ranking.evaluation(shared)

  def _frozen(self, tokenizer: Tokenizer) -> Scores:
    results = []
    for task in self.tasks:
      assert isinstance(task.data, Retrieval)
      ranking = dev_ranking.DevRanking(task.data, tokenizer, [task.measure])
      results.append(ranking.frozen())
      encoder = dev_ranking.Frozen(self.config, task.data.workdir, tokenizer)
      for line in encoder.describe(ranking.cut) if jax.process_index() == 0 else ():
        logger.info('%s: %s', task.name, line)
    return self._mean(results)

  def _floor(self, scores: Scores) -> Scores:
    """``scores``, where labelled pairs are at least as good as one answer."""
    means, values = dict(scores.means), dict(scores.values)
    for task in self.tasks:
      if not isinstance(task.data, LabelledPairs) or task.data.dev is None:
        continue
      labels = pairs.labels_of(pairs.read_pairs(task.data.dev))
      one = pairs.one_answer(labels, task.measure)
      if one.means[task.measure] > means[f'{task.name}/{task.measure}']:
        means |= {f'{task.name}/{name}': value for name, value in one.means.items()}
        values[task.name] = one.values['']
        if jax.process_index() == 0:
          answer = 'yes' if one.means['yes'] else 'no'
          logger.info('%s: the baseline is %s to all pairs', task.name, answer)
    return scores._replace(means=means | {MEAN: self._mean_of(means)}, values=values)

  def _mean(self, results: list[Scores]) -> Scores:
    each = list(zip(self.tasks, results, strict=True))
    means = {
      f'{task.name}/{name}': value for task, scores in each for name, value in scores.means.items()
    }
    values = {task.name: scores.values[''] for task, scores in each if '' in scores.values}
    new = {task.name: scores.new[''] for task, scores in each if '' in scores.new}
    notes = [
      f'{task.name}: yes to {scores.means["yes"]:.0%} of the pairs'
      for task, scores in each
      if not 0.05 <= scores.means.get('yes', 0.5) <= 0.95
    ]
    return Scores(means | {MEAN: self._mean_of(means)}, values, new, note='; '.join(notes))

  def _mean_of(self, means: Mapping[str, float]) -> float:
    return float(np.mean([means[f'{task.name}/{task.measure}'] for task in self.tasks]))


def _check_lengths(
  section: ConfigDict,
  config: ConfigDict,
  form: str,
  around: Mapping[str, int],
  tokenizer: Tokenizer,
  model: EncoderConfig,
) -> int:
  specials = tokenizer.num_specials
  kinds = {side: (side,) for side in SIDES} if form == 'retrieval' else {'pair': SIDES}
  longest = 0
  for kind, texts in kinds.items():
    inner = sum(section[f'{text}_max_length'] - specials for text in texts)
    longest = max(longest, total := inner + around[kind])
    settings = ', '.join(f'config.data.{text}_max_length' for text in texts)
    dual_encoder.check_length(config, model, f'{settings} and the template', total)
  return longest


def _open_feed(
  task: Task, config: ConfigDict, form: str, tokenizer: Tokenizer
) -> batches.Feed | pairs.PairFeed | pairs.QueryPairFeed:
  data = task.data
  if isinstance(data, LabelledPairs):
    return pairs.PairFeed(pairs.tokenise(data.train, tokenizer, data.section), data.section)
  tokens = data.open_cache('train', data.train, tokenizer)
  if form == 'retrieval':
    # In these arrangements other tasks also give negatives.
    mixed = config.arrangement in ('balanced', 'random') and len(config.tasks) > 1
    retrieval_data.check_comparable(config, tokens, alone=not mixed)
  feed = batches.Feed(tokens, mix=batches.Mix(**config.mix), **data.feed_options())
  return feed if form == 'retrieval' else pairs.QueryPairFeed(feed)
