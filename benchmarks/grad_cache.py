"""Time and memory of an update in 1, 2, 4, 8 and 16 chunks of the gradient cache.

    python benchmarks/grad_cache.py [--size=minilm] [--queries=16] [--prompt=16] [--runs=3]
        [--methods=DPT,FT]

A chunk is encoded once without keeping activations and again for the gradient. So with 2 chunks or
more, an update should take 3/2 (DPT) or 4/3 (FT) of the time without chunks, whatever their number,
and the memory of its activations should be inversely proportional to the chunks. `memory` is the
temporary memory of the compiled program, without arguments and results. All take turns. Writes
benchmarks/results/grad_cache_SIZE-DEVICE.json.
"""

from typing import Any

import made
import options
import record
import timing
import updates

CHUNKS = (1, 2, 4, 8, 16)


def main() -> None:
  parser = options.parser(
    __doc__, queries=(16, 128), query_length=32, passage_length=128, prompt=(16, 128), runs=(3, 5)
  )
  options.add_size(parser)
  options.add_dtype(parser)
  methods = 'DPT,FT' if options.accelerated() else 'DPT'
  parser.add_argument('--methods', default=methods, help='DPT, FT or both')
  args = parser.parse_args()
  model = made.SHAPES[args.size]
  params = updates.parameters(model)
  batch = made.batch(model, args.queries, args.query_length, args.passage_length)
  cases: dict[str, Any] = {}
  for method in args.methods.split(','):
    ways = {}
    for chunks in CHUNKS:
      if args.queries % chunks == 0:
        settings = updates.options(
          method, args.prompt, args.dtype, [f'batch_size={args.queries}', f'grad_cache={chunks}']
        )
        ways[f'{chunks} chunks'] = updates.retrieval(settings, model, params, batch)
    losses = {name: way.first_step()[0] for name, way in ways.items()}
    spread = max(losses.values()) - min(losses.values())
    assert spread < (5e-2 if args.dtype == 'bfloat16' else 1e-4), (
      f'{method}: the loss depends on the chunks: {losses}'
    )
    found = timing.summary(timing.take_turns(ways, args.runs), '1 chunks')
    for name, way in ways.items():
      found[name]['memory_mib'] = round(timing.temporary_mib(way.compiled), 1)
    timing.show(
      found,
      ['milliseconds', 'fastest_and_slowest', 'ratio', 'memory_mib'],
      f'{method}, {args.size}',
    )
    cases[method] = found
  record.write_jax(f'grad_cache_{args.size}', cases, vars(args))


if __name__ == '__main__':
  main()
