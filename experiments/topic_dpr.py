"""Topic-DPR against its baselines on papers: the same positives, steps and measures for all.

    python experiments/topic_dpr.py --data=../shared/data --out=runs/topic-dpr

A sample of arXiv, by a hash of the id: 3,000 documents to train on, 500 to choose on, 1,000 whose
titles are the test queries and whose abstracts are the corpus. all-MiniLM-L6-v2, 60 updates of 32
documents. All runs are made in this process, in the order of `PARTS`; `--part` makes some of them.
Every run leaves its vectors in OUT/vectors and a line in OUT/ledger.jsonl, and the same command
goes on where it stopped. `--part=tables` makes tables, verdicts and figures of what is there
(OUT/results.md, OUT/*.png), and with `--docs=docs` puts them into docs/experiments/topic-dpr.md.

Verdicts follow rules that were fixed before the runs: the mean over seeds, a paired bootstrap over
test documents; a claim is *held* or *not* where the 95 % interval of the difference leaves out 0
and all seeds agree in its sign, else *undecided*.
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
from dprjax import papers as papers_command
from dprjax.base import files
from dprjax.data import text, topic_models
from dprjax.formats import paper_records, texts
from dprjax.inference.embedder import Embedder, place
from dprjax.methods import topic_dpr, training
from dprjax.methods.method import Parts
from dprjax.models import hub
from dprjax.retrieval import bm25_index
from dprjax.runtime import config as configs
from dprjax.runtime import mesh, tree

ROOT = pathlib.Path(__file__).resolve().parent.parent
RATES = {'topic': (1e-3, 5e-3), 'dptdr': (7e-3, 2e-2)}
WEIGHTS = ((0.1, 0.1), (0.3, 0.5))  # alpha and margin
TUNED_RATE = 2e-5  # of the backbone
BEST = 101  # passages ranked for a query: 100 without its own

PARTS = {
  'frozen': ('minilm', 'bm25', 'sweep', 'dptdr', 'one', 'topic'),
  'own': ('own',),
  'tuned': ('dpr', 'dptdr-tuned', 'topic-tuned'),
  'words': ('words', 'random-words'),
  'without': ('without-tt',),
  'single': ('random-topics', 'ten', 'lda'),
}


class Row(NamedTuple):
  """A kind of run.

  Attributes:
    recipe: of configs/topic_dpr.py.
    chosen: whose rate, alpha and margin it has.
    options: others of its own.
    topics: its file of topics.
    seeds: at most so many.
    steps: whether each third of the training is measured too.
  """

  recipe: str
  chosen: str
  options: tuple[str, ...] = ()
  topics: str = ''
  seeds: int = 3
  steps: bool = False


ROWS = {
  'dptdr': Row('dptdr', 'dptdr', steps=True),
  'one': Row('topic', 'topic', ('topics.keep=1',), 'hlda', steps=True),
  'topic': Row('topic', 'topic', (), 'hlda', steps=True),
  'own': Row('topic', 'topic', ('topics.query=own',), 'hlda'),
  'dpr': Row('dpr', 'dptdr', steps=True),
  'dptdr-tuned': Row('dptdr,tuned', 'dptdr', steps=True),
  'topic-tuned': Row('topic,tuned', 'topic', (), 'hlda', steps=True),
  'words': Row('words', 'dptdr', (), 'hlda', 2),
  'random-words': Row('random_words', 'dptdr', (), 'hlda', 2),
  'without-tt': Row('topic', 'topic', ('topics.topic_topic=False',), 'hlda'),
  'random-topics': Row('topic', 'topic', ('topics.random_topics=True',), 'hlda', 1),
  'ten': Row('topic', 'topic', (), 'ten', 1),
  'lda': Row('topic', 'topic', (), 'lda', 1),
}
TOPICS = {
  'hlda': topic_models.TopicSettings(),
  'lda': topic_models.TopicSettings(kind='lda'),
  # Ten topics need a larger gamma.
  'ten': topic_models.TopicSettings(topics=10, gamma=10.0),
}


def main():
  parser = trials.parser(__doc__, PARTS, '0,1,2')
  parser.add_argument('--updates', type=int, default=60, help='of a training; a multiple of 3')
  parser.add_argument('--train', type=int, default=3000, help='documents to train on')
  parser.add_argument('--dev', type=int, default=500, help='documents to choose on')
  parser.add_argument('--test', type=int, default=1000, help='documents to measure on')
  args = trials.begin(parser, PARTS)
  experiment = Experiment(args)
  for part in args.part.split(','):
    for name in PARTS.get(part, ()):
      experiment.make(name)
    experiment.tables(maps=part == 'tables')


class Documents(NamedTuple):
  """Papers of a split, which are its queries and its corpus."""

  ids: list[str]
  titles: list[str]
  abstracts: list[str]
  categories: list[tuple[str, ...]]


class Experiment:
  """All runs, each in its own folder, and what was measured of them."""

  def __init__(self, args):
    self.args = args
    self.seeds = [int(seed) for seed in args.seeds.split(',')]
    self.out = pathlib.Path(args.out).resolve()
    names = ('backbone', 'updates', 'train', 'dev', 'test')
    settings = {name: getattr(args, name) for name in names}
    trials.claim(self.out, settings)
    source = gain_sets.only(pathlib.Path(args.data).resolve() / 'arxiv', '*.jsonl*')
    self.papers = self.out / 'papers'
    if not self.papers.exists():
      sizes = {name: settings[name] for name in ('train', 'dev', 'test')}
      papers_command.convert(str(source), str(self.papers), sizes)
    self.backbone = hub.load_backbone(args.backbone)
    self.tokenizer = text.load_tokenizer(self.backbone.path)
    self.devices = mesh.make_mesh({'data': -1})
    self.embedders = {}

  @functools.cache  # noqa: B019
  def documents(self, split):
    folder = self.papers / split
    found = list(paper_records.read_papers(folder / 'corpus.jsonl'))
    titles = {query.id: query.text for query in texts.read_texts(folder / 'queries.jsonl', 'query')}
    return Documents(
      [paper.id for paper in found],
      [titles[paper.id] for paper in found],
      [paper.passage for paper in found],
      [paper.categories for paper in found],
    )

  @functools.cache  # noqa: B019
  def topics(self, kind):
    """Topics of the training documents."""
    path = self.out / f'topics-{kind}.npz'
    if not path.exists():
      fitted = topic_models.fit(
        topic_models.choose(self.documents('train').abstracts), TOPICS[kind]
      )
      trials.say(
        f'{path}: sizes {fitted.all_sizes}, agreement {fitted.agreement:.3f}; '
        + '; '.join(' '.join(words[:4]) for words in fitted.topics.names)
      )
      topic_models.save_topics(path, fitted.topics)
    return topic_models.load_topics(path)

  def make(self, name):
    """All runs of a name."""
    if name == 'sweep':
      for kind in RATES:
        self.choose(kind)
    elif name == 'minilm':
      self.measure('minilm', 0, lambda folder: self.encode_bare('minilm-0'))
    elif name == 'bm25':
      self.measure('bm25', 0, lambda folder: self.rank_words('bm25-0'))
    else:
      for seed in self.seeds[: ROWS[name].seeds]:
        settings = self.choose(ROWS[name].chosen)
        self.run(name, ROWS[name], seed, settings)

  @functools.cache  # noqa: B019
  def choose(self, kind):
    """The rate, then alpha and margin, that are best on dev; seed 0, three trials each."""
    tried = {}

    def trial(rate, weights):
      settings = {'rate': rate, 'alpha': weights[0], 'margin': weights[1]}
      name = f'dev-{kind}-{rate:g}-{weights[0]:g}'
      self.run(name, ROWS[kind]._replace(steps=False), 0, settings, split='dev')
      scores = self.scores(f'{name}-0', 'dev', self.args.updates)
      # Its own topic, since its document's tells of the answer.
      way = 'infer' if kind == 'topic' else 'plain'
      tried[rate, weights] = float(scores[f'{way}/counted/nAP@10'].mean())

    for rate in RATES[kind]:
      trial(rate, WEIGHTS[0])
    best = max(tried, key=tried.get)[0]
    for weights in WEIGHTS[1:]:
      trial(best, weights)
    rate, weights = max(tried, key=tried.get)
    chosen = {'rate': rate, 'alpha': weights[0], 'margin': weights[1]}
    found = [
      {'rate': rate, 'alpha': w[0], 'margin': w[1], 'nAP@10': value}
      for (rate, w), value in tried.items()
    ]
    files.write_json(self.out / f'chosen-{kind}.json', {'chosen': chosen, 'tried': found})
    return chosen

  def flags(self, row, seed, settings):
    """What a run of a row is trained with."""
    tuned = row.recipe in ('dpr', 'words', 'random_words') or 'tuned' in row.recipe
    prompted = row.recipe.startswith(('topic', 'dptdr'))
    options = [
      f'backbone.path={self.args.backbone}',
      f'data.dir={self.papers}/train',
      'data.format=beir',
      'data.hold_out=0.0',
      f'data.token_cache={self.out}/token_cache',
      'data.query_buckets=(16,)',
      'data.passage_buckets=(48,)',
      'epochs=0.0',
      f'steps={self.args.updates}',
      f'checkpoint.every={self.args.updates // 3}',
      'checkpoint.keep=3',
      'log_every=10',
      f'seed={seed}',
      f'topics.alpha={settings["alpha"]}',
      f'topics.margin={settings["margin"]}',
      *row.options,
    ]
    if prompted:
      options.append(f'optim.learning_rate={settings["rate"]}')
      if tuned:
        factor = TUNED_RATE / settings['rate']
        options.append(f"optim.learning_rate_rules=(('backbone/.*', {factor!r}), ('.*', 1.0))")
    if row.topics:
      self.topics(row.topics)
      options.append(f'topics.path={self.out}/topics-{row.topics}.npz')
    return [
      f'--config={ROOT}/configs/topic_dpr.py:{row.recipe}',
      *(f'--config.{option}' for option in options),
    ]

  def run(self, name, row, seed, settings, split='test'):
    """Trains, encodes a split, and forgets the checkpoints."""

    def work(workdir):
      config = configs.parse(self.flags(row, seed, settings))
      began = time.monotonic()
      if not training.train(config, workdir).done:
        sys.exit('stopped; the same command goes on')
      trained_s = time.monotonic() - began
      last = self.args.updates
      for step in [last // 3, last * 2 // 3, last] if row.steps else [last]:
        trained = trials.restore(workdir, self.backbone, step)
        self.encode(f'{name}-{seed}', row, config, trained, split, step, step == last)
      shutil.rmtree(workdir / 'checkpoints')
      return {
        'train_s': round(trained_s),
        'encode_s': round(time.monotonic() - began - trained_s),
        'config': [flag.replace(str(self.out), 'OUT') for flag in self.flags(row, seed, settings)],
      }

    self.measure(name, seed, work)

  def measure(self, name, seed, work):
    """``work`` unless it was done, and a line of the ledger."""
    folder = self.out / 'runs' / f'{name}-{seed}'
    trials.measure(self.out, name, seed, functools.partial(work, folder))

  def encode_bare(self, run):
    """all-MiniLM-L6-v2 as it is."""
    row = ROWS['dpr']
    config = configs.parse(self.flags(row, 0, {'alpha': 0.1, 'margin': 0.1, 'rate': 0}))
    self.encode(run, row, config, {}, 'test', 0, True)

  def rank_words(self, run):
    """BM25."""
    documents = self.documents('test')
    found = bm25_index.build(documents.ids, documents.abstracts).search(documents.titles, BEST)
    self.save(run, 'test', 0, {'rows': found.rows, 'scores': found.scores})

  def embedder(self, row, config, found):
    """Compiled once for all runs of a shape; its first argument is the parameters."""
    count = 0 if found is None else len(found)
    key = (row.recipe.split(',')[0], count, config.prompt.length, config.topics.words)
    if key not in self.embedders:
      model = topic_dpr.build(config, self.backbone.config, self.devices, self.tokenizer)

      def embed(params, *batch):
        return model.embed(tree.unflatten(params), 'passage', *batch)

      embedder = Embedder(embed, self.devices, 64, 48, self.tokenizer.pad_id)
      self.embedders[key] = model, embedder
    return self.embedders[key]

  def encode(self, run, row, config, trained, split, step, whole):
    """Vectors of a split's abstracts and titles; these under all that may choose their topic.

    oracle: the document's topic; infer: the title's own; all: every topic, where it is whole.
    """
    documents = self.documents(split)
    found = None
    if row.topics:
      found = topic_dpr.keep(self.topics(row.topics), config.topics.keep)
    model, embedder = self.embedder(row, config, found)
    parts = Parts(self.backbone.params, text={'topics': found})
    params = tree.flatten(model.init(parts, jax.random.key(0))) | trained
    params = place(self.devices, params)
    rows = {
      side: self.tokenizer.encode(some, length)[0]
      for side, some, length in (
        ('titles', documents.titles, config.data.query_max_length),
        ('abstracts', documents.abstracts, config.data.passage_max_length),
      )
    }

    def vectors(side, numbers):
      return embedder(params, rows[side], columns=(numbers,))

    none = np.zeros(len(documents.ids), np.int32)
    if found is None or (len(found) == 1 and not config.topics.words):
      kept = {'passages': vectors('abstracts', none), 'plain': vectors('titles', none)}
    elif config.topics.random_words:
      draw = functools.partial(
        topic_dpr.random_words, found, self.tokenizer, config.topics.words, seed=config.seed
      )
      own = draw(documents.ids)
      # A title that does not know its document's words draws others.
      others = draw([f'title of {id_}' for id_ in documents.ids])
      kept = {
        'passages': vectors('abstracts', own),
        'oracle': vectors('titles', own),
        'infer': vectors('titles', others),
      }
    else:
      of_document = found.assign(documents.abstracts)
      own = found.assign(documents.titles)
      if config.topics.random_topics:
        of_document = topic_dpr.random_topics(found, documents.ids, config.seed)
        own = of_document
      given = np.arange(len(found), dtype=np.int32)
      if config.topics.words:
        given = topic_dpr.word_tokens(found, self.tokenizer, config.topics.words)
      kept = {'passages': vectors('abstracts', given[of_document]), 'topics': of_document}
      kept['oracle'] = vectors('titles', given[of_document])
      if whole and split == 'test' and not config.topics.words:
        each = [vectors('titles', np.broadcast_to(given[k], len(own))) for k in given]
        kept['all'] = np.stack(each)
        kept['infer'] = kept['all'][own, np.arange(len(own))]
      else:
        # Most have the topic of their document.
        other = np.flatnonzero(own != of_document)
        kept['infer'] = kept['oracle'].copy()
        if len(other):
          kept['infer'][other] = embedder(
            params, [rows['titles'][i] for i in other], columns=(given[own][other],)
          )
    self.save(run, split, step, kept)

  def save(self, run, split, step, arrays):
    path = self.out / 'vectors' / f'{run}-{split}-{step}.npz'
    path.parent.mkdir(exist_ok=True)
    with files.atomic_write(path, 'wb') as file:
      np.savez(file, **arrays)

  def scores(self, run, split, step):
    """Measures of each query, by way and with the own abstract counted or left out."""
    documents = self.documents(split)
    return topic_dpr_tables.scores(self.out, f'{run}-{split}-{step}', documents, BEST)

  def tables(self, maps):
    """Of what there is; t-SNE takes minutes."""
    trials.say('tables')
    topic_dpr_tables.write(
      self.out,
      self.documents('test'),
      self.topics('hlda'),
      self.args.updates,
      self.args.docs if maps else None,
      maps,
    )


if __name__ == '__main__':
  main()
