"""Inspects backbones: reads the texts once, measures each backbone on them, makes the tables."""

import dataclasses
import itertools
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import Bool, Float

from dprjax.analysis import statistics as analysis
from dprjax.analysis.statistics import Triplet
from dprjax.base import files
from dprjax.base.errors import InputError
from dprjax.base.progress import Progress, duration
from dprjax.data import similarity, sources
from dprjax.data.similarity import Pair
from dprjax.data.topics import Topics
from dprjax.formats import mediawiki
from dprjax.formats.texts import Passage, Query
from dprjax.inference.embedder import Embedder, place
from dprjax.inference.retriever import Retriever
from dprjax.models import encoder

logger = logging.getLogger('dprjax')

_SEED = 0

T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class Texts:
  """The texts that backbones are measured on; empty if not requested.

  Attributes:
    pairs: for the correlation with human scores.
    triplets: for the distinction of sections.
    positives: (query, relevant passage), for alignment.
    passages: for uniformity.
    queries: likewise.
    pairs_of_own: (row of ``queries``, its own passage), where there are categories.
    unrelated: which of the queries have no category in common with which of the passages.
    labels: kind ('topic', 'category') -> which of the passages have which label of that kind.
    label_names: kind -> the labels' names.
    attended: for the entropy of attention.
    named: attribute -> its number and source in words, for the note below the table.
  """

  pairs: list[Pair] = dataclasses.field(default_factory=list)
  triplets: list[Triplet] = dataclasses.field(default_factory=list)
  positives: list[tuple[str, str]] = dataclasses.field(default_factory=list)
  passages: list[str] = dataclasses.field(default_factory=list)
  queries: list[str] = dataclasses.field(default_factory=list)
  pairs_of_own: list[tuple[int, str]] = dataclasses.field(default_factory=list)
  unrelated: Bool[np.ndarray, 'queries passages'] | None = None
  labels: dict[str, Bool[np.ndarray, 'passages C']] = dataclasses.field(default_factory=dict)
  label_names: dict[str, list[str]] = dataclasses.field(default_factory=dict)
  attended: list[str] = dataclasses.field(default_factory=list)
  named: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Findings:
  """The measures of one backbone; None without texts for them.

  Attributes:
    settings: how it makes vectors, in words.
    spearman: of cosines and human scores; NaN if all cosines are equal.
    accuracy: the fraction of section triplets that it distinguishes.
    alignment: of queries and relevant passages, scaled to unit length.
    uniformity: of passages, likewise.
    raw_alignment, raw_uniformity: the same of the vectors as they are (DPTDR Table 8).
    entropy: of the first token's attention, in nats, mean over texts.
    query_uniformity: of queries, scaled to unit length.
    own_cosine, unrelated_cosine: Sim(q, p+), of a query and its own passage, and Sim(q, p-), of
      queries and passages without a common category (Topic-DPR Table 3).
    near: kind of label -> the share of a passage's 10 nearest with a label in common.
    drawn: the passages in two dimensions, by t-SNE.
  """

  settings: str
  spearman: float | None = None
  accuracy: float | None = None
  alignment: float | None = None
  uniformity: float | None = None
  raw_alignment: float | None = None
  raw_uniformity: float | None = None
  entropy: Float[np.ndarray, 'L N'] | None = None
  query_uniformity: float | None = None
  own_cosine: float | None = None
  unrelated_cosine: float | None = None
  near: dict[str, float] = dataclasses.field(default_factory=dict)
  drawn: Float[np.ndarray, 'passages 2'] | None = None

  @property
  def scores(self) -> dict[str, float]:
    """The measures on sentences, at most 1, by column title."""
    scores = {'STS Spearman': self.spearman, 'section accuracy': self.accuracy}
    return {title: value for title, value in scores.items() if value is not None}


def read_texts(
  sts: files.PathLike | None = None,
  wikipedia: files.PathLike | None = None,
  beir: files.PathLike | None = None,
  split: str = 'test',
  most: int = 1000,
  topic_model: Topics | None = None,
) -> Texts:
  """Reads the given sources and draws texts from them.

  Args:
    sts: pairs with scores, see ``data.similarity``; all are used, so that the correlation can be
      compared with published ones.
    wikipedia: a dump, see ``formats.mediawiki``; triplets and sections are drawn from its first
      ``most`` articles.
    beir: a data set with judgements, see ``data.sources``.
    split: the split of the judgements.
    most: the largest number of triplets, sections, positives, queries and passages, at least 2.
    topic_model: the passages' topics are labels too.

  Raises:
    InputError: no source was given, one cannot be read, or one has nothing that can be used.
  """
  if most < 2:
    raise InputError(
      f'max_texts: {most} is too few, uniformity is over pairs of texts; give 2 or more (1000 is '
      'the default)'
    )
  if sts is None and wikipedia is None and beir is None:
    raise InputError(
      'there is no text to measure a backbone on: give one or more of --sts, --wikipedia and --beir'
    )
  texts = Texts()
  # The first source gives the texts for the attention; Condenser uses sections of Wikipedia.
  if wikipedia is not None:
    texts = _with_wikipedia(texts, wikipedia, most)
  if beir is not None:
    texts = _with_retrieval(texts, beir, split, most, topic_model)
  if sts is not None:
    texts = _with_similarity(texts, sts, most)
  return texts


def _with_similarity(texts: Texts, path: files.PathLike, most: int) -> Texts:
  pairs = similarity.read_pairs(path)
  if len({pair.score for pair in pairs}) == 1:
    raise InputError(
      f'{path}: every pair has the score {pairs[0].score:g}; a rank correlation needs different '
      'scores'
    )
  named = {'pairs': f'{len(pairs):,} pairs of {_base(path)}'}
  attended = texts.attended
  if not attended:
    sentences = list(dict.fromkeys(sentence for pair in pairs for sentence in pair[:2]))
    attended = random.Random(_SEED).sample(sentences, min(most, len(sentences)))
    named['attended'] = f'{len(attended):,} sentences of {_base(path)}'
  return dataclasses.replace(texts, pairs=pairs, attended=attended, named=texts.named | named)


def _with_wikipedia(texts: Texts, path: files.PathLike, most: int) -> Texts:
  counted = _counted(itertools.islice(mediawiki.read_articles(path), most), 'articles', path)
  articles = list(counted)
  triplets = analysis.section_triplets(articles, _SEED, most)
  if not triplets:
    raise InputError(
      f'{path}: none of the first {len(articles):,} articles (max_texts: {most:,} at most) has two '
      'sections with sentences in them, which the distinction of sections needs'
    )
  sections = [section.text for article in articles for section in analysis.themed(article)]
  attended = random.Random(_SEED).sample(sections, min(most, len(sections)))
  named = {
    'triplets': f'{len(triplets):,} triplets from {len(articles):,} articles of {_base(path)}',
    'attended': f'{len(attended):,} sections of {_base(path)}',
  }
  return dataclasses.replace(texts, triplets=triplets, attended=attended, named=texts.named | named)


def _with_retrieval(
  texts: Texts, path: files.PathLike, split: str, most: int, topic_model: Topics | None
) -> Texts:
  dataset = sources.load_dataset(sources.Source(str(path), split=split))
  rng = random.Random(_SEED)
  pairs = [
    (query.text, passage) for query in dataset.queries for passage in dataset.positives(query.id)
  ]
  pairs = rng.sample(pairs, min(most, len(pairs)))
  # Drawn by themselves, so that the other draws do not depend on them.
  queries = random.Random(_SEED).sample(dataset.queries, min(most, len(dataset.queries)))
  wanted = {passage for _, passage in pairs}
  wanted.update(query.id for query in queries)
  wanted.update(next(iter(dataset.positives(query.id))) for query in queries)
  texts_by_id: dict[str, str] = {}
  kept: list[Passage] = []
  seen = 0
  for passage in _counted(dataset.passages, 'passages', path):
    if not passage.text:
      continue
    if passage.id in wanted:
      texts_by_id[passage.id] = passage.text
    # A reservoir: it holds every passage so far with the same chance (Vitter 1985, algorithm R).
    seen += 1
    if len(kept) < most:
      kept.append(passage)
    elif (place := rng.randrange(seen)) < most:
      kept[place] = passage
  positives = [(query, texts_by_id[id_]) for query, id_ in pairs if id_ in texts_by_id]
  if len(positives) < len(pairs):
    logger.info(
      '%s: %s of %s positives have no text or are not in the corpus: left out',
      path,
      f'{len(pairs) - len(positives):,}',
      f'{len(pairs):,}',
    )
  if not positives or len(kept) < 2:
    raise InputError(
      f'{path}: {len(positives)} positives and {len(kept)} passages with text; alignment needs '
      'one, uniformity two'
    )
  name = f'{_base(path)}/{split}'
  named = {
    'positives': f'{len(positives):,} pairs of a query and a relevant passage of {name}',
    'passages': f'{len(kept):,} passages of {name}',
  }
  named['queries'] = f'{len(queries):,} queries of {name}'
  passages = [passage.text for passage in kept]
  attended = texts.attended
  if not attended:
    attended, named['attended'] = passages, named['passages']
  texts = dataclasses.replace(
    texts,
    positives=positives,
    passages=passages,
    queries=[query.text for query in queries],
    attended=attended,
    named=texts.named | named,
  )
  if topic_model is not None:
    topic_model.check_shares(passages, str(path))
    texts.labels['topic'] = np.eye(len(topic_model), dtype=bool)[topic_model.assign(passages)]
    texts.label_names['topic'] = [' '.join(words[:3]) for words in topic_model.names]
    texts.named['topic'] = named['passages']
  return _with_categories(texts, dataset, queries, [passage.id for passage in kept], texts_by_id)


def _with_categories(
  texts: Texts,
  dataset: sources.Dataset,
  queries: Sequence[Query],
  passage_ids: Sequence[str],
  texts_by_id: Mapping[str, str],
) -> Texts:
  """What categories of the corpus tell of queries and passages, if it has any."""
  if dataset.format not in sources.WITH_CATEGORIES:
    return texts
  try:
    categories = dataset.read_categories()
  except InputError as error:  # another corpus may mean something else by the word
    logger.info('%s; its categories are passed over', error)
    return texts
  # A query's own passage has its id, or is the one that is relevant to it.
  own: dict[int, str] = {}
  for number, query in enumerate(queries):
    relevant = dataset.positives(query.id)
    passage = query.id if query.id in relevant else relevant[0]
    if passage in texts_by_id and (passage == query.id or len(relevant) == 1):
      own[number] = passage
  drawn = [*passage_ids, *own.values()]
  names = list(dict.fromkeys(name for id_ in drawn for name in categories.get(id_, ())))
  if not names:
    return texts
  numbers = {name: number for number, name in enumerate(names)}

  def mark(ids: Sequence[str]) -> np.ndarray:
    marked = np.zeros((len(ids), len(names)), bool)
    for row, id_ in enumerate(ids):
      marked[row, [numbers[name] for name in categories.get(id_, ())]] = True
    return marked

  of_passages, of_queries = mark(passage_ids), mark([own.get(i, '') for i in range(len(queries))])
  common = of_queries.astype(np.float32) @ of_passages.astype(np.float32).T
  known = np.outer(of_queries.any(axis=1), of_passages.any(axis=1))
  unrelated = np.logical_and(known, common == 0)
  named = {}
  if own:
    named['own'] = f'{len(own):,} {texts.named["queries"].partition(" ")[2]}'
    named['unrelated'] = f'{np.count_nonzero(unrelated):,} pairs without a common category'
  if of_passages.any():
    texts.labels['category'] = of_passages
    texts.label_names['category'] = names
    named['category'] = texts.named['passages']
  return dataclasses.replace(
    texts,
    pairs_of_own=[(number, texts_by_id[id_]) for number, id_ in own.items()],
    unrelated=unrelated,
    named=texts.named | named,
  )


def _base(path: files.PathLike) -> str:
  return str(path).rstrip('/').rpartition('/')[2]


def _counted(items: Iterator[T], unit: str, path: files.PathLike) -> Iterator[T]:
  progress = Progress(unit, task=f'reading {path}')
  for item in items:
    yield item
    progress.advance()


def inspect(
  name: str, retriever: Retriever, texts: Texts, batch_size: int = 64, draw: bool = False
) -> Findings:
  """Measures one backbone, with its prompt if it has one, on all of ``texts``.

  Sentences (of pairs and triplets) are encoded as queries, so that the queries' text prefix or
  prompt applies to both sides.

  Args:
    name: the backbone's name, for the log.
    retriever: the backbone, prompt and settings. Vectors are scaled to unit length here, but for
      the raw measures, which need a retriever that does not normalise.
    texts: see ``read_texts``.
    batch_size: texts at a time, over all local devices, for the attention.
    draw: the passages, by t-SNE, which needs scikit-learn.

  Raises:
    InputError: scikit-learn is missing; the backbone gives vectors that are not finite.
  """

  def encode(kind: str, what: str) -> analysis.Encode:
    def run(batch: Sequence[str]) -> Float[np.ndarray, 'n H']:
      vectors = retriever.encode(batch, kind, Progress('texts', len(batch), f'{name}: {what}'))
      if not np.isfinite(vectors).all():
        raise InputError(
          f'{name}: its vectors are not all finite numbers; its training must have diverged'
        )
      return vectors

    return run

  began = time.monotonic()
  found: dict[str, Any] = {}
  if texts.pairs:
    found['spearman'] = analysis.sts(texts.pairs, encode('query', 'sentences'))
  if texts.triplets:
    found['accuracy'] = analysis.section_accuracy(
      texts.triplets, encode('query', 'sentences of sections')
    )
  if texts.positives:
    queries, passages = ([pair[i] for pair in texts.positives] for i in (0, 1))
    x = encode('query', 'queries')(queries)
    y = encode('passage', 'relevant passages')(passages)
    others = encode('passage', 'passages')(texts.passages)
    found['alignment'] = analysis.alignment(analysis.unit(x), analysis.unit(y))
    found['uniformity'] = analysis.uniformity(analysis.unit(others))
    if not retriever.encoder.entry().spec.normalize:
      found['raw_alignment'] = analysis.alignment(x, y)
      found['raw_uniformity'] = analysis.uniformity(others)
    if len(texts.queries) > 1:
      asked = encode('query', 'queries')(texts.queries)
      found['query_uniformity'] = analysis.uniformity(analysis.unit(asked))
      if texts.pairs_of_own:
        own = encode('passage', 'own passages')([text for _, text in texts.pairs_of_own])
        rows = [row for row, _ in texts.pairs_of_own]
        found['own_cosine'] = float(analysis.cosine(asked[rows], own).mean())
        if texts.unrelated is not None and texts.unrelated.any():
          found['unrelated_cosine'] = analysis.mean_cosine(asked, others, texts.unrelated)
    found['near'] = {
      kind: analysis.near_share(others, labels) for kind, labels in texts.labels.items()
    }
    if draw:
      found['drawn'] = analysis.tsne(others)
  if texts.attended:
    found['entropy'] = first_token_entropies(
      retriever,
      texts.attended,
      batch_size,
      Progress('texts', len(texts.attended), f'{name}: attention'),
    ).mean(axis=0)
  spec = retriever.encoder.entry().spec
  lengths = dict.fromkeys((spec.query_max_length, spec.passage_max_length))
  logger.info('%s: inspected in %s', name, duration(time.monotonic() - began))
  return Findings(
    settings=f'{spec.pooling} pooling, at most {" and ".join(map(str, lengths))} tokens',
    **found,
  )


def first_token_entropies(
  retriever: Retriever,
  texts: Sequence[str],
  batch_size: int = 64,
  progress: Callable[[int], None] | None = None,
) -> Float[np.ndarray, 'texts L N']:
  """``attention_entropy`` of each text, which are encoded as passages.

  The first token attends to the vectors of a prompt too; under a prompt of kind topic, to those of
  the text's own topic.
  """
  entry = retriever.encoder.entry()
  prompt, shift = entry.prompt, entry.shift_positions
  backbone = retriever.encoder.backbones['passage']
  config = backbone.config

  given: Any = None
  columns: tuple[np.ndarray, ...] = ()
  if prompt is not None and retriever.encoder.topics:
    (topic_model,) = retriever.encoder.topics.values()
    given, columns = prompt.arrays['prefix'], (topic_model.assign(texts),)
  elif prompt is not None:
    given = prompt.prefix('passage')

  def embed(
    params: Any, tokens: jax.Array, mask: jax.Array, numbers: jax.Array | None = None
  ) -> jax.Array:
    prefix = params[1] if numbers is None else params[1][numbers]  # [B, L, 2, P, N, D]
    weights = encoder.first_token_attention(
      config, params[0], tokens, mask, prompt=prefix, shift_positions=shift
    )
    entropy = analysis.attention_entropy(weights)  # [L, B, N]
    return entropy.swapaxes(0, 1).reshape(entropy.shape[1], -1)

  mesh = retriever.encoder.mesh
  placed = place(mesh, (backbone.params, given))
  embedder = Embedder(
    embed, mesh, batch_size, entry.spec.passage_max_length, retriever.encoder.tokenizer.pad_id
  )
  rows = retriever.encoder.tokenize(texts, 'passage')
  values = embedder(placed, rows, progress, columns).astype(np.float64)
  return values.reshape(len(texts), config.num_layers, config.num_heads)


def table(findings: Mapping[str, Findings]) -> tuple[list[str], list[list[str]]]:
  """Column titles and a row for each backbone; only columns that have a value."""
  values: dict[str, dict[str, float | None]] = {
    name: {
      **found.scores,
      'alignment': found.alignment,
      'uniformity': found.uniformity,
      'uniformity of queries': found.query_uniformity,
      'Sim(q, p+)': found.own_cosine,
      'Sim(q, p-)': found.unrelated_cosine,
      **{f'10 nearest: same {kind}': share for kind, share in found.near.items()},
      'raw alignment': found.raw_alignment,
      'raw uniformity': found.raw_uniformity,
      'CLS attention entropy': None if found.entropy is None else float(found.entropy.mean()),
      'in the last layer': None if found.entropy is None else float(found.entropy[-1].mean()),
    }
    for name, found in findings.items()
  }
  titles = dict.fromkeys(
    title for row in values.values() for title, value in row.items() if value is not None
  )
  rows = [[name, *(_shown(row.get(title)) for title in titles)] for name, row in values.items()]
  return ['backbone', *titles], rows


def _shown(value: float | None) -> str:
  return '' if value is None else 'undefined' if np.isnan(value) else f'{value:.4f}'


def layers_table(findings: Mapping[str, Findings]) -> tuple[list[str], list[list[str]]]:
  """The entropy by layer, mean over heads; blank beyond a backbone's last layer."""
  entropies = {
    name: found.entropy.mean(axis=1)
    for name, found in findings.items()
    if found.entropy is not None
  }
  most = max(map(len, entropies.values()), default=0)
  rows = [
    [name, *(f'{value:.3f}' for value in layers), *[''] * (most - len(layers))]
    for name, layers in entropies.items()
  ]
  return ['CLS attention entropy', *(f'layer {i + 1}' for i in range(most))], rows


def note(texts: Texts, findings: Mapping[str, Findings]) -> list[str]:
  """Lines on what each column is, over how many texts, and how the backbones make vectors."""
  explained = {
    'pairs': 'STS Spearman: rank correlation of the cosine with human scores, {}.',
    'triplets': 'Section accuracy: {}; by chance 0.5.',
    'positives': 'Alignment (alpha = 2): {}; lower is nearer. Of unit vectors, and raw.',
    'passages': 'Uniformity (t = 2): {}; lower is more even. Of unit vectors, and raw.',
    'queries': 'Uniformity of queries: {}.',
    'own': 'Sim(q, p+): mean cosine of a query and its own passage, {}.',
    'unrelated': 'Sim(q, p-): mean cosine, {}.',
    'topic': 'The 10 nearest, by cosine, of {}, that have its topic by their words.',
    'category': 'The 10 nearest, by cosine, of {}, that have a category in common with it.',
    'attended': 'CLS attention entropy: in nats, mean over heads and {}.',
  }
  lines = [line.format(texts.named[key]) for key, line in explained.items() if key in texts.named]
  settings = '; '.join(f'{name}: {found.settings}' for name, found in findings.items())
  return [*lines, f'{settings}.']
