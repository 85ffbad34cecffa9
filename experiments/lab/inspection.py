"""Inspects backbones: more measures of a frozen one, with or without a prompt.

    PYTHONPATH=experiments python -m lab.inspection --backbone=DIR --backbone=ours=DIR \\
        --sts=stsb-test.csv --wikipedia=enwiki.xml.bz2 --beir=scifact --out=report.md \\
        --figure=report.png

There are columns for the given texts:

- --sts: the rank correlation of cosines with human scores
- --wikipedia: the distinction of Wikipedia sections (Ein Dor et al. 2018)
- --beir: alignment and uniformity (Wang & Isola 2020)
- the entropy of first-token attention (Condenser, section 5), on sections of --wikipedia, else on
  passages of --beir, else on the sentences of --sts

If the passages of --beir have categories, or --topics gives them topics (Topic-DPR, section 5),
there are more: the cosines of a query with its own passage, Sim(q, p+), and with passages without a
common category, Sim(q, p-); and the share of the 10 nearest passages of a passage with its topic or
one of its categories. --tsne draws the passages by both.
"""

import dataclasses
import functools
import itertools
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import Bool, Float

from dprjax.base import cli, files, flags, machine, outputs
from dprjax.base.errors import InputError
from dprjax.base.flags import flag
from dprjax.base.progress import Progress, duration
from dprjax.encoding.embedder import Embedder, place
from dprjax.models import encoder
from dprjax.models.adapter import stack
from dprjax.papers.topic_dpr.topic_models import Topics, load_topics
from dprjax.retrieval import comparison
from dprjax.retrieval import figures as drawing
from dprjax.retrieval.retriever import Retriever
from dprjax.text import sources
from dprjax.text.fields import check_id
from lab import figures, measures, mediawiki, spaces, sts
from lab.measures import Triplet
from lab.sts import Pair

logger = logging.getLogger('dprjax')

_SEED = 0

T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class Texts:
  """The texts that backbones are measured on; empty if not requested.

  Attributes:
    drawn: from a data set, for alignment and uniformity.
    pairs: for the correlation with human scores.
    triplets: for the distinction of sections.
    positives, passages, queries: the texts of ``drawn``.
    pairs_of_own: (row of ``queries``, its own passage), where there are categories.
    unrelated: which of the queries have no category in common with which of the passages.
    labels: kind ('topic', 'category') -> which of the passages have which label of that kind.
    label_names: kind -> names of the labels.
    attended: for the entropy of attention.
    named: attribute -> its number and source in words, for the note below the table.
  """

  drawn: spaces.Sample | None = None
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
class Findings(spaces.Findings):
  """The measures of one backbone; None without texts for them.

  Attributes:
    spearman: of cosines and human scores; NaN if all cosines are equal.
    accuracy: the fraction of section triplets that it distinguishes.
    entropy: of first-token attention, in nats, mean over texts.
    own_cosine, unrelated_cosine: Sim(q, p+), of a query and its own passage, and Sim(q, p-), of
      queries and passages without a common category (Topic-DPR Table 3).
    near: kind of label -> the share of the 10 nearest passages with a common label.
    points: the passages in two dimensions, by t-SNE.
  """

  spearman: float | None = None
  accuracy: float | None = None
  entropy: Float[np.ndarray, 'L N'] | None = None
  own_cosine: float | None = None
  unrelated_cosine: float | None = None
  near: dict[str, float] = dataclasses.field(default_factory=dict)
  points: Float[np.ndarray, 'passages 2'] | None = None

  @property
  def scores(self) -> dict[str, float]:
    """The measures on sentences, at most 1, by column title."""
    scores = {'STS Spearman': self.spearman, 'section accuracy': self.accuracy}
    return {title: value for title, value in scores.items() if value is not None}

  def columns(self) -> dict[str, float | None]:
    """The measures by column title."""
    of_vectors = super().columns()
    raw = {name: of_vectors.pop(name) for name in ('raw alignment', 'raw uniformity')}
    return {
      **self.scores,
      **of_vectors,
      'Sim(q, p+)': self.own_cosine,
      'Sim(q, p-)': self.unrelated_cosine,
      **{f'10 nearest: same {kind}': share for kind, share in self.near.items()},
      **raw,
      'CLS attention entropy': None if self.entropy is None else float(self.entropy.mean()),
      'in the last layer': None if self.entropy is None else float(self.entropy[-1].mean()),
    }


def read_texts(
  scored: files.PathLike | None = None,
  wikipedia: files.PathLike | None = None,
  beir: files.PathLike | None = None,
  split: str = 'test',
  most: int = 1000,
  topic_model: Topics | None = None,
) -> Texts:
  """Reads the given sources and draws texts from them.

  Args:
    scored: pairs with scores, see ``sts``; all are used, so that the correlation can be
      compared with published ones.
    wikipedia: a dump, see ``lab.mediawiki``; triplets and sections are drawn from its first
      ``most`` articles.
    beir: a data set with judgements, see ``text.sources``.
    split: the split of the judgements.
    most: the largest number of triplets, sections, positives, queries and passages, at least 2.
    topic_model: topics of the passages are labels too.

  Raises:
    InputError: no source was given, one cannot be read, or one has nothing that can be used.
  """
  if most < 2:
    raise InputError(
      f'max_texts: {most} is too few, uniformity is over pairs of texts; give 2 or more (1000 is '
      'the default)'
    )
  if scored is None and wikipedia is None and beir is None:
    raise InputError(
      'there is no text to measure a backbone on: give one or more of --sts, --wikipedia and --beir'
    )
  texts = Texts()
  # The first source gives the texts for the attention; Condenser uses sections of Wikipedia.
  if wikipedia is not None:
    texts = _with_wikipedia(texts, wikipedia, most)
  if beir is not None:
    texts = _with_retrieval(texts, beir, split, most, topic_model)
  if scored is not None:
    texts = _with_similarity(texts, scored, most)
  return texts


def _with_similarity(texts: Texts, path: files.PathLike, most: int) -> Texts:
  pairs = sts.read_pairs(path)
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
  triplets = measures.section_triplets(articles, _SEED, most)
  if not triplets:
    raise InputError(
      f'{path}: none of the first {len(articles):,} articles (max_texts: {most:,} at most) has two '
      'sections with sentences in them, which the distinction of sections needs'
    )
  sections = [section.text for article in articles for section in measures.themed(article)]
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
  name = f'{_base(path)}/{split}'
  drawn = spaces.draw(dataset, name, most)
  named = {
    'positives': f'{len(drawn.positives):,} pairs of a query and a relevant passage of {name}',
    'passages': f'{len(drawn.passages):,} passages of {name}',
    'queries': f'{len(drawn.queries):,} queries of {name}',
  }
  passages = [passage.text for passage in drawn.passages]
  attended = texts.attended
  if not attended:
    attended, named['attended'] = passages, named['passages']
  texts = dataclasses.replace(
    texts,
    drawn=drawn,
    positives=drawn.positives,
    passages=passages,
    queries=[query.text for query in drawn.queries],
    attended=attended,
    named=texts.named | named,
  )
  if topic_model is not None:
    topic_model.check_shares(passages, str(path))
    texts.labels['topic'] = np.eye(len(topic_model), dtype=bool)[topic_model.assign(passages)]
    texts.label_names['topic'] = [' '.join(words[:3]) for words in topic_model.names]
    texts.named['topic'] = named['passages']
  return _with_categories(texts, dataset, drawn)


def _with_categories(texts: Texts, dataset: sources.Dataset, drawn: spaces.Sample) -> Texts:
  """Adds pairs and labels from categories of the corpus, if it has any."""
  if dataset.format not in sources.WITH_CATEGORIES:
    return texts
  try:
    categories = dataset.read_categories()
  except InputError as error:  # another corpus may mean something else by the word
    logger.info('%s; its categories are passed over', error)
    return texts
  queries, texts_by_id = drawn.queries, drawn.relevant
  passage_ids = [passage.id for passage in drawn.passages]
  # The own passage of a query has its id, or is the only one that is relevant to it.
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

  Sentences (of pairs and triplets) are encoded as queries, so that the text prefix or prompt of
  queries applies to both sides.

  Args:
    name: of the backbone, for the log.
    retriever: the backbone, prompt and settings. Vectors are scaled to unit length here, but for
      the raw measures, which need a retriever that does not normalise.
    texts: see ``read_texts``.
    batch_size: texts at a time, over all local devices, for the attention.
    draw: the passages, by t-SNE, which needs scikit-learn.

  Raises:
    InputError: scikit-learn is missing; the backbone gives vectors that are not finite.
  """

  def encode(batch: Sequence[str]) -> Float[np.ndarray, 'n H']:
    return spaces.vectors(name, retriever, batch, 'query', 'sentences')

  began = time.monotonic()
  found: dict[str, Any] = {'settings': spaces.describe(retriever)}
  if texts.pairs:
    found['spearman'] = measures.sts(texts.pairs, encode)
  if texts.triplets:
    found['accuracy'] = measures.section_accuracy(texts.triplets, encode)
  if texts.drawn is not None:
    vectors = spaces.encode(name, retriever, texts.drawn)
    found |= dataclasses.asdict(spaces.measure(retriever, vectors))
    if texts.pairs_of_own:
      passages = [text for _, text in texts.pairs_of_own]
      own = spaces.vectors(name, retriever, passages, 'passage', 'own passages')
      rows = [row for row, _ in texts.pairs_of_own]
      found['own_cosine'] = float(measures.cosine(vectors.queries[rows], own).mean())
      if texts.unrelated is not None and texts.unrelated.any():
        found['unrelated_cosine'] = measures.mean_cosine(
          vectors.queries, vectors.passages, texts.unrelated
        )
    found['near'] = {
      kind: measures.near_share(vectors.passages, labels) for kind, labels in texts.labels.items()
    }
    if draw:
      found['points'] = measures.tsne(vectors.passages)
  if texts.attended:
    found['entropy'] = first_token_entropies(
      retriever,
      texts.attended,
      batch_size,
      Progress('texts', len(texts.attended), f'{name}: attention'),
    ).mean(axis=0)
  logger.info('%s: inspected in %s', name, duration(time.monotonic() - began))
  return Findings(**found)


def first_token_entropies(
  retriever: Retriever,
  texts: Sequence[str],
  batch_size: int = 64,
  progress: Callable[[int], None] | None = None,
) -> Float[np.ndarray, 'texts L N']:
  """``attention_entropy`` of each text, encoded as a passage.

  The first token attends to the vectors of a prompt too; under a prompt of kind topic, to those of
  the topic of the text.
  """
  entry = retriever.encoder.entry()
  prompt = entry.prompt
  backbone = retriever.encoder.backbones['passage']
  config = backbone.config

  adapters = [None] if prompt is None else prompt.adapters('passage')
  adapter, columns = adapters[0], tuple[np.ndarray, ...]()
  if retriever.encoder.topics:
    (topic_model,) = retriever.encoder.topics.values()
    adapter, columns = stack(adapters), (topic_model.assign(texts),)

  def embed(
    params: Any, tokens: jax.Array, mask: jax.Array, numbers: jax.Array | None = None
  ) -> jax.Array:
    own = params[1] if numbers is None else params[1].choose(numbers)
    weights = encoder.first_token_attention(config, params[0], tokens, mask, adapter=own)
    entropy = measures.attention_entropy(weights)  # [L, B, N]
    return entropy.swapaxes(0, 1).reshape(entropy.shape[1], -1)

  mesh = retriever.encoder.mesh
  placed = place(mesh, (jax.tree.map(np.asarray, backbone.params), adapter))
  embedder = Embedder(
    embed, mesh, batch_size, entry.spec.passage_max_length, retriever.encoder.tokenizer.pad_id
  )
  rows = retriever.encoder.tokenize(texts, 'passage')
  values = embedder(placed, rows, progress, columns).astype(np.float64)
  return values.reshape(len(texts), config.num_layers, config.num_heads)


def layers_table(findings: Mapping[str, Findings]) -> tuple[list[str], list[list[str]]]:
  """The entropy by layer, mean over heads; blank beyond the last layer of a backbone."""
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
  """Lines on the meaning of each column, its number of texts, and the pooling of backbones."""
  explained = {
    'pairs': 'STS Spearman: rank correlation of the cosine with human scores, {}.',
    'triplets': 'Section accuracy: {}; by chance 0.5.',
    'positives': 'Alignment (alpha = 2) of unit vectors, and raw: {}; lower is nearer.',
    'passages': 'Uniformity (t = 2) of unit vectors, and raw: {}; lower is more even.',
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackboneFlags:
  backbone: tuple[tuple[str, str], ...] = flag(
    'a Hugging Face directory, a hub id, or package:NAME',
    (),
    read=flags.maybe_named,
    metavar='[NAME=]DIR',
  )
  prompt: tuple[tuple[str, str], ...] = flag(
    'a prompt.npz for the backbone of this name',
    (),
    read=flags.maybe_named,
    metavar='[NAME=]FILE',
  )
  beir: str | None = flag(
    'a retrieval data set with judgements: queries and passages', None, metavar='DIR'
  )
  split: str = flag('of --beir, with judgements', 'test')
  max_texts: int = flag('most queries, passages and pairs of them', 1000)
  pooling: str | None = flag('default: that of the prompt or the backbone', None, metavar='NAME')
  normalize: bool = flag('scale vectors to unit length; false also gives raw measures', False)
  max_length: int | None = flag('most tokens of a text; same default', None)
  batch_size: int = flags.batch_size()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  out: str | None = flag('the table as Markdown', None, metavar='report.md')
  figure: str | None = flag('the figure: png, pdf or svg', None, metavar='report.png')
  backbones: BackboneFlags = flags.group(BackboneFlags, 'backbones')
  sts: str | None = flag('pairs with scores of 0 to 5, csv, tsv or jsonl', None, metavar='FILE')
  wikipedia: str | None = flag(
    'pages-articles.xml(.bz2): distinction of sections', None, metavar='DUMP'
  )
  topics: str | None = flag(
    'of dprjax.topics: the topics of the passages of --beir', None, metavar='topics.npz'
  )
  tsne: str | None = flag(
    'the passages of --beir in two dimensions; needs scikit-learn', None, metavar='map.png'
  )


def main(argv: Sequence[str] | None = None) -> None:
  cli.run(Flags, _command, argv)


def _command(args: Flags) -> None:
  if not args.backbones.backbone:
    raise InputError('give --backbone=DIR')
  if args.backbones.beir is None:
    flags.refuse(args, ('topics', 'tsne'), 'beir')
  for name, path in (('figure', args.figure), ('tsne', args.tsne)):
    if path is not None:
      drawing.check_name(path, f'--{name}')
  if args.tsne is not None:
    measures.import_manifold()  # now, not after the work
  inputs = backbone_files(args.backbones) | flags.paths(args, 'sts', 'wikipedia', 'topics')
  also = {'--figure': args.figure, '--tsne': args.tsne}
  with (
    outputs.claim(args.out, inputs, endings=('',), also=also),
    outputs.claim(args.figure, inputs, flag='--figure', endings=('',)),
    outputs.claim(args.tsne, inputs, flag='--tsne', endings=('',)),
  ):
    _report(args)


def _backbones(args: BackboneFlags) -> dict[str, tuple[str, str | None]]:
  """(backbone, prompt or None) by name."""
  paths: dict[str, str] = {}
  for given, path in args.backbone:
    # The last part of the path, or of package:NAME.
    name = given or path.rstrip('/').rpartition('/')[2].removeprefix('package:')
    check_id(name, f'--backbone={path}')
    if name in paths:
      raise InputError(f'--backbone: two have the name {name}; name them, --backbone=NAME={path}')
    paths[name] = path
  prompts: dict[str, str] = {}
  for given, path in args.prompt:
    if not given and len(paths) > 1:
      raise InputError(f'--prompt={path}: several backbones; give --prompt=NAME={path}')
    name = given or next(iter(paths))
    if name not in paths:
      raise InputError(f'--prompt={name}={path}: the backbones are {", ".join(paths)}')
    if name in prompts:
      raise InputError(f'--prompt: two for {name}; give the backbone twice, under two names')
    prompts[name] = path
    files.existing(path, 'prompt')
  return {name: (path, prompts.get(name)) for name, path in paths.items()}


def loaders(args: BackboneFlags) -> dict[str, Callable[[], Retriever]]:
  """Functions that load each backbone, after loading each once.

  So a bad backbone fails before others take minutes. None stays in memory.
  """

  def load(path: str, prompt: str | None) -> Retriever:
    return Retriever.load(
      path,
      prompt,
      pooling=args.pooling,
      normalize=args.normalize,
      query_max_length=args.max_length,
      passage_max_length=args.max_length,
      batch_size=args.batch_size,
    )

  found: dict[str, Callable[[], Retriever]] = {
    name: functools.partial(load, path, prompt) for name, (path, prompt) in _backbones(args).items()
  }
  if len(found) > 1:
    for one in found.values():
      one()
  return found


def backbone_files(args: BackboneFlags) -> dict[str, list[str]]:
  """The inputs of the backbones, by flag."""
  return {
    '--backbone': [path for _, path in args.backbone],
    '--prompt': [path for _, path in args.prompt],
    '--beir': [args.beir] if args.beir else [],
  }


def _report(args: Flags) -> None:
  machine.keep_programs()
  backbones = args.backbones
  retrievers = loaders(backbones)
  topic_model = load_topics(args.topics) if args.topics else None
  texts = read_texts(
    args.sts, args.wikipedia, backbones.beir, backbones.split, backbones.max_texts, topic_model
  )
  if args.tsne is not None and not texts.labels:
    raise InputError(
      f'--tsne: the passages of {backbones.beir} have no categories; give their topics, --topics'
    )
  findings = {
    name: inspect(name, load(), texts, backbones.batch_size, args.tsne is not None)
    for name, load in retrievers.items()
  }
  columns, rows = spaces.table(findings)
  layers, by_layer = layers_table(findings)
  lines = note(texts, findings)
  if args.figure is not None:
    foot = f'attention over {texts.named["attended"]}' if by_layer else ''
    figures.backbones(findings, foot, args.figure)
  if args.tsne is not None:
    points = {name: found.points for name, found in findings.items() if found.points is not None}
    foot = f't-SNE of {texts.named["passages"]}'
    figures.maps(points, texts.labels, texts.label_names, foot, args.tsne)
  if args.out is not None:
    with files.atomic_write(args.out) as file:
      # Two spaces break a Markdown line.
      file.write(comparison.markdown(columns, rows, '  \n'.join(lines)))
      if by_layer:
        file.write('\n' + comparison.markdown(layers, by_layer, ''))
  cli.print_table(columns, rows)
  if by_layer:
    cli.print_table(layers, by_layer)
  print('\n'.join(lines))


if __name__ == '__main__':
  main()
