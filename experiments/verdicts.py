"""The claims of all papers, decided again from the ledgers that the project keeps.

    python experiments/verdicts.py [--docs=docs]

Prints the tables of docs/results.md in seconds, and with `--docs` puts them there. Nothing is
trained, and no data set is read: the scores of each test query are in experiments/ledgers.

An interval is over seeds and queries (`trials.interval`). *Planned* rows and their rule were fixed
before their runs; the others were thought of afterwards, and ask for a confirmation. *Sources* are
data sets with texts of their own: MedQuAD with cut questions is MedQuAD.
"""

import argparse
import importlib
import pathlib
import tempfile
from typing import NamedTuple

import numpy as np

import nir_tables
import topic_dpr_tables
import trials


class Row(NamedTuple):
  """A comparison.

  Attributes:
    claim: its number in docs/results.md.
    text: the systems, the better one first.
    paper: the two numbers of the paper.
    experiment: the module, whose ledger has the runs.
    pairs: (system, the one that it is above); several where all have to be near 0.
    sets: the settings; (): all that have both systems with all seeds.
    near: whether the claim is that there is no difference.
    planned: whether it and its rule were fixed before the runs.
    measure: '': the score; else of `Experiment.look` or `Experiment.shift` in pretraining.py.
  """

  claim: str
  text: str
  paper: str
  experiment: str
  pairs: tuple[tuple[str, str], ...]
  sets: tuple[str, ...] = ()
  near: bool = False
  planned: bool = True
  measure: str = ''


def trained(claim, text, paper, ours, theirs, kind, sets, planned=True, near=False):
  """A row of backbones, whose vector is that of the first token."""
  pair = tuple(f'{start}.{kind}.cls' for start in (ours, theirs))
  return Row(claim, text, paper, 'pretraining', (pair,), sets, near, planned)


def looked(claim, text, paper, more, less, measure):
  pair = (f'{more}.cls', f'{less}.cls')
  return Row(claim, text, paper, 'pretraining', (pair,), measure=measure)


WHOLE = ('scifact', 'medquad')
LOW = ('medquad-100', 'medquad-1000')
LONG = ('scifact-long',)
ROWS = (
  Row('D1', 'FT above a prompt of 16', '34.9, 32.7 MRR@10', 'prompt_tuning', (('ft', 'p16'),)),
  Row('D1', 'FT above a prompt of 64', '', 'prompt_tuning', (('ft', 'p64'),)),
  Row('D1', 'FT above `:beir`', '', 'gain', (('ft', 'new'),)),
  Row(
    'D2',
    'DPT not below FT, both with RIP and UNM',
    '39.1, 39.4',
    'unm',
    (('dpt.denoised.rip', 'ft.denoised.rip'),),
  ),
  Row('D2', 'RIP and UNM help DPT', '', 'unm', (('dpt.denoised.rip', 'dpt.batch'),)),
  Row(
    'D3',
    'P of 8, 32, 64 as good as 16',
    '38.5 to 39.1',
    'prompt_tuning',
    tuple((f'p{length}', 'p16') for length in (8, 32, 64)),
    near=True,
  ),
  Row('D4', 'no MLP above an MLP', '38.7, 38.0', 'prompt_tuning', (('p16', 'mlp'),)),
  Row(
    'D5',
    'a prompt of RIP as good a start as a random one',
    '32.4, 32.4',
    'prompt_tuning',
    (('rip', 'p32'),),
    near=True,
  ),
  *(
    trained(
      'D6',
      f'sentences above spans, coCondenser, {said}',
      paper,
      'cocondenser-sentence',
      'cocondenser-span',
      kind,
      sets,
      planned=kind != 'dpt',  # that row was named when its runs were there
    )
    for said, paper, kind, sets in (
      ('zero-shot', '15.4, 11.1', 'zero', WHOLE),
      ('zero-shot, all texts of one length', '', 'zero', ('medquad-even',)),
      ('DPT', '', 'dpt', WHOLE),
      ('FT', '', 'ft', WHOLE),
    )
  ),
  *(
    trained(
      'D7',
      f'RIP above {said}, {unit}s, {kind.upper()}',
      paper if (unit, kind) == ('sentence', 'dpt') else '',
      f'rip-{unit}',
      f'{other}-{unit}',
      kind,
      WHOLE,
      planned=(kind, unit) != ('ft', 'sentence'),  # named after a seed of MedQuAD
    )
    for kind in ('dpt', 'ft')
    for said, other, paper in (
      ('coCondenser', 'cocondenser', '38.7, 37.3'),
      ('masked LM', 'mlm', '38.7, 35.5'),
    )
    for unit in ('sentence', 'span')
  ),
  *(
    trained(
      'D7',
      f'RIP above {said}, sentences, FT of 1,200 updates',
      '',
      'rip-sentence',
      f'{other}-sentence',
      'ft',
      LONG,
      planned=False,
    )
    for said, other in (('coCondenser', 'cocondenser'), ('masked LM', 'mlm'))
  ),
  *(
    looked('D8', f'RIP {said}, {unit}s', paper if unit == 'sentence' else '', *pair, measure)
    for unit in ('sentence', 'span')
    for said, paper, pair, measure in (
      (
        'better aligned than masked LM',
        '21.9, 161',
        (f'mlm-{unit}', f'rip-{unit}'),
        'raw alignment',
      ),
      (
        'more uniform than masked LM',
        '-26.4, -13.8',
        (f'mlm-{unit}', f'rip-{unit}'),
        'raw uniformity',
      ),
      (
        'more uniform than coCondenser',
        '',
        (f'cocondenser-{unit}', f'rip-{unit}'),
        'raw uniformity',
      ),
    )
  ),
  Row(
    'D9',
    'negatives of two retrievers above those of BM25, DPT',
    '38.3, 36.8',
    'unm',
    (('dpt.undenoised', 'dpt.bm25'),),
  ),
  Row(
    'D10',
    'denoised ones above them, DPT',
    '38.7, 38.3',
    'unm',
    (('dpt.denoised', 'dpt.undenoised'),),
  ),
  trained(
    'C1',
    'Condenser above masked LM, STS-b, 500 pairs',
    '76.6, 68.6',
    'condenser',
    'mlm',
    'ft',
    ('stsb-500',),
  ),
  trained('C1', 'the same, 1,000 pairs', '', 'condenser', 'mlm', 'ft', ('stsb-1000',)),
  trained('C2', 'the same, sections', '.73, .72', 'condenser', 'mlm', 'ft', ('sections-1000',)),
  trained('C3', 'the same, few queries', '72.7, 66.6', 'condenser', 'mlm', 'ft', LOW),
  trained('C3', 'the same, all queries', '', 'condenser', 'mlm', 'ft', WHOLE),
  *(
    trained(
      'C4', f'ICT as good as Condenser, {said}', paper, 'ict', 'condenser', 'ft', sets, near=True
    )
    for said, paper, sets in (('few queries', '72.9, 72.7', LOW), ('all queries', '', WHOLE))
  ),
  looked(
    'C5',
    'FT moves attention more after masked LM than after Condenser',
    'a figure',
    'mlm',
    'condenser',
    'shift',
  ),
  looked('C5', 'the same, ICT', '', 'mlm', 'ict', 'shift'),
  Row(
    'C6',
    'negatives of two retrievers above those of BM25, FT',
    '36.6, 33.8',
    'unm',
    (('ft.undenoised', 'ft.bm25'),),
  ),
)
NEAR = 0.01  # in nDCG@10


def main():
  made = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  made.add_argument('--docs', help='the docs folder whose results.md takes the table')
  docs = made.parse_args().docs
  for name, text in tables().items():
    print(text)
    if docs:
      trials.insert(pathlib.Path(docs) / 'results.md', name, text)


def tables():
  """The tables of docs/results.md in Markdown, by the name of their marks."""
  return {'verdicts.py': table(), 'verdicts.py, topics and tasks': later_table()}


def later_table():
  """The table of the claims of Topic-DPR and NIR-Prompt."""
  rows = [
    row
    for module in (topic_dpr_tables, nir_tables)
    for row in module.claims(module.Results(trials.kept_lines(module.LEDGER)), numbered=True)
  ]
  return trials.table(trials.CLAIMS, rows)


def table():
  """The table of the claims of DPTDR and Condenser, in Markdown."""
  with tempfile.TemporaryDirectory() as out:
    ledgers = {name: Ledger(name, f'{out}/{name}') for name in {row.experiment for row in ROWS}}
    rows = [cells(row, ledgers[row.experiment]) for row in ROWS]
  head = ['', 'claim', 'verdict', 'here', 'paper', 'seeds, sources', 'planned']
  return trials.table(head, rows)


class Ledger:
  """An experiment and what its kept ledger has."""

  def __init__(self, name, out):
    module = importlib.import_module(name)
    args = module.parser().parse_args(['--data=.', f'--out={out}', '--dtype=mixed'])
    self.experiment = module.Experiment(args)
    self.found = self.experiment.found()
    self.lines = trials.ledger(self.experiment.out)

  def pair(self, row, ours, theirs):
    """{seed: {set: scores}} of both systems."""
    if row.measure == 'shift':
      where = [self.found['medquad'][f'{one.replace(".", ".ft.")}'] for one in (ours, theirs)]
    elif row.measure:
      where = [
        {line['seed']: line for line in self.lines if line['run'] == f'looks/{one}'}
        for one in (ours, theirs)
      ]
    else:
      sets = row.sets or [
        name
        for name in self.experiment.sets
        if self.settled(name, ours) and self.settled(name, theirs)
      ]
      return self.experiment.pair(self.found, sets, ours, theirs)
    return [
      {seed: {row.measure: of_each(line, row.measure)} for seed, line in lines.items()}
      for lines in where
    ]

  def settled(self, name, way):
    """Whether a setting has a system with all seeds."""
    return set(self.experiment.seeds) <= self.found[name][way].keys()

  def source(self, name):
    """The source of a setting's texts."""
    sets = self.experiment.sets
    return (sets[name].source if name in sets else name).partition('-')[0]


def cells(row, ledger):
  """The cells of a row."""
  found, count = [], ''
  for ours, theirs in row.pairs:
    pair = ledger.pair(row, ours, theirs)
    names = list(pair[0][min(pair[0])])
    found.append(trials.compare(*pair, names))
    sources = {ledger.source(name) for name in names} if not row.measure else {row.measure}
    count = f'{len(pair[0])}, {len(sources)}'
  shown = '; '.join(
    f'{trials.number(mean)} [{trials.number(low)}, {trials.number(high)}]'
    for mean, low, high, _ in found
  )
  said = near(found) if row.near else found[0][3]
  planned = 'yes' if row.planned else 'no'
  return [row.claim, row.text, f'**{said}**', shown, row.paper, count, planned]


def of_each(line, measure):
  """A measure of each text; of unit vectors only its mean was kept."""
  return np.array(line['scores'].get(measure, [line.get(measure)]))


def near(found):
  """The verdict on intervals being near 0."""
  if all(low > -NEAR and high < NEAR for _, low, high, _ in found):
    return 'held'
  return 'not' if any(low > NEAR or high < -NEAR for _, low, high, _ in found) else 'undecided'


if __name__ == '__main__':
  main()
