"""The report on experiments/small_labels.py, from its ledger: tables and a figure.

Means are over sources: first over the settings of each.
"""

import collections

import numpy as np
import scipy.special

import charts
import gain_sets
import small_choices
import small_sets
import trials
from dprjax.base.counts import counted
from dprjax.retrieval import choosing, figures
from dprjax.retrieval.choosing import BM25, FROZEN, Candidate

DRAWS = 2000  # of sources, seeds and queries
HARM = 0.005
LABELS = {
  'frozen': 'frozen',
  'bm25': 'BM25',
  'linear': 'linear map',
  'nudge': 'NUDGE',
  'query': 'prompt (queries)',
  'lora': 'LoRA',
  'both': 'prompt (both)',
  'query-text': 'prompt (queries), from a text',
  'both-text': 'prompt (both), from a text',
  'ft': 'fine-tuned',
}
CHOOSER = 'chooser'
FUSED = Candidate(FROZEN.model, fused=True)

# Ways that the report on another encoder compares.
COMPARED = (
  ('ft', 'both', 'D1, fine-tuning above a prompt for both sides'),
  ('ft', 'both-text', 'D1 with a prompt that starts from a text'),
  ('query-text', 'query', 'A text above random numbers as the start of a prompt for queries'),
  ('both-text', 'both', 'A text above random numbers as the start of a prompt for both sides'),
)


def over_sources(settings, values):
  """The mean over sources of the means of settings, with its 95 % interval.

  Draws resample sources, a seed for each size of a source, and test queries.

  Args:
    settings: the settings.
    values: for each setting, one number a test query.
  """
  by_source = collections.defaultdict(lambda: collections.defaultdict(list))
  for one, own in zip(settings, values, strict=True):
    by_source[one.source][one.count].append(own)
  sources = [*by_source.values()]
  rng = np.random.default_rng(0)
  # Means of drawn queries, once for each setting; draws of sources take one of them.
  drawn = [
    [
      [own[rng.integers(0, len(own), (DRAWS, len(own)))].mean(axis=1) for own in some]
      for some in sizes.values()
    ]
    for sizes in sources
  ]
  picks = rng.integers(0, len(sources), (DRAWS, len(sources)))
  means = np.zeros(DRAWS)
  for draw in range(DRAWS):
    means[draw] = np.mean(
      [
        np.mean([some[rng.integers(0, len(some))][draw] for some in drawn[pick]])
        for pick in picks[draw]
      ]
    )
  point = np.mean(
    [np.mean([np.mean([own.mean() for own in some]) for some in one.values()]) for one in sources]
  )
  return float(point), *map(float, np.quantile(means, [0.025, 0.975]))


def shown(interval):
  mean, low, high = interval
  return f'{mean:+.3f} [{low:+.3f}, {high:+.3f}]'


def rule_rows(rules, settings):
  """Gains of rules: their table, and the means of the settings by rule."""
  rows, found = [], {}
  for label, rule in rules.items():
    gains = [one.gain(rule(one)) for one in settings]
    means = np.array([gain.mean() for gain in gains])
    found[label] = means
    rows.append(
      [
        label,
        shown(over_sources(settings, gains)),
        f'{means.min():+.3f}',
        f'{np.mean(means < 0):.0%}',
        f'{np.mean(means < -HARM):.0%}',
      ]
    )
  head = ['rule', 'mean gain in nDCG@10', 'worst run', 'runs below frozen', f'below by over {HARM}']
  return trials.table(head, rows), found


def calibration(settings, chosen):
  """Predicted against real gains of the choices, and of all candidates."""
  lines = []
  for label, some in (
    ('chosen candidates', [(one, [chosen[id(one)].candidate]) for one in settings]),
    ('all candidates', [(one, [*chosen[id(one)].estimates]) for one in settings]),
  ):
    predicted, real, inside, losses, lost = [], [], [], [], []
    for one, names in some:
      for name in names:
        if name == FROZEN:
          continue
        estimate, gain = chosen[id(one)].estimates[name], one.gain(name)
        predicted.append(estimate.expected)
        real.append(gain.mean())
        wide = 1.96 * np.sqrt(estimate.deviation**2 + small_choices.error(gain))
        inside.append(abs(gain.mean() - estimate.expected) <= wide)
        losses.append(estimate.loss)
        lost.append(gain.mean() < -choosing.LOSS)
    slope = np.polyfit(predicted, real, 1)[0] if len(predicted) > 2 else np.nan
    lines.append(
      [
        label,
        f'{len(predicted)}',
        f'{np.mean(predicted):+.3f}',
        f'{np.mean(real):+.3f}',
        f'{slope:.2f}',
        f'{np.mean(inside):.0%}',
        f'{np.mean(losses):.0%}',
        f'{np.mean(lost):.0%}',
      ]
    )
  head = [
    '',
    'number',
    'expected gain',
    'real gain',
    'slope',
    'real within 95 % interval',
    f'expected chance of losing over {choosing.LOSS}',
    'lost so much',
  ]
  return trials.table(head, lines)


def trained_prompts():
  """The same of the trainings that experiments/gain.py keeps: two prompts on 17 settings.

  Only the mean of their gain on held-out queries is known; the scatter of the test queries stands
  for that of the held-out queries.
  """
  lines = trials.kept_lines(trials.LEDGERS / 'gain.jsonl')
  frozen = {
    line['run'].partition('/')[0]: np.array(line['scores']['nDCG@10'])
    for line in lines
    if line['run'].endswith('/frozen')
  }
  rows = []
  for line in lines:
    name, _, way = line['run'].partition('/')
    if way not in ('query', 'both') or name not in gain_sets.SETTINGS:
      continue
    setting = gain_sets.SETTINGS[name]
    # Folds hold out all; from 500 queries on a fifth is held out.
    held = setting.train if setting.train < 500 else setting.train // 5
    gain = np.array(line['scores']['nDCG@10']) - frozen[setting.source]
    rows.append((gain.mean(), np.var(gain), len(gain), line['gain'], held))
  real, variance, tests, measured, held = np.array(rows).T
  expected, _, left = choosing.posterior(measured, variance, held, choosing.PRIOR)
  some = expected > 0
  loss = scipy.special.ndtr((-choosing.LOSS - expected) / np.sqrt(left))
  inside = np.abs(real - expected) <= 1.96 * np.sqrt(left + variance / tests)
  slope = np.polyfit(expected[some], real[some], 1)[0]
  return (
    f'\nOf the {len(rows)} prompts of [gain.md](gain.md), {some.sum()} have an expected gain above '
    f'0. On the average {expected[some].mean():+.4f} is expected of these, and they gain '
    f'{real[some].mean():+.4f}, at worst {real[some].min():+.4f} (slope {slope:.2f}; '
    f'{inside[some].mean():.0%} within the 95 % interval). The chance of losing over '
    f'{choosing.LOSS} is {loss[some].mean():.0%} on the average, and '
    f'{np.mean(real[some] < -choosing.LOSS):.0%} lose so much. The others would gain '
    f'{real[~some].mean():+.4f}.\n'
  )


COLUMNS = [
  Candidate('frozen'),
  Candidate('bm25'),
  Candidate('frozen', fused=True),
  *(
    Candidate(way, fused=fused)
    for way in ('linear', 'nudge', 'query', 'query-text', 'lora', 'both', 'both-text', 'ft')
    for fused in (False, True)
  ),
]


def label(candidate):
  return LABELS[candidate.model] + (' + BM25' if candidate.fused else '')


def score_rows(settings, chosen, of):
  """A table of all settings: means over queries and seeds."""
  groups = collections.defaultdict(list)
  for one in settings:
    groups[one.source, one.count].append(one)
  names = used(settings)
  rows = []
  for (source, count), some in groups.items():
    row = [source, f'{count}']
    for name in names:
      own = [of(one, name) for one in some if name in one.tested]
      row.append(f'{np.mean(own):.3f}'.lstrip('0') if own else '')
    own = np.mean([of(one, chosen[id(one)].candidate) for one in some])
    row.append('' if np.isnan(own) else f'{own:.3f}'.lstrip('0'))
    row.append(', '.join(dict.fromkeys(str(chosen[id(one)].candidate) for one in some)))
    rows.append(row)
  head = ['source', 'queries', *map(label, names), 'chooser', 'chosen']
  return trials.table(head, [row + [''] * (len(head) - len(row)) for row in rows])


def used(settings):
  """The columns that some setting has."""
  return [name for name in COLUMNS if any(name in one.tested for one in settings)]


def complete(settings):
  """The settings that have all of these columns."""
  return [one for one in settings if {*used(settings)} <= one.tested.keys()]


def way_rows(settings, chosen, columns=(), fused=True):
  """Each way over the settings that have it: gain, recall, losses, seconds, bytes.

  Args:
    settings: the settings.
    chosen: the choices of the chooser.
    columns: those to show, by number; (): all.
    fused: with the ways that are fused with BM25, besides the frozen encoder.
  """
  rows = []
  names = [
    name for name in COLUMNS if name != FROZEN and (fused or not name.fused or name == FUSED)
  ]
  for name in [*names, CHOOSER]:
    some = [one for one in settings if name == CHOOSER or name in one.tested]
    if not some:
      continue
    pick = [chosen[id(one)].candidate if name == CHOOSER else name for one in some]
    gains = [one.gain(own) for one, own in zip(some, pick, strict=True)]
    beside = [gain - one.gain(FUSED) for one, gain in zip(some, gains, strict=True)]
    recalls = [
      one.recall[own] - one.recall[FROZEN]
      for one, own in zip(some, pick, strict=True)
      if own in one.recall
    ]
    means = np.array([gain.mean() for gain in gains])
    lines = [] if name == CHOOSER else [one.lines[name.model] for one in some]
    rows.append(
      [
        CHOOSER if name == CHOOSER else label(name),
        f'{len(some)}',
        shown(over_sources(some, gains)),
        shown(over_sources(some, beside)) if name != FUSED else '',
        f'{np.mean([gain.mean() for gain in recalls]):+.3f}' if recalls else '',
        f'{means.min():+.3f}',
        f'{np.mean(means < -HARM):.0%}',
        f'{np.median([line["seconds"] for line in lines]):.0f}' if lines else '',
        f'{np.median([line.get("bytes", 0) for line in lines]) / 1000:,.0f}' if lines else '',
      ]
    )
  head = [
    'way',
    'settings',
    'gain in nDCG@10, 95 % interval',
    'over frozen + BM25',
    'in R@100',
    'worst setting',
    f'lose over {HARM}',
    'seconds',
    'kB',
  ]
  if columns:
    head, *rows = ([row[column] for column in columns] for row in (head, *rows))
  return trials.table(head, rows)


def source_rows(settings, chosen):
  """nDCG@10 of each source, a mean over its settings."""
  rows = []
  for source in dict.fromkeys(one.source for one in settings):
    some = [one for one in settings if one.source == source]
    picked = [[FROZEN, BM25, FUSED, chosen[id(one)].candidate] for one in some]
    scores = [
      [one.tested[name].mean() for name in names] for one, names in zip(some, picked, strict=True)
    ]
    rows.append([source, *(f'{score:.3f}'.lstrip('0') for score in np.mean(scores, axis=0))])
  return trials.table(['source', *map(label, (FROZEN, BM25, FUSED)), CHOOSER], rows)


def seen_rows(settings, chosen, data):
  """Gains on test queries whose answers training queries have, and on the others."""
  rows = []
  for one in settings:
    source = small_sets.read(data, one.source)
    _, train, test = small_sets.numbers(source)
    known = small_sets.seen(train[: one.count], test)
    if not 0 < known.sum() < len(known):
      continue
    names = [name for name in COLUMNS[1:] if name in one.tested]
    for what, some in (('seen', known), ('not seen', ~known)):
      row = {label(name): one.gain(name)[some].mean() for name in names}
      row[CHOOSER] = one.gain(chosen[id(one)].candidate)[some].mean()
      rows.append(([one.name, f'{what} ({some.sum()})'], row))
  if not rows:
    return ''
  names = list(dict.fromkeys(name for _, row in rows for name in row if name != CHOOSER))
  names.append(CHOOSER)
  cells = [
    head + [f'{row[name]:+.3f}' if name in row else '' for name in names] for head, row in rows
  ]
  return trials.table(['setting', 'answers', *names], cells)


def draw(settings, chosen, path):
  """Mean gains of all ways, on the settings that have them."""
  settings = complete(settings)
  rows = {}
  for name in [*used(settings), CHOOSER]:
    if name != FROZEN:
      gains = [one.gain(chosen[id(one)].candidate if name == CHOOSER else name) for one in settings]
      rows[name] = over_sources(settings, gains)
  order = sorted(rows, key=lambda name: -rows[name][0])
  queries = [one.count for one in settings]
  foot = (
    f'{len(settings)} settings of {len({one.source for one in settings})} sets, {min(queries)} to '
    f'{max(queries):,} judged queries, one seed; 95 % intervals over sets and queries'
  )
  values = {
    'chosen by held-out queries' if name == CHOOSER else label(name): figures.Bar(*rows[name])
    for name in order
  }
  title = 'Fusions with BM25 gain most, and held-out queries choose well'
  charts.dots({'': values}, 'gain in nDCG@10 over the frozen encoder', foot, path, title=title)


def show(out, data, docs):
  """Prints and writes everything; with ``docs`` puts it there."""
  settings = small_choices.read(trials.ledger(out))
  rules, chosen = small_choices.rules_of(settings)
  table, found = rule_rows(rules, settings)
  goals = goal_lines(settings, found)
  fresh = [one for one in settings if one.source in small_sets.FRESH]
  parts = [
    '### What to expect of each way\n',
    way_rows(settings, chosen),
    '### The settings of all these ways\n',
    way_rows(complete(settings), chosen),
    '### Rules of choice\n',
    table,
    '### Rules of choice, on the settings of all ways\n',
    rule_rows(rules, complete(settings))[0],
    goals,
  ]
  if fresh and len(fresh) < len(settings):
    gains = [one.gain(chosen[id(one)].candidate) for one in fresh]
    means = np.array([gain.mean() for gain in gains])
    parts.append(
      f'\nOn the {len({one.source for one in fresh})} sources that tuned only the limit on losses '
      f'({len(fresh)} settings) the chooser gains {shown(over_sources(fresh, gains))}, at worst '
      f'{means.min():+.3f}.\n'
    )
  parts += ['### Expected and real gains\n', calibration(settings, chosen), trained_prompts()]
  parts += [
    '### nDCG@10\n',
    score_rows(settings, chosen, lambda one, name: one.tested[name].mean()),
    '### R@100\n',
    score_rows(
      settings,
      chosen,
      lambda one, name: one.recall[name].mean() if name in one.recall else np.nan,
    ),
  ]
  if rows := seen_rows(settings, chosen, data):
    parts += ['### Gains on seen and unseen answers\n', rows]
  lines = [line for one in settings for line in one.lines.values()]
  commits = ', '.join(dict.fromkeys(line['commit'] for line in lines))
  parts.append(f'{len(lines)} runs, {len(settings)} settings; commit {commits}.\n')
  known = small_choices.prior(settings)
  parts.append(f'The prior of all sources: spread {known.spread:.3f}, noise {known.noise:.3f}.\n')
  made = '\n'.join(parts)
  trials.write(out / 'results.md', made)
  print(made)
  drawn = out / 'small-labels.png'
  draw(settings, chosen, drawn)
  if docs:
    short = [
      '### Every way\n',
      way_rows(complete(settings), chosen, (0, 2, 3, 7, 8)),
      '### Rules of choice\n',
      table,
      '### nDCG@10 of each source\n',
      source_rows(settings, chosen),
      f'{len(lines)} runs, {len(settings)} settings.\n',
    ]
    trials.publish(docs, 'small_labels', '\n'.join(short), [drawn])


def show_other(out, data, docs, encoder):
  """The same of another encoder, in short; its chooser has the prior of MiniLM."""
  settings = small_choices.read(trials.ledger(out))
  chosen = {
    id(one): choosing.choose(small_choices.candidates(one), prior=choosing.PRIOR)
    for one in settings
  }
  claims = []
  for above, below, claim in COMPARED:
    pairs = [one for one in settings if {Candidate(above), Candidate(below)} <= one.tested.keys()]
    if pairs:
      gaps = [one.tested[Candidate(above)] - one.tested[Candidate(below)] for one in pairs]
      count = counted(len(pairs), 'settings')
      claims.append(f'{claim}: {shown(over_sources(pairs, gaps))} on {count}.\n')
  before = [
    f'{line["run"].replace("/untrained ", ", ")} {line["nDCG@10"]:.3f}'
    for line in trials.ledger(out)
    if '/untrained ' in line['run']
  ]
  if before:
    claims.append(f'nDCG@10 of prompts before training: {"; ".join(before)}.\n')
  parts = [way_rows(settings, chosen), *claims]
  parts.append(score_rows(settings, chosen, lambda one, name: one.tested[name].mean()))
  if rows := seen_rows(settings, chosen, data):
    parts += ['Gains on seen and unseen answers:\n', rows]
  lines = [line for one in settings for line in one.lines.values()]
  rates = [
    f'{way} {rate:g}'
    for way, rate in dict.fromkeys(
      (line['run'].partition('/')[2], line['rate']) for line in lines if line.get('rate')
    )
  ]
  commits = ', '.join(dict.fromkeys(line['commit'] for line in lines))
  parts.append(f'Rates: {", ".join(rates)}. {len(lines)} runs; commit {commits}.\n')
  made = '\n'.join(parts)
  trials.write(out / 'results.md', made)
  print(made)
  if docs:
    short = '\n'.join([way_rows(settings, chosen, (0, 2, 7, 8), fused=False), *claims])
    trials.publish(docs, 'small_labels', short, [], encoder)


def goal_lines(settings, found):
  """The goals of the experiment, and whether they were met."""
  means, best = found['the chooser'], found['the best with hindsight']
  single = np.array(
    [
      max(one.gain(name).mean() for name in one.tested if not name.fused and name.step == 1)
      for one in settings
    ]
  )
  of = np.array([one.source for one in settings])
  tops = {source: single[of == source].mean() for source in dict.fromkeys(of)}
  shares = [means[of == source].mean() / top for source, top in tops.items() if top > HARM]
  reached = sum(share >= 0.9 for share in shares)
  return (
    f'\nGoals: a mean gain of .06: {means.mean():+.3f}, settings alike. At least .9 of the gain '
    f'of the best single way with hindsight on each source: {reached} of {len(shares)} sources. '
    f'(Of the best candidate with hindsight, fusions too: {means.mean() / best.mean():.2f} of the '
    f'mean.) Harm above {HARM} in under 2 % of the runs: {np.mean(means < -HARM):.1%}.\n'
  )
