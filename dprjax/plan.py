"""Plans the memory of an experiment on a machine that may be absent.

    python -m dprjax.plan --config=configs/dptdr.py:msmarco --target=v5e:2x4 --target=h100:8 \\
        --out=plan.md

It needs no data, weights or accelerator, only the compiler of the target: `pip install
'dprjax[plan]'` for TPUs, `'dprjax[plan-cuda]'` for GPUs. It compiles the training update and the
encoder forward pass for each padded length. A table shows whether they fit. If the update does not,
the plan searches flags that make it fit. Compiling a large encoder takes minutes a program.

Targets: TPUs with a topology (v4:2x2x1, v5e:2x4, v5p:2x2x1, v6e:2x4), GPUs with a number (h100:8,
a100:8, l4:1), and cpu, this machine. docs/planning.md explains the rows.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dprjax.base import cli, files, flags, outputs
from dprjax.base.flags import flag
from dprjax.base.progress import PASSING
from dprjax.planning import targets

if TYPE_CHECKING:  # imports JAX
  from dprjax.planning import compiling, programs, tables

logger = logging.getLogger('dprjax')


def plan(
  arguments: Sequence[str],
  target: targets.Target,
  compile_program: Callable[['programs.Job'], 'compiling.Program'],
  *,
  rows: int = 64,
  find: bool = True,
  forward: bool = True,
) -> 'tables.Plan':
  """Compiles the programs of an experiment for a target.

  Args:
    arguments: the config, as on the command line.
    compile_program: ``compiling.compile_program``, perhaps cached.
    rows: most rows of a forward pass, over all devices (``embedder.rows_at_once``).
    find: search flags if the update does not fit.
  """
  with cli.loading():
    from dprjax.encoding import embedder
    from dprjax.planning import backbones, compiling, programs, tables
  config = programs.read_config(arguments, target.platform)
  batch = programs.batch_of(config, backbones.shape_of(config))

  def job(more: Sequence[str] = (), length: int = 0) -> 'programs.Job':
    at_once = rows
    if length:
      at_once = embedder.rows_at_once(target.platform, target.devices, rows, length)
    replaced = {flag.partition('=')[0] for flag in more}
    others = [argument for argument in arguments if argument.partition('=')[0] not in replaced]
    return programs.CompileJob(target.name, (*others, *more), length, at_once)

  def update(more: Sequence[str]) -> 'compiling.Program':
    return compile_program(job(more))

  compiled = {'update': update(())}
  title = 'update' if compiled['update'].fits else ''
  flags: tuple[str, ...] = ()
  fit = compiling.Fit((), None)
  if not title and find and compiled['update'].fits is not None:
    fit = compiling.fit(config, target.devices, compiled['update'], update)
  if fit.program is not None and fit.flags:
    title, flags = 'update that fits', fit.flags
    compiled[title] = fit.program
  for length in embedder.padded_lengths(batch.longest) if forward else ():
    forward_pass = job(flags, length)
    compiled[f'encode {forward_pass.rows} x {length}'] = compile_program(forward_pass)
  return tables.Plan(target, config, batch, compiled, title, flags)


def compile_aloud(job: 'programs.Job', limit: float) -> 'compiling.Program':
  from dprjax.planning import compiling, tables

  what = f'the forward pass of {job.rows} x {job.length} tokens' if job.length else 'the update'
  flags = [flag.removeprefix('--config.') for flag in job.config if flag.startswith('--config.')]
  logger.info('%s', ' '.join([f'{job.target}: compiling {what}', *flags]), extra=PASSING)
  program = compiling.compile_program(job, limit)
  logger.info('%s: compiled %s; fits: %s', job.target, what, tables.fits(program))
  return program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  experiment: tuple[str, ...] = flags.config(
    'an experiment, for example configs/dptdr.py:msmarco',
    'override an option, for example --config.batch_size=512; config.backbone.path may also be '
    'bert-base, roberta-large and so on, or a config.json',
  )
  target: tuple[str, ...] = flag('v5e:2x4, h100:8, cpu ...; may be repeated', metavar='MACHINE')
  out: str | None = flag('the tables as Markdown', None, metavar='plan.md')
  batch_size: int = flag(
    'texts of a forward pass, over all devices, as in dprjax.encode', 64, most=2**20, metavar='N'
  )
  forward: bool = flag('also compile the forward passes', True)
  search: bool = flag('search flags that make an update fit', True)
  timeout: int = flag('limit for compiling a program', 1800, most=24 * 3600, metavar='SECONDS')


def _command(args: Flags) -> None:
  machines = [targets.parse(name) for name in dict.fromkeys(args.target)]
  for machine in machines:
    targets.check_installed(machine)
  with outputs.claim(args.out, {}, endings=('',)):
    _plan(args, machines)


def _plan(args: Flags, machines: Sequence[targets.Target]) -> None:
  with cli.loading():
    from dprjax.planning import tables

  written = [f'# Plan\n\n    python -m dprjax.plan {" ".join(args.experiment)}\n']
  for machine in machines:
    planned = plan(
      args.experiment,
      machine,
      functools.partial(compile_aloud, limit=args.timeout),
      rows=args.batch_size,
      find=args.search,
      forward=args.forward,
    )
    print(planned.title)
    cli.print_table(*tables.table(planned))
    print('\n'.join(tables.note(planned)), flush=True)
    written.append(tables.markdown(planned))
  if args.out is not None:
    with files.atomic_write(args.out) as file:
      file.write('\n'.join(written))


main = cli.main(Flags, _command)

if __name__ == '__main__':
  main()
