"""Queries and passages to train a dual encoder on, and the dev split's retrieval quality while it
trains.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import ml_collections
import numpy as np
from etils import epath
from jax.sharding import Mesh

from dprjax.base.errors import InputError
from dprjax.data import batches, docstrings, sources, store
from dprjax.data.text import Tokenizer
from dprjax.formats import trec
from dprjax.formats.qrels import write_qrels
from dprjax.inference.embedder import Embedder
from dprjax.methods.feed import Batch, Feed, Text
from dprjax.methods.method import System
from dprjax.models.encoder import EncoderConfig
from dprjax.models.prompts import KINDS
from dprjax.retrieval import exact, measures
from dprjax.runtime import mesh, tree


def find(config: ml_collections.FrozenConfigDict, workdir: epath.Path, devices: Mesh) -> Text:
  """The text that ``config.data`` names: a split to train on and, if any, a split to evaluate on.

  Raises:
    InputError: there is none such.
  """
  train, dev = find_splits(config, workdir)
  return Text(
    functools.partial(read_passages, train),
    functools.partial(_open, config, workdir, devices, train, dev),
  )


def find_splits(
  config: ml_collections.FrozenConfigDict, workdir: epath.Path
) -> tuple[sources.Source, sources.Source | None]:
  """Which files to train on, and which, if any, to evaluate on.

  Raises InputError for a form that there is not.
  """
  knobs = config.data
  path, form = knobs.dir, knobs.format
  known = ('auto', 'docstrings', *sources.FORMATS)
  if form not in known:
    raise InputError(f'config.data.format: expected one of {", ".join(known)}, not {form!r}')
  if form == 'docstrings':
    path, form = str(workdir / 'data'), 'beir'
    if not epath.Path(path).exists():
      docstrings.build(path, packages=knobs.dir.split(','))
  hold_out = (knobs.hold_out, config.seed) if knobs.hold_out and not knobs.dev_split else None
  train = sources.Source(
    path,
    form,
    knobs.train_split,
    negatives=knobs.train or None,
    hold_out=hold_out,
    max_queries=knobs.max_queries or None,
    strict=knobs.strict,
  )
  dev = (
    dataclasses.replace(train, negatives=None, held_out=True, max_queries=None)
    if hold_out
    else None
  )
  if knobs.dev_split:
    dev = sources.Source(path, form, knobs.dev_split, strict=knobs.strict)
  return train, dev


def read_passages(source: sources.Source) -> Iterator[str]:
  """The texts of a split's passages, for a vocabulary."""
  return (passage.text for passage in sources.load_dataset(source).passages)


def _open(
  config: ml_collections.FrozenConfigDict,
  workdir: epath.Path,
  devices: Mesh,
  train: sources.Source,
  dev: sources.Source | None,
  tokenizer: Tokenizer,
  model: EncoderConfig,
) -> Feed:
  room = model.max_tokens - (config.prompt.length if config.prompt.shift_positions else 0)
  for kind in KINDS:
    if config.data[f'{kind}_max_length'] > room:
      raise InputError(
        f'config.data.{kind}_max_length: {config.data[f"{kind}_max_length"]} exceeds the {room} '
        f'positions of {config.backbone.path}'
      )
  tokens = open_store(config, workdir, 'train', train, tokenizer)
  update = config.batch_size * config.accumulate
  share, shares = mesh.batch_rank(devices)
  dataset = batches.make_batches(
    tokens,
    batch_size=update,
    negatives=config.negatives,
    mix=batches.Mix(**config.mix),
    query_buckets=config.data.query_buckets,
    passage_buckets=config.data.passage_buckets,
    seed=config.seed,
    process_index=share,
    process_count=shares,
    max_relevant=config.data.max_relevant,
  )
  seen = update * (1 + config.negatives) - 1 if config.in_batch else config.negatives

  def ids(batch: Batch) -> str:
    queries, passages = (
      tokens.query_ids(batch['query_index']),
      tokens.passage_ids(batch['passage_index'][:, 0]),
    )
    return (
      f'queries {", ".join(queries[:8])}{"..." if len(queries) > 8 else ""}, '
      f'positives {", ".join(passages[:8])}{"..." if len(passages) > 8 else ""}'
    )

  return Feed(
    loader=batches.open_batches(dataset, config.data.threads),
    epoch=len(dataset),
    unit='pairs',
    said=f'{tokens.num_queries} training queries, {tokens.num_passages} passages; up to {seen} '
    'negatives a query',
    ids=ids,
    shape=lambda batch: (
      f'queries of {batch["query_tokens"].shape[1]} and passages of '
      f'{batch["passage_tokens"].shape[2]} tokens'
    ),
    evaluation=functools.partial(_evaluation, config, workdir, dev, tokenizer, devices)
    if dev
    else None,
  )


def open_store(
  config: ml_collections.FrozenConfigDict,
  workdir: epath.Path,
  name: str,
  source: sources.Source,
  tokenizer: Tokenizer,
) -> store.Store:
  """The token store of a split, built where it is not there yet."""
  folder = (epath.Path(config.data.store) if config.data.store else workdir / 'store') / name
  return store.build_store(
    source,
    tokenizer,
    folder,
    process_index=jax.process_index(),
    process_count=jax.process_count(),
    **{
      knob: config.data[knob]
      for knob in ('query_max_length', 'passage_max_length', 'query_prefix', 'passage_prefix')
    },
  )


def dev_judgements(workdir: epath.Path, source: sources.Source) -> dict[str, dict[str, int]]:
  """query id -> passage id -> grade of the dev split, which the first call writes to ``dev.tsv`` as
  well: for whoever evaluates a run afterwards, since which queries were held out is known here
  alone.
  """
  judged = sources.load_dataset(source).qrels
  if jax.process_index() == 0 and not (workdir / 'dev.tsv').exists():
    write_qrels(workdir / 'dev.tsv', judged)
  return judged


def graded(
  judged: Mapping[str, Mapping[str, int]], query: str, passages: Sequence[str]
) -> dict[str, int]:
  """The grades of a query's relevant passages. The store knows which are relevant, the judgements
  how much; what is known to be relevant by its text alone (judged under another id, or for another
  query of the same text) counts 1.
  """
  return {passage: max(judged[query].get(passage, 1), 1) for passage in passages}


def _evaluation(
  config: ml_collections.FrozenConfigDict,
  workdir: epath.Path,
  source: sources.Source,
  tokenizer: Tokenizer,
  devices: Mesh,
  system: System,
) -> Callable[[dict[str, jax.Array]], dict[str, float]]:
  """``{name: array} -> {measure: value}`` on the dev split: exact search in the corpus, or in a
  sample of it.
  """
  tokens = open_store(config, workdir, 'dev', source, tokenizer)
  judged = dev_judgements(workdir, source)
  queries = np.arange(tokens.num_queries)
  records = tokens.query_rows(queries)
  passages = np.arange(tokens.num_passages)
  if 0 < config.eval.corpus_limit < len(passages):
    # The dev queries' own passages (which may alone be more than the limit), and others drawn at
    # random.
    own = np.unique(np.concatenate([row.relevant for row in records]))
    others = np.setdiff1d(passages, own)
    drawn = np.random.default_rng(config.seed).choice(
      others, max(config.eval.corpus_limit - len(own), 0), replace=False
    )
    passages = np.sort(np.concatenate([own, drawn]))
  query_ids, passage_ids = tokens.query_ids(queries), tokens.passage_ids(passages)
  names = dict(zip(passages.tolist(), passage_ids, strict=True))
  qrels = {
    query: graded(judged, query, [names[passage] for passage in row.relevant.tolist()])
    for query, row in zip(query_ids, records, strict=True)
  }
  rows = {'query': [row.tokens for row in records], 'passage': tokens.passage_tokens(passages)}
  wanted = list(dict.fromkeys([config.eval.measure, 'nDCG@10', 'RR@10', 'R@100']))

  def embed(kind: str, params: dict[str, jax.Array], *batch: jax.Array) -> jax.Array:
    return system.embed(tree.unflatten(params), kind, *batch)

  embedders = {
    kind: Embedder(
      functools.partial(embed, kind),
      devices,
      config.eval.batch_size,
      config.data[f'{kind}_max_length'],
      tokenizer.pad_id,
    )
    for kind in KINDS
  }

  def evaluate(params: dict[str, jax.Array]) -> dict[str, float]:
    vectors = {kind: embedders[kind](params, rows[kind]) for kind in KINDS}
    top = exact.search(vectors['query'], vectors['passage'], min(100, len(passage_ids)))
    run = trec.run_from_rows(query_ids, passage_ids, top.rows, top.scores)
    return measures.measure(run, qrels, wanted)['mean']

  return evaluate
