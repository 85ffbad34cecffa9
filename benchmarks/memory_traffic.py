"""The bytes that a compiled program moves to and from memory, with plain and fused attention.

    python benchmarks/memory_traffic.py --target=v5e:1x1

Compiles encoding and a DPT update with RoBERTa-large for a chip that need not be there (the extras
plan and plan-cuda have the compilers), with plain and with fused attention. Prints the bytes and
products of each program.
"""

import argparse

import hlo
from dprjax.planning import compiling
from dprjax.planning.programs import CompileJob

ROWS, LENGTH = 64, 128
WITHOUT_DROPOUT = ('--config.backbone.dropout=0.0', '--config.prompt.dropout=0.0')
# One prompt for all examples of a batch; each with its own dropout has a copy of the prompt.
BATCH = ('--config.prompt.dropout_scope=batch',)
PROGRAMS = {
  f'encode {ROWS} x {LENGTH}': (LENGTH, WITHOUT_DROPOUT),
  'DPT': (0, WITHOUT_DROPOUT),
  'DPT, dropout, a mask a batch': (0, BATCH),
  'DPT, dropout': (0, ()),
}


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--target', default='v5e:1x1', help='one chip, as dprjax.plan names it')
  parser.add_argument('--programs', default=','.join(map(str, range(len(PROGRAMS)))))
  parser.add_argument('--attention', default='plain,fused')
  args = parser.parse_args()
  print(f'{args.target}, RoBERTa-large, P = 128, {ROWS} queries and {ROWS} passages of {LENGTH}')
  print('program | attention | GB | TFLOP | GiB | compiled in s')
  for number in map(int, args.programs.split(',')):
    name, (length, flags) = list(PROGRAMS.items())[number]
    for attention in args.attention.split(','):
      config = (
        '--config=configs/dptdr.py:msmarco',
        '--config.backbone.path=roberta-large',
        '--config.negatives=0',
        f'--config.batch_size={ROWS}',
        '--config.grad_cache=1',
        f'--config.data.query_max_length={LENGTH}',
        f'--config.backbone.attention={attention}',
        *flags,
      )
      made = compiling.compile_program(
        CompileJob(args.target, config, length, ROWS), 3600, text=True
      )
      print(name, attention, row(made), sep=' | ', flush=True)


def row(made):
  if made.failure:
    return made.failure
  found = hlo.HloProgram(made.answer['text']).cost()
  return (
    f'{found.bytes / 1e9:.1f} | {found.flops / 1e12:.3f} | {made.needs / 2**30:.2f} | '
    f'{made.answer["seconds"]["compile"]:.0f}'
  )


if __name__ == '__main__':
  main()
