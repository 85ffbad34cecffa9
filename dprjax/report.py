"""Compares systems or inspects backbones: a table, on the console and as Markdown, and a figure.

    python -m dprjax.report --metrics BM25=bm25.json --metrics frozen=frozen.json \\
        --metrics "+ prompt=dpt.json" --out=report.md --figure=report.png
    python -m dprjax.report --backbone=DIR --backbone=ours=DIR --sts=stsb-test.csv \\
        --wikipedia=enwiki.xml.bz2 --beir=scifact --out=report.md --figure=report.png

Systems: the files are metrics.json of dprjax.evaluate. All systems are compared with the first by a
paired bootstrap over queries: queries are drawn with replacement 10,000 times, the same ones for
both systems, and * marks a difference if the middle 95 % of its means exclude 0. The intervals in
the figure are each system's own, from the same draws. Data sets are drawn separately and have equal
weight. Values under "extra" in metrics.json (--extra of dprjax.evaluate) become columns.

Backbones: frozen, with or without a prompt. There are columns for the texts that are given:
alignment and uniformity (Wang & Isola 2020) of unit vectors and of raw ones, the entropy of the
first token's attention (Condenser, section 5) and the distinction of Wikipedia sections (Ein Dor et
al. 2018); see dprjax.analysis. The attention is measured on sections of --wikipedia, else on
passages of --beir, else on the sentences of --sts.

Where the passages of --beir have categories, or --topics gives them topics (Topic-DPR, section 5),
there are also the cosines of a query with its own passage, Sim(q, p+), and with passages that have
no category in common with it, Sim(q, p-), and the share of a passage's 10 nearest that have its
topic or a category of it. --tsne draws the passages by both.
"""

import argparse
import contextlib
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from dprjax.analysis import figures
from dprjax.base import files, outputs, reading
from dprjax.base.errors import InputError
from dprjax.formats.fields import Record, check_id, is_number
from dprjax.runtime import cli

logger = logging.getLogger('dprjax')

_DRAWS = 10_000
_DRAWS_AT_ONCE = 500  # bounds the memory
_SEED = 0
_LARGEST = 1e15  # of a measure's values


class Compared(NamedTuple):
  """One system under one measure.

  Attributes:
    mean: over queries; with several data sets, the mean of their means.
    low, high: the 95 % interval of the mean.
    difference: from the first system, over the queries that both have; None for the first.
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
  """Compares every system with the first under one measure.

  Args:
    systems: name -> metrics as ``evaluate`` writes them; the first is the baseline.
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
  datasets = metrics.get('datasets', {'': metrics})
  return {name: part['per_query'][measure] for name, part in datasets.items()}


def _bootstrap(parts: Sequence[Float[np.ndarray, 'queries']]) -> Float[np.ndarray, 'draws']:
  """Means of the parts' means over queries drawn with replacement.

  Parts of the same sizes get the same draws.
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
  """Reads a metrics.json of dprjax.evaluate.

  Raises:
    InputError: the file is something else; a value is no finite number; a measure has no queries,
      or is not of every data set.
  """
  record = Record(reading.read_json_object(path, 'metrics'), str(path))
  names = _numbers(record.record('mean'))
  if 'datasets' in record.values:
    datasets = record.record('datasets')
    parts = [datasets.record(name) for name in datasets.values]
  else:
    parts = [record]
  if not parts or not names:
    raise InputError(f'{path} is not a metrics.json of dprjax.evaluate: no mean of any measure')
  for part in [*parts, *([record] if parts != [record] else [])]:
    mean, per_query = part.record('mean'), part.record('per_query')
    for name in names:
      mean.number(name)
      if not _numbers(per_query.record(name)):
        raise InputError(f'{per_query.where}: {name!r} is of no query')
  for name, value in record.values.get('extra', {}) and record.record('extra').values.items():
    if not isinstance(value, str | bool) and value is not None and not is_number(value):
      raise InputError(f"{path}, 'extra': {name!r} is {value!r:.40}; expected text or a number")
  return record.values


def _numbers(record: Record) -> list[str]:
  """The keys of an object that holds finite numbers alone."""
  for name in record.values:
    if abs(record.number(name)) > _LARGEST:
      raise InputError(f'{record.where}: {name!r:.80} is above {_LARGEST:.0e}; no measure is')
  return list(record.values)


def table(
  systems: dict[str, dict[str, Any]], measures: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
  """Column titles and rows: system, data set if there are several, measures, extra columns.

  A * marks significant differences.
  """
  compared = {measure: compare(systems, measure) for measure in measures}
  extra = list(
    dict.fromkeys(key for metrics in systems.values() for key in metrics.get('extra', {}))
  )
  several = any('datasets' in metrics for metrics in systems.values())
  rows = []
  for name, metrics in systems.items():
    extras = [_shown(metrics.get('extra', {}).get(key)) for key in extra]
    for label, part in metrics.get('datasets', {}).items():
      values = [f'{part["mean"][measure]:.4f}' for measure in measures]
      rows.append([name, label, *values, *[''] * len(extra)])
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
  if isinstance(value, int) and not isinstance(value, bool):
    return f'{value:,}'
  return f'{value:.4g}' if isinstance(value, float) else str(value)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> str:
  """The table and a note below it."""

  def line(cells: Sequence[str]) -> str:
    cells = [' '.join(cell.splitlines()).replace('|', '\\|') for cell in cells]
    return f'| {" | ".join(cells)} |'

  left = 2 if 'data set' in columns else 1
  rule = line(['---'] * left + ['---:'] * (len(columns) - left))
  return '\n'.join([line(columns), rule, *map(line, rows), '', note, ''])


def note(systems: dict[str, dict[str, Any]], measures: Sequence[str]) -> str:
  """The number of queries, and what * means."""
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
  """Bars grouped by measure, one for each system, with 95 % intervals."""
  values = {
    measure: {
      name: figures.Bar(*result[:3], result.significant)
      for name, result in compare(systems, measure).items()
    }
    for measure in measures
  }
  foot = 'whiskers: 95 % bootstrap intervals' + (
    ';  * differs from the first system (paired)' if len(systems) > 1 else ''
  )
  several = any('datasets' in metrics for metrics in systems.values())
  ylabel = f'mean over {"data sets" if several else "queries"}'
  figures.bars(values, ylabel, foot, path)


def _named(text: str) -> tuple[str | None, str]:
  """``NAME=VALUE`` or ``VALUE``, for argparse's ``type``."""
  return cli.named(text) if '=' in text else (None, text)


def _inputs(args: argparse.Namespace) -> dict[str, list[str]]:
  """What the command reads, by flag."""
  given = {
    f'--{name}': [path for _, path in getattr(args, name) or ()]
    for name in ('metrics', 'backbone', 'prompt')
  }
  single = {f'--{name}': getattr(args, name) for name in ('sts', 'wikipedia', 'beir', 'topics')}
  return given | {flag: [path] for flag, path in single.items() if path}


def _report_systems(args: argparse.Namespace) -> None:
  systems: dict[str, dict[str, Any]] = {}
  for name, path in args.metrics:
    if name in systems:
      raise InputError(f'--metrics: two systems are called {name}')
    check_id(name, f'--metrics={name}={path}')
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
  text = note(systems, measures)
  if args.figure is not None:
    figure(systems, measures, args.figure)
  if args.out is not None:
    with files.atomic_write(args.out) as file:
      file.write(markdown(columns, rows, text))
  cli.print_table(columns, rows)
  print(text)


def _backbones(args: argparse.Namespace) -> dict[str, tuple[str, str | None]]:
  """Name -> (backbone, prompt or None)."""
  paths: dict[str, str] = {}
  for given, path in args.backbone:
    # The last part of a path, or the name in package:NAME.
    name = given or path.rstrip('/').rpartition('/')[2].removeprefix('package:')
    check_id(name, f'--backbone={path}')
    if name in paths:
      raise InputError(f'--backbone: two are called {name}; name them, --backbone=NAME={path}')
    paths[name] = path
  prompts: dict[str, str] = {}
  for given, path in args.prompt or ():
    if given is None and len(paths) > 1:
      raise InputError(
        f'--prompt={path}: there are several backbones; name one, --prompt=NAME={path}'
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
  # Imported here, so that --metrics does not wait for JAX.
  from dprjax.analysis import inspection
  from dprjax.data.topics import load_topics
  from dprjax.inference.retriever import Retriever
  from dprjax.runtime import compiled

  compiled.keep()

  backbones = _backbones(args)
  topic_model = load_topics(args.topics) if args.topics else None
  batch_size = args.batch_size or 64

  def load(path: str, prompt: str | None) -> Retriever:
    return Retriever.load(
      path,
      prompt,
      pooling=args.pooling,
      normalize=bool(args.normalize),  # measures scale vectors themselves where they should
      query_max_length=args.max_length,
      passage_max_length=args.max_length,
      batch_size=batch_size,
    )

  if len(backbones) > 1:
    # A bad one is an error before the others take minutes. They are not kept, to save memory.
    for path, prompt in backbones.values():
      load(path, prompt)
  texts = inspection.read_texts(
    args.sts, args.wikipedia, args.beir, args.split or 'test', args.max_texts or 1000, topic_model
  )
  draw = args.tsne is not None
  if draw and not texts.labels:
    raise InputError(
      f'--tsne: the passages of {args.beir} have no categories; give their topics, --topics'
    )
  findings = {
    name: inspection.inspect(name, load(path, prompt), texts, batch_size, draw)
    for name, (path, prompt) in backbones.items()
  }
  columns, rows = inspection.table(findings)
  layers, by_layer = inspection.layers_table(findings)
  lines = inspection.note(texts, findings)
  if args.figure is not None:
    foot = f'attention over {texts.named["attended"]}' if by_layer else ''
    figures.backbones(findings, foot, args.figure)
  if args.tsne is not None:
    points = {name: found.drawn for name, found in findings.items() if found.drawn is not None}
    foot = f't-SNE of {texts.named["passages"]}'
    figures.maps(points, texts.labels, texts.label_names, foot, args.tsne)
  if args.out is not None:
    with files.atomic_write(args.out) as file:
      file.write(markdown(columns, rows, '  \n'.join(lines)))  # two spaces break a Markdown line
      if by_layer:
        file.write('\n' + markdown(layers, by_layer, ''))
  cli.print_table(columns, rows)
  if by_layer:
    cli.print_table(layers, by_layer)
  print('\n'.join(lines))


# The arguments that belong to --backbone and to --metrics.
_OF_BACKBONES = (
  'sts',
  'wikipedia',
  'beir',
  'topics',
  'tsne',
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
  parser.add_argument('--out', metavar='report.md', help='the table as Markdown')
  parser.add_argument('--figure', metavar='report.png', help='the figure: png, pdf or svg')
  systems = parser.add_argument_group('systems')
  systems.add_argument(
    '--metrics',
    type=cli.named,
    action='append',
    metavar='NAME=metrics.json',
    help='a system; all are compared with the first',
  )
  systems.add_argument(
    '--measure',
    action='extend',
    nargs='+',
    metavar='MEASURE',
    help='measures to show (default: all that every system has)',
  )
  inspected = parser.add_argument_group('backbones')
  inspected.add_argument(
    '--backbone',
    type=_named,
    action='append',
    metavar='[NAME=]DIR',
    help='a Hugging Face directory, a hub id, or package:NAME',
  )
  inspected.add_argument(
    '--prompt',
    type=_named,
    action='append',
    metavar='[NAME=]FILE',
    help='a prompt.npz for the backbone of that name',
  )
  inspected.add_argument(
    '--sts',
    metavar='FILE',
    help='pairs with scores of 0 to 5, csv, tsv or jsonl: rank correlation with the cosine',
  )
  inspected.add_argument(
    '--wikipedia',
    metavar='DUMP',
    help='pages-articles.xml(.bz2): distinction of sections, entropy of attention',
  )
  inspected.add_argument(
    '--beir',
    metavar='DIR',
    help='a retrieval data set: alignment of queries and positives, uniformity of passages and '
    'queries',
  )
  inspected.add_argument(
    '--topics', metavar='topics.npz', help='of dprjax.topics: the topics of the passages of --beir'
  )
  inspected.add_argument(
    '--tsne',
    metavar='map.png',
    help='the passages of --beir in two dimensions; needs scikit-learn (the extra tsne)',
  )
  inspected.add_argument('--split', help='of --beir, with judgements (default: test)')
  inspected.add_argument(
    '--max_texts',
    type=cli.positive,
    help='most triplets, sections, passages, ...; all STS pairs are used (default: 1000)',
  )
  inspected.add_argument(
    '--pooling', choices=('cls', 'mean'), help='default: that of the prompt or the backbone'
  )
  inspected.add_argument(
    '--normalize',
    type=cli.boolean,
    metavar='true|false',
    help='scale vectors to unit length (default: false, so that there are raw measures too)',
  )
  inspected.add_argument('--max_length', type=cli.positive, help='most tokens of a text; likewise')
  inspected.add_argument(
    '--batch_size', type=cli.positive, help='texts at a time over all devices (default: 64)'
  )

  def command(args: argparse.Namespace) -> None:
    if bool(args.metrics) == bool(args.backbone):
      raise InputError(
        'give --metrics to compare systems, or --backbone to inspect backbones'
        + (', not both' if args.metrics else '')
      )
    other, wrong = ('--metrics', _OF_METRICS) if args.backbone else ('--backbone', _OF_BACKBONES)
    for name in wrong:
      if getattr(args, name) is not None:
        raise InputError(f'--{name} goes with {other}')
    for name in ('topics', 'tsne'):
      if getattr(args, name) is not None and args.beir is None:
        raise InputError(f'--{name} goes with --beir')
    figure_flags = [name for name in ('figure', 'tsne') if getattr(args, name) is not None]
    for name in figure_flags:
      figures.check_name(getattr(args, name), f'--{name}')
    inputs = _inputs(args)
    with contextlib.ExitStack() as stack:
      if args.out is not None:
        stack.enter_context(outputs.claim(args.out, inputs, endings=('',)))
      written = {f'--{name}': getattr(args, name) for name in figure_flags}
      outputs.check_outputs_apart(written | ({} if args.out is None else {'--out': args.out}))
      for name, path in written.items():
        stack.enter_context(outputs.claim(path, inputs, flag=name, endings=('',)))
      if args.metrics:
        _report_systems(args)
      else:
        _report_backbones(args)

  cli.run(parser, command, argv)


if __name__ == '__main__':
  main()
