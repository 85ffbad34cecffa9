"""Plans of the recipes and of embedding models on machines for rent: docs/plans.md.

    python experiments/plans.py [--only=dptdr.*v5e:2x4] [--minutes=60] [--compile=false]
    python experiments/plans.py --show='dptdr.py:msmarco roberta-large v5e:2x4'

The first command compiles the programs that experiments/plans.jsonl lacks and writes the page;
`make plans` is the same. --only is a regular expression of RECIPE BACKBONE MACHINE, or of MODEL
MACHINE encode or update. Each compiled program is a line of the file, so the command can be stopped
at any time and continues there. All programs take hours; an update of a large encoder takes
minutes. After a change of a model, a method, jax or a compiler, remove the lines that should be
compiled again.

The second command prints the plans that match, from the file: memory
of the update and of the encoder.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import itertools
import json
import pathlib
import re
import time

from dprjax import plan
from dprjax.base import cli, files, flags
from dprjax.base.errors import InputError
from dprjax.planning import backbones, compiling, programs, tables, targets

ROOT = pathlib.Path(__file__).resolve().parent.parent
LEDGER = ROOT / 'experiments' / 'plans.jsonl'
PAGE = ROOT / 'docs' / 'plans.md'

RECIPES = (
  'dptdr.py:msmarco',
  'dptdr.py:nq',
  'ft.py:msmarco',
  'ft.py:nq',
  'cross_encoder.py:msmarco',
  'rip.py',
  'condenser.py:cocondenser',
  'condenser.py:ict',
  'topic_dpr.py:topic,tuned',
  'nir_retriever.py:emm,manual,paper',
  'nir_reranker.py:emm,manual,paper',
)
# Recipes whose batch has too few rows for more chips than this, and a batch that more can share.
LARGER = {
  'cross_encoder.py:msmarco': (8, ('--config.batch_size=32',)),
  'topic_dpr.py:topic,tuned': (4, ('--config.batch_size=64', '--config.topics.batch=32')),
  'nir_retriever.py:emm,manual,paper': (16, ('--config.batch_size=64',)),
  'nir_reranker.py:emm,manual,paper': (4, ('--config.batch_size=160',)),
}
BACKBONES = ('roberta-large', 'bert-base')

# Published shapes (`dprjax.planning.backbones`), with the pooling in the folder of the model.
EMBEDDERS = {
  'qwen3-embedding-0.6b': 'lasttoken',
  'embeddinggemma-300m': 'mean',
  'qwen3-embedding-8b': 'lasttoken',
  'qwen3-embedding-4b': 'lasttoken',
}
EMBEDDER_MACHINES = ('v5e:2x4', 'v6e:2x4', 'h100:1', 'h100:8')
# Texts of a forward pass and their tokens; lengths of prompts, the last one for the update.
TEXTS, TOKENS = 64, 512
LENGTHS = 16, 64
BANKS = 1000, 100_000
PLANNED = 'compiled, not run'
MACHINES = ('v5e:2x4', 'v5e:4x8', 'v6e:2x4', 'v5p:2x2x1', 'h100:8')
DEFAULT = 'dptdr.py:msmarco'
MISSING = '?'


class Absent(Exception):
  """A program without a line in the file, if none may be compiled."""


class Ledger:
  """The compiled programs, by their job.

  Args:
    path: the file of lines.
    deadline: `time.monotonic` after which no program is begun.
  """

  def __init__(self, path, deadline=float('-inf')):
    self._path, self._deadline = path, deadline
    entries = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    self._known = {json.dumps(entry['job'], sort_keys=True): entry for entry in entries}

  @property
  def versions(self):
    """Versions of jax and of the compilers of the programs."""
    used = {
      f'{name} {version}'
      for entry in self._known.values()
      for name, version in entry['versions'].items()
    }
    return ', '.join(sorted(used))

  def compile_program(self, job, may_compile=True):
    """As ``compiling.compile_program``; raises Absent where it may not or has no time to."""
    key = json.dumps(dataclasses.asdict(job), sort_keys=True)
    entry = self._known.get(key)
    if entry is None:
      if not may_compile or time.monotonic() > self._deadline:
        raise Absent
      versions = versions_of(targets.parse(job.target))
      made = plan.compile_aloud(job, 3600)
      entry = {'job': json.loads(key), 'versions': versions, 'answer': dict(made.answer)}
      self._known[key] = entry
      with self._path.open('a') as file:
        file.write(json.dumps(entry) + '\n')
    return compiling.Program(job, entry['answer'])


def versions_of(target):
  """Versions of jax and of the compiler of a target."""
  names = {'tpu': ['jax', 'libtpu'], 'cuda': ['jax', 'jax-cuda12-plugin'], 'cpu': ['jax']}
  targets.check_installed(target)
  return {name: importlib.metadata.version(name) for name in names[target.platform]}


def larger(recipe, machine):
  """Flags of a batch that the chips of a machine can share; () where they share the default one."""
  most, flags = LARGER.get(recipe, (float('inf'), ()))
  return flags if targets.parse(machine).devices > most else ()


def make(recipe, backbone, machine, compile_program):
  """A plan of a recipe on a machine; raises Absent where a program is."""
  arguments = [
    f'--config=configs/{recipe}',
    f'--config.backbone.path={backbone}',
    *larger(recipe, machine),
  ]
  return plan.plan(
    arguments,
    targets.parse(machine),
    compile_program,
    forward=recipe == DEFAULT,
  )


def recipe_plans(compile_program):
  """The plans by (recipe, backbone, machine); None where a program is missing.

  Args:
    compile_program: ``(names, job) -> Program``; may raise Absent.
  """
  plans = {}
  # The first recipe everywhere, then the next one.
  for names in itertools.product(BACKBONES, RECIPES, MACHINES):
    backbone, recipe, machine = names
    names = recipe, backbone, machine
    try:
      plans[names] = make(*names, functools.partial(compile_program, names))
    except Absent:
      plans[names] = None
    except InputError as error:
      print(f'{" ".join(names)}: {error}', flush=True)
      plans[names] = None
  return plans


def embedder_job(model, machine, what):
  """The forward pass of long texts, or an update of a prompt by the recipe for NQ."""
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


def embedder_programs(compile_program):
  """The programs by (model, machine, 'encode' or 'update'); None where one is missing."""
  made = {}
  for what, machine, model in itertools.product(('encode', 'update'), EMBEDDER_MACHINES, EMBEDDERS):
    names = model, machine, what
    try:
      made[names] = compile_program(names, embedder_job(*names))
    except Absent:
      made[names] = None
  return made


def recipe_cell(found):
  """Memory of a recipe on a machine."""
  if found is None:
    return MISSING
  if not found.update:
    return 'does not fit' if found.programs['update'].fits is False else 'unknown'
  return f'{found.programs[found.update].needs / targets.GIB:.1f}'


def embedder_cell(made):
  """Memory of an embedding model on a machine."""
  if made is None:
    return MISSING
  if 'memory' not in made.answer:
    return 'unknown' if made.fits is None else tables.fits(made)
  return f'{made.needs / targets.GIB:.1f}'


def markdown(columns, rows):
  """Lines of a table."""
  return [
    f'| {" | ".join(columns)} |',
    f'|{"---|" * len(columns)}',
    *(f'| {" | ".join(row)} |' for row in rows),
  ]


def on(machine):
  """The heading of a column: a machine and the memory of its chip."""
  return f'{machine}, {targets.parse(machine).memory / targets.GIB:.0f} GiB'


def answer(plans):
  """The findings of the tables of recipes, in bullets."""
  known = {names: found for names, found in plans.items() if found is not None}
  fitting = sum(bool(found.update) for found in known.values())
  fit = f'All {fitting}' if fitting == len(known) else f'{fitting} of {len(known)}'
  lines = [f'- **{fit} combinations of recipe, backbone and machine fit.**']
  if missing := [names for names, found in plans.items() if found is None]:
    lines.append(f'- {len(missing)} of {len(plans)} combinations are not compiled yet ({MISSING}).')
  return lines


def embedder_answer(made):
  """The findings of the tables of embedding models, in a bullet."""
  counts = {}
  for (_, _, what), one in made.items():
    if one is not None:
      fit, all_ = counts.get(what, (0, 0))
      counts[what] = fit + bool(one.fits), all_ + 1
  said = ', '.join(
    f'{words} fits in {counts[what][0]} of {counts[what][1]} plans'
    for what, words in (('encode', 'encoding'), ('update', 'training a prompt'))
    if what in counts
  )
  return ['- Embedding models of .3 to 8 billion parameters:', f'  {said}.']


def added(plans):
  """The table of further flags, a line for each recipe and its flags."""
  machines = {}
  for (recipe, backbone, machine), found in plans.items():
    flags = (*larger(recipe, machine), *(found.flags if found else ()))
    if flags:
      where = machines.setdefault((recipe, ' '.join(flags)), {})
      where.setdefault(backbone, []).append(machine)
  rows = []
  for (recipe, flags), where in machines.items():
    groups = {}
    for backbone, names in where.items():
      groups.setdefault(', '.join(names), []).append(backbone)
    said = '; '.join(
      names if len(of) == len(BACKBONES) else f'{names} ({", ".join(of)})'
      for names, of in groups.items()
    )
    rows.append((f'`{recipe}`', said, f'`{flags}`'))
  return markdown(('recipe', 'machines', 'flags to add'), rows)


def recipe_lines(plans):
  """The section of the recipes."""
  lines = [
    '## Recipes',
    '',
    'A cell has the GiB that each chip needs for the update, the heading those that programs can',
    'use.',
  ]
  for backbone in BACKBONES:
    rows = [
      (f'`{recipe}`', *(recipe_cell(plans[recipe, backbone, machine]) for machine in MACHINES))
      for recipe in RECIPES
    ]
    lines += ['', f'### {backbone}', '', *markdown((PLANNED, *map(on, MACHINES)), rows)]
  return [
    *lines,
    '',
    '### Flags to add',
    '',
    'These recipes need further flags: a batch that all chips can share, or less memory.',
    '',
    *added(plans),
  ]


def embedder_lines(made):
  """The section of embedding models."""
  lines = [
    '## Embedding models',
    '',
    'A cell has the GiB that each chip needs'
    + (f' ({MISSING}: not compiled yet).' if None in made.values() else '.'),
  ]
  titles = {
    'encode': (
      'Encode',
      f'`dprjax.encode` encodes {TEXTS} texts of {TOKENS} tokens at a time under a prompt of '
      f'{LENGTHS[-1]} vectors.',
      'It splits weights over the fewest chips that hold them in half of their memory.',
    ),
    'update': (
      'Train a prompt',
      f'An update of a prompt of {LENGTHS[-1]} vectors by `dptdr.py:nq` has 128 queries and 256',
      'passages. Add `--config.backbone.remat=true`, and for qwen3-embedding-8b on v5e:2x4',
      '`--config.mesh.fsdp=8 --config.mesh.data=1`.',
    ),
  }
  for what, (title, *text) in titles.items():
    rows = [
      (
        model,
        *(embedder_cell(made[model, machine, what]) for machine in EMBEDDER_MACHINES),
      )
      for model in EMBEDDERS
    ]
    columns = (PLANNED, *map(on, EMBEDDER_MACHINES))
    lines += ['', f'### {title}', '', *text, '', *markdown(columns, rows)]
  rows = []
  for model in EMBEDDERS:
    shape = backbones.named(model)
    one = 2 * 2 * shape.num_layers * LENGTHS[0] * shape.num_kv_heads * shape.head_dim
    rows.append((model, *(size(count * one) for count in (1, *BANKS))))
  columns = ('model', '1 prompt', *(f'{count:,} prompts' for count in BANKS))
  return [
    *lines,
    '',
    '### Memory of served prompts',
    '',
    f'Prompts of {LENGTHS[0]} vectors, bfloat16; files have twice the size. 1,000 fit beside every',
    'model. 100,000 do not: `dprjax.serve` keeps them in files, and the most used ones in memory.',
    '',
    *markdown(columns, rows),
  ]


def size(count):
  """Bytes in words."""
  return f'{count / 1e9:,.3g} GB' if count >= 1e9 else f'{count / 1e6:,.3g} MB'


def page(plans, made, versions):
  """docs/plans.md."""
  lines = [
    '# What a recipe needs on a rented machine',
    '',
    'Every row is *compiled, not run*: [`dprjax.plan`](planning.md) compiled the programs, and no',
    'such machine ran them. On TPUs the compiler gives the bytes and refuses what does not fit. On',
    'GPUs it gives bytes, and three quarters of the memory are taken for the limit.',
    '',
    *answer(plans),
    *embedder_answer(made),
    '',
    'Arithmetic and frozen weights are bfloat16.',
    '',
    *recipe_lines(plans),
    '',
    *embedder_lines(made),
    '',
    '## One plan in full',
    '',
    "    python experiments/plans.py --show='dptdr.py:msmarco roberta-large v5e:2x4'",
    '',
    'prints the plans that match.',
    '',
    '`make plans` compiles missing programs into `experiments/plans.jsonl` and writes this page.',
    f'Compilers: {versions}.',
  ]
  return '\n'.join(lines) + '\n'


def known_page():
  """docs/plans.md from the programs that are known."""
  ledger = Ledger(LEDGER)

  def known(_, job):
    return ledger.compile_program(job, may_compile=False)

  return page(recipe_plans(known), embedder_programs(known), ledger.versions)


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--only', default='', help='a regular expression: RECIPE BACKBONE MACHINE')
  parser.add_argument('--minutes', type=float, default=float('inf'), help='begin no program after')
  parser.add_argument('--compile', type=flags.boolean, default=True, metavar='true|false')
  parser.add_argument('--show', help='print the plans that this regular expression matches')
  args = parser.parse_args()
  cli.speak()
  ledger = Ledger(LEDGER, time.monotonic() + 60 * args.minutes)
  only, may_compile = args.only, args.compile and args.show is None

  def compile_program(names, job):
    wanted = re.search(only, ' '.join(names)) is not None
    return ledger.compile_program(job, may_compile and wanted)

  if args.show is not None:
    for names, found in recipe_plans(compile_program).items():
      if found is not None and re.search(args.show, ' '.join(names)):
        print(f'# {" ".join(names)}\n\n{tables.markdown(found)}')
    return
  made = embedder_programs(compile_program)
  plans = recipe_plans(compile_program)
  with files.atomic_write(PAGE) as file:
    file.write(page(plans, made, ledger.versions))


if __name__ == '__main__':
  main()
