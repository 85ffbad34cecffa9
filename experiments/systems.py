"""Shared by experiments that train systems on settings: learning rates, seeds, scores of queries.

A system (`Way`) is a recipe with options and learning rates; held-out queries choose one rate with
the first seed. A setting (`gain_sets.Setting`) is a BEIR folder. `Runs` trains every system on
every setting with every seed and measures each test query; every finished run is a line of
OUT/ledger.jsonl.
"""

import collections
import functools
import json
import pathlib
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

import charts
import evaluation
import gain_sets
import trials
from dprjax.base import mesh
from dprjax.exports import exporting
from dprjax.models import hub
from dprjax.retrieval import figures
from dprjax.text import tokenizing
from dprjax.training import config as configs
from dprjax.training import train as training

QUERY_LENGTH = 64  # tokens, as in the recipes
FLOORS = {'bm25': 'BM25', 'frozen': 'frozen'}  # systems without a training

BATCH = 16
GAINED = 'gain in nDCG@10 over the frozen encoder'
# Options of a training until the score on held-out queries has not risen for two evaluations.
TUNED = (
  'data.folds=0',
  'data.hold_out=0.2',
  f'batch_size={BATCH}',
  'epochs=0.0',
  'steps=300',
  'eval.every=25',
  'eval.patience=2',
  'weight_interpolation=0.0',
)
# A prompt as in DPTDR, and the whole encoder in its place.
PLAIN = (*TUNED, 'prompt.dropout=0.0', 'ema=0.0')
FINE_TUNED = ('prompt.length=0', "trainable=('backbone/.*',)", 'optim.weight_decay=0.01')


class Way(NamedTuple):
  """A system.

  Attributes:
    label: in the tables.
    recipe: of configs/.
    rates: learning rates for held-out queries to choose from; (): that of the recipe.
    options: differences from the recipe.
    both: whether it changes passages too.
    keeps: when a user keeps the frozen encoder: if `train` says that nothing was gained ('chance'),
      if no checkpoint was above it ('never above'), or ''.
    start: its backbone, by the name in the experiment; '': --backbone.
    trained: whether it is trained before it is measured.
  """

  label: str
  recipe: str
  rates: tuple[float, ...] = ()
  options: tuple[str, ...] = ()
  both: bool = True
  keeps: str = 'chance'
  start: str = ''
  trained: bool = True


load = functools.cache(hub.load_backbone)


# Of every encoder here, whatever its folder says.
ENCODER = ('pooling=mean', 'normalize=True', 'data.query_prefix=', 'data.passage_prefix=')


def parser(doc, settings, seeds, ways):
  """A parser with the flags of every such experiment."""
  made = trials.parser(doc, settings, seeds)
  made.add_argument('--ways', default=','.join(ways), help='some systems, separated by commas')
  made.add_argument('--length', type=int, default=64, help='tokens of a passage, at most')
  made.add_argument(
    '--dtype', default='auto', help='of the arithmetic; mixed: faster on processors with AMX'
  )
  made.add_argument(
    '--again',
    action='store_true',
    help='repeat also runs that the project keeps (experiments/ledgers), and compare',
  )
  return made


def parse(recipe, options):
  """The config of a recipe of configs/, or of a config file elsewhere, with options."""
  path = trials.ROOT / 'configs' / recipe
  encoder = ENCODER if recipe.startswith('dptdr.py:beir') else ()
  options = ['eval.skip_saturated=False', *encoder, *options]  # each is measured
  return configs.parse([f'--config={path}', *(f'--config.{option}' for option in options)])


def train(config, workdir):
  """The result of a training; exits where it was stopped."""
  result = training.train(config, workdir)
  if not result.done:
    sys.exit('stopped; the same command goes on')
  return result


def pretrain(out, run, seed, config, folder):
  """Pretrains and exports to ``folder``; the line has the losses, means over the last tenth."""
  workdir = out / 'runs' / folder.stem

  def work():
    train(config, workdir)
    rows = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
    last = [row for row in rows if row['step'] > 0.9 * rows[-1]['step']]
    names = [name for name in ('mlm', 'condenser', 'contrast', 'accuracy') if name in last[-1]]
    exporting.export(workdir, folder)
    return {
      'passages': config.batch_size,
      **{name: float(np.mean([row[name] for row in last])) for name in names},
    }

  # Its result is gone, or is on another machine: it runs again.
  with trials.changing(out):
    others = [one for one in trials.ledger(out) if (one['run'], one['seed']) != (run, seed)]
    trials.write_ledger(out / trials.LEDGER, others)
  trials.measure(out, run, seed, work)
  shutil.rmtree(workdir)


class Runs:
  """All runs, each in its own folder, and their measurements.

  Attributes:
    name: of the experiment.
    sets: the settings, by name.
    ways: the systems, by name.
    columns: those of the tables, including systems that are combined from others.
    claims: (claim, system, the one that it is above).
    title: of the figure.
    fixed: settings shared by all runs of an OUT: arguments of the command.
  """

  name: str
  sets: Mapping[str, gain_sets.Setting]
  ways: Mapping[str, Way]
  columns: Sequence[str]
  claims: Sequence[tuple[str, str, str]]
  title: str = ''
  fixed: Sequence[str] = ('backbone', 'length', 'dtype')

  def __init__(self, args):
    self.args = args
    self.out = pathlib.Path(args.out).resolve()
    self.settings = {name: getattr(args, name) for name in self.fixed}
    trials.claim(self.out, self.settings)
    if not args.again:
      trials.take_up(self.out, self.ledger, self.settings)
    self.source = pathlib.Path(args.data).resolve()
    self.seeds = [int(seed) for seed in args.seeds.split(',')]

  @functools.cached_property
  def devices(self):
    return mesh.make_mesh({'data': -1})

  def go(self):
    """Runs the parts of the command line, and shows the tables after each."""
    for part in self.args.part.split(','):
      if part in self.sets:
        self.make(part)
        if self.args.again:
          trials.compare_kept(self.out, self.ledger)
      self.tables(self.args.docs if part == 'tables' else None)

  @property
  def ledger(self):
    """The ledger that the project keeps."""
    return trials.LEDGERS / f'{self.name}.jsonl'

  def tables(self, docs):
    """Prints tables of all finished runs; with ``docs``, writes them there and keeps the ledger."""
    found = self.found()
    names = [name for name in self.sets if name in found]
    if not names:
      return
    lines = trials.ledger(self.out)
    commits = ', '.join(dict.fromkeys(line['commit'] for line in lines))
    made = self.page(found, names) + f'\n{len(lines)} runs; commit {commits}.\n'
    trials.write(self.out / 'results.md', made)
    print(made)
    drawn = self.draw(found, names)
    if docs:
      short = f'{self.short(found, names)}\n{len(lines)} runs.\n'
      trials.publish(docs, self.name, short, drawn)
      trials.keep(self.out, self.ledger, self.settings)

  def page(self, found, names):
    """The tables and verdicts."""
    return self.scores(found, names) + self.verdicts(found, names)

  def short(self, found, names):
    """The part of `page` that docs/experiments has."""
    return self.page(found, names)

  def draw(self, found, names):
    """Paths of the figures: gains with their intervals."""
    drawn = self.out / f'{self.name.replace("_", "-")}.png'
    foot = '95 % intervals over seeds and test queries'
    gains = self.gains(found, names)
    if not any(gains.values()):
      return []
    charts.differences(gains, GAINED, foot, drawn, self.title)
    return [drawn]

  def gains(self, found, names):
    """{setting: {label: bar}} over the frozen encoder."""
    gains = collections.defaultdict(dict)
    for name in names:
      for way in self.columns:
        if seeds := sorted(found[name][way]):
          pair = (
            {seed: {name: self.used(found, name, key, seed)} for seed in seeds}
            for key in (way, 'frozen')
          )
          mean, low, high, _ = trials.compare(*pair, [name])
          gains[name][self.ways[way].label] = figures.Bar(mean, low, high, False)
    return gains

  def make(self, name):
    """All runs of a setting."""
    folder, source = self.folder(name), self.sets[name].source
    self.passages(name)
    trials.measure(self.out, f'{source}/bm25', 0, lambda: evaluation.search_words(folder))
    trials.measure(self.out, f'{source}/frozen', 0, lambda: self.search(name, None, 0, 0, {}))
    self.train(name, self.args.ways.split(','))

  def train(self, name, ways):
    """The runs of some systems on a setting."""
    for way in ways:
      rate = self.choose(name, way)
      for seed in self.seeds:
        self.test(name, way, rate, seed)

  def backbone(self, way, seed):
    """The folder or name of the backbone of a system."""
    del way, seed
    return self.args.backbone

  def more_options(self, name, way, seed):
    """Further options of a system on a setting, from the experiment."""
    del name, way, seed
    return ()

  def folder(self, name):
    return gain_sets.prepare(self.source, self.out / 'data', name, self.sets[name])

  def lengths(self, name):
    """Tokens of a query and of a passage, at most."""
    del name
    return QUERY_LENGTH, self.args.length

  def passages(self, name):
    """The folder of passages of a source under the bare backbone, shared by all its settings."""
    source = self.sets[name].source
    out = self.out / 'passages' / source
    trials.once(
      self.out / 'passages' / f'{source}.json',
      lambda: evaluation.encode_passages(
        self.args.backbone, self.folder(name), out, *self.lengths(name)
      ),
    )
    return out

  def config(self, name, way, rate, seed):
    """The config of a run; that of the bare backbone without a system."""
    one = self.ways[way] if way else Way('', 'dptdr.py:beir,both', options=('prompt.length=0',))
    query_length, passage_length = self.lengths(name)
    options = [
      f'backbone.path={self.backbone(way, seed)}',
      f'backbone.dtype={self.args.dtype}',
      'backbone.unroll=0',
      f'data.dir={self.folder(name)}',
      f'data.query_max_length={query_length}',
      f'data.passage_max_length={passage_length}',
      f'seed={seed}',
      *one.options,
      *(self.more_options(name, way, seed) if way else ()),
    ]
    if rate:
      options.append(f'optim.learning_rate={rate}')
    if not one.both:
      options.append(f'data.passage_embeddings={self.passages(name)}')
    return parse(one.recipe, options)

  @functools.cache  # noqa: B019
  def choose(self, name, way):
    """The best learning rate on held-out queries with the first seed; 0: that of the recipe."""
    seed = self.seeds[0]
    tried = {rate: self.run(name, way, rate, seed)['best'] for rate in self.ways[way].rates}
    return max(tried, key=tried.get) if tried else 0

  def workdir(self, name, way, rate, seed):
    return self.out / 'runs' / f'{name}-{way}-{rate:g}-{seed}'

  def run(self, name, way, rate, seed):
    """Trains, unless that was done: the steps, and the gain on held-out queries."""
    workdir = self.workdir(name, way, rate, seed)

    def work():
      began = time.monotonic()
      result = train(self.config(name, way, rate, seed), workdir)
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
      if not self.ways[way].trained:
        return self.search(name, way, rate, seed, {})
      ran = self.run(name, way, rate, seed)
      trials.check_here(self.out, ran, workdir)
      trained = trials.restore(workdir, load(self.backbone(way, seed)), ran['step'])
      found = self.search(name, way, rate, seed, trained)
      shutil.rmtree(workdir)
      return found | {
        'rate': rate,
        'bytes': sum(leaf.nbytes for leaf in trained.values()),
        **{key: ran[key] for key in ('step', 'gain', 'better', 'train_s')},
      }

    return trials.measure(self.out, f'{name}/{way}', seed, work)

  def search(self, name, way, rate, seed, trained):
    """The test queries among all passages."""
    backbone = load(self.backbone(way, seed))
    return evaluation.search(
      backbone,
      tokenizing.load_tokenizer(backbone.path),
      self.devices,
      self.config(name, way, rate, seed),
      trained,
      self.folder(name),
      None if way and self.ways[way].both else self.passages(name),
    )

  def found(self):
    """{setting: {system: {seed: line}}}; systems without a training have all seeds."""
    found = collections.defaultdict(lambda: collections.defaultdict(dict))
    lines = trials.ledger(self.out)
    seeds = {*self.seeds, *(line['seed'] for line in lines)}
    for line in lines:
      name, _, way = line['run'].partition('/')
      if name in self.sets and way in self.ways:
        found[name][way][line['seed']] = line
    for line in lines:
      source, _, way = line['run'].partition('/')
      if way in FLOORS:
        for name, systems in found.items():
          if self.sets[name].source == source:
            systems[way] = dict.fromkeys(seeds, line)
    return found

  def used(self, found, name, way, seed):
    """nDCG@10, or the measure of the setting, of each test query.

    The model is the one that a user would use, see `Way.keeps`.
    """
    kept = self.kept(way, found[name][way][seed])
    return self.own(found, name, 'frozen' if kept else way, seed)

  def own(self, found, name, way, seed):
    """The same for the trained model, also if nobody would use it."""
    return np.array(next(iter(found[name][way][seed]['scores'].values())))

  def kept(self, way, line):
    """Whether a user keeps the frozen encoder."""
    keeps = self.ways[way].keeps if way in self.ways else ''
    return (keeps == 'chance' and not line['better']) or (
      keeps == 'never above' and line['gain'] <= 0
    )

  def mean(self, found, name, way):
    """The mean of each seed."""
    return [self.used(found, name, way, seed).mean() for seed in sorted(found[name][way])]

  def scores(self, found, names):
    """All settings and systems."""
    systems = [*FLOORS, *self.columns]
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
    for label, of in (('mean gain (settings)', np.mean), ('smallest gain', np.min)):
      count = label.endswith(')')
      shown = {
        way: f'{of(values):+.3f}' + (f' ({len(values)})' if count else '')
        for way, values in gains.items()
      }
      rows.append([label, '', *(shown.get(way, '') for way in systems)])
    labels = {**FLOORS, **{way: self.ways[way].label for way in self.columns}}
    head = ['setting', 'test queries', *(labels[way] for way in systems)]
    return f'## nDCG@10\n\n{trials.table(head, rows)}\n' + self.costs(found, names)

  def costs(self, found, names):
    """Learning rate, updates, seconds and bytes of each system: medians over settings and seeds."""
    rows = []
    for way in self.columns:
      one = self.ways[way]
      lines = [line for name in names for line in found[name][way].values()]
      if lines and lines[0]['run'].endswith(f'/{way}'):
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

  def verdicts(self, found, names):
    """The verdict over all settings that have both systems with all seeds."""
    rows = []
    for claim, ours, theirs in self.claims:
      both = self.settled(found, names, ours, theirs)
      if both:
        verdict = trials.shown(self.difference(found, names, ours, theirs))
        rows.append([claim, f'{len(both)}', verdict])
    head = ['claim', 'settings', 'difference in nDCG@10, interval, verdict']
    return f'## Verdicts\n\n{trials.table(head, rows)}' if rows else ''

  def settled(self, found, names, *ways):
    """The settings that have all these systems with all seeds."""
    return [
      name for name in names if all(seed in found[name][way] for way in ways for seed in self.seeds)
    ]

  def difference(self, found, names, ours, theirs):
    """The verdict of trials.py on the first system being above the second; None without runs."""
    both = self.settled(found, names, ours, theirs)
    return trials.compare(*self.pair(found, both, ours, theirs), both) if both else None

  def pair(self, found, names, ours, theirs):
    """{seed: {setting: scores}} of both systems, with all seeds that both have on all settings."""
    seeds = set.intersection(*(set(found[name][way]) for name in names for way in (ours, theirs)))
    return [
      {seed: {name: self.used(found, name, way, seed) for name in names} for seed in sorted(seeds)}
      for way in (ours, theirs)
    ]
