"""A plan as a table: a row for each figure, a column for each program."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import ml_collections

from dprjax.base.progress import duration
from dprjax.planning import targets
from dprjax.planning.compiling import Program
from dprjax.retrieval import comparison
from dprjax.training.method import BatchShapes

_ROWS = (
  'fits',
  'why not',
  'parameters, MiB',
  'optimiser, MiB',
  'batch and rest, MiB',
  'activations, MiB',
  'peak, GiB',
  'compiled in',
)


@dataclasses.dataclass(frozen=True)
class Plan:
  """A plan of an experiment for a target.

  Attributes:
    target: the machine.
    config: the experiment.
    batch: its longest batch.
    programs: by title of their column.
    update: title of the update that fits, or ''.
    flags: additional flags that make it fit.
  """

  target: targets.Target
  config: ml_collections.ConfigDict
  batch: BatchShapes
  programs: Mapping[str, Program]
  update: str
  flags: tuple[str, ...]

  @property
  def dtype(self) -> str:
    return str(self.config.backbone.dtype)

  @property
  def title(self) -> str:
    """The machine in one line."""
    count, chip = self.target.devices, self.target.chip
    if chip not in targets.CHIPS:
      return f'{self.target.name}: {count} of this processor'
    return f'{self.target.name}: {count} x {targets.CHIPS[chip].kind}'


def table(plan: Plan) -> tuple[list[str], list[list[str]]]:
  """Columns, and a row for each figure of any program."""
  columns = {title: _column(plan, title) for title in plan.programs}
  cells = [
    [row, *(column.get(row, '') for column in columns.values())]
    for row in _ROWS
    if any(row in column for column in columns.values())
  ]
  return ['a chip', *columns], cells


def note(plan: Plan) -> list[str]:
  """Lines that explain the figures and give flags."""
  config, answers = plan.config, [program.answer for program in plan.programs.values()]
  known: Mapping[str, Any] = next((one for one in answers if 'mesh' in one), {})
  lines = []
  if known:
    axes = ' x '.join(f'{axis} {size}' for axis, size in known['mesh'].items())
    lines.append(
      f'{config.method}{f" ({config.task})" if config.task else ""} on {config.backbone.path}: '
      f'{known["trained"] / 1e6:,.1f} M of {known["parameters"] / 1e6:,.1f} M parameters trained; '
      f'arithmetic and frozen weights {plan.dtype}; mesh {axes}.'
    )
  if plan.target.chip in targets.CHIPS:
    chip = targets.CHIPS[plan.target.chip]
    lines.append(f'A chip has {chip.memory / targets.GIB:,.2f} GiB for programs ({chip.source}).')
  shapes = ', '.join(f'{rows:,} x {length}' for rows, length in plan.batch.calls)
  lines.append(
    f'An update encodes {shapes} tokens, the longest padded lengths; other lengths need up to '
    f'{plan.batch.programs - 1} more programs.'
    if plan.batch.programs > 1
    else f'An update encodes {shapes} tokens.'
  )
  if not plan.update:
    lines.append('No update fits.')
  elif plan.flags:
    lines.append(f'It fits with {" ".join(plan.flags)}')
  return lines


def markdown(plan: Plan) -> str:
  columns, rows = table(plan)
  lines = '  \n'.join(note(plan))  # two spaces break a line
  return f'## {plan.title}\n\n{comparison.markdown(columns, rows, lines)}'


def _column(plan: Plan, title: str) -> dict[str, str]:
  program = plan.programs[title]
  answer, update = program.answer, not program.job.length
  cells = {'fits': fits(program)}
  if 'seconds' in answer:
    cells['compiled in'] = duration(sum(answer['seconds'].values()))
  if program.fits is None:
    cells['why not'] = program.failure
  if 'held' in answer and update:
    held = answer['held']
    cells['parameters, MiB'] = _number((held['trained'] + held['frozen']) / 2**20)
    cells['optimiser, MiB'] = _number(held['optimizer'] / 2**20)
  if not math.isnan(program.needs):
    cells['peak, GiB'] = _number(program.needs / targets.GIB)
  if 'memory' in answer:
    memory = answer['memory']
    rest = memory['argument'] - (sum(answer['held'].values()) if update else 0)
    if update:
      cells['batch and rest, MiB'] = _number(rest / 2**20)
    else:
      cells['parameters, MiB'] = _number(rest / 2**20)
    cells['activations, MiB'] = _number(memory['temp'] / 2**20)
  return cells


def fits(program: Program) -> str:
  """Whether a program fits, and the margin."""
  has = program.has / targets.GIB
  if program.fits is None:
    return 'not known'
  if math.isnan(program.needs):
    return f'no, more than {has:.2f} GiB'
  needs = program.needs / targets.GIB
  if program.fits:
    return f'yes, {needs:.2f} of {has:.2f} GiB'
  return f'no, {needs - has:.2f} GiB over {has:.2f}'


def _number(value: float) -> str:
  if value >= 100:
    return f'{value:,.0f}'
  return f'{value:.3g}' if value >= 1e-4 or not value else '< 0.0001'
