"""Distinction of Wikipedia sections: sentences of one section closer than those of another.

The triplet loss, max(|a - p| - |a - n| + margin, 0), takes an anchor a, another sentence p of its
section, and a sentence n of another section of the same article (Ein Dor et al. 2018; Reimers and
Gurevych 2019, sections 3 and 4.4; Condenser section 4.2). Triplets are drawn from a MediaWiki dump.
Sentences are encoded as queries. The recipe is `configs/sections.py` beside this file.
"""

import functools
import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from dprjax.base import files
from dprjax.base.counts import ReadReport, counted
from dprjax.base.errors import InputError
from dprjax.base.progress import Progress
from dprjax.losses.types import Batch, Loss, Params
from dprjax.models.encoder_config import EncoderConfig
from dprjax.text import fingerprint
from dprjax.text.tokenizing import Tokenizer
from dprjax.training import config as configs
from dprjax.training import dual_encoder
from dprjax.training import options as tables
from dprjax.training.method import (
  BatchShapes,
  DataSource,
  Evaluate,
  Method,
  Model,
  Scores,
  TrainingData,
)
from lab import measures, sentences
from lab.measures import Triplet
from lab.mediawiki import Article, read_articles
from lab.sentences import Examples

VIEWS = ('anchor', 'positive', 'negative')
FORMAT_VERSION = 1
OPTIONS = {
  # how much farther than the positive the negative should be, in the unit of the vectors
  'margin': tables.number(1.0, above=0, most=1e6),
  # triplets of an article, at most; 0: with each of its sentences as an anchor
  'per_article': tables.whole(4, least=0, most=10**6),
  # triplets of articles held out, to measure on
  'dev_triplets': tables.whole(200_000, least=1, most=10**9),
}


def build(
  config: ConfigDict, model: EncoderConfig, devices: Mesh, _: Tokenizer | None = None
) -> Model:
  """The triplet loss, the mean over the update.

  Raises:
    InputError: a option has a value it cannot have.
  """
  configs.check_own(config, OPTIONS)
  encoders = dual_encoder.build(config, model, devices)
  encode = sentences.encode_views(encoders, VIEWS, config, model, devices)
  margin = config.sections.margin

  def loss(params: Params, batch: Batch, key: Array | None) -> Loss:
    anchor, positive, negative = encode(params, batch, key)
    near, far = distance(anchor, positive), distance(anchor, negative)
    value = jnp.mean(jax.nn.relu(near - far + margin))
    return value, {'loss': value, 'accuracy': jnp.mean((near < far).astype(jnp.float32))}

  shown = {'accuracy': 'accuracy'}
  return Model(encoders.init, loss, encoders.embed, shown, dual_encoder.without_adapter)


def distance(x: Float[Array, 'B H'], y: Float[Array, 'B H']) -> Float[Array, ' B']:
  """Euclidean distances of rows; 0, with gradient zero rather than NaN, where they are equal."""
  square = jnp.sum(jnp.square(x - y), axis=1)
  equal = square == 0
  return jnp.where(equal, 0, jnp.sqrt(jnp.where(equal, 1, square)))


def find_data(
  section: ConfigDict,
  config: ConfigDict,
  workdir: epath.Path,
  devices: Mesh,
) -> DataSource:
  """The dumps that ``config.data.dir`` names, separated by commas.

  Raises:
    InputError: a dump is missing, the format or the measure is another, or a option has a value it
      cannot have.
  """
  configs.check_own(config, OPTIONS)
  if section.format not in ('auto', 'mediawiki'):
    raise InputError(
      f"config.data.format: sections are those of a dump, 'mediawiki', not {section.format!r}"
    )
  if section.hold_out and config.eval.measure != 'accuracy':
    raise InputError(
      f"config.eval.measure: triplets are measured by 'accuracy', not {config.eval.measure!r}"
    )
  paths = [files.regular_file(path.strip(), 'dump') for path in section.dir.split(',')]

  def read() -> Iterator[str]:
    return (part.text for article in _articles(paths) for part in article.sections)

  return DataSource(
    read, functools.partial(_open, section, config, workdir, devices, paths), _roles(paths)
  )


def _roles(paths: Iterable[epath.Path]) -> dict[str, epath.Path]:
  return {f'dump {number} ({path.name})': path for number, path in enumerate(paths, start=1)}


def _articles(paths: Iterable[epath.Path]) -> Iterator[Article]:
  for path in paths:
    yield from read_articles(path)


def draw_triplets(
  articles: Iterable[Article],
  seed: int,
  *,
  per_article: int = 0,
  hold_out: float = 0.0,
  most: int = 0,
  most_held_out: int = 0,
) -> tuple[list[Triplet], list[Triplet]]:
  """Triplets to train on, and those of articles that are held out.

  The seed and the title of an article decide its triplets and whether it is held out. If there are
  too many, a sample is kept, with the same chance for each (Vitter 1985, algorithm R): memory does
  not grow with the dump.

  Args:
    per_article: triplets of an article, at most; 0: with each of its sentences as an anchor.
    hold_out: fraction of the articles.
    most, most_held_out: triplets that are kept, at most; 0: all.
  """
  kept: tuple[list[Triplet], list[Triplet]] = ([], [])
  limits, seen = (most, most_held_out), [0, 0]
  draw = random.Random(seed)
  for article in articles:
    digest = hashlib.sha256(f'{seed}:{article.title}'.encode()).digest()
    held_out = int.from_bytes(digest[:7]) / 2**56 < hold_out
    limit = limits[held_out]
    for triplet in measures.section_triplets(
      [article], int.from_bytes(digest[7:15]), per_article or 1 << 60
    ):
      seen[held_out] += 1
      if not limit or len(kept[held_out]) < limit:
        kept[held_out].append(triplet)
      elif (place := draw.randrange(seen[held_out])) < limit:
        kept[held_out][place] = triplet
  return kept


def _open(
  section: ConfigDict,
  config: ConfigDict,
  workdir: epath.Path,
  devices: Mesh,
  paths: list[epath.Path],
  tokenizer: Tokenizer,
  model: EncoderConfig,
) -> TrainingData:
  length, buckets = sentences.check_lengths(section, config, model)
  train, dev = _open_cache(section, config, workdir, paths, tokenizer)
  batches = sentences.make_batches(
    train,
    VIEWS,
    {'triplet_index': np.arange(len(train), dtype=np.int32)},
    config,
    devices,
    unit='triplets',
    buckets=buckets,
    pad_id=tokenizer.pad_id,
  )

  def ids(batch: Mapping[str, np.ndarray]) -> str:
    return f'triplets {", ".join(str(row) for row in batch["triplet_index"][:8])}'

  return TrainingData(
    batches=batches,
    unit='triplets',
    description=f'{counted(len(train), "triplets")} of sentences to train on, {len(dev):,} of '
    'articles held out',
    ids=ids,
    evaluation=functools.partial(_evaluation, config, devices, dev, tokenizer, length)
    if len(dev)
    else None,
  )


def _open_cache(
  section: ConfigDict,
  config: ConfigDict,
  workdir: epath.Path,
  paths: list[epath.Path],
  tokenizer: Tokenizer,
) -> tuple[Examples, Examples]:
  """The triplets to train on and those held out; drawn once from the same dumps."""
  own = config.sections
  prefix = section.query_prefix
  settings = {
    'format_version': FORMAT_VERSION,
    'tokenizer_sha256': tokenizer.sha256,
    'query_max_length': section.query_max_length,
    'query_prefix': prefix,
    'seed': config.seed,
    'per_article': own.per_article,
    'hold_out': section.hold_out,
    'max_queries': section.max_queries,
    'dev_triplets': own.dev_triplets,
  }

  def draw(folder: epath.Path) -> fingerprint.Built:
    report, progress = ReadReport(), Progress('articles', task='reading the dump')

    def read() -> Iterator[Article]:
      for article in _articles(paths):
        report.count('articles')
        progress.advance()
        yield article

    triplets = draw_triplets(
      read(),
      config.seed,
      per_article=own.per_article,
      hold_out=section.hold_out,
      most=section.max_queries,
      most_held_out=own.dev_triplets,
    )
    names = ', '.join(str(path) for path in paths)
    if not triplets[0] or (section.hold_out and not triplets[1]):
      raise InputError(
        f'{names}: {counted(report.counts["articles"], "articles")} with {len(triplets[0])} '
        f'triplets to train on and {len(triplets[1])} to measure on; a triplet needs an article of '
        'two sections with sentences in them: take a larger dump, or another config.data.hold_out'
      )
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for name, some in zip(('train', 'dev'), triplets, strict=True):
      report.counts[f'{name} triplets'] = len(some)
      texts = [prefix + sentence for triplet in some for sentence in triplet]
      examples = Examples.encode(tokenizer, texts, len(VIEWS), section.query_max_length)
      arrays[f'{name}_tokens'], arrays[f'{name}_lengths'] = examples.tokens, examples.lengths
    return fingerprint.Built(arrays, report, {})

  folder = (
    epath.Path(section.token_cache) if section.token_cache else workdir / 'token_cache'
  ) / 'sections'
  fingerprint.build_once(
    folder,
    'sections',
    settings,
    _roles(paths),
    draw,
    jax.process_index(),
  )
  _, arrays = fingerprint.open_built(folder, 'sections')
  train, dev = (
    Examples(arrays[f'{name}_tokens'], arrays[f'{name}_lengths']) for name in ('train', 'dev')
  )
  return train, dev


def _evaluation(
  config: ConfigDict,
  devices: Mesh,
  triplets: Examples,
  tokenizer: Tokenizer,
  length: int,
  model: Model,
) -> Evaluate:
  """``accuracy``: the fraction of held-out triplets whose positive is nearer than the negative."""
  rows = [triplets.view(number) for number in range(len(VIEWS))]

  embedder = sentences.make_embedder(config, devices, model, length, tokenizer.pad_id)

  def evaluate(params: Mapping[str, Array]) -> Scores:
    anchors, positives, negatives = (np.float64(embedder(params, texts)) for texts in rows)
    near, far = (np.linalg.norm(anchors - others, axis=1) for others in (positives, negatives))
    return Scores({'accuracy': float(np.mean(near < far))}, {'': (near < far).astype(np.float64)})

  return evaluate


def shapes(config: ConfigDict, model: EncoderConfig, _: Tokenizer) -> BatchShapes:
  """See ``Method.shapes``."""
  return sentences.batch_shapes(VIEWS, {'triplet_index': np.int32}, config, model)


METHOD = Method(
  build, find_data, dual_encoder.export, options={build: dual_encoder.OPTIONS}, shapes=shapes
)
