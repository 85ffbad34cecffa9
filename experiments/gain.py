"""What a prompt gains by default, in many settings: many and few queries, good and bad labels.

    python experiments/gain.py --data=../shared/data --out=runs/gain

All start from all-MiniLM-L6-v2. A setting (experiments/gain_sets.py) is a BEIR folder with training
and test judgements. On each, over seeds:

- BM25, and the encoder as it is;
- the recipes `dptdr.py:beir,query`, a prompt for queries alone, and `dptdr.py:beir,both`, one for
  both sides; and `dptdr.py:beir`, which trains both and takes the one that is better on held-out
  queries: its rows are made of theirs;
- the recipe as it was before: a prompt for both sides at a lower rate;
- fine-tuning, and a linear map of the query's vector: the best of three learning rates each on
  held-out training queries (with the first seed), trained until that score no longer rises.

The recipes find their number of updates as they do for anyone: on held-out training queries or by
cross-validation. Where a recipe says that nothing was gained, its user keeps the encoder as it is;
so does the table, which counts these runs. (Fine-tuning and the linear map are what they are, also
where they lose.) Every run leaves a line in OUT/ledger.jsonl, and the
same command goes on where it stopped, on another machine too (experiments/ledgers/gain.jsonl).
`--part` names some settings, `--ways` some systems, or variants of the recipe with one thing
changed (`--ways=free,batch`; they are made only where they are named, and have their own table).
`--part=tables` makes tables and figures of what is there, and with `--docs=docs` puts them into
docs/results.md and keeps the ledger.

Verdicts follow the rules of trials.py, over all settings and their test queries.
"""

import collections
import functools
import pathlib
import shutil
import sys
import time
from typing import NamedTuple

import numpy as np

import evaluation
import gain_sets
import trials
from dprjax.analysis import figures
from dprjax.data import text
from dprjax.methods import training
from dprjax.models import hub
from dprjax.runtime import config as configs
from dprjax.runtime import mesh

KEPT = trials.LEDGERS / 'gain.jsonl'
QUERY_LENGTH = 64  # tokens, as in the recipes


class Way(NamedTuple):
  """A system.

  Attributes:
    label: in the tables.
    recipe: of configs/.
    rates: learning rates, of which held-out queries choose; (): the recipe's own.
    knobs: what differs from the recipe.
    both: whether it changes passages too.
    keeps: when a user keeps the encoder as it is: where `train` says that nothing was gained
      ('chance'), where no checkpoint was above it ('never above'), or ''.
  """

  label: str
  recipe: str
  rates: tuple[float, ...] = ()
  knobs: tuple[str, ...] = ()
  both: bool = True
  keeps: str = 'chance'


# Trained until the score on held-out queries has not risen for two evaluations.
TUNED = (
  'data.folds=0',
  'data.hold_out=0.2',
  'batch_size=16',
  'epochs=0.0',
  'steps=300',
  'eval.every=25',
  'eval.patience=2',
  'interpolate=1.0',
)
CHOSEN = 'new'  # of the two that follow
WAYS = {
  CHOSEN: Way(':beir', 'dptdr.py:beir'),
  'query': Way(':beir,query', 'dptdr.py:beir,query', both=False),
  'both': Way(':beir,both', 'dptdr.py:beir,both'),
  'old': Way(
    ':beir before',
    'dptdr.py:beir,both',
    knobs=(
      'optim.learning_rate=7e-3',
      'prompt.dropout=0.0',
      'ema=0.0',
      'interpolate=1.0',
      'data.hold_out=0.1',
      'data.folds=5',
      'data.folds_below=200',
      'eval.epochs=1.0',
    ),
    keeps='never above',
  ),
  'ft': Way(
    'fine-tuned',
    'dptdr.py:beir,both',
    (2e-5, 5e-5, 1e-4),
    (
      *TUNED,
      'prompt.length=0',
      "trainable=('backbone/.*',)",
      'optim.weight_decay=0.01',
    ),
    keeps='',
  ),
  'linear': Way(
    'a linear map',
    'dptdr.py:beir,query',
    (3e-4, 1e-3, 3e-3),
    (*TUNED, 'method=lab.linear_map', "trainable=('head/.*',)", 'prompt.anchor=0.0'),
    both=False,
    keeps='',
  ),
}
# The recipe for queries with one thing changed, each: what the parts are for. (Negatives of the
# batch are those of a larger batch, too.)
CHANGED = {
  'rate=0.007': ('optim.learning_rate=7e-3',),
  'rate=0.03': ('optim.learning_rate=3e-2',),
  'rate=0.3': ('optim.learning_rate=0.3',),
  'length=4': ('prompt.length=4',),
  'length=64': ('prompt.length=64',),
  'batch': ('corpus_negatives=0', 'batch_size=32'),
  'free': ('prompt.anchor=0.0',),
  'anchor=2': ('prompt.anchor=2.0',),
  'vectors': ("prompt.anchor_to='vectors'", 'prompt.anchor=3.0'),
  'dropout=0': ('prompt.dropout=0.0',),
  'ema=0': ('ema=0.0',),
  'interpolate=1': ('interpolate=1.0',),
  'interpolate=0.5': ('interpolate=0.5',),
  'temperature=0.02': ('temperature=0.02',),
}
LABELS = {
  'batch': 'negatives of the batch (32 queries)',
  'free': 'no trust region',
  'vectors': 'trust region of vectors, 3',
}
VARIANTS = {
  way: Way(LABELS.get(way, way), 'dptdr.py:beir,query', knobs=knobs, both=False)
  for way, knobs in CHANGED.items()
}
EVERY = WAYS | VARIANTS
TRAINED = [way for way in WAYS if way != CHOSEN]
FLOORS = {'bm25': 'BM25', 'frozen': 'frozen'}
CLAIMS = (
  ('the recipe gains', 'new', 'frozen'),
  ('the recipe above the one before', 'new', 'old'),
  ('the better of two above a prompt for queries', 'new', 'query'),
  ('the better of two above a prompt for both sides', 'new', 'both'),
  ('a prompt for queries above one for both sides', 'query', 'both'),
  ('fine-tuning above the recipe', 'ft', 'new'),
  ('fine-tuning above a prompt for both sides', 'ft', 'both'),
  ('a linear map above the recipe', 'linear', 'new'),
)
CURVES = ('medquad', 'docstrings')  # sources that have settings of many sizes


def main():
  parser = trials.parser(__doc__, gain_sets.SETTINGS, '0,1,2')
  parser.add_argument('--ways', default=','.join(TRAINED), help='some systems, separated by commas')
  parser.add_argument('--length', type=int, default=64, help='tokens of a passage, at most')
  parser.add_argument(
    '--dtype', default='auto', help='of the arithmetic; mixed: faster on processors with AMX'
  )
  args = trials.begin(parser, gain_sets.SETTINGS)
  experiment = Experiment(args)
  for part in args.part.split(','):
    if part in gain_sets.SETTINGS:
      experiment.make(part)
    experiment.tables(args.docs if part == 'tables' else None)


class Experiment:
  """All runs, each in its own folder, and what was measured of them."""

  def __init__(self, args):
    self.args = args
    self.out = pathlib.Path(args.out).resolve()
    self.settings = {name: getattr(args, name) for name in ('backbone', 'length', 'dtype')}
    trials.claim(self.out, self.settings)
    trials.take_up(self.out, KEPT, self.settings)
    self.source = pathlib.Path(args.data).resolve()
    self.backbone = hub.load_backbone(args.backbone)
    self.tokenizer = text.load_tokenizer(self.backbone.path)
    self.devices = mesh.make_mesh({'data': -1})
    self.seeds = [int(seed) for seed in args.seeds.split(',')]

  def make(self, name):
    """All runs of a setting."""
    folder = self.folder(name)
    self.passages(name)
    source = gain_sets.SETTINGS[name].source
    trials.measure(self.out, f'{source}/bm25', 0, lambda: evaluation.search_words(folder))
    trials.measure(self.out, f'{source}/frozen', 0, lambda: self.search(name, 'query', 0, 0, {}))
    for way in self.args.ways.split(','):
      rate = self.choose(name, way)
      for seed in self.seeds:
        self.test(name, way, rate, seed)

  def folder(self, name):
    return gain_sets.prepare(self.source, self.out / 'data', name)

  def passages(self, name):
    """The folder of a source's passages under the bare backbone, which all its settings share."""
    source = gain_sets.SETTINGS[name].source
    out = self.out / 'passages' / source
    trials.once(
      self.out / 'passages' / f'{source}.json',
      lambda: evaluation.encode_passages(
        self.args.backbone, self.folder(name), out, QUERY_LENGTH, self.args.length
      ),
    )
    return out

  def config(self, name, way, rate, seed):
    """What a run is trained with."""
    knobs = [
      f'backbone.path={self.args.backbone}',
      f'backbone.dtype={self.args.dtype}',
      'backbone.unroll=0',
      f'data.dir={self.folder(name)}',
      f'data.query_max_length={QUERY_LENGTH}',
      f'data.passage_max_length={self.args.length}',
      f'seed={seed}',
      *EVERY[way].knobs,
    ]
    if rate:
      knobs.append(f'optim.learning_rate={rate}')
    if not EVERY[way].both:
      knobs.append(f'data.passage_embeddings={self.passages(name)}')
    config = f'--config={trials.ROOT}/configs/{EVERY[way].recipe}'
    return configs.parse([config, *(f'--config.{knob}' for knob in knobs)])

  @functools.cache  # noqa: B019
  def choose(self, name, way):
    """The learning rate that is best on held-out queries with the first seed; 0: the recipe's."""
    seed = self.seeds[0]
    tried = {rate: self.run(name, way, rate, seed)['best'] for rate in EVERY[way].rates}
    return max(tried, key=tried.get) if tried else 0

  def workdir(self, name, way, rate, seed):
    return self.out / 'runs' / f'{name}-{way}-{rate:g}-{seed}'

  def run(self, name, way, rate, seed):
    """Trains, unless that was done: the steps, and the gain on held-out queries."""
    workdir = self.workdir(name, way, rate, seed)

    def work():
      began = time.monotonic()
      result = training.train(self.config(name, way, rate, seed), workdir)
      if not result.done:
        sys.exit('stopped; the same command goes on')
      return {
        'best': result.best,
        'step': result.best_step or result.step,
        'gain': result.gain.difference,
        'better': result.gain.better,
        'train_s': round(time.monotonic() - began),
      }

    return trials.measure(self.out, f'{name}/{way}@{rate:g}', seed, work)

  def test(self, name, way, rate, seed):
    """Measures a run on the test queries, and forgets its workdir."""
    workdir = self.workdir(name, way, rate, seed)

    def work():
      ran = self.run(name, way, rate, seed)
      trials.check_here(self.out, ran, workdir)
      trained = trials.restore(workdir, self.backbone, ran['step'])
      found = self.search(name, way, rate, seed, trained)
      shutil.rmtree(workdir)
      return found | {
        'rate': rate,
        'bytes': sum(leaf.nbytes for leaf in trained.values()),
        **{key: ran[key] for key in ('step', 'gain', 'better', 'train_s')},
      }

    return trials.measure(self.out, f'{name}/{way}', seed, work)

  def search(self, name, way, rate, seed, trained):
    """The test queries among all passages; without trained parameters, by the encoder as it is."""
    config = self.config(name, way, rate, seed)
    if not trained:
      config.prompt.length, config.prompt.sides, config.prompt.anchor = 0, 'both', 0.0
    return evaluation.search(
      self.backbone,
      self.tokenizer,
      self.devices,
      config,
      trained,
      self.folder(name),
      None if EVERY[way].both else self.passages(name),
    )

  def tables(self, docs):
    """The tables, the verdicts and the figures of what is there."""
    found = self.found()
    names = [name for name in gain_sets.SETTINGS if name in found]
    if not names:
      return
    made = self.scores(found, names) + self.unseen(found, names) + self.variants(found, names)
    made += self.verdicts(found, names)
    lines = trials.ledger(self.out)
    commits = ', '.join(dict.fromkeys(line['commit'] for line in lines))
    made += f'\n{len(lines)} runs; commit {commits}.\n'
    (self.out / 'results.md').write_text(made)
    print(made)
    drawn = self.draw(found, names)
    if docs:
      trials.publish(docs, 'gain', made, drawn)
      trials.keep(self.out, KEPT, self.settings)

  def found(self):
    """{setting: {system: {seed: line}}}; those that nothing trains have all seeds."""
    found = collections.defaultdict(lambda: collections.defaultdict(dict))
    for line in trials.ledger(self.out):
      name, _, way = line['run'].partition('/')
      if way in EVERY:
        found[name][way][line['seed']] = line
    for line in trials.ledger(self.out):
      source, _, way = line['run'].partition('/')
      if way in FLOORS:
        for name, systems in found.items():
          if gain_sets.SETTINGS[name].source == source:
            systems[way] = dict.fromkeys(self.seeds, line)
    for systems in found.values():
      for seed in sorted(systems['query'].keys() & systems['both'].keys()):
        # As methods/alternatives.py chooses; the encoder as it is has one score for both.
        systems[CHOSEN][seed] = max(
          (systems[way][seed] for way in ('both', 'query')),
          key=lambda line: (line['better'], line['gain']),
        )
    return found

  def used(self, found, name, way, seed):
    """nDCG@10 of each test query, of what a user would use: see the module's docstring."""
    line = found[name][way][seed]
    if self.kept(way, line):
      line = found[name]['frozen'][seed]
    return np.array(line['scores']['nDCG@10'])

  def kept(self, way, line):
    """Whether a user keeps the encoder as it is."""
    keeps = EVERY[way].keeps if way in EVERY else ''
    return (keeps == 'chance' and not line['better']) or (
      keeps == 'never above' and line['gain'] <= 0
    )

  def mean(self, found, name, way):
    """The mean of each seed."""
    return [self.used(found, name, way, seed).mean() for seed in sorted(found[name][way])]

  def scores(self, found, names):
    """All settings and systems."""
    systems = [*FLOORS, *WAYS]
    rows, gains = [], collections.defaultdict(list)
    for name in names:
      row = [name, f'{len(found[name]["frozen"][self.seeds[0]]["scores"]["nDCG@10"])}']
      for way in systems:
        if not found[name][way]:
          row.append('')
          continue
        values = self.mean(found, name, way)
        kept = sum(self.kept(way, line) for line in found[name][way].values())
        row.append(
          (f'{values[0]:.3f}' if way in FLOORS else trials.cell(values))
          + (f' ({kept} kept)' if kept else '')
        )
        gains[way].append(np.mean(values) - np.mean(self.mean(found, name, 'frozen')))
      rows.append(row)
    whole = {way: values for way, values in gains.items() if len(values) == len(names)}
    for label, of in (('mean gain', np.mean), ('smallest gain', np.min)):
      rows.append(
        [label, '', *(f'{of(whole[way]):+.3f}' if way in whole else '' for way in systems)]
      )
    labels = {**FLOORS, **{key: way.label for key, way in WAYS.items()}}
    head = ['setting', 'test queries', *(labels[way] for way in systems)]
    return f'### nDCG@10\n\n{trials.table(head, rows)}\n' + self.costs(found, names)

  def variants(self, found, names):
    """The recipe for queries with one thing changed: its gain less that recipe's, by seeds."""
    rows = []
    for way, one in VARIANTS.items():
      row, differences = [one.label], []
      for name in names:
        seeds = sorted(found[name][way].keys() & found[name]['query'].keys())
        ours, theirs = (
          [self.used(found, name, key, seed).mean() for seed in seeds] for key in (way, 'query')
        )
        row.append(f'{np.mean(ours) - np.mean(theirs):+.3f}' if seeds else '')
        differences += [np.mean(ours) - np.mean(theirs)] if seeds else []
      if differences:
        rows.append([*row, f'{np.mean(differences):+.3f}'])
    if not rows:
      return ''
    made = trials.table([':beir,query with', *names, 'mean'], rows)
    return f'### One thing changed\n\nDifferences from `:beir,query` in nDCG@10.\n\n{made}\n'

  def costs(self, found, names):
    """Learning rate, updates, seconds and bytes of each system: medians over settings and seeds."""
    rows = []
    for way in TRAINED:
      one = WAYS[way]
      lines = [line for name in names for line in found[name][way].values()]
      if lines:
        rates = collections.Counter(f'{line["rate"]:g}' for line in lines)
        rows.append(
          [
            one.label,
            ', '.join(f'{rate} ({count})' for rate, count in rates.items()) if one.rates else '',
            f'{np.median([line["step"] for line in lines]):.0f}',
            f'{np.median([line["train_s"] for line in lines]):.0f}',
            f'{lines[0]["bytes"] / 1e3:,.0f} kB',
            f'{np.median([line["reencode_s"] for line in lines]):.0f}' if one.both else 'none',
          ]
        )
    head = ['', 'rate (runs)', 'updates', 'a training, s', 'trained', 'passages again, s']
    return f'{trials.table(head, rows)}\n'

  def unseen(self, found, names):
    """Of the settings whose test queries have answers of both kinds."""
    rows = []
    systems = ['frozen', *WAYS]
    for name in names:
      unseen = evaluation.unseen(self.folder(name))
      if not 0 < unseen.sum() < len(unseen):
        continue
      for label, some in (('seen', ~unseen), ('not seen', unseen)):
        row = [name, f'{label} ({some.sum()})']
        for way in systems:
          seeds = sorted(found[name][way])
          values = [self.used(found, name, way, seed)[some].mean() for seed in seeds]
          row.append(trials.cell(values[:1] if way == 'frozen' else values))
        rows.append(row)
    if not rows:
      return ''
    head = ['setting', 'answers', 'frozen', *(way.label for way in WAYS.values())]
    return f'### Answers that training queries have\n\n{trials.table(head, rows)}\n'

  def verdicts(self, found, names):
    """Of all settings that have both systems with all seeds."""
    rows = []
    for claim, ours, theirs in CLAIMS:
      both = [
        name
        for name in names
        if all(seed in found[name][way] for way in (ours, theirs) for seed in self.seeds)
      ]
      if both:
        systems = (
          {seed: {name: self.used(found, name, way, seed) for name in both} for seed in self.seeds}
          for way in (ours, theirs)
        )
        rows.append([claim, f'{len(both)}', trials.shown(trials.compare(*systems, both))])
    head = ['claim', 'settings', 'difference in nDCG@10, interval, verdict']
    return f'### Verdicts\n\n{trials.table(head, rows)}' if rows else ''

  def draw(self, found, names):
    """Gains with their intervals, and learning curves."""
    gains = collections.defaultdict(dict)
    for name in names:
      for way, one in WAYS.items():
        if seeds := sorted(found[name][way]):
          systems = (
            {seed: {name: self.used(found, name, key, seed)} for seed in seeds}
            for key in (way, 'frozen')
          )
          mean, low, high, _ = trials.compare(*systems, [name])
          gains[name][one.label] = figures.Bar(mean, low, high, False)
    foot = 'whiskers: 95 % intervals by bootstrap over test queries'
    drawn = [self.out / 'gain.png', self.out / 'gain-curves.png']
    figures.differences(gains, 'gain in nDCG@10 over the frozen encoder', foot, drawn[0])
    curves = {}
    for source in CURVES:
      lines = {}
      for one in WAYS.values():
        points = [
          (setting.train, gains[name][one.label].mean)
          for name, setting in gain_sets.SETTINGS.items()
          if setting.source == source and not setting.degraded and one.label in gains[name]
        ]
        if points:
          lines[one.label] = points
      if lines:
        curves[f'gain in nDCG@10 on {source}'] = lines
    if curves:
      count = len(self.seeds)
      foot = 'one seed' if count == 1 else f'means of {count} seeds'
      figures.paths(curves, 'training queries', foot, drawn[1])
    return drawn


if __name__ == '__main__':
  main()
