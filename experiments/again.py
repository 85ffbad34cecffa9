"""Runs one seed of one row of each verdict again, and compares it with the kept ledger.

    python experiments/again.py --data=../shared/data --out=runs/again [--only=D4,T4]

Two cores need an hour. A run has the rates and other choices of the ledger, so only one training is
made. OUT/again.md has a row for each: its mean score, the kept one and its commit, the difference
with a 95 % interval over test queries (the same queries, paired), and the range of all kept seeds.
*Differs*: the interval leaves out 0. A seed that draws other queries since (`draws` in the first
line of a ledger) may well differ by as much as two seeds do; what is outside of the range wants an
explanation, or a new run of the row. The same command goes on where it stopped.

D6 to D8 and C1 to C5 start from backbones that take hours (experiments/pretraining.py), D10 from
rerankers (experiments/unm.py): `--again` of these runs them.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time
from typing import NamedTuple

import numpy as np

import trials

SEED = 1  # rates were chosen with seed 0


class Row(NamedTuple):
  """A run of a ledger.

  Attributes:
    claims: the verdicts that it is a row of.
    experiment: the script.
    run: its name in the ledger.
    flags: that make it.
  """

  claims: str
  experiment: str
  run: str
  flags: tuple[str, ...]

  @classmethod
  def system(cls, claims, experiment, run):
    part, _, way = run.partition('/')
    return cls(claims, experiment, run, (f'--part={part}', f'--ways={way}'))


ROWS = (
  Row.system('D1', 'prompt_tuning', 'medquad/ft'),
  Row.system('D2', 'unm', 'scifact/dpt.batch'),
  Row.system('D3', 'prompt_tuning', 'medquad/p8'),
  Row.system('D4', 'prompt_tuning', 'medquad/mlp'),
  Row.system('D5', 'prompt_tuning', 'medquad/p32'),
  Row.system('D9', 'unm', 'medquad-cut/dpt.bm25'),
  Row.system('C6', 'unm', 'scifact/ft.bm25'),
  Row('T1 T5 T7', 'topic_dpr', 'topic', ('--part=tuned',)),
  Row('T2', 'topic_dpr', 'words', ('--part=words',)),
  Row('T3', 'topic_dpr', 'dpr', ('--part=tuned',)),
  Row('T4 T6', 'topic_dpr', 'dptdr', ('--part=tuned',)),
  Row('N1', 'nir_prompt', 'ft-qa', ('--part=retriever',)),
  Row('N2 N3', 'nir_prompt', 'ft', ('--part=retriever',)),
)
HEAD = ('verdict', 'run', 'kept', 'now', 'difference', 'seeds', 'commits', 'seconds', '')


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--data', required=True, help='the folder of data sets')
  parser.add_argument('--out', type=pathlib.Path, required=True)
  parser.add_argument('--only', default='', help='verdicts, separated by commas')
  args = parser.parse_args()
  wanted = set(filter(None, args.only.split(',')))
  rows = [row for row in ROWS if not wanted or wanted & set(row.claims.split())]
  total, done, shown = sum(kept_seconds(row) for row in rows), 0, []
  for row in rows:
    bar = '#' * round(30 * done / total)
    trials.say(f'[{bar:30}] {done // 60} of {total // 60} min  {row.claims}: {row.run}')
    shown.append(compare(row, *made_again(row, args)))
    done += kept_seconds(row)
    table = trials.table(HEAD, shown)
    trials.write(args.out / 'again.md', table)
  print(table)


def lines_of(row):
  """The kept lines of all seeds of a run, and the others."""
  path = trials.LEDGERS / f'{row.experiment}.jsonl'
  lines = trials.kept_lines(path)
  own = [line for line in lines if line['run'] == row.run]
  return {line['seed']: line for line in own}, lines, json.loads(path.read_text().split('\n')[0])


def kept_seconds(row):
  return lines_of(row)[0][SEED]['seconds']


def made_again(row, args):
  """The kept line and a new one of the run."""
  kept, lines, settings = lines_of(row)
  out = args.out / row.run.replace('/', '-')
  if not (out / trials.LEDGER).exists():
    trained = f'{row.run}@{kept[SEED].get("rate", 0):g}'  # a line of its own in some ledgers
    others = [
      line for line in lines if line['seed'] != SEED or line['run'] not in (row.run, trained)
    ]
    trials.write_ledger(out / trials.LEDGER, others)
  settings.pop(trials.NOTE, None)
  command = [
    *(sys.executable, str(trials.ROOT / 'experiments' / f'{row.experiment}.py')),
    *(f'--data={args.data}', f'--out={out}', f'--seeds=0,{SEED}', *row.flags),
    *(f'--{name}={value}' for name, value in settings.items()),
  ]
  found = line_in(out, row.run)
  if found is None:
    began = time.monotonic()
    with (out / 'log').open('a') as log:
      subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    trials.say(f'{row.run}: {time.monotonic() - began:.0f} s')
    found = line_in(out, row.run)
  return kept, found


def line_in(out, run):
  lines = (line for line in trials.ledger(out) if (line['run'], line['seed']) == (run, SEED))
  return next(lines, None)


def compare(row, kept, found):
  """The cells of a run, by the measure of its verdict: nAP of Topic-DPR, else the first."""
  before = kept[SEED]
  names = list(before['scores'])
  name = next((name for name in names if name.endswith('nAP@10')), names[0])
  old, new = (np.array(line['scores'][name]) for line in (before, found))
  gap = new - old
  draws = trials.counts(len(gap)) @ gap / len(gap)
  low, high = np.quantile(draws, [0.025, 0.975])
  seeds = [np.mean(line['scores'][name]) for line in kept.values()]
  inside = min(seeds) <= new.mean() <= max(seeds)
  said = 'differs' if low > 0 or high < 0 else 'same'
  return [
    row.claims,
    f'{row.experiment}: {row.run}, seed {SEED}, {name}',
    f'{old.mean():.4f}',
    f'{new.mean():.4f}',
    f'{gap.mean():+.4f} [{low:+.4f}, {high:+.4f}]',
    f'{min(seeds):.4f} to {max(seeds):.4f}',
    f'{before["commit"]}, {found["commit"]}',
    f'{before["seconds"]}, {found["seconds"]}',
    said + (', within the seeds' if said == 'differs' and inside else ''),
  ]


if __name__ == '__main__':
  main()
