"""Compares systems or inspects backbones: a table, on the console and as Markdown, and a figure.

    python -m dprjax.report --metrics BM25=bm25.json --metrics frozen=frozen.json \\
        --metrics "+ prompt=dpt.json" --out=report.md --figure=report.png
    python -m dprjax.report --backbone=DIR --backbone=ours=DIR --beir=scifact --out=report.md \\
        --figure=report.png

Systems: the files are metrics.json of dprjax.evaluate. All systems are compared with the first by a
paired bootstrap over queries: queries are drawn with replacement 10,000 times, the same ones for
both systems, and * marks a difference if the middle 95 % of its means exclude 0. The intervals in
the figure are each system's own, from the same draws. Data sets are drawn separately and have equal
weight. Values under "extra" in metrics.json (--extra of dprjax.evaluate) become columns.

Backbones: frozen, with or without a prompt: alignment and uniformity (Wang & Isola 2020) of unit
vectors and of raw ones, on the queries and passages of --beir. `experiments/lab/inspection.py`
measures more: scored sentence pairs, sections, attention, categories and topics.
"""

import argparse
import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dprjax.analysis import comparison, figures
from dprjax.base import files, outputs
from dprjax.base.errors import InputError
from dprjax.formats.fields import check_id
from dprjax.runtime import cli

if TYPE_CHECKING:  # it imports JAX
  from dprjax.inference.retriever import Retriever

logger = logging.getLogger('dprjax')


def _named(text: str) -> tuple[str | None, str]:
  """``NAME=VALUE`` or ``VALUE``, for argparse's ``type``."""
  return cli.named(text) if '=' in text else (None, text)


def _inputs(args: argparse.Namespace) -> dict[str, list[str]]:
  """What the command reads, by flag."""
  given = {
    f'--{name}': [path for _, path in getattr(args, name) or ()]
    for name in ('metrics', 'backbone', 'prompt')
  }
  return given | ({'--beir': [args.beir]} if args.beir else {})


def _report_systems(args: argparse.Namespace) -> None:
  systems: dict[str, dict[str, Any]] = {}
  for name, path in args.metrics:
    if name in systems:
      raise InputError(f'--metrics: two systems are called {name}')
    check_id(name, f'--metrics={name}={path}')
    systems[name] = comparison.read_metrics(path)
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
  columns, rows = comparison.table(systems, measures)
  text = comparison.note(systems, measures)
  if args.figure is not None:
    figures.compared(systems, measures, args.figure)
  if args.out is not None:
    with files.atomic_write(args.out) as file:
      file.write(comparison.markdown(columns, rows, text))
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


def retrievers(args: argparse.Namespace) -> dict[str, Callable[[], 'Retriever']]:
  """Loads each backbone once, so that a bad one is an error before the others take minutes.

  They are not kept, to save memory: what is returned loads them again, by name.
  """
  from dprjax.inference.retriever import Retriever

  def load(path: str, prompt: str | None) -> 'Retriever':
    return Retriever.load(
      path,
      prompt,
      pooling=args.pooling,
      normalize=bool(args.normalize),  # measures scale vectors themselves where they should
      query_max_length=args.max_length,
      passage_max_length=args.max_length,
      batch_size=args.batch_size or 64,
    )

  found: dict[str, Callable[[], Retriever]] = {
    name: functools.partial(load, path, prompt) for name, (path, prompt) in _backbones(args).items()
  }
  if len(found) > 1:
    for one in found.values():
      one()
  return found


def _report_backbones(args: argparse.Namespace) -> None:
  # Imported here, so that --metrics does not wait for JAX.
  from dprjax.analysis import inspection
  from dprjax.data import sources
  from dprjax.runtime import compiled

  if args.beir is None:
    raise InputError('--backbone: there is no text to measure a backbone on; give --beir')
  compiled.keep()
  loaded = retrievers(args)
  split = args.split or 'test'
  dataset = sources.load_dataset(sources.Source(args.beir, split=split))
  name = f'{args.beir.rstrip("/").rpartition("/")[2]}/{split}'
  drawn = inspection.draw(dataset, name, args.max_texts or 1000)
  findings = {name: inspection.inspect(name, load(), drawn) for name, load in loaded.items()}
  columns, rows = inspection.table(findings)
  lines = inspection.note(drawn, findings)
  if args.figure is not None:
    figures.backbones(findings, args.figure)
  if args.out is not None:
    with files.atomic_write(args.out) as file:
      # Two spaces break a Markdown line.
      file.write(comparison.markdown(columns, rows, '  \n'.join(lines)))
  cli.print_table(columns, rows)
  print('\n'.join(lines))


# The arguments that belong to --backbone and to --metrics.
_OF_BACKBONES = (
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


def add_backbone_flags(parser: argparse.ArgumentParser) -> None:
  """The flags that say which backbones are inspected, and on which data set."""
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
    '--beir', metavar='DIR', help='a retrieval data set with judgements: queries and passages'
  )
  inspected.add_argument('--split', help='of --beir, with judgements (default: test)')
  inspected.add_argument(
    '--max_texts',
    type=cli.positive,
    help='most queries, passages and pairs of them (default: 1000)',
  )
  inspected.add_argument(
    '--pooling', metavar='NAME', help='default: that of the prompt or the backbone'
  )
  inspected.add_argument(
    '--normalize',
    type=cli.boolean,
    metavar='true|false',
    help='scale vectors to unit length (default: false, so that there are raw measures too)',
  )
  inspected.add_argument('--max_length', type=cli.positive, help='most tokens of a text; likewise')
  inspected.add_argument(
    '--batch_size',
    type=cli.positive,
    help='texts at a time over all devices, at most (default: 64)',
  )


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
  add_backbone_flags(parser)

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
    if args.figure is not None:
      figures.check_name(args.figure, '--figure')
    written = {f'--{name}': getattr(args, name) for name in ('out', 'figure')}
    written = {flag: path for flag, path in written.items() if path is not None}
    outputs.check_outputs_apart(written)
    inputs = _inputs(args)
    with contextlib.ExitStack() as stack:
      for flag, path in written.items():
        stack.enter_context(outputs.claim(path, inputs, flag=flag, endings=('',)))
      if args.metrics:
        _report_systems(args)
      else:
        _report_backbones(args)

  cli.run(parser, command, argv)


if __name__ == '__main__':
  main()
