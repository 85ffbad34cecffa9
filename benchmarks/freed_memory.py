"""A training step on a processor where glibc keeps the memory that XLA frees, and as it is.

    python benchmarks/freed_memory.py [--size=minilm] [--queries=8] [--candidates=8] [--prompt=16]
        [--runs=5] [--steps=3] [--method=DPT]

XLA allocates the temporary memory of a program at each call and frees it at its end. glibc gives
blocks of that size back to the system, which maps and clears their pages again in the next step.
The environment decides, so each way is a process of its own; they take turns. Besides times, the
table has the pages that a step maps and the peak memory of the process. Writes
benchmarks/results/freed_memory_SIZE-DEVICE.json; ratios are to glibc as it is (above 1: slower).
"""

import argparse
import contextlib
import json
import os
import pathlib
import resource
import subprocess
import sys

import made
import options
import record
import timing
import updates

VARIABLE = 'GLIBC_TUNABLES'
KEPT = {'arena_max': 1, 'mmap_max': 0, 'trim_threshold': 1 << 40, 'top_pad': 256 << 20}
WAYS: dict[str, dict[str, int]] = {
  'as it is': {},
  'huge pages': {'hugetlb': 1},
  'kept': KEPT,
  'kept, huge pages': KEPT | {'hugetlb': 1},
}


def main() -> None:
  parser = options.parser(
    __doc__, queries=8, candidates=8, query_length=32, passage_length=64, prompt=16, runs=5, steps=3
  )
  options.add_size(parser)
  options.add_dtype(parser)
  parser.add_argument('--method', choices=('DPT', 'FT'), default='DPT')
  parser.add_argument('--child', action='store_true', help=argparse.SUPPRESS)
  args = parser.parse_args()
  if options.accelerated():
    parser.error('programs of an accelerator allocate no memory here; set JAX_PLATFORMS=cpu')
  if args.child:
    serve(args)
    return
  with contextlib.ExitStack() as stack:
    children = {name: stack.enter_context(Child(settings)) for name, settings in WAYS.items()}
    seconds = timing.take_turns(children, args.runs)
  cases = timing.summary(seconds, 'as it is', args.steps)
  for name, child in children.items():
    cases[name]['pages_a_step'] = round(child.last['faults'] / args.steps)
    cases[name]['peak_mib'] = child.last['peak_mib']
  columns = ['milliseconds', 'fastest_and_slowest', 'ratio', 'pages_a_step', 'peak_mib']
  timing.show(cases, columns, f'{args.method}, {args.size}')
  settings = {key: value for key, value in vars(args).items() if key != 'child'}
  record.write_jax(f'freed_memory_{args.size}', cases, settings)


class Child:
  """A process with an environment of its own, which takes steps when it is called.

  Attributes:
    last: its output after its last steps.
  """

  def __init__(self, settings: dict[str, int]):
    tunables = ':'.join(f'glibc.malloc.{name}={value}' for name, value in settings.items())
    self._process = subprocess.Popen(
      [sys.executable, str(pathlib.Path(__file__).resolve()), *sys.argv[1:], '--child'],
      env=os.environ | {VARIABLE: tunables},
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    self.last: dict[str, int] = {}

  def __enter__(self) -> 'Child':
    return self

  def __exit__(self, *error: object) -> None:
    self._process.communicate()  # closes its input, which ends it

  def __call__(self) -> None:
    assert self._process.stdin is not None and self._process.stdout is not None
    self._process.stdin.write('\n')
    self._process.stdin.flush()
    self.last = json.loads(self._process.stdout.readline())


def serve(args: argparse.Namespace) -> None:
  """Takes steps for each line of standard input, and prints their time, pages and memory."""
  model = made.SHAPES[args.size]
  lengths = args.query_length, args.passage_length, args.candidates
  step = updates.retrieval(
    updates.options(args.method, args.prompt, args.dtype, ['backbone.unroll=0']),
    model,
    updates.parameters(model),
    made.batch(model, args.queries, *lengths),
  )
  for _ in sys.stdin:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(args.steps)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(
      json.dumps({'faults': used.ru_minflt - before, 'peak_mib': used.ru_maxrss >> 10}), flush=True
    )


if __name__ == '__main__':
  main()
