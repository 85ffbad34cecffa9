"""The chooser of experiments/small_labels.py, from its ledger, and other rules of choice.

The chooser of a source has the prior of the other sources only. It is compared with rules that a
user could follow instead.
"""

import collections
from typing import NamedTuple

import numpy as np

import small_sets
from dprjax.retrieval import choosing
from dprjax.retrieval.choosing import BM25, FROZEN, Candidate

OFFERED = ('bm25', 'linear', 'query', 'both', 'lora')  # `dprjax train` does not move passages


class Setting(NamedTuple):
  """One source, number of training queries and seed.

  Attributes:
    held: by candidate, nDCG@10 of the training queries, NaN where it was trained on them.
    tested: by candidate, nDCG@10 of the test queries.
    recall: R@100 of the test queries, of some candidates.
    lines: of the ledger, by way.
  """

  source: str
  count: int
  seed: int
  held: dict
  tested: dict
  recall: dict
  lines: dict

  @property
  def name(self):
    return f'{self.source}-{self.count}'

  def gain(self, candidate):
    """A value of each test query."""
    return self.tested[candidate] - self.tested[FROZEN]


def read(lines):
  """The settings of a ledger that have the frozen encoder."""
  found = collections.defaultdict(dict)
  for line in lines:
    setting, _, way = line['run'].partition('/')
    if 'views' in line:
      found[(*setting.rsplit('-', 1), line['seed'])][way] = line
  made = []
  for (source, count, seed), ways in found.items():
    if 'frozen' not in ways:
      continue
    held, tested, recall = {}, {}, {}
    for way, line in ways.items():
      views = {name: np.array(values, float) for name, values in line['views'].items()}
      for half in ('', 'half '):
        for fused in ('', 'fused '):
          if f'{half}{fused}held' not in views:
            continue
          candidate = Candidate(way, 0.5 if half else 1.0, bool(fused))
          own = views[f'{half}{fused}held']
          if line['held'] != 'all':
            whole = np.full(int(count), np.nan)
            whole[line['held']] = own
            own = whole
          tested[candidate] = views[f'{half}{fused}nDCG@10']
          # With a weight of 0 or 1 it is only the way or BM25, and no candidate.
          if not fused or 0 < views[f'{half}fused weights'][0] < 1:
            held[candidate] = own
          if not half:
            recall[candidate] = views[f'{fused}R@100']
    made.append(Setting(source, int(count), seed, held, tested, recall, ways))
  order = {name: place for place, name in enumerate(small_sets.SOURCES)}
  return sorted(made, key=lambda one: (order[one.source], one.count, one.seed))


def error(values):
  """The squared standard error of a mean."""
  return np.var(values, ddof=1) / len(values) if len(values) > 1 else 0.1**2


def prior(settings):
  """`choosing.PRIOR` by moments: over sources, minus the part that single queries explain."""
  by_source = collections.defaultdict(list)
  for one in settings:
    for candidate, held in one.held.items():
      if candidate in (FROZEN, BM25) or candidate.step != 1:
        continue  # plain BM25 is too far from the others to share their spread
      gain, known = one.gain(candidate), held - one.held[FROZEN]
      known = known[~np.isnan(known)]
      by_source[one.source].append((gain.mean(), error(gain), known.mean(), error(known)))
  own = [np.array(some) for some in by_source.values()]  # moments weigh sources alike
  spread = np.mean([np.mean(some[:, 0] ** 2 - some[:, 1]) for some in own])
  noise = np.mean(
    [np.mean((some[:, 0] - some[:, 2]) ** 2 - some[:, 1] - some[:, 3]) for some in own]
  )
  return choosing.Prior(float(np.sqrt(max(spread, 0.02**2))), float(np.sqrt(max(noise, 0.005**2))))


def candidates(one, half=True, ways=None):
  """The input of the chooser for a setting."""
  return {
    name: held
    for name, held in one.held.items()
    if (half or name.step == 1) and (ways is None or name == FROZEN or name.model in ways)
  }


def choices(settings, **options):
  """{setting: choice}, each by the prior of the other sources."""
  found = {}
  for one in settings:
    others = [other for other in settings if other.source != one.source]
    known = prior(others) if others else choosing.PRIOR
    found[id(one)] = choosing.choose(candidates(one, **options), prior=known)
  return found


def largest(one, **options):
  """The candidate with the best held-out mean: no shrinkage."""
  own = candidates(one, **options)
  gains = {name: np.nanmean(values - own[FROZEN]) for name, values in own.items()}
  return max(gains, key=gains.get)


def rules_of(settings):
  """({rule: function from a setting to its candidate}, the choices of the chooser)."""
  chosen = choices(settings)
  whole = choices(settings, half=False)
  offered = choices(settings, half=False, ways=OFFERED)
  rules = {
    'frozen with BM25, always': lambda one: Candidate('frozen', fused=True),
    'linear map with BM25, always': lambda one: Candidate('linear', fused=True),
    'the best held-out mean': largest,
    'the chooser, of what `:beir,thorough` offers': lambda one: offered[id(one)].candidate,
    'the chooser, without half steps': lambda one: whole[id(one)].candidate,
    'the chooser': lambda one: chosen[id(one)].candidate,
    'the best with hindsight': lambda one: max(one.tested, key=lambda c: one.tested[c].mean()),
  }
  return rules, chosen
