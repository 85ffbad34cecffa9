"""Tables, verdicts and figures of experiments/nir_prompt.py, of whatever runs there are."""

import collections
import json
import pathlib
import re

import numpy as np

import nir_sets
import prompt_cosines
import trials
from dprjax.analysis import figures
from dprjax.models import artifact

# Systems by row. One of a run for each task has their names with * for the task.
ROWS = {
  'bm25': 'BM25',
  'zero-mean': 'MiniLM as it is, mean',
  'zero-cls': 'MiniLM as it is, [CLS]',
  'zero-mask': 'MiniLM as it is, [MASK]',
  'untrained': 'manual template, untrained',
  'ft-*': 'FT, a task each',
  'ft-mask-*': 'FT, a task each, at [MASK]',
  'ft': 'FT',
  'ft-mark': 'FT with marks',
  'ft-mask': 'FT at [MASK]',
  'manual': 'NIR-Prompt, manual',
  'emm-hybrid': 'NIR-Prompt, hybrid',
  'emm': 'NIR-Prompt, continuous',
  'emm-free': 'n = 0',
  'emm-random_task': 'batches of a random task',
  'emm-balanced': 'balanced batches',
  'emm-random': 'mixed batches',
}


def _rows(*names):
  return {name: ROWS[name] for name in names}


_FT = 'ft-*', 'ft-mask-*', 'ft', 'ft-mark', 'ft-mask'
RETRIEVER = _rows('bm25', 'zero-mean', 'zero-cls', 'zero-mask', *_FT, 'emm')
VARIANTS = _rows('emm', 'manual', 'emm-free', 'emm-random_task', 'emm-balanced', 'emm-random')
RERANKER = _rows(
  *('bm25', 'untrained', 'ft-*', 'ft', 'ft-mark'),
  *('manual', 'emm-hybrid', 'emm', 'emm-free', 'emm-random'),
)
NEW_TASK = {
  'few-ft-*': 'FT',
  'few-ft-after-*': 'FT after the other tasks',
  'few-unfused-*': 'NIR-Prompt, fresh prompt',
  'few-frozen-*': 'NIR-Prompt, fusion alone, frozen backbone',
  'few-fused-*': 'NIR-Prompt, fusion',
}
# Runs of the retriever that are in sections of their own.
NOT_OF_RETRIEVER = tuple(
  f'retriever/{name}' for name in ('manual', 'free', 'emm-', 'few', 'ft-without')
)
# What the paper claims: the first system above the second.
CLAIMS = (
  ('FT of a task each above FT of all (Table 8)', 'ft-*', 'ft', 'in'),
  ('the same at [MASK]', 'ft-mask-*', 'ft-mask', 'in'),
  ('NIR-Prompt above FT of all (8)', 'emm', 'ft', 'in'),
  ('NIR-Prompt above FT of a task each (8)', 'emm', 'ft-*', 'in'),
  ('NIR-Prompt above FT with marks', 'emm', 'ft-mark', 'in'),
  ('NIR-Prompt above FT at [MASK], so that prompts explain it', 'emm', 'ft-mask', 'in'),
  ('NIR-Prompt above FT of all (9)', 'emm', 'ft', 'out'),
  ('NIR-Prompt above FT of a task each (9)', 'emm', 'ft-*', 'out'),
  ('NIR-Prompt above FT at [MASK]', 'emm', 'ft-mask', 'out'),
  ('fusion above FT alone on a new task (10)', 'few-fused-*', 'few-ft-*', 'in'),
  ('fusion above FT after the others (10)', 'few-fused-*', 'few-ft-after-*', 'in'),
  ('fusion above a fresh prompt (10)', 'few-fused-*', 'few-unfused-*', 'in'),
  ('fixing the prompts above n = 0 (Figures 8, 9)', 'emm', 'emm-free', 'in'),
  ('alternate above random tasks (13)', 'emm', 'emm-random_task', 'in'),
  ('alternate above balanced batches (13)', 'emm', 'emm-balanced', 'in'),
  ('the arrangement of the stage above mixed batches (13)', 'emm', 'emm-random', 'in'),
)


class Results:
  """Scores of each query by system, seed, and set with measure; and the ledger they are from."""

  def __init__(self, out):
    self.out = pathlib.Path(out)
    self.lines = trials.ledger(self.out)
    self.found = collections.defaultdict(dict)
    for line in self.lines:
      stage, _, name = line['run'].partition('/')
      if 'scores' in line:
        self.found[stage, name][line['seed']] = {
          key: np.array(scores) for key, scores in line['scores'].items()
        }

  def system(self, stage, name):
    """{seed: {set/measure: scores}} of a row; a seed has all runs of the row, or is left out."""
    if '*' not in name:
      return self.found.get((stage, name), {})
    tasks = nir_sets.RETRIEVAL if stage == 'retriever' else nir_sets.RETRIEVAL + nir_sets.PAIRS
    parts = [self.found.get((stage, name.replace('*', task)), {}) for task in tasks]
    seeds = set.intersection(*(set(part) for part in parts))
    return {
      seed: {key: scores for part in parts for key, scores in part[seed].items()}
      for seed in sorted(seeds)
    }

  def keys(self, stage, domain):
    """The sets of a domain, with their measures."""
    tasks = nir_sets.RETRIEVAL if stage == 'retriever' else nir_sets.RETRIEVAL + nir_sets.PAIRS
    return [
      f'{name}/{"RR@10" if task in nir_sets.RETRIEVAL else "accuracy"}'
      for task in tasks
      for name in ((nir_sets.IN_DOMAIN[task],) if domain == 'in' else nir_sets.OUT_OF_DOMAIN[task])
    ]

  def mean(self, stage, name, keys):
    """By seed, the mean over the sets; nothing where one is missing."""
    return [
      float(np.mean([scores[key].mean() for key in keys]))
      for scores in self.system(stage, name).values()
      if all(key in scores for key in keys)
    ]

  def compare(self, stage, name, other, keys):
    """A verdict on the first system being above the second; None where there are no such runs."""
    return trials.compare(self.system(stage, name), self.system(stage, other), keys)


def write(out, docs=None):
  """OUT/results.md and the figures; with ``docs`` its sections whose rows are all there."""
  results = Results(out)
  made = {name: make(results) for name, make in SECTIONS.items()}
  whole = '\n'.join(text for text, _ in made.values() if text)
  trials.write(results.out / 'results.md', whole + '\n')
  print(whole)
  for name, (text, complete) in made.items():
    if docs and complete:
      drawn = [results.out / file for file in re.findall(r'!\[.*\]\((.*)\)', text)]
      trials.publish(docs, 'nir_prompt', text, drawn, name)


def section(results, stage, rows, domains, *more):
  """Tables of some systems, the claims about them, what else there is, and their runs.

  Returns the text, and whether all systems were measured.
  """
  measured = {name: label for name, label in rows.items() if results.system(stage, name)}
  if len(measured) < 2:
    return '', False
  parts = [
    main_table(results, stage, measured, domains),
    claims_table(results, stage, measured),
    *(one(results) for one in more),
  ]
  return '\n'.join(part for part in parts if part), len(measured) == len(rows)


def sets_section(results):
  return counts_table(results.out), True


def retriever_section(results):
  text, complete = section(
    results,
    'retriever',
    RETRIEVER,
    ('in', 'out'),
    lambda results: draw(results, 'retriever', RETRIEVER),
    lambda results: draw_prompts(results, 'retriever'),
    lambda results: runs_table(results, 'retriever/', NOT_OF_RETRIEVER),
  )
  return text, complete and len(results.system('retriever', 'emm')) > 1


def variants_section(results):
  return section(
    results,
    'retriever',
    VARIANTS,
    ('in', 'out'),
    lambda results: runs_table(
      results, ('retriever/manual', 'retriever/emm', 'retriever/free'), 'retriever/emm-without'
    ),
  )


def new_task_section(results):
  return section(
    results,
    'retriever',
    NEW_TASK,
    ('in',),
    lambda results: weights_table(results.out),
    lambda results: runs_table(
      results, ('retriever/few', 'retriever/ft-without', 'retriever/emm-without')
    ),
  )


def reranker_section(results):
  return section(
    results,
    'reranker',
    RERANKER,
    ('in', 'out'),
    apart_table,
    lambda results: draw_prompts(results, 'reranker'),
    lambda results: runs_table(results, 'reranker/'),
  )


SECTIONS = {
  'sets': sets_section,
  'retriever': retriever_section,
  'variants': variants_section,
  'new task': new_task_section,
  'reranker': reranker_section,
}


def counts_table(out):
  path = pathlib.Path(out) / 'sets' / 'counts.json'
  counts = json.loads(path.read_text())
  rows = [
    [name, ', '.join(f'{key} {n:,}' for key, n in some.items())] for name, some in counts.items()
  ]
  return trials.table(['set', 'how many'], rows)


def main_table(results, stage, systems, domains):
  """Tables 8 and 9: every set, in domain and out of it, and the means."""
  head, columns = [], []
  for domain in domains:
    keys = results.keys(stage, domain)
    columns += [*([key] for key in keys), keys]
    head += [key.partition('/')[0] for key in keys]
    head.append({'in': 'in domain', 'out': 'out of domain'}[domain])
  rows = [
    [label, *(trials.cell(results.mean(stage, name, keys)) for keys in columns)]
    for name, label in systems.items()
  ]
  if stage == 'reranker':
    floor = [larger_class(results.out, keys[0]) if len(keys) == 1 else '' for keys in columns]
    rows.insert(0, ['the larger class for all', *floor])
  return trials.table(['', *head], rows)


def larger_class(out, key):
  """The accuracy of one answer for all pairs of a set; '' for a set of retrieval."""
  path = out / 'sets' / 'test' / key.partition('/')[0] / 'test.jsonl'
  if not path.exists():
    return ''
  labels = [json.loads(line)['label'] for line in path.read_text().splitlines()]
  return f'{max(np.mean(labels), 1 - np.mean(labels)):.3f}'


def claims_table(results, stage, systems):
  """The claims about two of the systems."""
  rows = []
  for claim, name, other, domain in CLAIMS:
    if name not in systems or other not in systems:
      continue
    if found := results.compare(stage, name, other, results.keys(stage, domain)):
      rows.append([claim, {'in': 'in domain', 'out': 'out of domain'}[domain], trials.shown(found)])
  return trials.table(['claim', 'sets', 'difference, interval, verdict'], rows) if rows else ''


def apart_table(results):
  """Table 11: whether QA and paraphrase are told apart."""
  keys = ['apart/qa', 'apart/paraphrase']
  rows = [
    [label, *(trials.cell(results.mean('reranker', name, [key])) for key in keys)]
    for name, label in RERANKER.items()
    if results.mean('reranker', name, keys)
  ]
  head = ['', 'QA: the passage that answers wins', 'paraphrase: the question wins']
  return '### QA against paraphrase\n\n' + trials.table(head, rows) if rows else ''


def weights_table(out):
  """The weights of a new task's prompt after its training."""
  rows = []
  for path in sorted(pathlib.Path(out).glob('runs/*/few-fused-*/training/metrics.jsonl')):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    last = [line for line in lines if any(key.startswith('weight/') for key in line)][-1:]
    for line in last:
      shares = {key.split('/')[2]: v for key, v in line.items() if key.startswith('weight/')}
      rows.append([path.parts[-3], ', '.join(f'{key} {v:.3f}' for key, v in shares.items())])
  return '### Weights of fused prompts\n\n' + trials.table(['run', 'weights'], rows) if rows else ''


def draw(results, stage, rows):
  """Bars of the means; the line that shows them."""
  keys = {'in domain': results.keys(stage, 'in'), 'out of domain': results.keys(stage, 'out')}
  systems = {
    label: name
    for name, label in rows.items()
    if all(results.mean(stage, name, some) for some in keys.values())
  }
  if not systems:
    return ''
  values = {
    title: {
      label: figures.Bar(float(np.mean(means)), min(means), max(means), False)
      for label, means in (
        (label, results.mean(stage, name, some)) for label, name in systems.items()
      )
    }
    for title, some in keys.items()
  }
  foot = 'means over test sets; whiskers: the range over seeds'
  title = 'Fine-tuning at [MASK] ranks higher than NIR-Prompt'
  path = results.out / f'nir-{stage}.png'
  figures.dots(values, 'RR@10', foot, path, title=title, differences=False)
  return f'![The {stage}: means over test sets](nir-{stage}.png)\n'


def draw_prompts(results, stage):
  """Cosines of the prompts of the tasks of a stage; the line that shows them."""
  found = {
    path.parent.name.removeprefix('mdm-').removesuffix('-0'): artifact.load_prompt(path)
    for path in sorted((results.out / 'runs' / stage).glob('mdm-*-0/prompt.npz'))
  }
  if len(found) < 2:
    return ''
  file = f'nir-{stage}-prompts.png'
  foot = 'seed 0; learned vectors of all slots end to end'
  prompt_cosines.draw(found, results.out / file, foot)
  return f'![How alike prompts are]({file})\n'


def runs_table(results, starts, but=()):
  """The runs whose names begin so."""
  rows = [
    [
      line['run'],
      str(line['seed']),
      str(line['seconds']),
      '' if line.get('best') is None else f'{line["best"]:.3f} at {line["best_step"]}',
      f'{line["mlm_accuracy"]:.3f}' if 'mlm_accuracy' in line else '',
      f'{line["P(yes)"]:.1e}, {line["P(no)"]:.1e}' if 'P(yes)' in line else '',
      line['commit'],
    ]
    for line in results.lines
    if line['run'].startswith(starts) and not (but and line['run'].startswith(but))
  ]
  head = ['run', 'seed', 's', 'best dev mean', 'masked tokens right', 'P(yes), P(no)', 'commit']
  used = [i for i in range(len(head)) if any(row[i] for row in rows)]
  return '### Runs\n\n' + trials.table(
    [head[i] for i in used], [[row[i] for i in used] for row in rows]
  )
