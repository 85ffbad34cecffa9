"""Plans of the recipes and of embedding models on the machines that people rent: docs/plans.md.

    python experiments/plans.py [--only=dptdr.*v5e:2x4] [--minutes=60] [--compile=false]

`make plans` is the same. --only also names embedding models: MODEL MACHINE encode or update. Every
program is compiled once: what is known of it is a line of
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
from dprjax.planning import backbones, compiling, programs, tables, targets
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

# Published shapes (`dprjax.planning.backbones`), with the pooling of the model's folder.
EMBEDDERS = {
  'qwen3-embedding-0.6b': 'lasttoken',
  'embeddinggemma-300m': 'mean',
  'qwen3-embedding-8b': 'lasttoken',
  'qwen3-embedding-4b': 'lasttoken',
}
EMBEDDER_MACHINES = ('v5e:2x4', 'h100:1', 'v6e:2x4', 'h100:8')
# Texts of a forward pass and their tokens; vectors of a prompt, the update's is the last.
TEXTS, TOKENS = 64, 512
LENGTHS = 16, 64
BANKS = 10, 1000, 100_000
MACHINES = ('v5e:2x4', 'v5e:4x8', 'v6e:2x4', 'v5p:2x2x1', 'h100:8')


# What the table of embedding models says; read it again where the table changes.
ANSWER = (
  '- **Encoding fits everywhere.** Qwen3-Embedding-8B has 15.1 GB in bfloat16: on v5e two chips',
  '  share its weights and need 7.6 GiB of 15.75 each; a v6e or an H100 holds them whole.',
  '- **Rates**: products bind all but the 0.6B model on a v6e and the two small models on an H100.',
  '- **Prompts**: 1,000 of 16 vectors take .4 to 2.4 GB of each chip, and fit beside every model;',
  "  100,000 take 39 to 236 GB, so `dprjax.serve` keeps them in files, the most used in the host's",
  '  memory and on the chips.',
)


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


def embedder_job(model, machine, what):
  """The forward pass of long texts, or an update of a prompt by NQ's recipe."""
  flags = [
    '--config=configs/dptdr.py:nq',
    f'--config.backbone.path={model}',
    f'--config.pooling={EMBEDDERS[model]}',
    f'--config.prompt.length={LENGTHS[-1]}',
    *(f'--config.{flag}' for flag in typed(model, machine) if what == 'update'),
  ]
  return programs.CompileJob(machine, tuple(flags), TOKENS if what == 'encode' else 0, TEXTS)


def typed(model, machine):
  """Flags with which an update should fit."""
  split = model.endswith('8b') and machine.startswith('v5e')
  return ['backbone.remat=true', *(['mesh.fsdp=8', 'mesh.data=1'] if split else [])]


def embedder_rows(ledger, wanted):
  """Lines of the table of embedding models."""
  rows = []
  for what in ('encode', 'update'):
    for machine in EMBEDDER_MACHINES:
      for model in EMBEDDERS:
        found = ledger(wanted(model, machine, what))
        try:
          made = found.compile_program(embedder_job(model, machine, what))
        except Absent:
          continue
        rows.append((model, machine, what, made))
  models, machines = [*EMBEDDERS], EMBEDDER_MACHINES
  return sorted(rows, key=lambda row: (models.index(row[0]), machines.index(row[1]), row[2]))


def embedders(rows):
  """The section of embedding models."""
  lines = [
    '## Embedding models',
    '',
    *ANSWER,
    '',
    f'Encoding: {TEXTS} texts of {TOKENS} tokens at a time under a prompt of {LENGTHS[-1]}',
    'vectors, by `dprjax.encode`, which splits weights over the fewest chips that hold them in',
    'half of their memory. Training: an update of such a prompt by `configs/dptdr.py:nq`, 128',
    'queries and 256 passages. EmbeddingGemma has 4.7 M numbers more, in dense layers behind its',
    'pooling.',
    '',
    '| model | machine | program | type | a chip needs | bound by | tokens a second, all chips |',
    '|---|---|---|---|---|---|---|',
  ]
  known = {row[:3] for row in rows}
  missing = {
    f'{what} on {machine}': [model for model in EMBEDDERS if (model, machine, what) not in known]
    for what in ('encode', 'update')
    for machine in EMBEDDER_MACHINES
  }
  for model, machine, what, made in rows:
    flags = ' '.join(typed(model, machine)) if what == 'update' else ''
    cells = [model, machine, what, f'`{flags}`' if flags else 'nothing', tables.fits(made)]
    if 'xla' in made.answer:
      bound = made.bound('bfloat16')
      tokens = TEXTS * TOKENS
      if what == 'update':
        config = programs.read_config(made.job.config, made.target.platform)
        calls = programs.batch_of(config, backbones.SHAPES[model]).calls
        tokens = sum(rows * length for rows, length in calls)
      cells += [bound.what, f'{tokens / bound.seconds:,.0f}']
    else:
      cells += [made.failure[:80] if made.fits is None else '', '']
    lines.append(f'| {" | ".join(cells)} |')
  if len(known) < len(EMBEDDERS) * len(EMBEDDER_MACHINES) * 2:
    lines += ['', 'Not compiled yet:', '']
    lines += [f'- {where}: {", ".join(models)}' for where, models in missing.items() if models]
  lines += [
    '',
    'Memory of prompts in a bank, bfloat16; a file has float32, twice the size:',
    '',
    f'| model | P | one | {" | ".join(f"{count:,}" for count in BANKS)} |',
    f'|---|---|---|{"---|" * len(BANKS)}',
  ]
  for model in EMBEDDERS:
    for length in LENGTHS:
      shape = backbones.SHAPES[model]
      one = 2 * 2 * shape.num_layers * length * shape.num_kv_heads * shape.head_dim
      sizes = ' | '.join(size(count * one) for count in (1, *BANKS))
      lines.append(f'| {model} | {length} | {sizes} |')
  return lines


def size(count):
  """Bytes in words."""
  return f'{count / 1e9:,.3g} GB' if count >= 1e9 else f'{count / 1e6:,.3g} MB'


def listed(missing):
  """The recipes and backbones, each with its machines."""
  machines = {}
  for recipe, backbone, machine in missing:
    machines.setdefault((recipe, backbone), []).append(machine)
  return '; '.join(
    f'{recipe} {backbone} ({", ".join(names) if len(names) < len(MACHINES) else "all machines"})'
    for (recipe, backbone), names in machines.items()
  )


def page(plans, missing, versions, models):
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
    '# Plans of the recipes and of embedding models',
    '',
    '    make plans',
    '',
    'What recipes and embedding models need on machines that people rent, as',
    '[`dprjax.plan`](planning.md) finds it without them; nothing here was measured on one.',
    'Arithmetic and frozen weights are bfloat16, the default on accelerators.',
    '',
    'On TPUs no program is faster than its bound. On GPUs the bytes of memory are counted as if',
    'there were no caches. So where memory binds an H100, its least ms, its rates and its MFU at',
    'most are estimates, and a GPU can be faster. What it needs of its memory is no estimate.',
    '',
    'The command compiles what is missing from `experiments/plans.jsonl`, and writes this page.',
    f'Compiled with {versions}.',
    '',
    *embedders(models),
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
    '',
    'The columns `encode` of the recipes below were compiled with float32 weights, whole on each',
    'chip. `dprjax.encode` now places bfloat16 weights, so their parameters take half of that.',
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

  def ledger(wanted):
    return Ledger(LEDGER, deadline, args.compile and wanted)

  def wanted(*name):
    return re.search(args.only, ' '.join(name)) is not None

  models = embedder_rows(ledger, wanted)
  # The first recipe everywhere, then the next one.
  for backbone in BACKBONES:
    for recipe in RECIPES:
      for machine in MACHINES:
        name = (recipe, backbone, machine)
        known = ledger(wanted(*name))
        try:
          plans[name] = make(*name, known)
        except (Absent, InputError) as error:
          if isinstance(error, InputError) and wanted(*name):
            print(f'{" ".join(name)}: {error}', flush=True)
          missing.append(name)
        else:
          versions = known.versions
  with files.atomic_write(PAGE) as file:
    file.write(page(plans, missing, versions, models))


if __name__ == '__main__':
  main()
