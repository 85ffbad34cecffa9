"""Topic-DPR against its baselines on papers: the same positives, updates and measures for all.

    python experiments/topic_dpr.py --data=../shared/data --out=runs/topic-dpr

A sample of arXiv, by a hash of the id: 3,000 documents to train on, 500 to choose on, 1,000 whose
titles are the test queries and whose abstracts are the corpus. all-MiniLM-L6-v2; titles of 16
tokens, abstracts of 32; 40 updates of 16 documents; all of them go through the topic-topic loss
(n = N). The encoder is trained too, as in the rows of the paper whose numbers are the highest; in
`frozen` ones it is not. Every run leaves a line in OUT/ledger.jsonl with the scores of each test
document, and the same command goes on where it stopped. `--part` makes some of `PARTS`.
`--part=tables` makes the tables of what there is, and with `--docs=docs` puts them into
docs/experiments/topic-dpr.md and keeps the ledger (experiments/ledgers/topic_dpr.jsonl).

Rules, fixed before the runs:

- Choices on dev by nAP@10 of titles with the topics of their own words, seed 0, for DPR, DPTDR and
  Topic-DPR alike: one of three rates; a rate at the edge adds the next one, at most two; then alpha
  of .1 or .3 at the best rate. The rate is that of the encoder for DPR, and that of the prompts for
  the others, whose encoder has the rate of DPR. Topic-DPR chooses without the topic-topic loss,
  whose texts are four fifths of an update.
- Prompts on a frozen encoder choose a rate and alpha of their own in the same way. Other systems
  take the choice of the one that they vary. The margin is .1.
- A verdict is on the mean difference over three seeds with its 95 % interval over seeds and test
  documents (`trials.interval`). *Held* or *not*: the interval excludes 0 and all seeds agree in the
  sign; else *undecided*.
- Uniformity is compared after all updates. Its score of a document is linear in it (the
  infinitesimal jackknife), so that the variance over documents is that of a U-statistic.
"""

import functools
import pathlib
import shutil
import sys
import time
from typing import NamedTuple

import jax
import numpy as np

import gain_sets
import topic_dpr_tables
import trials
from dprjax.base import mesh, tree
from dprjax.encoding.embedder import Embedder, place
from dprjax.models import hub
from dprjax.papers.topic_dpr import papers as records
from dprjax.papers.topic_dpr import topic_dpr, topic_models
from dprjax.retrieval import bm25_index
from dprjax.text import texts, tokenizing
from dprjax.training import config as configs
from dprjax.training import train
from dprjax.training.method import Parts

ROOT = pathlib.Path(__file__).resolve().parent.parent
RATES = {
  'dpr': (2e-5, 6e-5, 2e-4),
  'dptdr': (1e-2, 3e-2, 1e-1),
  'topic': (2e-3, 6e-3, 2e-2),
}
RATES |= {f'{kind}-frozen': RATES[kind] for kind in ('dptdr', 'topic')}
# The row that chooses in place of another.
TRIED = {'topic': 'without-tt', 'topic-frozen': 'without-tt-frozen'}
FACTOR, MOST = 3, 5  # between rates; rates at most
ALPHAS = (0.1, 0.3)  # the first one while rates are chosen

PARTS = {
  'tuned': ('minilm', 'bm25', 'dpr', 'dptdr', 'topic', 'random-topics'),
  'words': ('words', 'random-words'),
  'without': ('without-tt',),
  'frozen': ('dptdr-frozen', 'topic-frozen'),
}


class Row(NamedTuple):
  """A kind of run.

  Attributes:
    recipe: of configs/topic_dpr.py.
    chosen: the row that gives its rate and alpha.
    topics: whether it has topics.
    options: others of its own.
  """

  recipe: str
  chosen: str
  topics: bool = False
  options: tuple[str, ...] = ()


ROWS = {
  'dpr': Row('dpr', 'dpr'),
  'dptdr': Row('dptdr,tuned', 'dptdr'),
  'topic': Row('topic,tuned', 'topic', True),
  'random-topics': Row('topic,tuned', 'topic', True, ('topics.random_topics=True',)),
  'without-tt': Row('topic,tuned', 'topic', True, ('topics.topic_topic=False',)),
  'words': Row('words', 'dpr', True),
  'random-words': Row('random_words', 'dpr', True),
  'dptdr-frozen': Row('dptdr', 'dptdr-frozen'),
  'topic-frozen': Row('topic', 'topic-frozen', True),
  'without-tt-frozen': Row('topic', 'topic-frozen', True, ('topics.topic_topic=False',)),
}


def main():
  parser = trials.parser(__doc__, PARTS, '0,1,2')
  parser.add_argument('--updates', type=int, default=40, help='of a training')
  parser.add_argument('--batch', type=int, default=16, help='documents of an update')
  parser.add_argument('--train', type=int, default=3000, help='documents to train on')
  parser.add_argument('--dev', type=int, default=500, help='documents to choose on')
  parser.add_argument('--test', type=int, default=1000, help='documents to measure on')
  args = trials.begin(parser, PARTS)
  experiment = Experiment(args)
  for part in args.part.split(','):
    for name in PARTS.get(part, ()):
      experiment.make(name)
    topic_dpr_tables.write(experiment.out, args.docs if part == 'tables' else None)
  if args.docs:
    trials.keep(experiment.out, topic_dpr_tables.LEDGER, experiment.settings)


class Documents(NamedTuple):
  """Papers of a split, which are its queries and its corpus."""

  ids: list[str]
  titles: list[str]
  abstracts: list[str]
  categories: list[tuple[str, ...]]


class Experiment:
  """All runs, each in its own folder."""

  def __init__(self, args):
    self.args = args
    self.seeds = [int(seed) for seed in args.seeds.split(',')]
    self.out = pathlib.Path(args.out).resolve()
    names = ('backbone', 'updates', 'batch', 'train', 'dev', 'test')
    self.settings = {name: getattr(args, name) for name in names}
    trials.claim(self.out, self.settings)
    trials.take_up(self.out, topic_dpr_tables.LEDGER, self.settings)
    self.embedders = {}

  @functools.cached_property
  def papers(self):
    """The folder of the splits."""
    made = self.out / 'papers'
    if not made.exists():
      source = gain_sets.only(pathlib.Path(self.args.data).resolve() / 'arxiv', '*.jsonl*')
      sizes = {name: self.settings[name] for name in ('train', 'dev', 'test')}
      records.convert(str(source), str(made), sizes)
    return made

  @functools.cached_property
  def backbone(self):
    return hub.load_backbone(self.args.backbone)

  @functools.cached_property
  def tokenizer(self):
    return tokenizing.load_tokenizer(self.backbone.path)

  @functools.cached_property
  def devices(self):
    return mesh.make_mesh({'data': -1})

  @functools.cache  # noqa: B019
  def documents(self, split):
    folder = self.papers / split
    found = list(records.read_papers(folder / 'corpus.jsonl'))
    titles = {query.id: query.text for query in texts.read_texts(folder / 'queries.jsonl', 'query')}
    return Documents(
      [paper.id for paper in found],
      [titles[paper.id] for paper in found],
      [paper.passage for paper in found],
      [paper.categories for paper in found],
    )

  @functools.cached_property
  def topics(self):
    """Topics of the training documents."""
    path = self.out / 'topics.npz'
    if not path.exists():
      chosen = topic_models.choose(self.documents('train').abstracts)
      topic_models.save_topics(path, topic_models.fit(chosen, topic_models.TopicSettings()).topics)
    return topic_models.load_topics(path)

  def make(self, name):
    """All seeds of a row."""
    if name in topic_dpr_tables.FIXED:
      work = self.rank_words if name == 'bm25' else self.encode_bare
      trials.measure(self.out, name, 0, work)
      return
    row = ROWS[name]
    rate, alpha = self.choose(row.chosen)
    for seed in self.seeds:
      trials.measure(self.out, name, seed, lambda s=seed: self.run(name, s, rate, alpha, 'test'))

  @functools.cache  # noqa: B019
  def choose(self, kind):
    """The rate, then alpha, that are best on dev with seed 0."""
    tried = {}

    def trial(rate, alpha):
      if (rate, alpha) not in tried:
        work = functools.partial(self.run, TRIED.get(kind, kind), 0, rate, alpha, 'dev')
        tried[rate, alpha] = trials.measure(self.out, f'dev/{kind}/{rate:g}/{alpha:g}', 0, work)[
          'nAP@10'
        ]

    rates = list(RATES[kind])
    while True:
      for rate in rates:
        trial(rate, ALPHAS[0])
      best = max(tried, key=tried.get)[0]
      if best not in (rates[0], rates[-1]) or len(rates) == MOST:
        break
      if best == rates[0]:
        rates.insert(0, best / FACTOR)
      else:
        rates.append(best * FACTOR)
    for alpha in ALPHAS[1:]:
      trial(best, alpha)
    return max(tried, key=tried.get)

  def flags(self, name, seed, rate, alpha):
    """The command line of a training."""
    row = ROWS[name]
    options = [
      f'backbone.path={self.args.backbone}',
      'backbone.dtype=mixed',
      f'data.dir={self.papers}/train',
      'data.format=beir',
      'data.hold_out=0.0',
      f'data.token_cache={self.out}/token_cache',
      'data.passage_max_length=32',
      'data.query_buckets=(16,)',
      'data.passage_buckets=(32,)',
      'epochs=0.0',
      f'batch_size={self.args.batch}',
      f'steps={self.args.updates}',
      f'checkpoint.every={self.args.updates}',
      'log_every=10',
      f'seed={seed}',
      f'topics.alpha={alpha}',
      f'optim.learning_rate={rate}',
      *row.options,
    ]
    if row.topics:
      assert self.topics
      options += [f'topics.path={self.out}/topics.npz', 'topics.batch=0']
    if row.chosen == 'dpr':
      options.append("optim.learning_rate_rules=(('.*', 1.0),)")
    elif 'tuned' in row.recipe:
      factor = self.choose('dpr')[0] / rate
      options.append(f"optim.learning_rate_rules=(('backbone/.*', {factor!r}), ('.*', 1.0))")
    return [
      f'--config={ROOT}/configs/topic_dpr.py:{row.recipe}',
      *(f'--config.{option}' for option in options),
    ]

  def run(self, name, seed, rate, alpha, split):
    """Trains unless that is done, measures a split, and after the test forgets the checkpoint."""
    config = configs.parse(self.flags(name, seed, rate, alpha))
    workdir = self.out / 'runs' / f'{name}-{rate:g}-{alpha:g}-{seed}'
    began = time.monotonic()
    if not train.train(config, workdir).done:
      sys.exit('stopped; the same command goes on')
    trained = trials.restore(workdir, self.backbone, self.args.updates)
    vectors = self.encode(ROWS[name], config, trained, split)
    found = {'rate': rate, 'alpha': alpha, 'train_s': round(time.monotonic() - began)}
    if split == 'dev':
      # By the words of a title, since the topic of its document tells of the answer.
      way = 'infer' if 'infer' in vectors else 'plain'
      scores = topic_dpr_tables.ranking(vectors, way, self.documents(split))
      return found | {'nAP@10': float(scores['nAP@10'].mean())}
    shutil.rmtree(workdir / 'checkpoints')
    return found | {'scores': self.scores(vectors)}

  def scores(self, vectors):
    return topic_dpr_tables.scores(vectors, self.documents('test'), self.topics)

  def encode_bare(self):
    """all-MiniLM-L6-v2 as it is."""
    config = configs.parse(self.flags('dpr', 0, 1e-5, 0.1))
    return {'scores': self.scores(self.encode(ROWS['dpr'], config, {}, 'test'))}

  def rank_words(self):
    """BM25."""
    documents = self.documents('test')
    index = bm25_index.build(documents.ids, documents.abstracts)
    found = index.search(documents.titles, topic_dpr_tables.BEST)
    return {'scores': self.scores({'rows': found.rows, 'scores': found.scores})}

  def embedder(self, row, config):
    """Compiled once for all runs of a shape; its first argument is the parameters."""
    key = (row.recipe.split(',')[0], row.topics)
    if key not in self.embedders:
      model = topic_dpr.build(config, self.backbone.config, self.devices, self.tokenizer)

      def embed(params, *batch):
        return model.embed(tree.unflatten(params), 'passage', *batch)

      length = config.data.passage_max_length
      self.embedders[key] = model, Embedder(embed, self.devices, 64, length, self.tokenizer.pad_id)
    return self.embedders[key]

  def encode(self, row, config, trained, split):
    """Vectors of the abstracts of a split, and of its titles in each way.

    oracle: under the topic of the document; infer: under that of its own words.
    """
    documents = self.documents(split)
    found = self.topics if row.topics else None
    model, embedder = self.embedder(row, config)
    parts = Parts(self.backbone.params, text={'topics': found})
    params = place(self.devices, tree.flatten(model.init(parts, jax.random.key(0))) | trained)
    rows = {
      side: self.tokenizer.encode(some, length)[0]
      for side, some, length in (
        ('titles', documents.titles, config.data.query_max_length),
        ('abstracts', documents.abstracts, config.data.passage_max_length),
      )
    }

    def vectors(side, numbers):
      return embedder(params, rows[side], columns=(numbers,))

    if found is None:
      none = np.zeros(len(documents.ids), np.int32)
      return {'passages': vectors('abstracts', none), 'plain': vectors('titles', none)}
    if config.topics.random_words:
      draw = functools.partial(
        topic_dpr.random_words, found, self.tokenizer, config.topics.words, seed=config.seed
      )
      own = draw(documents.ids)
      # A title that does not know the words of its document draws others.
      others = draw([f'title of {id_}' for id_ in documents.ids])
      return {
        'passages': vectors('abstracts', own),
        'oracle': vectors('titles', own),
        'infer': vectors('titles', others),
      }
    if config.topics.random_topics:
      dealt = topic_dpr.random_topics(found, documents.ids, config.seed)
      return {
        'passages': vectors('abstracts', dealt),
        'oracle': vectors('titles', dealt),
        'dealt': dealt,
      }
    given = np.arange(len(found), dtype=np.int32)
    if config.topics.words:
      given = topic_dpr.word_tokens(found, self.tokenizer, config.topics.words)
    of_document, own = (found.assign(some) for some in (documents.abstracts, documents.titles))
    return {
      'passages': vectors('abstracts', given[of_document]),
      'oracle': vectors('titles', given[of_document]),
      'infer': vectors('titles', given[own]),
    }


if __name__ == '__main__':
  main()
