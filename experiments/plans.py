"""Plans of the recipes on the machines that people rent: docs/plans.md.

    python experiments/plans.py [--only=dptdr.*v5e:2x4] [--minutes=60] [--compile=false]

`make plans` is the same. Every program is compiled once: what is known of it is a line of
experiments/plans.jsonl, so that the command can be stopped at any time and goes on where it was.
Without a line, its recipe is missing from the page. Where the code of models and methods changes,
or jax or a compiler, remove the lines that should be compiled again. All of them take hours:
minutes for an update of a large encoder.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import pathlib
import re
import time

from dprjax import plan
from dprjax.base import files
from dprjax.base.errors import InputError
from dprjax.planning import compiling, targets
from dprjax.runtime import cli, flags

ROOT = pathlib.Path(__file__).resolve().parent.parent
LEDGER = ROOT / 'experiments' / 'plans.jsonl'
PAGE = ROOT / 'docs' / 'plans.md'

# What is trained, and its examples: MS MARCO's queries with judgements and its passages, NQ's
# questions with an answer among the passages, arXiv's papers in
# docs/experiments/topic-dpr.md, 40,000 of each task of NIR-Prompt.
RECIPES = {
  'dptdr.py:msmarco': 502939,
  'dptdr.py:nq': 58880,
  'ft.py:msmarco': 502939,
  'ft.py:nq': 58880,
  'cross_encoder.py:msmarco': 502939,
  'rip.py': 8841823,
  'condenser.py:cocondenser': 8841823,
  'condenser.py:ict': 8841823,
  'topic_dpr.py:topic,tuned': 29431,
  'nir_retriever.py:emm,manual,paper': 120000,
  'nir_reranker.py:emm,manual,paper': 200000,
}
# Where more chips than so many cannot share the recipe's batch, which has too few rows.
LARGER = {
  'cross_encoder.py:msmarco': (8, ('--config.batch_size=32',)),
  'topic_dpr.py:topic,tuned': (4, ('--config.batch_size=64', '--config.topics.batch=32')),
  'nir_retriever.py:emm,manual,paper': (16, ('--config.batch_size=64',)),
  'nir_reranker.py:emm,manual,paper': (4, ('--config.batch_size=160',)),
}
BACKBONES = ('roberta-large', 'bert-base')
MACHINES = ('v5e:2x4', 'v5e:4x8', 'v6e:2x4', 'v5p:2x2x1', 'h100:8')


class Absent(Exception):
  """A program that no line is of, where none may be compiled."""


class Ledger:
  """What is known of compiled programs, by what was compiled."""

  def __init__(self, path, deadline, may_compile):
    self._path, self._deadline, self._may_compile = path, deadline, may_compile
    self._known = {}
    if path.exists():
      for line in path.read_text().splitlines():
        entry = json.loads(line)
        self._known[json.dumps(entry['job'], sort_keys=True)] = entry

  @property
  def versions(self):
    """Of jax and the compilers that the programs were compiled with."""
    used = {
      f'{name} {version}'
      for entry in self._known.values()
      for name, version in entry['versions'].items()
    }
    return ', '.join(sorted(used))

  def compile_program(self, job):
    """As ``compiling.compile_program``; raises Absent where there is no time for it."""
    key = json.dumps(dataclasses.asdict(job), sort_keys=True)
    entry = self._known.get(key)
    if entry is None:
      if not self._may_compile or time.monotonic() > self._deadline:
        raise Absent
      versions = versions_of(targets.parse(job.target))
      made = plan.compile_aloud(job, 3600)
      entry = {'job': json.loads(key), 'versions': versions, 'answer': dict(made.answer)}
      self._known[key] = entry
      with self._path.open('a') as file:
        file.write(json.dumps(entry) + '\n')
    return compiling.Program(job, entry['answer'])


def versions_of(target):
  """Of jax and the compiler of a target."""
  names = {'tpu': ['jax', 'libtpu'], 'cuda': ['jax', 'jax-cuda12-plugin'], 'cpu': ['jax']}
  targets.check_installed(target)
  return {name: importlib.metadata.version(name) for name in names[target.platform]}


def larger(recipe, machine):
  """Flags of a batch that the machine's chips can share, where the recipe's cannot be."""
  most, flags = LARGER.get(recipe, (float('inf'), ()))
  return flags if targets.parse(machine).devices > most else ()


def make(recipe, backbone, machine, ledger):
  """A recipe's plan on a machine; Absent where a program of it is."""
  arguments = [
    f'--config=configs/{recipe}',
    f'--config.backbone.path={backbone}',
    *larger(recipe, machine),
  ]
  return plan.plan(
    arguments,
    targets.parse(machine),
    ledger.compile_program,
    examples=RECIPES[recipe],
    forward=recipe == 'dptdr.py:msmarco',
  )


def summary(made):
  """A line of the first table."""
  (recipe, backbone, machine), found = made
  flags = ' '.join(
    flag.removeprefix('--config.') for flag in (*larger(recipe, machine), *found.flags)
  )
  cells = [f'`configs/{recipe}`', backbone, machine]
  if not found.update:
    return [
      *cells,
      'none found' if found.programs['update'].fits is False else 'not known',
      *'    ',
    ]
  program = found.programs[found.update]
  bound = program.bound(found.dtype)
  (unit, count), *_ = found.batch.texts.items()
  hours = '' if found.updates is None else f'{found.updates * bound.seconds / 3600 / 0.5:,.3g}'
  return [
    *cells,
    f'`{flags}`' if flags else 'nothing',
    f'{program.needs / targets.GIB:.1f} of {program.has / targets.GIB:.1f}',
    f'{1e3 * bound.seconds:,.0f}, {bound.what}',
    f'{0.5 * count / bound.seconds:,.0f} {unit}',
    hours,
  ]


def listed(missing):
  """The recipes and backbones, each with its machines."""
  machines = {}
  for recipe, backbone, machine in missing:
    machines.setdefault((recipe, backbone), []).append(machine)
  return '; '.join(
    f'{recipe} {backbone} ({", ".join(names) if len(names) < len(MACHINES) else "all machines"})'
    for (recipe, backbone), names in machines.items()
  )


def page(plans, missing, versions):
  """docs/plans.md."""
  columns = [
    'recipe',
    'backbone',
    'machine',
    'type',
    'GiB a chip',
    'least ms a step, bound by',
    'a second at half the bound',
    'hours at half the bound',
  ]
  rows = [summary(made) for made in plans.items()]
  lines = [
    '# Plans of the recipes',
    '',
    '    make plans',
    '',
    'What each recipe needs on machines that people rent, as [`dprjax.plan`](planning.md) finds it',
    'without them; nothing here was measured on one. Arithmetic and frozen weights are bfloat16,',
    'the default on accelerators.',
    'The command compiles what is missing from `experiments/plans.jsonl`, and writes this page.',
    f'Compiled with {versions}.',
    '',
    '## What to type on which machine',
    '',
    f'| {" | ".join(columns)} |',
    f'|{"---|" * len(columns)}',
    *(f'| {" | ".join(row)} |' for row in rows),
    '',
    f'{len(missing)} of {len(missing) + len(plans)} combinations are not compiled yet, of these '
    f'recipes: {listed(missing)}.'
    if missing
    else f'All {len(plans)} combinations are compiled.',
  ]
  for (recipe, backbone, machine), found in plans.items():
    body = plan.report(found).partition('\n')[2]
    lines += ['', f'## {recipe} of {backbone} on {machine}', body.rstrip()]
  return '\n'.join(lines) + '\n'


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--only', default='', help='a regular expression: RECIPE BACKBONE MACHINE')
  parser.add_argument('--minutes', type=float, default=float('inf'), help='begin no program after')
  parser.add_argument('--compile', type=flags.boolean, default=True, metavar='true|false')
  args = parser.parse_args()
  cli.speak()
  deadline = time.monotonic() + 60 * args.minutes
  plans, missing, versions = {}, [], ''
  # The first recipe everywhere, then the next one.
  for backbone in BACKBONES:
    for recipe in RECIPES:
      for machine in MACHINES:
        name = (recipe, backbone, machine)
        wanted = re.search(args.only, ' '.join(name)) is not None
        ledger = Ledger(LEDGER, deadline, args.compile and wanted)
        try:
          plans[name] = make(*name, ledger)
        except (Absent, InputError) as error:
          if isinstance(error, InputError) and wanted:
            print(f'{" ".join(name)}: {error}', flush=True)
          missing.append(name)
        else:
          versions = ledger.versions
  with files.atomic_write(PAGE) as file:
    file.write(page(plans, missing, versions))


if __name__ == '__main__':
  main()
