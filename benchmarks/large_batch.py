"""The large batch of RIP on one device: 2,048 passages (4,096 sentences) in one update, in chunks.

    python benchmarks/large_batch.py [--passages=2048] [--chunk=128] [--size=tiny] [--tokens=64]
        [--vocabulary=8000]

There are two series of the update of configs/rip.py (loss, gradient, AdamW) on random tokens: a
growing batch with chunks of one size, and the whole batch in more and more chunks. Each case runs
in its own process. There are two memories: the temporary memory of the compiled program, without
arguments and results; and the peak of the process during an update (Linux), minus its memory
before. A case that would take more than --most MiB is only compiled. Writes
benchmarks/results/large_batch-DEVICE.json.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time
import types

import jax
import numpy as np

import options
import record
import timing
import updates
from dprjax.models import scratch
from dprjax.papers.condenser import pretrain
from dprjax.training import config as configs
from dprjax.training.method import Parts

OPTIONS = {
  'passages': 2048,
  'chunk': 128,
  'tokens': 64,
  'vocabulary': 8000,
  'runs': 2,
  'most': 4096,
}


def main() -> None:
  parser = options.parser(__doc__, **OPTIONS)
  parser.add_argument('--size', default='tiny', choices=sorted(scratch.SIZES))
  # PASSAGES,CHUNKS: measured in this process and printed as JSON.
  parser.add_argument('--case', help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.case:
    print(json.dumps(measure(args, *map(int, args.case.split(',')))))
    return
  counts = [2**i for i in range(args.passages.bit_length()) if 2**i * args.chunk <= args.passages]
  grown = [(args.chunk * count, count) for count in counts]
  cut = [
    (args.passages, count)
    for count in (*counts, 2 * counts[-1], 4 * counts[-1])
    if args.passages % count == 0
  ]
  cases = {}
  for series, pairs in (('chunks of one size', grown), ('one batch', cut)):
    print(
      f'{series}:\n{"passages":>9} {"chunks":>7} {"compiled, MiB":>14} {"process, MiB":>13} '
      f'{"seconds":>8}'
    )
    for passages, chunks in pairs:
      if (name := f'{passages} in {chunks}') not in cases:
        # In its own process: the allocator of XLA keeps the memory of earlier cases.
        found = subprocess.run(
          [
            sys.executable,
            __file__,
            *(f'--{option}={getattr(args, option)}' for option in (*OPTIONS, 'size')),
            f'--case={passages},{chunks}',
          ],
          check=True,
          stdout=subprocess.PIPE,
          text=True,
        )
        cases[name] = json.loads(found.stdout)
      one = cases[name]
      print(
        f'{passages:>9} {chunks:>7} {one["temporary_mib"]:>14} {one.get("process_mib", ""):>13} '
        f'{one.get("seconds", ""):>8}',
        flush=True,
      )
  settings = {name: value for name, value in vars(args).items() if name != 'case'}
  record.write_jax('large_batch', cases, settings)


def measure(args: argparse.Namespace, passages: int, chunks: int) -> dict[str, float]:
  """The MiB and the median of the seconds that one update takes."""
  config = configs.parse(
    [
      f'--config={updates.ROOT}/configs/rip.py',
      f'--config.batch_size={passages}',
      f'--config.grad_cache={chunks}',
    ]
  )
  model = scratch.shape(args.size, args.vocabulary)
  special = (0, 1, 2, 3, 4)
  system = pretrain.build(
    config,
    model,
    updates.one_device(),
    types.SimpleNamespace(mask_id=4, vocab_size=args.vocabulary, special_ids=special),
  )
  rng = np.random.default_rng(0)
  batch = {'passage_index': np.arange(passages, dtype=np.int32)}
  words = np.broadcast_to(np.arange(args.tokens, dtype=np.int32), (passages, args.tokens)).copy()
  words[:, [0, -1]] = -1
  for view in ('first', 'second'):
    tokens = rng.integers(len(special), args.vocabulary, words.shape).astype(np.int32)
    batch |= {
      f'{view}_tokens': tokens,
      f'{view}_mask': np.ones(words.shape, bool),
      f'{view}_words': words,
    }
  update = updates.Update(
    config, system, Parts(scratch.init_params(model, jax.random.key(0))), batch
  )
  memory = update.compiled.memory_analysis()
  found = {
    'temporary_mib': round(timing.temporary_mib(update.compiled), 1),
    'arguments_mib': round(memory.argument_size_in_bytes / 2**20, 1),
  }
  if found['temporary_mib'] > args.most:
    return found
  before, seconds = held('VmRSS'), []
  pathlib.Path('/proc/self/clear_refs').write_text('5')  # the peak so far is of the compiler
  for _ in range(args.runs):
    began = time.perf_counter()
    update()
    seconds.append(time.perf_counter() - began)
  assert np.isfinite(update.metrics['loss'])
  return found | {
    'process_mib': round(held('VmHWM') - before, 1),
    'seconds': round(float(np.median(seconds)), 1),
  }


def held(what: str) -> float:
  """MiB of memory that this process holds (VmRSS), or held at its peak (VmHWM)."""
  lines = pathlib.Path('/proc/self/status').read_text().splitlines()
  return int(next(line for line in lines if line.startswith(what)).split()[1]) / 2**10


if __name__ == '__main__':
  main()
