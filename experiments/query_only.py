"""A prompt for queries alone against one for both sides, fine-tuning and a linear map.

    python experiments/query_only.py --data=../shared/data --out=runs/query-only

On SciFact, MedQuAD, Cranfield and titles of arXiv, which find their own abstracts. All start from
all-MiniLM-L6-v2 and see the same batches. Each method has three learning rates, of which dev
queries choose one with seed 0, and is trained until its dev nDCG@10 no longer rises (at the next of
the scores, every 25 updates); its best checkpoint is tested. The passages are encoded once for the
methods that leave them as they are. Every run leaves a line in OUT/ledger.jsonl, with the score of
each test query, and the same command goes on where it stopped, on another machine too: runs of the
same settings in experiments/ledgers/query_only.jsonl are taken over. `--part` names some of the
sets; `--part=tables` makes the tables of what is there (OUT/results.md), and with `--docs=docs`
puts them into docs/results.md and keeps the ledger.

Verdicts follow rules that were fixed before the runs: the mean over seeds, averaged over the sets,
with a paired bootstrap over each set's queries; a claim is *held* or *not* where the 95 % interval
of the difference leaves out 0 and all seeds agree in its sign, else *undecided*.
"""

import collections
import functools
import json
import pathlib
import shutil
import sys
import time
from typing import NamedTuple

import numpy as np

import evaluation
import gain_sets
import trials
from dprjax.base import files
from dprjax.data import text
from dprjax.formats import papers, texts
from dprjax.formats.qrels import read_qrels, write_qrels
from dprjax.methods import training
from dprjax.models import hub
from dprjax.runtime import config as configs
from dprjax.runtime import mesh

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROMPT_RATES = (2e-3, 7e-3, 2e-2)


class Set(NamedTuple):
  """A data set: tokens of its queries and passages, and at most how many queries of each split."""

  query_length: int
  passage_length: int
  train: int = 1500
  dev: int = 200
  test: int = 500


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
CHOSEN_BY = 40  # queries, at least, of which a learning rate is chosen
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


# What is claimed: the first above the second.
CLAIMS = (
  ('a prompt for queries gains', 'query', 'frozen'),
  ('a prompt for queries above a linear map', 'query', 'linear'),
  ('a prompt for both above one for queries', 'both', 'query'),
  ('fine-tuning above a prompt for queries', 'ft', 'query'),
  ('fine-tuning above a prompt for both', 'ft', 'both'),
  ('the whole corpus as negatives helps', 'corpus', 'query'),
)
KEPT = trials.LEDGERS / 'query_only.jsonl'


def main():
  parser = trials.parser(__doc__, PARTS, '0,1')
  parser.add_argument('--ways', default=','.join(WAYS), help='some methods, separated by commas')
  parser.add_argument('--updates', type=int, default=150, help='of a training, at most')
  parser.add_argument('--every', type=int, default=25, help='updates between two scores on dev')
  parser.add_argument('--batch', type=int, default=16, help='queries of an update')
  parser.add_argument('--rates', type=int, default=3, help='learning rates to try')
  parser.add_argument('--length', type=int, default=64, help='tokens of a passage, at most')
  parser.add_argument('--passages', type=int, default=2000, help='of a set, but all judged ones')
  parser.add_argument(
    '--dtype', default='auto', help='of the arithmetic; mixed: faster on processors with AMX'
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
    names = 'backbone', 'updates', 'every', 'batch', 'rates', 'length', 'passages', 'dtype'
    self.settings = {name: getattr(args, name) for name in names}
    trials.claim(self.out, self.settings)
    trials.take_up(self.out, KEPT, self.settings)
    self.source = pathlib.Path(args.data).resolve()
    self.backbone = hub.load_backbone(args.backbone)
    self.tokenizer = text.load_tokenizer(self.backbone.path)
    self.devices = mesh.make_mesh({'data': -1})
    self.seeds = [int(seed) for seed in args.seeds.split(',')]

  def make(self, name):
    """All runs of a set."""
    self.prepare(name)
    self.encode_passages(name)
    self.measure_frozen(name)
    for way in self.args.ways.split(','):
      rate = self.choose(name, way)
      for seed in self.seeds:
        self.run(name, way, rate, seed)
        self.test(name, way, rate, seed)

  def prepare(self, name):
    """The data set, unless it was made."""
    if not (self.out / 'data' / name / 'qrels' / 'test.tsv').exists():
      {'arxiv': self.make_arxiv}.get(name, self.split)(name)

  def split(self, name):
    """A BEIR folder with judgements to train, to choose and to test on, by a hash of the query.

    A passage counts as judged where one of these queries finds it.
    """
    folder, source = self.out / 'data' / name, self.source / name
    (folder / 'qrels').mkdir(parents=True, exist_ok=True)
    found = {path.stem: read_qrels(path) for path in (source / 'qrels').glob('*.tsv')}
    if 'train' not in found:  # Cranfield: half of the queries to test on
      whole = found.pop('test')
      order = sorted(whole, key=gain_sets.hashed)
      half = len(order) // 2
      found['train'] = {query: whole[query] for query in order[:half]}
      found['test'] = {query: whole[query] for query in order[half:]}
    if 'dev' not in found:
      order = sorted(found['train'], key=gain_sets.hashed)
      part = max(len(order) // 5, CHOSEN_BY)
      found['dev'] = {query: found['train'][query] for query in order[:part]}
      found['train'] = {query: found['train'][query] for query in order[part:]}
    for split in ('train', 'dev', 'test'):
      order = sorted(found[split], key=gain_sets.hashed)[: getattr(PARTS[name], split)]
      found[split] = {query: found[split][query] for query in order}
    judged = {doc for split in found.values() for docs in split.values() for doc in docs}
    self.write_corpus(folder, list(texts.read_corpus(source / 'corpus.jsonl')), judged)
    shutil.copyfile(source / 'queries.jsonl', folder / 'queries.jsonl')
    for split in ('train', 'dev', 'test'):
      write_qrels(folder / 'qrels' / f'{split}.tsv', found[split])

  def make_arxiv(self, name):
    """Titles that find their own abstracts: two ninths to test on, one to choose by."""
    folder = self.out / 'data' / name
    (folder / 'qrels').mkdir(parents=True, exist_ok=True)
    source = next((self.source / name).glob('*.jsonl*'))
    whole = sorted(
      (paper for paper in papers.read_papers(source) if paper.title and paper.passage),
      key=lambda paper: gain_sets.hashed(paper.id),
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
    """The judged passages, and others up to --passages of them all."""
    entries = sorted(entries, key=lambda one: one[1].id not in judged)
    entries = entries[: max(self.args.passages, len(judged))]
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
    return trials.once(
      self.out / 'runs' / f'{name}-passages' / 'done.json',
      lambda: evaluation.encode_passages(
        self.args.backbone,
        self.out / 'data' / name,
        self.out / 'passages' / name,
        *self.lengths(name),
      ),
    )

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
      f'eval.every={self.args.every}',
      'eval.patience=1',
      f'checkpoint.every={self.args.every}',
      'eval.corpus_limit=500',
      f'backbone.dtype={self.args.dtype}',
      f'optim.learning_rate={rate}',
      f'seed={seed}',
      'prompt.dropout=0.0',
      'ema=0.0',
      'shrink=0.0',
      *WAYS[way].knobs,
    ]
    if not WAYS[way].both:
      knobs.append(f'data.passage_embeddings={self.out}/passages/{name}')
    config = f'--config={ROOT}/configs/dptdr.py:beir,both'
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
      return {
        'best': result.best,
        'best_step': result.best_step,
        'steps': result.step,
        'train_s': round(time.monotonic() - began),
      }

    return trials.measure(self.out, f'{name}-{way}@{rate:g}', seed, work)

  def test(self, name, way, rate, seed):
    """Measures a run on the test split, and forgets its checkpoints."""
    workdir = self.workdir(name, way, rate, seed)

    def work():
      ran = self.run(name, way, rate, seed)
      trials.check_here(self.out, ran, workdir)
      trained = trials.restore(workdir / 'run', self.backbone, ran['best_step'])
      found = self.search(name, way, self.config(name, way, rate, seed), trained)
      shutil.rmtree(workdir / 'run' / 'checkpoints')
      return found | {
        'set': name,
        'way': way,
        'rate': rate,
        'bytes': sum(leaf.nbytes for leaf in trained.values()),
        **{key: ran[key] for key in ('best', 'best_step', 'steps', 'train_s')},
      }

    trials.measure(self.out, f'{name}-{way}', seed, work)

  def measure_frozen(self, name):
    """The backbone as it is."""

    def work():
      config = self.config(name, 'query', 0.0, 0)
      config.prompt.length = 0
      config.prompt.sides = 'both'
      return self.search(name, 'query', config, {}) | {'set': name, 'way': 'frozen'}

    trials.measure(self.out, f'{name}-frozen', 0, work)

  def search(self, name, way, config, trained):
    """The test queries among all passages: means, and nDCG@10 of each query."""
    return evaluation.search(
      self.backbone,
      self.tokenizer,
      self.devices,
      config,
      trained,
      self.out / 'data' / name,
      None if WAYS[way].both else self.out / 'passages' / name,
    )

  def tables(self, docs):
    """Means and half ranges over the seeds so far, and verdicts."""
    lines = [line for line in trials.ledger(self.out) if 'scores' in line]
    made = ''
    for name in PARTS:
      if any(line['set'] == name for line in lines):
        self.prepare(name)
      rows = [
        self.row(name, way, own)
        for way in ('frozen', *WAYS)
        if (own := [line for line in lines if (line['set'], line['way']) == (name, way)])
      ]
      if rows:
        head = ['', *evaluation.MEASURES, 'nDCG@10, answers not seen']
        head += ['rate', 'queries seen', 'training, s', 'trained', 'encoded again']
        unseen = self.unseen(name)
        once = self.encode_passages(name)
        made += (
          f'### {name}\n\n{trials.table(head, rows)}\n{len(unseen):,} queries to test on, '
          f'{sum(unseen):,} of them with answers that answer no training query; '
          f'{once["passages"]:,} passages, encoded once in {once["encode_s"]:.0f} s.\n\n'
        )
    made += self.verdicts(lines)
    commits = ', '.join(dict.fromkeys(line['commit'] for line in trials.ledger(self.out)))
    made += f'\n{len(trials.ledger(self.out))} runs; commit {commits}.\n'
    (self.out / 'results.md').write_text(made)
    print(made)
    if docs:
      trials.publish(docs, 'query_only', made, [])
      trials.keep(self.out, KEPT, self.settings)

  def unseen(self, name):
    """Of each test query, whether its answers are none of the training queries'."""
    return evaluation.unseen(self.out / 'data' / name)

  def row(self, name, way, own):
    """A line of a set's table, of the lines of its seeds."""
    measured = [trials.cell(line[measure] for line in own) for measure in evaluation.MEASURES]
    unseen = self.unseen(name)
    if unseen.any():
      scores = [np.array(line['scores']['nDCG@10'])[unseen].mean() for line in own]
      measured.append(trials.cell(scores))
    else:
      measured.append('')
    if way == 'frozen':
      return ['frozen', *measured, '', '', '', '', '']
    # A score that still rose at the last update would rise on.
    rising = any(line['best_step'] == self.args.updates for line in own)
    seen = ', '.join(f'{line["best_step"] * self.args.batch:,}' for line in own)
    return [
      WAYS[way].label,
      *measured,
      f'{own[0]["rate"]:g}',
      seen + (', rising' if rising else ''),
      f'{np.mean([line["train_s"] for line in own]):.0f}',
      f'{own[0]["bytes"] / 1e3:,.0f} kB',
      f'all, {own[0]["reencode_s"]:.0f} s' if WAYS[way].both else 'none',
    ]

  def verdicts(self, lines):
    """Of all sets together that have both systems."""
    found = collections.defaultdict(lambda: collections.defaultdict(dict))
    for line in lines:
      for seed in self.seeds if line['way'] == 'frozen' else [line['seed']]:
        found[line['way']][seed][line['set']] = np.array(line['scores']['nDCG@10'])
    rows = []
    for claim, ours, theirs in CLAIMS:
      names = [
        name
        for name in PARTS
        if all(name in found[way][seed] for way in (ours, theirs) for seed in self.seeds)
      ]
      if names:
        said = trials.compare(found[ours], found[theirs], names)
        rows.append([claim, ', '.join(names), trials.shown(said)])
    head = ['claim', 'sets', 'difference in nDCG@10, interval, verdict']
    return '### Verdicts\n\n' + trials.table(head, rows) if rows else ''


if __name__ == '__main__':
  main()
