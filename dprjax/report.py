"""Compares systems: a table, on the console and as Markdown or LaTeX, and a figure.

    python -m dprjax.report --metrics frozen=frozen.json --metrics BM25=bm25.json \\
        --metrics prompt=prompt.json --out=report.md --figure=report.png

A system is a metrics.json of dprjax.evaluate. A paired bootstrap over queries (10,000 draws)
compares each system with the first; * marks a difference whose 95 % interval excludes 0. The figure
shows the differences with their intervals.
Values under "extra" in metrics.json (--extra of dprjax.evaluate) become columns. `--format=latex`
writes a tabular with the rules of booktabs.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from dprjax.base import cli, files, outputs
from dprjax.base.errors import InputError
from dprjax.base.flags import flag
from dprjax.retrieval import comparison, figures
from dprjax.text.fields import check_id


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  metrics: dict[str, str] = flag(
    'a system; the first is the baseline of comparisons', metavar='NAME=metrics.json'
  )
  measure: tuple[str, ...] = flag(
    'measures to show (default: all common to the systems)', (), split=' ', metavar='MEASURE'
  )
  out: str | None = flag('the table', None, metavar='report.md')
  format: str = flag('of --out', 'markdown', choices=comparison.FORMATS)
  figure: str | None = flag('the figure: png, pdf or svg', None, metavar='report.png')


def _report(args: Flags) -> None:
  systems: dict[str, dict[str, Any]] = {}
  for name, path in args.metrics.items():
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
  write(systems, measures, args.out, args.figure, args.format)


def write(
  systems: dict[str, dict[str, Any]],
  measures: Sequence[str],
  out: files.PathLike | None,
  figure: files.PathLike | None,
  form: str = 'markdown',
) -> None:
  """Prints the table of systems, and writes it to ``out``, and the figure.

  Args:
    systems: the content of a metrics.json by name; the first is the baseline.
    form: of ``comparison.FORMATS``.
  """
  columns, rows = comparison.table(systems, measures)
  text = comparison.note(systems, measures)
  if figure is not None:
    figures.compared(systems, measures, figure)
  if out is not None:
    with files.atomic_write(out) as file:
      file.write(comparison.FORMATS[form](columns, rows, text))
  cli.print_table(columns, rows)
  print(text)


def _command(args: Flags) -> None:
  if args.figure is not None:
    figures.check_name(args.figure, '--figure')
  inputs = {'--metrics': list(args.metrics.values())}
  with (
    outputs.claim(args.out, inputs, endings=('',), also={'--figure': args.figure}),
    outputs.claim(args.figure, inputs, flag='--figure', endings=('',)),
  ):
    _report(args)


main = cli.main(Flags, _command)

if __name__ == '__main__':
  main()
