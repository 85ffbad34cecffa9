"""The gain of a prompt by default, in many settings: many and few queries, good and bad labels.

    python experiments/gain.py --data=../shared/data --out=runs/gain

All start from all-MiniLM-L6-v2. A setting (experiments/gain_sets.py) is a BEIR folder with training
and test judgements. These systems are measured on each, over seeds:

- BM25, and the frozen encoder
- the recipe `dptdr.py:beir,query`: a prompt for queries only
- the recipe `dptdr.py:beir,both`: a prompt for both sides
- the recipe `dptdr.py:beir`: trains both prompts and takes the one that is better on held-out
  queries; its rows come from the runs of the two
- the earlier recipe: a prompt for both sides at a lower rate
- fine-tuning, and a linear map of query vectors: the best of three learning rates each on held-out
  training queries (with the first seed), trained until that score no longer rises

The recipes find their number of updates as usual: on held-out training queries or by
cross-validation. Where a recipe says that nothing was gained, its user keeps the frozen encoder; so
does the table, which counts these runs. Fine-tuning and the linear map keep their scores, also
losses.

Every run leaves a line in OUT/ledger.jsonl, and the same command continues where it stopped, on
another machine too (experiments/ledgers/gain.jsonl). `--part` names some settings. `--ways` names
some systems, or variants of a recipe with one thing changed (`--ways=free,batch`), which run only
if named and have their own table. `--part=tables` makes tables and figures of all finished runs;
with `--docs=docs` it puts them into docs/experiments/gain.md and keeps the ledger.

Verdicts follow the rules of trials.py, over all settings and their test queries.
"""

import numpy as np

import charts
import evaluation
import gain_sets
import mining
import systems
import trials

CHOSEN = 'new'  # of the two that follow
WAYS = {
  CHOSEN: systems.Way(':beir', 'dptdr.py:beir'),
  'query': systems.Way(':beir,query', 'dptdr.py:beir,query', both=False),
  'both': systems.Way(':beir,both', 'dptdr.py:beir,both'),
  'old': systems.Way(
    ':beir before',
    'dptdr.py:beir,both',
    options=(
      'optim.learning_rate=7e-3',
      'prompt.dropout=0.0',
      'ema=0.0',
      'weight_interpolation=0.0',
      'data.hold_out=0.1',
      'data.folds=5',
      'data.folds_below=200',
      'eval.epochs=1.0',
    ),
    keeps='never above',
  ),
  'ft': systems.Way(
    'fine-tuned',
    'dptdr.py:beir,both',
    (2e-5, 5e-5, 1e-4),
    (*systems.TUNED, *systems.FINE_TUNED),
    keeps='',
  ),
  'linear': systems.Way(
    'a linear map',
    'dptdr.py:beir,query',
    (3e-4, 1e-3, 3e-3),
    (
      *systems.TUNED,
      'method=lab.linear_map',
      "trainable=('head/.*',)",
      'prompt.regularization=0.0',
    ),
    both=False,
    keeps='',
  ),
}
# Recipes with one thing changed each, which show the effect of the parts. (The recipe for queries
# with negatives of the batch also has a larger batch.)
CHANGED = {
  'query': {
    'rate=0.007': ('optim.learning_rate=7e-3',),
    'rate=0.03': ('optim.learning_rate=3e-2',),
    'rate=0.3': ('optim.learning_rate=0.3',),
    'length=4': ('prompt.length=4',),
    'length=64': ('prompt.length=64',),
    'batch': ('corpus_negatives=0', 'batch_size=32'),
    'margin': ('method=lab.margin',),
    'free': ('prompt.regularization=0.0',),
    'anchor=2': ('prompt.regularization=2.0',),
    'vectors': ("prompt.regularization_on='vectors'", 'prompt.regularization=3.0'),
    'dropout=0': ('prompt.dropout=0.0',),
    'ema=0': ('ema=0.0',),
    'shrink=0': ('weight_interpolation=0.0',),
    'shrink=200': ('weight_interpolation=200.0',),
    'temperature=0.02': ('temperature=0.02',),
    'learnt': (
      'method=lab.learnt_temperature',
      "trainable=('(prompt|head)/.*',)",
      "optim.learning_rate_rules=(('head/.*', 0.1), ('.*', 1.0))",
    ),
  },
  'both': {
    'untied': ('prompt.tied=False',),
    'mined': ('negatives=1',),
  },
}
LABELS = {
  'anchor=2': 'regularization of 2',
  'shrink=0': 'no weight interpolation',
  'shrink=200': 'weight interpolation of 200',
  'batch': 'negatives of the batch (32 queries)',
  'margin': 'no negatives that the frozen encoder ranks above the positive',
  'free': 'no regularization',
  'vectors': 'regularization of vectors, 3',
  'learnt': 'a learnt temperature',
  'untied': 'a prompt each for queries and passages',
  'mined': 'a negative of BM25 for each query',
  'gains': 'gains of LayerNorm in place of the prompt',
}
# The recipe of each variant.
BASES = {way: base for base, changed in CHANGED.items() for way in changed} | {'gains': 'query'}
VARIANTS = {
  way: systems.Way(LABELS.get(way, way), WAYS[base].recipe, options=options, both=WAYS[base].both)
  for base, changed in CHANGED.items()
  for way, options in changed.items()
} | {
  'gains': systems.Way(
    LABELS['gains'],
    'dptdr.py:beir,query',
    (1e-3, 3e-3, 1e-2),
    (
      *systems.TUNED,
      'method=lab.linear_map',
      "trainable=('backbone/.*norm/scale',)",
      'prompt.regularization=0.0',
    ),
    both=False,
    keeps='',
  )
}
TRAINED = [way for way in WAYS if way != CHOSEN]
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
DRAWN = {  # labels of the tables and of the figures
  WAYS[CHOSEN].label: 'prompt',
  WAYS['ft'].label: 'fine-tuning',
  WAYS['linear'].label: 'linear map',
}


def parser():
  return systems.parser(__doc__, gain_sets.SETTINGS, '0,1,2', TRAINED)


def main():
  Experiment(trials.begin(parser(), gain_sets.SETTINGS)).go()


class Experiment(systems.Runs):
  """Prompts by default, and the systems that they are compared with."""

  name = 'gain'
  sets = gain_sets.SETTINGS
  ways = WAYS | VARIANTS
  columns = tuple(WAYS)
  claims = CLAIMS
  title = 'Prompts gain nearly as much as fine-tuning, and lose on no setting'

  def page(self, found, names):
    made = self.scores(found, names) + self.unseen(found, names) + self.variants(found, names)
    return made + self.verdicts(found, names) + self.share(found, names)

  def short(self, found, names):
    made = self.scores(found, names) + self.variants(found, names, means=True)
    return made + self.verdicts(found, names) + self.share(found, names)

  def share(self, found, names):
    """The mean gain of the recipe over that of fine-tuning, on settings with both."""
    both = [name for name in names if found[name][CHOSEN] and found[name]['ft']]
    if not both:
      return ''
    new, ft, before = (
      np.mean([np.mean(self.mean(found, name, way)) for name in both])
      for way in (CHOSEN, 'ft', 'frozen')
    )
    return (
      f'\nOn the {len(both)} settings with fine-tuning, `:beir` gains {new - before:+.3f} on '
      f'average and fine-tuning {ft - before:+.3f}; '
      f'the ratio is {(new - before) / (ft - before):.2f}.\n'
    )

  def found(self):
    """The systems of any experiment, and the better of two prompts."""
    found = super().found()
    for ways in found.values():
      for seed in sorted(ways['query'].keys() & ways['both'].keys()):
        # As training/selection.py chooses; the frozen encoder has one score for both.
        ways[CHOSEN][seed] = max(
          (ways[way][seed] for way in ('both', 'query')),
          key=lambda line: (line['better'], line['gain']),
        )
    return found

  def more_options(self, name, way, seed):
    del seed
    if way != 'mined':
      return ()
    folder, out = self.folder(name), self.out / 'mined' / f'{name}.jsonl'
    run = mining.words(folder, out.with_suffix('.trec'))
    mining.mine(folder, folder / 'qrels' / 'train.tsv', [f'--run=bm25={run}'], out)
    return (f'data.mined_negatives={out}',)

  def variants(self, found, names, means=False):
    """Recipes with one thing changed: their scores less those of the recipe, by seeds.

    With ``means`` only their means over settings.
    """
    rows = []
    for way, base in BASES.items():
      pairs = {name: sorted(found[name][way].keys() & found[name][base].keys()) for name in names}
      used, own = (
        [
          np.mean([of(found, name, way, seed) for seed in seeds])
          - np.mean([of(found, name, base, seed) for seed in seeds])
          for name, seeds in pairs.items()
          if seeds
        ]
        for of in (self.used, self.own)
      )
      if used:
        shown = iter(f'{one:+.3f} ({other:+.3f})' for one, other in zip(used, own, strict=True))
        row = [next(shown) if seeds else '' for seeds in pairs.values()]
        mean = f'{np.mean(used):+.3f} ({np.mean(own):+.3f})'
        rows.append([WAYS[base].label, VARIANTS[way].label, *([] if means else row), mean])
    if not rows:
      return ''
    head = ['recipe', 'with', *([] if means else names), 'mean']
    # Settings without any have no column.
    filled = [i for i in range(len(head)) if any(row[i] for row in rows)]
    head, *rows = ([row[i] for i in filled] for row in (head, *rows))
    made = trials.table(head, rows)
    return (
      '## One thing changed\n\nDifferences from the recipe in nDCG@10, as their users would have '
      f'them; in brackets, of the prompts themselves.\n\n{made}\n'
    )

  def unseen(self, found, names):
    """The table of the settings whose test queries have answers of both kinds."""
    rows = []
    ways = ['frozen', *WAYS]
    for name in names:
      unseen = evaluation.unseen(self.folder(name))
      if not 0 < unseen.sum() < len(unseen):
        continue
      for label, some in (('seen', ~unseen), ('not seen', unseen)):
        row = [name, f'{label} ({some.sum()})']
        for way in ways:
          seeds = sorted(found[name][way])
          values = [self.used(found, name, way, seed)[some].mean() for seed in seeds]
          row.append(trials.cell(values[:1] if way == 'frozen' else values))
        rows.append(row)
    if not rows:
      return ''
    head = ['setting', 'answers', 'frozen', *(way.label for way in WAYS.values())]
    return f'## Answers that training queries have\n\n{trials.table(head, rows)}\n'

  def draw(self, found, names):
    """Gains with their intervals, and learning curves."""
    gains = {
      name: {DRAWN[label]: bar for label, bar in bars.items() if label in DRAWN}
      for name, bars in self.gains(found, names).items()
    }
    drawn = []
    if any(gains.values()):
      drawn.append(self.out / 'gain.png')
      foot = (
        '95 % intervals over seeds and test queries; hollow: frozen encoder kept; empty: not run'
      )
      charts.differences(gains, systems.GAINED, foot, drawn[-1], self.title)
    curves = {}
    for source in CURVES:
      lines = {}
      for label in DRAWN.values():
        points = [
          (setting.train, gains[name][label].mean)
          for name, setting in gain_sets.SETTINGS.items()
          if setting.source == source and not setting.degraded and label in gains.get(name, {})
        ]
        if points:
          lines[label] = points
      if lines:
        curves[f'gain in nDCG@10 on {source}'] = lines
    if curves:
      drawn.append(self.out / 'gain-curves.png')
      foot, title = 'means over seeds', 'More judged queries, more gain'
      charts.paths(curves, 'training queries', foot, drawn[-1], title)
    return drawn


if __name__ == '__main__':
  main()
