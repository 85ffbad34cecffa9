"""Compares systems, or looks at backbones: one table, in the terminal and as Markdown, and one
figure.

    python -m dprjax.report --metrics BM25=bm25.json --metrics frozen=frozen.json --metrics "+
        prompt=dpt.json" \\ --out=report.md --figure=report.png
    python -m dprjax.report --backbone=DIR --backbone=ours=DIR --sts=stsb-test.csv
        --wikipedia=enwiki.xml.bz2 --beir=scifact \\ --out=report.md --figure=report.png

Systems: the files are dprjax.evaluate's metrics.json. The first system is the one that the others
are compared with, by a paired bootstrap over the queries: the queries are drawn with replacement
10,000 times, the same for both systems, and a difference is marked with * where the middle 95 % of
the means' differences leave out 0. The intervals in the figure are each system's own, from the same
draws. Where there are several data sets each is drawn by itself, and they weigh the same. What
metrics.json has under "extra" (--extra of dprjax.evaluate) becomes a column.

Backbones: frozen, as they are, or under a prompt. Columns stand only for what there is text for.
Alignment and uniformity are those of Wang & Isola (2020), the entropy of the first token's
attention that of Condenser (section 5), the distinction of Wikipedia sections that of Ein Dor et
al. (2018); see dprjax.analysis. The attention is looked at on sections of --wikipedia, without it
on passages of --beir, without both on the sentences of --sts.
"""

import argparse
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from dprjax.analysis import figures
from dprjax.base import files
from dprjax.base.errors import InputError
from dprjax.runtime import cli

logger = logging.getLogger('dprjax')

_DRAWS = 10_000
_DRAWS_AT_ONCE = 500  # bounds the memory: so many draws of every query's number
_SEED = 0


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
    return (
      self.difference_low is not None
      and self.difference_high is not None
      and not self.difference_low <= 0 <= self.difference_high
    )


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
    low, high = np.quantile(
      _bootstrap([np.array(list(part.values())) for part in parts.values()]), [0.025, 0.975]
    )
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
      raise InputError(
        f'{name} and {next(iter(systems))} have no query in common: they cannot be compared'
      )
    differences = _bootstrap(pairs)
    result[name] = Compared(
      mean,
      low,
      high,
      float(np.mean([pair.mean() for pair in pairs])),
      *np.quantile(differences, [0.025, 0.975]),
    )
  return result


def _per_dataset(metrics: dict[str, Any], measure: str) -> dict[str, dict[str, float]]:
  return {
    name: one['per_query'][measure] for name, one in metrics.get('datasets', {'': metrics}).items()
  }


def _bootstrap(parts: Sequence[Float[np.ndarray, 'queries']]) -> Float[np.ndarray, 'draws']:
  """Means of the parts' means over queries drawn with replacement; the same draws for parts of the
  same sizes.
  """
  rng = np.random.default_rng(_SEED)
  total = np.zeros(_DRAWS)
  for part in parts:
    for start in range(0, _DRAWS, _DRAWS_AT_ONCE):
      total[start : start + _DRAWS_AT_ONCE] += part[
        rng.integers(0, len(part), (_DRAWS_AT_ONCE, len(part)))
      ].mean(axis=1)
  return total / len(parts)


def read_metrics(path: files.PathLike) -> dict[str, Any]:
  """A metrics.json. Raises InputError where it is not of that form."""
  metrics = files.read_json(path, 'metrics')
  for part in (
    metrics,
    *(metrics.get('datasets', {}).values() if isinstance(metrics, dict) else ()),
  ):
    good = (
      isinstance(part, dict)
      and all(isinstance(part.get(key), dict) for key in ('mean', 'per_query'))
      and part['mean']
    )
    if not good or any(not part['per_query'].get(measure) for measure in part['mean']):
      raise InputError(
        f'{path} is no metrics.json of dprjax.evaluate: expected "mean" and "per_query" with the '
        'same measures'
      )
  return metrics


def table(
  systems: dict[str, dict[str, Any]], measures: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
  """Column titles and rows: system, data set where there are several, measures with * for
  significant, extra columns.
  """
  compared = {measure: compare(systems, measure) for measure in measures}
  extra = list(
    dict.fromkeys(key for metrics in systems.values() for key in metrics.get('extra', {}))
  )
  several = any('datasets' in metrics for metrics in systems.values())
  rows = []
  for name, metrics in systems.items():
    extras = [_shown(metrics.get('extra', {}).get(key)) for key in extra]
    for label, one in metrics.get('datasets', {}).items():
      rows.append(
        [
          name,
          label,
          *(f'{one["mean"][measure]:.4f}' for measure in measures),
          *([''] * len(extra)),
        ]
      )
    values = [
      f'{compared[measure][name].mean:.4f}{"*" if compared[measure][name].significant else ""}'
      for measure in measures
    ]
    rows.append(
      [name, *(['average' if 'datasets' in metrics else ''] if several else []), *values, *extras]
    )
  return ['system', *(['data set'] if several else []), *measures, *extra], rows


def _shown(value: Any) -> str:
  if value is None:
    return ''
  if isinstance(value, str) and value.isdecimal():
    value = int(value)
  return (
    f'{value:,}'
    if isinstance(value, int) and not isinstance(value, bool)
    else f'{value:.4g}'
    if isinstance(value, float)
    else str(value)
  )


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> str:
  """The table and a note below it."""

  def line(cells: Sequence[str]) -> str:
    return '| ' + ' | '.join(cell.replace('|', '\\|') for cell in cells) + ' |'

  left = 2 if 'data set' in columns else 1
  return '\n'.join(
    [
      line(columns),
      line(['---'] * left + ['---:'] * (len(columns) - left)),
      *map(line, rows),
      '',
      note,
      '',
    ]
  )


def note(systems: dict[str, dict[str, Any]], measures: Sequence[str]) -> str:
  """What the marks mean, and over how many queries."""
  first, *others = systems
  sizes = {name: len(metrics['per_query'][measures[0]]) for name, metrics in systems.items()}
  counted = ', '.join(f'{name}: {size:,} queries' for name, size in sizes.items())
  if len(set(sizes.values())) == 1:
    counted = f'{sizes[first]:,} queries'
  if not others:
    return f'{counted}.'
  return (
    f'{counted}. *: differs from {first}; paired bootstrap over queries, {_DRAWS:,} draws, 95 '
    '% interval of the difference without 0.'
  )


def figure(
  systems: dict[str, dict[str, Any]], measures: Sequence[str], path: files.PathLike
) -> None:
  """Grouped bars: a group a measure, a bar a system, with 95 % intervals.

  The format goes by the name (png, pdf, svg).
  """
  values = {
    measure: {
      name: figures.Bar(one.mean, one.low, one.high, one.significant)
      for name, one in compare(systems, measure).items()
    }
    for measure in measures
  }
  foot = 'whiskers: 95 % bootstrap intervals' + (
    ';  * differs from the first system (paired)' if len(systems) > 1 else ''
  )
  ylabel = (
    'mean over queries'
    if not any('datasets' in one for one in systems.values())
    else 'mean over data sets'
  )
  figures.bars(values, ylabel, foot, path)


def _named(text: str) -> tuple[str | None, str]:
  """``NAME=VALUE`` or a value alone, for argparse's ``type``."""
  return cli.named(text) if '=' in text else (None, text)


def _report_systems(args: argparse.Namespace) -> None:
  systems: dict[str, dict[str, Any]] = {}
  for name, path in args.metrics:
    if name in systems:
      raise InputError(f'--metrics: two systems are called {name}')
    systems[name] = read_metrics(path)
  first = next(iter(systems.values()))
  shared = [
    measure
    for measure in first['mean']
    if all(measure in metrics['mean'] for metrics in systems.values())
  ]
  measures = args.measure or shared
  absent = [measure for measure in measures if measure not in shared]
  if absent or not measures:
    raise InputError(
      f'not every system has {", ".join(absent) or "a measure that the others have"}; all have '
      f'{", ".join(shared) or "none"}'
    )
  columns, rows = table(systems, measures)
  said = note(systems, measures)
  if args.figure:
    figure(systems, measures, args.figure)
  if args.out:
    with files.atomic_write(args.out) as file:
      file.write(markdown(columns, rows, said))
  cli.print_table(columns, rows)
  print(said)


def _backbones(args: argparse.Namespace) -> dict[str, tuple[str, str | None]]:
  """Name -> (backbone, prompt or None)."""
  paths: dict[str, str] = {}
  for given, path in args.backbone:
    # Of a path its last part, of package:NAME the name.
    name = given or path.rstrip('/').rpartition('/')[2].removeprefix('package:')
    if name in paths:
      raise InputError(f'--backbone: two are called {name}; name them, --backbone=NAME={path}')
    paths[name] = path
  prompts: dict[str, str] = {}
  for given, path in args.prompt or ():
    if given is None and len(paths) > 1:
      raise InputError(
        f'--prompt={path}: there are several backbones; say whose it is, --prompt=NAME={path}'
      )
    name = given or next(iter(paths))
    if name not in paths:
      raise InputError(
        f'--prompt={name}={path}: no backbone is called {name}; there are {", ".join(paths)}'
      )
    if name in prompts:
      raise InputError(
        f'--prompt: two are given for {name}; give the backbone twice, under two names, to compare '
        'them'
      )
    prompts[name] = path
    files.existing(path, 'prompt')
  return {name: (path, prompts.get(name)) for name, path in paths.items()}


def _report_backbones(args: argparse.Namespace) -> None:
  # Here, because --metrics need not wait for JAX.
  from dprjax.analysis import inspection
  from dprjax.inference.retriever import Retriever
  from dprjax.runtime import compiled

  compiled.keep()

  backbones = _backbones(args)
  batch_size = args.batch_size or 64

  def load(path: str, prompt: str | None) -> Retriever:
    return Retriever.load(
      path,
      prompt,
      pooling=args.pooling,
      normalize=args.normalize,
      query_max_length=args.max_length,
      passage_max_length=args.max_length,
      batch_size=batch_size,
    )

  if len(backbones) > 1:
    for path, prompt in backbones.values():
      load(
        path,
        prompt,
        # and dropped: the last should not be found bad when the others' minutes are spent, nor all
        # be held at once
      )
  texts = inspection.read_texts(
    args.sts, args.wikipedia, args.beir, args.split or 'test', args.max_texts or 1000
  )
  findings = {
    name: inspection.inspect(name, load(path, prompt), texts, batch_size)
    for name, (path, prompt) in backbones.items()
  }
  columns, rows = inspection.table(findings)
  layers, by_layer = inspection.layers_table(findings)
  said = inspection.note(texts, findings)
  if args.figure:
    foot = f'attention over {texts.named["attended"]}' if by_layer else ''
    figures.backbones(
      {name: inspection.looks(one) for name, one in findings.items()}, foot, args.figure
    )
  if args.out:
    with files.atomic_write(args.out) as file:
      file.write(markdown(columns, rows, '  \n'.join(said)))  # two spaces: a line break in Markdown
      if by_layer:
        file.write('\n' + markdown(layers, by_layer, ''))
  cli.print_table(columns, rows)
  if by_layer:
    cli.print_table(layers, by_layer)
  print('\n'.join(said))


# Arguments that go with --backbone, and with --metrics.
_OF_BACKBONES = (
  'sts',
  'wikipedia',
  'beir',
  'split',
  'prompt',
  'pooling',
  'normalize',
  'max_length',
  'max_texts',
  'batch_size',
)
_OF_METRICS = ('measure',)


def main(argv: Sequence[str] | None = None) -> None:
  parser = cli.Parser('report', __doc__ or '')
  parser.add_argument('--out', metavar='report.md', help='where the table goes as Markdown')
  parser.add_argument(
    '--figure', metavar='report.png', help='where the figure goes; png, pdf or svg'
  )
  systems = parser.add_argument_group('systems')
  systems.add_argument(
    '--metrics',
    type=cli.named,
    action='append',
    metavar='NAME=metrics.json',
    help='a system; the first is the one that the others are compared with',
  )
  systems.add_argument(
    '--measure',
    action='extend',
    nargs='+',
    metavar='MEASURE',
    help='which to show (default: all that every system has)',
  )
  looks = parser.add_argument_group('backbones')
  looks.add_argument(
    '--backbone',
    type=_named,
    action='append',
    metavar='[NAME=]DIR',
    help='a Hugging Face directory, a hub id, or package:NAME',
  )
  looks.add_argument(
    '--prompt',
    type=_named,
    action='append',
    metavar='[NAME=]FILE',
    help='a prompt.npz for the backbone of that name',
  )
  looks.add_argument(
    '--sts',
    metavar='FILE',
    help='pairs with scores of 0 to 5, csv, tsv or jsonl: rank correlation with the cosine',
  )
  looks.add_argument(
    '--wikipedia',
    metavar='DUMP',
    help='pages-articles.xml(.bz2): distinction of sections, entropy of attention',
  )
  looks.add_argument(
    '--beir',
    metavar='DIR',
    help='a retrieval data set: alignment of queries and positives, uniformity of passages',
  )
  looks.add_argument('--split', help='of --beir, whose judgements (default: test)')
  looks.add_argument(
    '--max_texts',
    type=cli.positive,
    help='triplets, sections, passages, ... at most; STS pairs are all taken (default: 1000)',
  )
  looks.add_argument(
    '--pooling', choices=('cls', 'mean'), help='default: as the prompt or the backbone says'
  )
  looks.add_argument(
    '--normalize',
    type=cli.boolean,
    metavar='true|false',
    help='likewise; all measures are of vectors at unit length',
  )
  looks.add_argument('--max_length', type=cli.positive, help='tokens a text is cut at; likewise')
  looks.add_argument(
    '--batch_size', type=cli.positive, help='texts at a time over all devices (default: 64)'
  )

  def command(args: argparse.Namespace) -> None:
    if bool(args.metrics) == bool(args.backbone):
      raise InputError(
        'give --metrics to compare systems, or --backbone to look at backbones'
        + (', not both' if args.metrics else '')
      )
    other, wrong = ('--metrics', _OF_METRICS) if args.backbone else ('--backbone', _OF_BACKBONES)
    for name in wrong:
      if getattr(args, name) is not None:
        raise InputError(f'--{name} goes with {other}')
    if args.out:
      files.output_file(args.out)
    if args.figure:
      figures.check_name(args.figure)
    if args.metrics:
      _report_systems(args)
    else:
      _report_backbones(args)

  cli.run(parser, command, argv)


if __name__ == '__main__':
  main()
