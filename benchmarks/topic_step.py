"""A step of Topic-DPR by the passages n that the topic-topic loss encodes under all K prompts.

    python benchmarks/topic_step.py [--size=minilm] [--documents=32] [--topics=5] [--prompt=16]
        [--title=16] [--abstract=48] [--runs=3]

Without that loss, a step encodes N titles of Tq and N abstracts of Tp tokens; with it n K abstracts
more. So the predicted time is 1 + n K Tp / (N (Tq + Tp)) times that without it. All take turns.
Memory is the temporary memory of the compiled program, without arguments and results; for the
largest n also in 2 and 4 chunks of the gradient cache. Writes
benchmarks/results/topic_step_SIZE-DEVICE.json.
"""

import types
from typing import Any

import numpy as np

import made
import options
import record
import timing
import updates
from dprjax.papers.topic_dpr import topic_dpr
from dprjax.training import config as configs
from dprjax.training.method import Parts

ROWS = (0, 4, 8, 16)


def main() -> None:
  parser = options.parser(__doc__, documents=32, topics=5, prompt=16, title=16, abstract=48, runs=3)
  options.add_size(parser)
  options.add_dtype(parser)
  args = parser.parse_args()
  model = made.SHAPES[args.size]
  rng = np.random.default_rng(0)
  params = updates.parameters(model)
  batch = made.batch(model, args.documents, args.title, args.abstract)
  numbers = rng.integers(args.topics, size=args.documents).astype(np.int32)
  batch |= {
    'categories': rng.integers(8, size=(args.documents, 2)).astype(np.int32),
    'query_number': numbers,
    'passage_number': numbers[:, None],
  }
  # Topics and a tokenizer that give the prompts random words.
  tokenizer = types.SimpleNamespace(
    encode=lambda texts, length: ([rng.integers(10, model.vocab_size, args.prompt)], 0),
    special_ids=(),
  )
  found = types.SimpleNamespace(names=[['word']] * args.topics)

  def update(rows: int, chunks: int = 1) -> updates.Update:
    config = configs.parse(
      [
        f'--config={updates.ROOT}/configs/topic_dpr.py',
        *(
          f'--config.{option}'
          for option in (
            f'batch_size={args.documents}',
            f'prompt.length={args.prompt}',
            f'backbone.dtype={args.dtype}',
            f'topics.batch={rows}',
            f'topics.alpha={0.1 if rows else 0.0}',
            f'grad_cache={chunks}',
          )
        ),
      ]
    )
    method = topic_dpr.build(config, model, updates.one_device(), tokenizer)
    return updates.Update(config, method, Parts(params, text={'topics': found}), batch)

  ways = {f'n = {rows}': update(rows) for rows in ROWS if rows <= args.documents}
  cases: dict[str, Any] = timing.summary(timing.take_turns(ways, args.runs), 'n = 0')
  tokens = args.documents * (args.title + args.abstract)
  for name, way in ways.items():
    rows = int(name.rpartition(' ')[2])
    cases[name]['predicted'] = round(1 + rows * args.topics * args.abstract / tokens, 3)
    cases[name]['memory_mib'] = round(timing.temporary_mib(way.compiled), 1)
  last = max(rows for rows in ROWS if rows <= args.documents)
  for chunks in (2, 4):
    way = update(last, chunks)
    cases[f'n = {last}, {chunks} chunks'] = {
      'memory_mib': round(timing.temporary_mib(way.compiled), 1)
    }
  timing.show(
    cases,
    ['milliseconds', 'fastest_and_slowest', 'ratio', 'predicted', 'memory_mib'],
    f'K = {args.topics}, {args.size}',
  )
  record.write_jax(f'topic_step_{args.size}', cases, vars(args))


if __name__ == '__main__':
  main()
