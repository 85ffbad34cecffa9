"""Compares systems or inspects backbones: a table, on the console and as Markdown, and a figure.

    python -m dprjax.report --metrics frozen=frozen.json --metrics BM25=bm25.json \\
        --metrics prompt=prompt.json --out=report.md --figure=report.png
    python -m dprjax.report --backbone=DIR --backbone=ours=DIR --beir=scifact --out=report.md \\
        --figure=report.png

Systems: metrics.json of dprjax.evaluate. A paired bootstrap over queries (10,000 draws) compares
each system with the first; * marks a difference whose 95 % interval excludes 0. The figure shows
the differences with their intervals. Data sets are drawn separately and have equal weight. Values
under "extra" in metrics.json (--extra of dprjax.evaluate) become columns.

Backbones, with or without a prompt: alignment and uniformity (Wang & Isola 2020) of unit and raw
vectors, on the queries and passages of --beir. `experiments/lab/inspection.py` measures more:
sentence pairs, sections, attention, categories and topics.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dprjax.analysis import comparison, figures
from dprjax.base import files, outputs
from dprjax.base.errors import InputError
from dprjax.formats.fields import check_id
from dprjax.runtime import cli, flags
from dprjax.runtime.flags import flag

if TYPE_CHECKING:  # imports JAX
  from dprjax.inference.retriever import Retriever

logger = logging.getLogger('dprjax')


@dataclasses.dataclass(frozen=True, kw_only=True)
class SystemFlags:
  metrics: dict[str, str] = flag(
    'a system; the first is the baseline of comparisons', {}, metavar='NAME=metrics.json'
  )
  measure: tuple[str, ...] = flag(
    'measures to show (default: all common to the systems)', (), split=' ', metavar='MEASURE'
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackboneFlags:
  backbone: tuple[tuple[str, str], ...] = flag(
    'a Hugging Face directory, a hub id, or package:NAME',
    (),
    read=flags.maybe_named,
    metavar='[NAME=]DIR',
  )
  prompt: tuple[tuple[str, str], ...] = flag(
    'a prompt.npz for the backbone of this name',
    (),
    read=flags.maybe_named,
    metavar='[NAME=]FILE',
  )
  beir: str | None = flag(
    'a retrieval data set with judgements: queries and passages', None, metavar='DIR'
  )
  split: str = flag('of --beir, with judgements', 'test')
  max_texts: int = flag('most queries, passages and pairs of them', 1000)
  pooling: str | None = flag('default: that of the prompt or the backbone', None, metavar='NAME')
  normalize: bool = flag('scale vectors to unit length; false also gives raw measures', False)
  max_length: int | None = flag('most tokens of a text; same default', None)
  batch_size: int = flags.batch_size()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  out: str | None = flag('the table as Markdown', None, metavar='report.md')
  figure: str | None = flag('the figure: png, pdf or svg', None, metavar='report.png')
  systems: SystemFlags = flags.group(SystemFlags, 'systems')
  backbones: BackboneFlags = flags.group(BackboneFlags, 'backbones')


def _report_systems(args: Flags) -> None:
  systems: dict[str, dict[str, Any]] = {}
  for name, path in args.systems.metrics.items():
    check_id(name, f'--metrics={name}={path}')
    systems[name] = comparison.read_metrics(path)
  first = next(iter(systems.values()))
  shared = [
    measure
    for measure in first['mean']
    if all(measure in metrics['mean'] for metrics in systems.values())
  ]
  measures = args.systems.measure or shared
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


def _backbones(args: BackboneFlags) -> dict[str, tuple[str, str | None]]:
  """(backbone, prompt or None) by name."""
  paths: dict[str, str] = {}
  for given, path in args.backbone:
    # The last part of the path, or of package:NAME.
    name = given or path.rstrip('/').rpartition('/')[2].removeprefix('package:')
    check_id(name, f'--backbone={path}')
    if name in paths:
      raise InputError(f'--backbone: two have the name {name}; name them, --backbone=NAME={path}')
    paths[name] = path
  prompts: dict[str, str] = {}
  for given, path in args.prompt:
    if not given and len(paths) > 1:
      raise InputError(f'--prompt={path}: several backbones; give --prompt=NAME={path}')
    name = given or next(iter(paths))
    if name not in paths:
      raise InputError(f'--prompt={name}={path}: the backbones are {", ".join(paths)}')
    if name in prompts:
      raise InputError(f'--prompt: two for {name}; give the backbone twice, under two names')
    prompts[name] = path
    files.existing(path, 'prompt')
  return {name: (path, prompts.get(name)) for name, path in paths.items()}


def retrievers(args: BackboneFlags) -> dict[str, Callable[[], 'Retriever']]:
  """Functions that load each backbone, after loading each once.

  So a bad backbone fails before others take minutes. None stays in memory.
  """
  from dprjax.inference.retriever import Retriever

  def load(path: str, prompt: str | None) -> 'Retriever':
    return Retriever.load(
      path,
      prompt,
      pooling=args.pooling,
      normalize=args.normalize,
      query_max_length=args.max_length,
      passage_max_length=args.max_length,
      batch_size=args.batch_size,
    )

  found: dict[str, Callable[[], Retriever]] = {
    name: functools.partial(load, path, prompt) for name, (path, prompt) in _backbones(args).items()
  }
  if len(found) > 1:
    for one in found.values():
      one()
  return found


def _report_backbones(args: BackboneFlags, figure: str | None, out: str | None) -> None:
  # Imported here, so that --metrics does not wait for JAX.
  from dprjax.analysis import inspection
  from dprjax.data import sources
  from dprjax.runtime import compiled

  if args.beir is None:
    raise InputError('--backbone needs --beir, the texts for its measures')
  compiled.keep()
  loaded = retrievers(args)
  dataset = sources.load_dataset(sources.Source(args.beir, split=args.split))
  name = f'{args.beir.rstrip("/").rpartition("/")[2]}/{args.split}'
  drawn = inspection.draw(dataset, name, args.max_texts)
  findings = {name: inspection.inspect(name, load(), drawn) for name, load in loaded.items()}
  columns, rows = inspection.table(findings)
  lines = inspection.note(drawn, findings)
  if figure is not None:
    figures.backbones(findings, figure)
  if out is not None:
    with files.atomic_write(out) as file:
      # Two spaces break a Markdown line.
      file.write(comparison.markdown(columns, rows, '  \n'.join(lines)))
  cli.print_table(columns, rows)
  print('\n'.join(lines))


def main(argv: Sequence[str] | None = None) -> None:
  cli.run(Flags, _command, argv)


def _command(args: Flags) -> None:
  systems, backbones = args.systems, args.backbones
  if bool(systems.metrics) == bool(backbones.backbone):
    raise InputError('give either --metrics to compare systems, or --backbone to inspect backbones')
  other, wrong = ('backbone', backbones) if systems.metrics else ('metrics', systems)
  flags.refuse(wrong, [field.name for field in dataclasses.fields(wrong)], other)
  if args.figure is not None:
    figures.check_name(args.figure, '--figure')
  inputs = {'--metrics': list(systems.metrics.values())} | backbone_files(backbones)
  with (
    outputs.claim(args.out, inputs, endings=('',), also={'--figure': args.figure}),
    outputs.claim(args.figure, inputs, flag='--figure', endings=('',)),
  ):
    if systems.metrics:
      _report_systems(args)
    else:
      _report_backbones(backbones, args.figure, args.out)


def backbone_files(args: BackboneFlags) -> dict[str, list[str]]:
  """The inputs of the backbones, by flag."""
  return {
    '--backbone': [path for _, path in args.backbone],
    '--prompt': [path for _, path in args.prompt],
    '--beir': [args.beir] if args.beir else [],
  }


if __name__ == '__main__':
  main()
