"""What the gradient cache costs and what it saves: an update in 1, 2, 4, 8 and 16 chunks, time and
memory.

    python benchmarks/grad_cache.py [--size=minilm] [--queries=16] [--prompt=16] [--runs=3]
    [--methods=DPT,FT]

Chunks are encoded once without keeping anything and once more for the gradient: from 2 chunks on,
an update should take 3/2 (DPT) or 4/3 (FT) of the time of one in a piece, and no more with more
chunks; its activations' memory should fall as one over the chunks. `memory` is what the compiled
program asks for beside arguments and results. All take turns. Writes
benchmarks/results/grad_cache_SIZE-DEVICE.json.
"""

import argparse
from typing import Any

import jax

import made
import record
import timing
import updates
from dprjax.runtime import cli

CHUNKS = (1, 2, 4, 8, 16)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  accelerated = jax.default_backend() != 'cpu'
  parser.add_argument(
    '--size', choices=sorted(made.SHAPES), default='large' if accelerated else 'minilm'
  )
  for name, on_cpu, elsewhere in (
    ('queries', 16, 128),
    ('query_length', 32, 32),
    ('passage_length', 128, 128),
    ('prompt', 16, 128),
    ('runs', 3, 5),
  ):
    parser.add_argument(
      f'--{name}', type=cli.positive, default=elsewhere if accelerated else on_cpu
    )
  parser.add_argument(
    '--dtype', choices=('float32', 'bfloat16'), default='bfloat16' if accelerated else 'float32'
  )
  parser.add_argument(
    '--methods', default='DPT' if not accelerated else 'DPT,FT', help='DPT, FT or both'
  )
  args = parser.parse_args()
  model = made.SHAPES[args.size]
  params = updates.parameters(model)
  batch = made.batch(model, args.queries, args.query_length, args.passage_length)
  cases: dict[str, Any] = {}
  for method in args.methods.split(','):
    ways = {}
    for chunks in CHUNKS:
      if args.queries % chunks == 0:
        knobs = updates.knobs(
          method, args.prompt, args.dtype, [f'batch_size={args.queries}', f'grad_cache={chunks}']
        )
        ways[f'{chunks} chunks'] = updates.retrieval(knobs, model, params, batch)
    losses = {name: way.first_step()[0] for name, way in ways.items()}
    spread = max(losses.values()) - min(losses.values())
    assert spread < (5e-2 if args.dtype == 'bfloat16' else 1e-4), (
      f'{method}: the loss depends on the chunks: {losses}'
    )
    found = timing.summary(timing.take_turns(ways, args.runs), '1 chunks')
    for name, way in ways.items():
      found[name]['memory_mib'] = round(
        way.compiled.memory_analysis().temp_size_in_bytes / 2**20, 1
      )
    timing.show(
      found,
      ['milliseconds', 'fastest_and_slowest', 'ratio', 'memory_mib'],
      f'{method}, {args.size}',
    )
    cases[method] = found
  record.write(
    f'grad_cache_{args.size}',
    cases,
    vars(args),
    {'jax': jax.__version__},
    jax.devices()[0].device_kind,
  )


if __name__ == '__main__':
  main()
