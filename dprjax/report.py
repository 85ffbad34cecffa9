"""Compares systems: one table, in the terminal and as Markdown, and one figure.

    python -m dprjax.report --metrics BM25=bm25.json --metrics frozen=frozen.json --metrics "+ prompt=dpt.json" \\
        --out=report.md --figure=report.png

The files are dprjax.evaluate's metrics.json. The first system is the one that the others are compared with, by a
paired bootstrap over the queries: the queries are drawn with replacement 10,000 times, the same for both systems, and
a difference is marked with * where the middle 95 % of the means' differences leave out 0. The intervals in the figure
are each system's own, from the same draws. Where there are several data sets each is drawn by itself, and they weigh
the same. What metrics.json has under "extra" (--extra of dprjax.evaluate) becomes a column.
"""

import argparse
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from dprjax import cli, files
from dprjax.errors import InputError

logger = logging.getLogger('dprjax')

_DRAWS = 10_000
_DRAWS_AT_ONCE = 500  # bounds the memory: so many draws of every query's number
_SEED = 0
# Okabe and Ito's colours, which differ for every kind of colour vision, the darker first; hatches tell them apart in print.
_COLOURS = ('#0072B2', '#E69F00', '#009E73', '#CC79A7', '#56B4E9', '#D55E00', '#F0E442', '#999999')
_HATCHES = ('', '//', '..', 'xx', '\\\\', 'oo', '++', '--')


class Compared(NamedTuple):
  """One system under one measure.

  Attributes:
    mean: over all queries (of the data sets' means where there are several).
    low, high: the 95 % interval of the mean.
    difference: to the first system, over the queries that both have; None for the first.
    difference_low, difference_high: the 95 % interval of the difference.
  """
  mean: float
  low: float
  high: float
  difference: float | None = None
  difference_low: float | None = None
  difference_high: float | None = None

  @property
  def significant(self) -> bool:
    return self.difference_low is not None and self.difference_high is not None and not self.difference_low <= 0 <= self.difference_high


def compare(systems: dict[str, dict[str, Any]], measure: str) -> dict[str, Compared]:
  """Every system under one measure, against the first.

  Args:
    systems: name -> what ``evaluate`` wrote; the first is the baseline.
    measure: one that all of them have.

  Raises:
    InputError: a system shares no query with the first.
  """
  result: dict[str, Compared] = {}
  baseline: dict[str, dict[str, float]] = {}
  for name, metrics in systems.items():
    parts = _per_dataset(metrics, measure)
    low, high = np.quantile(_bootstrap([np.array(list(part.values())) for part in parts.values()]), [0.025, 0.975])
    mean = float(metrics['mean'][measure])
    if not baseline:
      baseline = parts
      result[name] = Compared(mean, low, high)
      continue
    pairs = []
    for dataset, part in parts.items():
      both = [query_id for query_id in baseline.get(dataset, {}) if query_id in part]
      if both:
        pairs.append(np.array([part[query_id] - baseline[dataset][query_id] for query_id in both]))
    if not pairs:
      raise InputError(f'{name} and {next(iter(systems))} have no query in common: they cannot be compared')
    differences = _bootstrap(pairs)
    result[name] = Compared(mean, low, high, float(np.mean([pair.mean() for pair in pairs])), *np.quantile(differences, [0.025, 0.975]))
  return result


def _per_dataset(metrics: dict[str, Any], measure: str) -> dict[str, dict[str, float]]:
  return {name: one['per_query'][measure] for name, one in metrics.get('datasets', {'': metrics}).items()}


def _bootstrap(parts: Sequence[Float[np.ndarray, 'queries']]) -> Float[np.ndarray, 'draws']:
  """Means of the parts' means over queries drawn with replacement; the same draws for parts of the same sizes."""
  rng = np.random.default_rng(_SEED)
  total = np.zeros(_DRAWS)
  for part in parts:
    for start in range(0, _DRAWS, _DRAWS_AT_ONCE):
      total[start:start + _DRAWS_AT_ONCE] += part[rng.integers(0, len(part), (_DRAWS_AT_ONCE, len(part)))].mean(axis=1)
  return total / len(parts)


def read_metrics(path: files.PathLike) -> dict[str, Any]:
  """A metrics.json. Raises InputError where it is not of that form."""
  metrics = files.read_json(path, 'metrics')
  for part in (metrics, *(metrics.get('datasets', {}).values() if isinstance(metrics, dict) else ())):
    good = isinstance(part, dict) and all(isinstance(part.get(key), dict) for key in ('mean', 'per_query')) and part['mean']
    if not good or any(not part['per_query'].get(measure) for measure in part['mean']):
      raise InputError(f'{path} is no metrics.json of dprjax.evaluate: expected "mean" and "per_query" with the same measures')
  return metrics


def table(systems: dict[str, dict[str, Any]], measures: Sequence[str]) -> tuple[list[str], list[list[str]]]:
  """Column titles and rows: system, data set where there are several, measures with * for significant, extra columns."""
  compared = {measure: compare(systems, measure) for measure in measures}
  extra = list(dict.fromkeys(key for metrics in systems.values() for key in metrics.get('extra', {})))
  several = any('datasets' in metrics for metrics in systems.values())
  rows = []
  for name, metrics in systems.items():
    extras = [_shown(metrics.get('extra', {}).get(key)) for key in extra]
    for label, one in metrics.get('datasets', {}).items():
      rows.append([name, label, *(f'{one["mean"][measure]:.4f}' for measure in measures), *([''] * len(extra))])
    values = [f'{compared[measure][name].mean:.4f}{"*" if compared[measure][name].significant else ""}' for measure in measures]
    rows.append([name, *(['average' if 'datasets' in metrics else ''] if several else []), *values, *extras])
  return ['system', *(['data set'] if several else []), *measures, *extra], rows


def _shown(value: Any) -> str:
  if value is None:
    return ''
  if isinstance(value, str) and value.isdecimal():
    value = int(value)
  return f'{value:,}' if isinstance(value, int) and not isinstance(value, bool) else f'{value:.4g}' if isinstance(value, float) else str(value)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> str:
  """The table and a note below it."""
  def line(cells: Sequence[str]) -> str:
    return '| ' + ' | '.join(cell.replace('|', '\\|') for cell in cells) + ' |'
  left = 2 if 'data set' in columns else 1
  return '\n'.join([line(columns), line(['---'] * left + ['---:'] * (len(columns) - left)), *map(line, rows), '', note, ''])


def note(systems: dict[str, dict[str, Any]], measures: Sequence[str]) -> str:
  """What the marks mean, and over how many queries."""
  first, *others = systems
  sizes = {name: len(metrics['per_query'][measures[0]]) for name, metrics in systems.items()}
  counted = ', '.join(f'{name}: {size:,} queries' for name, size in sizes.items())
  if len(set(sizes.values())) == 1:
    counted = f'{sizes[first]:,} queries'
  if not others:
    return f'{counted}.'
  return f'{counted}. *: differs from {first}; paired bootstrap over queries, {_DRAWS:,} draws, 95 % interval of the difference without 0.'


def figure(systems: dict[str, dict[str, Any]], measures: Sequence[str], path: files.PathLike) -> None:
  """Grouped bars: a group a measure, a bar a system, with 95 % intervals. The format goes by the name (png, pdf, svg)."""
  # Here, because a table needs none of it.
  import matplotlib.backends.backend_agg
  import matplotlib.figure
  import matplotlib.layout_engine

  final = files.output_file(path)
  kinds = matplotlib.backends.backend_agg.FigureCanvasAgg.get_supported_filetypes()
  kind = final.suffix.removeprefix('.').lower()
  if kind not in kinds:
    raise InputError(f'--figure={final}: its name has to end in {", ".join(f".{name}" for name in ("png", "pdf", "svg"))}')
  compared = {measure: compare(systems, measure) for measure in measures}
  width = 0.82 / len(systems)
  drawing = matplotlib.figure.Figure(
      figsize=(max(6.4, 1.5 + len(measures) * max(1.2, 0.42 * len(systems))), 4.4), dpi=150,
      # A strip at the foot is left for the note.
      layout=matplotlib.layout_engine.ConstrainedLayoutEngine(rect=(0, 0.035, 1, 0.965)))
  axes = drawing.subplots()
  for number, name in enumerate(systems):
    some = [compared[measure][name] for measure in measures]
    places = np.arange(len(measures)) + (number - (len(systems) - 1) / 2) * width
    means = np.array([one.mean for one in some])
    spread = np.array([[one.mean - one.low for one in some], [one.high - one.mean for one in some]]).clip(0)
    axes.bar(
        places, means, width * 0.92, yerr=spread, label=name, color=_COLOURS[number % len(_COLOURS)], edgecolor='white', linewidth=0,
        hatch=_HATCHES[(number + number // len(_COLOURS)) % len(_HATCHES)], hatch_linewidth=0.6,
        error_kw={'elinewidth': 1, 'capsize': 2, 'ecolor': '#333333'})
    for place, one in zip(places, some, strict=True):
      axes.annotate(f'{one.mean:.3f}{"*" if one.significant else ""}', (place, one.high), xytext=(0, 3), textcoords='offset points',
                    ha='center', va='bottom', rotation=90, fontsize=7.5, color='#222222')
  top = max(one.high for by_name in compared.values() for one in by_name.values())
  axes.set_ylim(0, max(top, 0.05) * 1.18)  # room for the numbers above the bars
  axes.set_xlim(-0.6, len(measures) - 0.4)
  axes.set_xticks(np.arange(len(measures)), measures)
  axes.set_ylabel('mean over queries' if not any('datasets' in one for one in systems.values()) else 'mean over data sets')
  axes.spines[['top', 'right']].set_visible(False)
  axes.yaxis.grid(True, color='#dddddd', linewidth=0.6)
  axes.set_axisbelow(True)
  # As many names in a row as fit: about 0.075 inches a letter at this size, and 0.65 for the patch.
  fitting = int(drawing.get_figwidth() / (0.65 + 0.075 * max(map(len, systems))))
  drawing.legend(loc='outside upper center', ncols=max(1, min(len(systems), fitting)), frameon=False, fontsize=9)
  drawing.text(0.995, 0.005, 'whiskers: 95 % bootstrap intervals' + (';  * differs from the first system (paired)' if len(systems) > 1 else ''),
               ha='right', va='bottom', fontsize=7, color='#555555')
  with files.atomic_write(final, 'wb') as file:
    drawing.savefig(file, format=kind)


def main(argv: Sequence[str] | None = None) -> None:
  parser = cli.Parser('report', __doc__ or '')
  parser.add_argument('--metrics', type=cli.named, action='append', required=True, metavar='NAME=metrics.json',
                      help='a system; the first is the one that the others are compared with')
  parser.add_argument('--measure', action='extend', nargs='+', metavar='MEASURE', help='which to show (default: all that every system has)')
  parser.add_argument('--out', metavar='report.md', help='where the table goes as Markdown')
  parser.add_argument('--figure', metavar='report.png', help='where the figure goes; png, pdf or svg')

  def command(args: argparse.Namespace) -> None:
    for path in (args.out, args.figure):
      if path:
        files.output_file(path)
    systems: dict[str, dict[str, Any]] = {}
    for name, path in args.metrics:
      if name in systems:
        raise InputError(f'--metrics: two systems are called {name}')
      systems[name] = read_metrics(path)
    first = next(iter(systems.values()))
    shared = [measure for measure in first['mean'] if all(measure in metrics['mean'] for metrics in systems.values())]
    measures = args.measure or shared
    absent = [measure for measure in measures if measure not in shared]
    if absent or not measures:
      raise InputError(f'not every system has {", ".join(absent) or "a measure that the others have"}; all have {", ".join(shared) or "none"}')
    columns, rows = table(systems, measures)
    said = note(systems, measures)
    if args.figure:
      figure(systems, measures, args.figure)
    if args.out:
      with files.atomic_write(args.out) as file:
        file.write(markdown(columns, rows, said))
    cli.print_table(columns, rows)
    print(said)
  cli.run(parser, command, argv)


if __name__ == '__main__':
  main()
