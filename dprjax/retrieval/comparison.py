"""Compares systems by their metrics.json: intervals and a table."""

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from jaxtyping import Float

from dprjax.base import files, reading
from dprjax.base.errors import InputError
from dprjax.text.seen import ROLES

_DRAWS = 10_000
_DRAWS_AT_ONCE = 500  # bounds the memory
_SEED = 0
_LARGEST = 1e15  # of values of a measure


class Interval(NamedTuple):
  """A mean and its 95 % bootstrap interval."""

  mean: float
  low: float
  high: float


class Compared(NamedTuple):
  """A system under a measure.

  Attributes:
    mean, low, high: over queries, with the 95 % interval; data sets have equal weight.
    difference: from the first system, over common queries; None for the first.
  """

  mean: float
  low: float
  high: float
  difference: Interval | None = None

  @property
  def significant(self) -> bool:
    return self.difference is not None and not self.difference.low <= 0 <= self.difference.high


def difference(pairs: Sequence[Float[np.ndarray, ' queries']]) -> Interval:
  """The mean of paired differences, by a bootstrap over the pairs.

  Args:
    pairs: differences of two systems by query, for each data set; these have equal weight.
  """
  low, high = np.quantile(_bootstrap(pairs), [0.025, 0.975]).tolist()
  return Interval(float(np.mean([pair.mean() for pair in pairs])), low, high)


def compare(systems: dict[str, dict[str, Any]], measure: str) -> dict[str, Compared]:
  """Compares every system with the first under one measure.

  Args:
    systems: metrics of ``evaluate`` by name; the first is the baseline.
  """
  result: dict[str, Compared] = {}
  for name, metrics in systems.items():
    part = metrics['per_query'][measure]
    low, high = np.quantile(_bootstrap([np.array(list(part.values()))]), [0.025, 0.975])
    mean = float(metrics['mean'][measure])
    if not result:
      first, baseline = name, part
      result[name] = Compared(mean, low, high)
      continue
    both = [query_id for query_id in baseline if query_id in part]
    if not both:
      raise InputError(f'{name} and {first} have no query in common')
    apart = np.array([part[query_id] - baseline[query_id] for query_id in both])
    result[name] = Compared(mean, low, high, difference([apart]))
  return result


def _bootstrap(parts: Sequence[Float[np.ndarray, ' queries']]) -> Float[np.ndarray, ' draws']:
  """Means over parts of their means over drawn queries; parts of equal size get the same draws."""
  rng = np.random.default_rng(_SEED)
  total = np.zeros(_DRAWS)
  for part in parts:
    for start in range(0, _DRAWS, _DRAWS_AT_ONCE):
      total[start : start + _DRAWS_AT_ONCE] += part[
        rng.integers(0, len(part), (_DRAWS_AT_ONCE, len(part)))
      ].mean(axis=1)
  return total / len(parts)


def read_metrics(path: files.PathLike) -> dict[str, Any]:
  values = reading.read_json_object(path, 'metrics')
  metrics = reading.convert(values, str(path), _Metrics)
  if not metrics.mean or not all(metrics.per_query.get(name) for name in metrics.mean):
    raise InputError(f'{path} lacks a measure or its queries: is it from dprjax.evaluate?')
  return values


_Value = Annotated[float, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)]


class _Metrics(msgspec.Struct):
  mean: dict[str, _Value]
  per_query: dict[str, dict[str, _Value]]
  counts: dict[str, float] = {}
  command: str = ''
  extra: dict[str, str | bool | float | None] = {}


def table(
  systems: dict[str, dict[str, Any]], measures: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
  """Columns and rows: system, measures, extra columns.

  * marks significant differences.
  """
  compared = {measure: compare(systems, measure) for measure in measures}
  extra = list(
    dict.fromkeys(key for metrics in systems.values() for key in metrics.get('extra', {}))
  )
  rows = []
  for name, metrics in systems.items():
    extras = [_shown(metrics.get('extra', {}).get(key)) for key in extra]
    values = [
      f'{compared[measure][name].mean:.4f}{"*" if compared[measure][name].significant else ""}'
      for measure in measures
    ]
    rows.append([name, *values, *extras])
  return ['system', *measures, *extra], rows


def _shown(value: Any) -> str:
  if value is None:
    return ''
  if isinstance(value, str) and value.isdecimal():
    value = int(value)
  if isinstance(value, int) and not isinstance(value, bool):
    return f'{value:,}'
  return f'{value:.4g}' if isinstance(value, float) else str(value)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> str:
  def line(cells: Sequence[str]) -> str:
    cells = [' '.join(cell.splitlines()).replace('|', '\\|') for cell in cells]
    return f'| {" | ".join(cells)} |'

  rule = line(['---', *['---:'] * (len(columns) - 1)])
  return '\n'.join([line(columns), rule, *map(line, rows), '', note, ''])


_LATEX = str.maketrans(
  {
    **{letter: f'\\{letter}' for letter in '#$%&_{}'},
    '\\': r'\textbackslash{}',
    '~': r'\textasciitilde{}',
    '^': r'\textasciicircum{}',
  }
)


def latex(columns: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> str:
  """The table as a ``tabular`` with the rules of booktabs, and the note as comments above it."""

  def line(cells: Sequence[str]) -> str:
    return ' & '.join(' '.join(cell.split()).translate(_LATEX) for cell in cells) + r' \\'

  begin = rf'\begin{{tabular}}{{l{"r" * (len(columns) - 1)}}}'
  rules = [r'\toprule', line(columns), r'\midrule', *map(line, rows), r'\bottomrule']
  comment = f'% {" ".join(note.splitlines())}'
  return '\n'.join([comment, begin, *rules, r'\end{tabular}', ''])


FORMATS = {'markdown': markdown, 'latex': latex}


def note(systems: dict[str, dict[str, Any]], measures: Sequence[str]) -> str:
  """The number of queries, how many a system was trained on, and the meaning of *."""
  first, *others = systems
  sizes = {name: len(metrics['per_query'][measures[0]]) for name, metrics in systems.items()}
  counted = ', '.join(f'{name}: {size:,} queries' for name, size in sizes.items())
  if len(set(sizes.values())) == 1:
    counted = f'{sizes[first]:,} queries'
  seen = ''.join(
    f' {name} {what} {count:,} of them.'
    for name, metrics in systems.items()
    for role, what in ROLES.items()
    if (count := metrics.get('counts', {}).get(f'queries_seen_in_{role}', 0))
  )
  if not others:
    return f'{counted}.{seen}'
  return (
    f'{counted}.{seen} *: significantly different from {first} (95 % paired bootstrap over '
    f'queries, {_DRAWS:,} draws).'
  )
