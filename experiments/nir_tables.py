"""Tables and verdicts of experiments/nir_prompt.py, all from its ledger."""

from typing import NamedTuple

import numpy as np

import charts
import nir_sets
import trials
from dprjax.retrieval import figures

LEDGER = trials.LEDGERS / 'nir_prompt.jsonl'
MEASURES = ('RR@10', 'P@1', 'nDCG@10')  # verdicts are on the first
SEEDS = 3  # of a verdict; with fewer it is open
# Systems; one of a run for each task has their names with * for the task.
LABELS = {
  'bm25': 'BM25',
  'zero-mean': 'MiniLM as it is, mean',
  'ft-*': 'FT, a task each',
  'ft': 'FT',
  'ft-mask': 'FT at [MASK]',
  'emm': 'NIR-Prompt',
  'emm-free': 'NIR-Prompt, free prompts',
  'emm-random': 'NIR-Prompt, mixed batches',
  'new-*': 'a new task, fused, best of 3 rates',
  'one-*': 'a new task, fused',
  'fresh-*': 'a new task, a fresh prompt',
  'few-*': 'FT of 32 queries',
}
TITLE = 'No training is above the encoder as it is'
FIGURE = 'nir-prompt.png'


class Row(NamedTuple):
  """A claim: the first system is above the second.

  Attributes:
    claim: its number in docs/results.md; '': only on the page.
    text: the claim.
    paper: P@1 of the paper.
    ours, theirs: the systems.
    sets: the test sets, by task.
  """

  claim: str
  text: str
  paper: str
  ours: str
  theirs: str
  sets: dict[str, str]


IN, OUT = nir_sets.IN_DOMAIN, nir_sets.OUT_OF_DOMAIN
ROWS = (
  Row('N1', 'FT of a task each above FT of all', '46.9, 44.2 P@1', 'ft-*', 'ft', IN),
  Row('N2', 'NIR-Prompt above FT of all', '50.2, 44.2 P@1', 'emm', 'ft', IN),
  Row('', 'NIR-Prompt above FT of all at [MASK]', '', 'emm', 'ft-mask', IN),
  Row('', 'FT of all at [MASK] above FT of all', '', 'ft-mask', 'ft', IN),
  Row('N3', 'NIR-Prompt above FT of all, out of domain', 'on all sets', 'emm', 'ft', OUT),
  Row('', 'NIR-Prompt above FT at [MASK], out of domain', '', 'emm', 'ft-mask', OUT),
  Row('N4', 'fixed prompts above free ones', 'a figure', 'emm', 'emm-free', IN),
  Row('N5', 'batches of a task in turn above mixed ones', '', 'emm', 'emm-random', IN),
  Row('N6', 'fused prompts above a fresh one, new task', '', 'one-*', 'fresh-*', IN),
  Row('', 'fused prompts above FT of 32 queries, new task', '', 'one-*', 'few-*', IN),
)


class Results:
  """The scores of a ledger, by run and seed."""

  def __init__(self, lines):
    self.lines, self.found = lines, trials.scores_by_run(lines)

  def system(self, name):
    """{seed: {set/measure: scores}}; a seed has the runs of all tasks, or is left out."""
    names = [name.replace('*', task) for task in nir_sets.TASKS] if '*' in name else [name]
    parts = [self.found[one] for one in names]
    seeds = set.intersection(*(set(part) for part in parts))
    return {
      seed: {key: scores for part in parts for key, scores in part[seed].items()}
      for seed in sorted(seeds)
    }

  def compare(self, row, measure):
    """A verdict and the number of seeds; None where runs are missing."""
    pair = [self.system(name) for name in (row.ours, row.theirs)]
    found = trials.compare(*pair, [f'{name}/{measure}' for name in row.sets.values()])
    return found and (found, len(pair[0].keys() & pair[1].keys()))

  def cell(self, name, sets, measure):
    """The mean over sets and seeds, and half the range of seeds; '' without such scores."""
    keys = [f'{one}/{measure}' for one in sets]
    return trials.cell(
      np.mean([scores[key].mean() for key in keys])
      for scores in self.system(name).values()
      if scores.keys() >= set(keys)
    )


def claims(results, *, numbered):
  """Rows of verdicts: those of docs/results.md, or those only on the page."""
  rows = []
  for row in ROWS:
    if bool(row.claim) == numbered and (found := results.compare(row, MEASURES[0])):
      others = [f'{trials.number(results.compare(row, one)[0][0])} {one}' for one in MEASURES[1:]]
      unit = f'{MEASURES[0]} ({", ".join(others)})'
      rows.append(trials.claim_row(row.claim, row.text, row.paper, *found, unit, SEEDS))
  return rows


def write(out, docs=None):
  """OUT/results.md and the figure; into ``docs`` too, if it is given."""
  results = Results(trials.ledger(out))
  made = page(results)
  trials.write(out / 'results.md', made)
  print(made)
  draw(results, out / FIGURE)
  if docs:
    trials.publish(docs, 'nir_prompt', short(results), [out / FIGURE])


def page(results):
  """The tables of the page."""
  commits = ', '.join(dict.fromkeys(line['commit'] for line in results.lines))
  minutes = sum(line['seconds'] for line in results.lines) / 60
  return '\n'.join(
    (
      main_table(results),
      trials.table(trials.CLAIMS, claims(results, numbered=True) + claims(results, numbered=False)),
      f'![Gain in RR@10 over BM25]({FIGURE})\n',
      trainings(results),
      counts(results),
      f'{len(results.lines)} runs, {minutes:.0f} minutes in all; commit {commits}.\n',
    )
  )


def short(results):
  """The tables of docs/experiments; docs/results.md has the claims with numbers."""
  return '\n'.join(
    (
      main_table(results),
      trials.table(trials.CLAIMS[1:], [row[1:] for row in claims(results, numbered=False)]),
      f'![Gain in RR@10 over BM25]({FIGURE})\n',
      f'{len(results.lines)} runs.\n',
    )
  )


def main_table(results):
  """RR@10 of every set, and the means in all measures."""
  head, columns = [], []
  for title, sets in (('in domain', IN), ('out of domain', OUT)):
    head += [*sets.values(), *(f'{title}, {measure}' for measure in MEASURES)]
    columns += [([one], MEASURES[0]) for one in sets.values()]
    columns += [(list(sets.values()), measure) for measure in MEASURES]
  rows = [
    [text, *(results.cell(name, *column) for column in columns)]
    for name, text in LABELS.items()
    if results.system(name)
  ]
  return trials.table(['', *head], rows)


def trainings(results):
  """The score of each training on dev."""
  rows = [
    [line['run'], str(line['seed']), f'{line["rate"]:.2g}', f'{line["best"]:.3f}',
     str(line['best_step'])]
    for line in results.lines
    if 'best' in line
  ]  # fmt: skip
  return trials.table(['training', 'seed', 'rate', 'best RR@10 on dev', 'at update'], rows)


def counts(results):
  """The sizes of the sets."""
  rows = [
    [name, ', '.join(f'{key} {n:,}' for key, n in some.items())]
    for line in results.lines
    if line['run'] == 'sets'
    for name, some in line['counts'].items()
  ]
  return trials.table(['set', 'how many'], rows)


def draw(results, path):
  """RR@10 of each system less that of BM25."""
  panels = {}
  for title, sets in (('in domain', IN), ('out of domain', OUT)):
    for name, text in LABELS.items():
      if name != 'bm25' and results.system(name):
        words = dict.fromkeys(results.system(name), results.system('bm25').get(0, {}))
        keys = [f'{one}/{MEASURES[0]}' for one in sets.values()]
        mean, low, high, _ = trials.compare(results.system(name), words, keys)
        panels.setdefault(title, {})[text] = figures.Bar(mean, low, high, False)
  if panels:
    foot = 'means over three test sets each; 95 % intervals over seeds and queries'
    charts.dots(panels, 'gain in RR@10 over BM25', foot, path, title=TITLE)
