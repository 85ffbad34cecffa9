"""Memory of an update of a large decoder: by XLA, and the peak of the device.

    python benchmarks/update_memory.py [--backbone=qwen3-embedding-0.6b] [--layers=0]
        [--queries=32] [--passage_length=128] [--prompt=32]

Random weights in the shape of the backbone (`dprjax.plan --backbone`), held in bfloat16, a prompt
for both sides. --layers=N takes the first N layers. Writes
benchmarks/results/update_memory-DEVICE.json.
"""

import dataclasses
from typing import Any

import jax

import made
import options
import record
import timing
import updates
from dprjax.planning import backbones


def main() -> None:
  parser = options.parser(
    __doc__, queries=(2, 32), query_length=32, passage_length=128, prompt=32, layers=(2, 0)
  )
  parser.add_argument('--backbone', default='qwen3-embedding-0.6b', help='a shape of dprjax.plan')
  args = parser.parse_args()
  model = backbones.named(args.backbone)
  layers = args.layers or model.num_layers
  if not options.accelerated():
    model = dataclasses.replace(model, vocab_size=1000)
  model = dataclasses.replace(model, num_layers=layers, windowed=model.windowed[:layers])
  batch = made.batch(model, args.queries, args.query_length, args.passage_length)
  settings = updates.options('DPT', args.prompt, 'bfloat16')
  update = updates.retrieval(settings, model, updates.parameters(model), batch)
  update()
  case: dict[str, Any] = timing.summary(timing.take_turns({'update': update}, 5))
  case['update']['xla_mib'] = update.memory_mib
  stats = jax.devices()[0].memory_stats() or {}
  if 'peak_bytes_in_use' in stats:
    case['update']['peak_mib'] = round(stats['peak_bytes_in_use'] / 2**20, 1)
  print(case, flush=True)
  record.write_jax('update_memory', case, vars(args))


if __name__ == '__main__':
  main()
