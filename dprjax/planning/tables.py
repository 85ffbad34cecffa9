"""A plan as a table: a row for each figure, a column for each program."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import ml_collections

from dprjax.base.progress import duration
from dprjax.methods.method import BatchShapes
from dprjax.planning import hlo, roofline, targets
from dprjax.planning.compiling import Program

_WORK = (
  'fits',
  'why not',
  'parameters, MiB',
  'optimiser, MiB',
  'batch and rest, MiB',
  'activations, MiB',
  'peak, GiB',
  'products by formula, TFLOP',
  'products by XLA, TFLOP',
  'memory by formula, GB',
  'memory by XLA, GB',
  'least ms: products',
  'least ms: memory',
  'least ms: links',
  'bound by',
  'MFU at most',
  *(f'{kind}: times, MB' for kind in hlo.COLLECTIVES),
)
_TIME = ('hours', 'compiled in')


@dataclasses.dataclass(frozen=True)
class Plan:
  """A plan of an experiment for a target.

  Attributes:
    target: the machine.
    config: the experiment.
    batch: its longest batch.
    programs: by title of their column.
    update: title of the fastest update that fits, or ''.
    flags: additional flags that make it fit or faster.
    examples: training examples; None if unknown.
    share: of the bound, for additional rates.
  """

  target: targets.Target
  config: ml_collections.ConfigDict
  batch: BatchShapes
  programs: Mapping[str, Program]
  update: str
  flags: tuple[str, ...]
  examples: int | None
  share: float

  @property
  def dtype(self) -> str:
    return str(self.config.backbone.dtype)

  @property
  def updates(self) -> int | None:
    """Updates of the training; None if unknown."""
    if self.config.steps:
      return int(self.config.steps)
    if self.examples is None:
      return None
    size = self.config.batch_size * self.config.accumulate
    return max(round(self.config.epochs * (self.examples // size)), 1)

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
  units = dict.fromkeys((*plan.batch.texts, 'texts'))
  order = [*_WORK, *(f'{unit} a second' for unit in units), *_TIME]
  cells = [
    [row, *(column.get(row, '') for column in columns.values())]
    for row in order
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
      f'arithmetic {plan.dtype}, frozen weights {config.backbone.frozen_dtype}; mesh {axes}.'
    )
  if plan.target.chip in targets.CHIPS:
    most, chip = roofline.limits(plan.target, plan.dtype), targets.CHIPS[plan.target.chip]
    lines.append(
      f'Limits of a chip: {most.flops / 1e12:,.0f} TFLOP/s, {most.bandwidth / 1e9:,.0f} GB/s, '
      f'links {most.links / 1e9:,.0f} GB/s, {chip.memory / targets.GIB:,.2f} GiB for programs '
      f'({chip.source}).'
    )
  shapes = ', '.join(f'{rows:,} x {length}' for rows, length in plan.batch.calls)
  lines.append(
    f'An update encodes {shapes} tokens, the longest padded lengths; other lengths need up to '
    f'{plan.batch.programs - 1} more programs.'
    if plan.batch.programs > 1
    else f'An update encodes {shapes} tokens.'
  )
  lines.append(f'Rates and hours: at the bound; at {100 * plan.share:g} % of the bound.')
  if plan.updates is None:
    lines.append('Hours need the number of training examples: --examples=N.')
  if not plan.update:
    lines.append('No update fits.')
  elif plan.flags:
    said = 'It fits with' if plan.programs['update'].fits is False else 'It is faster with'
    lines.append(f'{said} {" ".join(plan.flags)}')
  return lines


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
  if 'formula' in answer:
    cells['products by formula, TFLOP'] = _number(answer['formula']['flops'] / 1e12)
    cells['memory by formula, GB'] = _number(answer['formula']['bytes'] / 1e9)
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
  if 'xla' in answer:
    cells |= _work(plan, program)
  return cells


def _work(plan: Plan, program: Program) -> dict[str, str]:
  answer = program.answer
  found, bound = answer['xla'], program.bound(plan.dtype)
  products = answer['formula']['flops'] / program.limits(plan.dtype).flops
  cells = {
    'products by XLA, TFLOP': _number(found['flops'] / 1e12),
    'memory by XLA, GB': _number(found['bytes'] / 1e9),
    'least ms: products': _number(1e3 * bound.flops),
    'least ms: memory': _number(1e3 * bound.bytes),
    'least ms: links': _number(1e3 * bound.links),
    'bound by': bound.what,
    'MFU at most': f'{100 * products / bound.seconds:.0f} %',
  }
  for one in found['collectives']:
    cells[f'{one["kind"]}: times, MB'] = f'{one["times"]:,}, {_number(one["bytes"] / 1e6)}'
  texts: Mapping[str, int] = {'texts': program.job.rows} if program.job.length else plan.batch.texts
  for unit, count in texts.items():
    rate = count / bound.seconds
    cells[f'{unit} a second'] = f'{_number(rate)}; {_number(plan.share * rate)}'
  if not program.job.length and plan.updates is not None:
    hours = plan.updates * bound.seconds / 3600
    cells['hours'] = f'{_hours(hours)}; {_hours(hours / plan.share)}'
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


def _hours(value: float) -> str:
  return _number(value) if value >= 0.01 else '< 0.01'


def _number(value: float) -> str:
  if value >= 100:
    return f'{value:,.0f}'
  return f'{value:.3g}' if value >= 1e-4 or not value else '< 0.0001'
