"""A prompt for queries alone against one for both sides, fine-tuning and a linear map.

    python experiments/query_only.py --data=../shared/data --out=runs/query-only

On SciFact, MedQuAD, Cranfield and titles of arXiv (1,000 of them to test on, which find their own
abstracts). All start from all-MiniLM-L6-v2 with the same updates of the same batches; each method
has three learning rates, of which the dev queries choose one with seed 0, and the best of three
checkpoints. The passages are encoded once for the methods that leave them as they are. Every run
leaves a line in OUT/ledger.jsonl and the measures of each test query in OUT/scores, and the same
command goes on where it stopped. `--part` names some of the sets; `--part=tables` makes the tables
of what is there (OUT/results.md), and with `--docs=docs` puts them into docs/results.md.
"""

import functools
import hashlib
import json
import pathlib
import shutil
import sys
import time
from typing import NamedTuple

import jax
import numpy as np

import trials
from dprjax.base import files
from dprjax.data import text
from dprjax.formats import papers, texts, trec
from dprjax.formats.qrels import read_qrels, write_qrels
from dprjax.inference import folders
from dprjax.inference.embedder import Embedder, place
from dprjax.inference.encoder import Encoder
from dprjax.methods import method as methods
from dprjax.methods import training
from dprjax.methods.method import Parts
from dprjax.models import hub
from dprjax.retrieval import embeddings, exact, measures
from dprjax.runtime import checkpoint, mesh, tree
from dprjax.runtime import config as configs

ROOT = pathlib.Path(__file__).resolve().parent.parent
MEASURES = ('nDCG@10', 'RR@10', 'R@100')
PROMPT_RATES = (2e-3, 7e-3, 2e-2)


def hashed(id_):
  """What decides the split of a query."""
  return hashlib.blake2b(id_.encode()).digest()


class Set(NamedTuple):
  """A data set: tokens of its queries and passages."""

  query_length: int
  passage_length: int


class Way(NamedTuple):
  """A method: its learning rates, whether passages change, and its knobs."""

  label: str
  rates: tuple[float, ...]
  both: bool
  knobs: tuple[str, ...]


PARTS = {
  'scifact': Set(64, 256),
  'medquad': Set(32, 64),
  'cranfield': Set(64, 256),
  'arxiv': Set(32, 256),
}
QUERY = ('prompt.sides=query', 'prompt.length=16')
WAYS = {
  'query': Way('a prompt for queries', PROMPT_RATES, False, QUERY),
  'corpus': Way(
    '+ the whole corpus as negatives', PROMPT_RATES, False, (*QUERY, 'corpus_negatives=-1')
  ),
  'linear': Way(
    "a linear map of the query's vector",
    (3e-4, 1e-3, 3e-3),
    False,
    (*QUERY, 'method=lab.linear_map', "trainable=('head/.*',)"),
  ),
  'both': Way('a prompt for both', PROMPT_RATES, True, ('prompt.length=16',)),
  'ft': Way(
    'fine-tuned whole',
    (1e-5, 2e-5, 5e-5),
    True,
    ('prompt.length=0', "trainable=('backbone/.*',)", 'optim.weight_decay=0.01'),
  ),
}


def main():
  parser = trials.parser(__doc__, PARTS, '0,1,2')
  parser.add_argument('--ways', default=','.join(WAYS), help='some methods, separated by commas')
  parser.add_argument('--updates', type=int, default=60, help='of a training; a multiple of 3')
  parser.add_argument('--batch', type=int, default=32, help='queries of an update')
  parser.add_argument('--rates', type=int, default=3, help='learning rates to try')
  parser.add_argument('--length', type=int, default=256, help='tokens of a passage, at most')
  parser.add_argument(
    '--passages', type=int, default=0, help='of a set, at most: judged ones first; 0: all'
  )
  args = trials.begin(parser, PARTS)
  experiment = Experiment(args)
  for part in args.part.split(','):
    if part in PARTS:
      experiment.make(part)
    experiment.tables(args.docs if part == 'tables' else None)


class Experiment:
  """All runs, each in its own folder, and what was measured of them."""

  def __init__(self, args):
    self.args = args
    self.out = pathlib.Path(args.out).resolve()
    names = ('backbone', 'updates', 'batch', 'rates', 'length', 'passages')
    trials.claim(self.out, {name: getattr(args, name) for name in names})
    self.source = pathlib.Path(args.data).resolve()
    self.backbone = hub.load_backbone(args.backbone)
    self.tokenizer = text.load_tokenizer(self.backbone.path)
    self.devices = mesh.make_mesh({'data': -1})
    self.seeds = [int(seed) for seed in args.seeds.split(',')]

  def make(self, name):
    """All runs of a set."""
    if not (self.out / 'data' / name / 'qrels' / 'test.tsv').exists():
      {'arxiv': self.make_arxiv}.get(name, self.split)(name)
    self.encode_passages(name)
    self.measure_frozen(name)
    for way in self.args.ways.split(','):
      rate = self.choose(name, way)
      for seed in self.seeds:
        self.run(name, way, rate, seed)
        self.test(name, way, rate, seed)

  def split(self, name):
    """A BEIR folder with judgements to train, to choose and to test on, by a hash of the query."""
    folder, source = self.out / 'data' / name, self.source / name
    (folder / 'qrels').mkdir(parents=True, exist_ok=True)
    found = {path.stem: read_qrels(path) for path in (source / 'qrels').glob('*.tsv')}
    if 'train' not in found:  # Cranfield: half of the queries to test on
      whole = found.pop('test')
      order = sorted(whole, key=hashed)
      half = len(order) // 2
      found['train'] = {query: whole[query] for query in order[:half]}
      found['test'] = {query: whole[query] for query in order[half:]}
    if 'dev' not in found:
      order = sorted(found['train'], key=hashed)
      fifth = len(order) // 5
      found['dev'] = {query: found['train'][query] for query in order[:fifth]}
      found['train'] = {query: found['train'][query] for query in order[fifth:]}
    judged = {doc for split in found.values() for docs in split.values() for doc in docs}
    self.write_corpus(folder, list(texts.read_corpus(source / 'corpus.jsonl')), judged)
    shutil.copyfile(source / 'queries.jsonl', folder / 'queries.jsonl')
    for split in ('train', 'dev', 'test'):
      write_qrels(folder / 'qrels' / f'{split}.tsv', found[split])

  def make_arxiv(self, name):
    """Titles that find their own abstracts: 3,000 to train on, 500 and 1,000."""
    folder = self.out / 'data' / name
    (folder / 'qrels').mkdir(parents=True, exist_ok=True)
    source = next((self.source / name).glob('*.jsonl*'))
    whole = sorted(
      (paper for paper in papers.read_papers(source) if paper.title and paper.passage),
      key=lambda paper: hashed(paper.id),
    )[:4500]
    entries = [(0, texts.Entry(paper.id, '', paper.passage)) for paper in whole]
    self.write_corpus(folder, entries, set())
    kept = {entry.id for _, entry in texts.read_corpus(folder / 'corpus.jsonl')}
    whole = [paper for paper in whole if paper.id in kept]
    with files.atomic_write(folder / 'queries.jsonl') as file:
      for paper in whole:
        file.write(json.dumps({'_id': paper.id, 'text': paper.title}) + '\n')
    borders = [0, *(len(whole) * part // 9 for part in (2, 3)), len(whole)]
    for split, start, stop in zip(('test', 'dev', 'train'), borders, borders[1:], strict=False):
      judged = {paper.id: {paper.id: 1} for paper in whole[start:stop]}
      write_qrels(folder / 'qrels' / f'{split}.tsv', judged)

  def write_corpus(self, folder, entries, judged):
    """All passages, or as many as --passages says, the judged ones first."""
    if limit := self.args.passages:
      entries = sorted(entries, key=lambda one: one[1].id not in judged)[:limit]
    with files.atomic_write(folder / 'corpus.jsonl') as file:
      for _, entry in entries:
        row = {'_id': entry.id, 'title': entry.title, 'text': entry.text}
        file.write(json.dumps(row) + '\n')

  def lengths(self, name):
    """Tokens of a query and of a passage."""
    lengths = PARTS[name]
    return lengths.query_length, min(lengths.passage_length, self.args.length)

  def encode_passages(self, name):
    """The bare backbone's, once for all methods that leave them as they are."""

    def work():
      began = time.monotonic()
      query_length, passage_length = self.lengths(name)
      encoder = Encoder.load(
        self.args.backbone,
        pooling='mean',
        normalize=True,
        query_max_length=query_length,
        passage_max_length=passage_length,
      )
      corpus = self.out / 'data' / name / 'corpus.jsonl'
      found = list(texts.read_texts(corpus, 'passage'))
      folders.fill_folder(
        encoder, 'passage', found, self.out / 'passages' / name, source=str(corpus)
      )
      return {'encode_s': time.monotonic() - began, 'passages': len(found)}

    return trials.once(self.out / 'runs' / f'{name}-passages' / 'done.json', work)

  def config(self, name, way, rate, seed):
    """What a run is trained with."""
    query_length, passage_length = self.lengths(name)
    knobs = [
      f'backbone.path={self.args.backbone}',
      f'data.dir={self.out}/data/{name}',
      f'data.store={self.out}/store/{name}',
      'data.dev_split=dev',
      'data.hold_out=0.0',
      f'data.query_max_length={query_length}',
      f'data.passage_max_length={passage_length}',
      f'batch_size={self.args.batch}',
      'epochs=0.0',
      f'steps={self.args.updates}',
      f'eval.every={self.args.updates // 3}',
      f'checkpoint.every={self.args.updates // 3}',
      'eval.corpus_limit=2000',
      f'optim.learning_rate={rate}',
      f'seed={seed}',
      *WAYS[way].knobs,
    ]
    if not WAYS[way].both:
      knobs.append(f'data.passage_embeddings={self.out}/passages/{name}')
    config = f'--config={ROOT}/configs/dptdr.py:beir'
    return configs.parse([config, *(f'--config.{knob}' for knob in knobs)])

  @functools.cache  # noqa: B019
  def choose(self, name, way):
    """The learning rate that is best on dev with the first seed."""
    rates = WAYS[way].rates[: self.args.rates]
    tried = {rate: self.run(name, way, rate, self.seeds[0])['best'] for rate in rates}
    return max(tried, key=tried.get)

  def workdir(self, name, way, rate, seed):
    return self.out / 'runs' / f'{name}-{way}-{rate:g}-{seed}'

  def run(self, name, way, rate, seed):
    """Trains, unless that was done; the best score on dev, and the time."""
    workdir = self.workdir(name, way, rate, seed)

    def work():
      began = time.monotonic()
      result = training.train(self.config(name, way, rate, seed), workdir / 'run')
      if not result.done:
        sys.exit('stopped; the same command goes on')
      return {'best': result.best, 'step': result.best_step, 'train_s': time.monotonic() - began}

    return trials.once(workdir / 'trained.json', work)

  def test(self, name, way, rate, seed):
    """Measures a run on the test split, and forgets its checkpoints."""
    workdir = self.workdir(name, way, rate, seed)

    def work():
      config = self.config(name, way, rate, seed)
      saved = checkpoint.Checkpoints(workdir / 'run', self.backbone.sha256, read_only=True)
      try:
        trained = saved.restore_trainable(saved.best())
      finally:
        saved.close()
      found = self.search(name, way, config, trained, f'{name}-{way}-{seed}')
      shutil.rmtree(workdir / 'run' / 'checkpoints')
      size = sum(leaf.nbytes for leaf in trained.values())
      ran = self.run(name, way, rate, seed)
      return found | {'set': name, 'way': way, 'rate': rate, 'bytes': size} | ran

    trials.measure(self.out, f'{name}-{way}', seed, work)

  def measure_frozen(self, name):
    """The backbone as it is."""

    def work():
      config = self.config(name, 'query', 0.0, 0)
      config.prompt.length = 0
      config.prompt.sides = 'both'
      return self.search(name, 'query', config, {}, f'{name}-frozen-0') | {
        'set': name,
        'way': 'frozen',
      }

    trials.measure(self.out, f'{name}-frozen', 0, work)

  def search(self, name, way, config, trained, key):
    """The test queries among all passages; keeps the measures of each query."""
    model = methods.load(config.method).build(config, self.backbone.config, self.devices, None)
    params = tree.flatten(model.init(Parts(self.backbone.params), jax.random.key(0))) | trained
    params = place(self.devices, params)
    folder = self.out / 'data' / name
    qrels = read_qrels(folder / 'qrels' / 'test.tsv')
    queries = [
      one for one in texts.read_texts(folder / 'queries.jsonl', 'query') if one.id in qrels
    ]

    def embed(kind, some):
      length = config.data[f'{kind}_max_length']
      rows = self.tokenizer.encode([one.text for one in some], length)[0]

      def run(params, *batch):
        return model.embed(tree.unflatten(params), kind, *batch)

      return Embedder(run, self.devices, 64, length, self.tokenizer.pad_id)(params, rows)

    began = time.monotonic()
    if WAYS[way].both:
      found = list(texts.read_texts(folder / 'corpus.jsonl', 'passage'))
      ids, passages = [one.id for one in found], embed('passage', found)
    else:
      stored = embeddings.load_embeddings(self.out / 'passages' / name)
      ids, passages = stored.ids, stored.vectors()
    seconds = time.monotonic() - began
    top = exact.search(embed('query', queries), passages, min(100, len(ids)))
    run = trec.run_from_rows([one.id for one in queries], ids, top.rows, top.scores)
    values = measures.measure(run, qrels, MEASURES)
    path = self.out / 'scores' / f'{key}.json'
    path.parent.mkdir(exist_ok=True)
    files.write_json(path, values['per_query'])
    return values['mean'] | {'reencode_s': seconds if WAYS[way].both else 0.0}

  def tables(self, docs):
    """Means and half ranges over the seeds so far."""
    lines = []
    ledger = self.out / 'ledger.jsonl'
    if ledger.exists():
      lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    made = ''
    for name in PARTS:
      rows = []
      for way in ('frozen', *WAYS):
        own = [line for line in lines if line.get('set') == name and line.get('way') == way]
        if not own:
          continue
        both = way in WAYS and WAYS[way].both
        passages = self.encode_passages(name)['passages']
        rows.append(
          [
            'frozen' if way == 'frozen' else WAYS[way].label,
            *(trials.cell(line[measure] for line in own) for measure in MEASURES),
            '' if way == 'frozen' else f'{own[0]["rate"]:g}',
            '' if way == 'frozen' else f'{np.mean([line["train_s"] for line in own]):.0f}',
            '' if way == 'frozen' else f'{own[0]["bytes"] / 1e3:,.0f} kB',
            f'{passages:,}, {own[0]["reencode_s"]:.0f} s' if both else 'none',
          ]
        )
      if rows:
        head = ['', *MEASURES, 'rate', 'training, s', 'trained', 'passages to embed again']
        once = self.encode_passages(name)
        made += (
          f'### {name}\n\n{trials.table(head, rows)}\n{once["passages"]:,} passages, encoded once '
          f'in {once["encode_s"]:.0f} s.\n\n'
        )
    (self.out / 'results.md').write_text(made)
    print(made)
    if docs:
      trials.publish(docs, 'query_only', made.rstrip() + '\n', [])


if __name__ == '__main__':
  main()
