"""Encoding under prompts that examples choose from a bank, against one prompt for all of them.

    python benchmarks/bank.py [--rows=32] [--tokens=64] [--prompt=16] [--runs=9]

Random weights in the shape of all-MiniLM-L6-v2. ``none``: the bare encoder; ``shared``: one prompt;
``bank K``: K prompts of one length; ``lengths``: ten, with 0 to ``--prompt`` vectors; ``layers
first``: the bank of a server. Forward pass, and with the gradient of the prompts. Writes
benchmarks/results/bank-DEVICE.json.
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import made
import record
import timing
from dprjax.models import encoder, scratch
from dprjax.models.adapters.prefix import Prefix

MODEL = made.SHAPES['minilm']
BANKS = (10, 1000)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  for name, default in (('rows', 32), ('tokens', 64), ('prompt', 16), ('runs', 9)):
    parser.add_argument(f'--{name}', type=int, default=default)
  args = parser.parse_args()
  params = jax.device_put(scratch.init_params(MODEL, jax.random.key(0)))
  batch = made.batch(MODEL, args.rows, 1, args.tokens, shortest=0.5)
  tokens, mask = (jnp.asarray(batch[f'passage_{name}'][:, 0]) for name in ('tokens', 'mask'))
  rng = np.random.default_rng(0)
  layers, *rest = MODEL.num_layers, 2, args.prompt, MODEL.num_heads, MODEL.head_dim

  def bank_of(count: int, shortest: int) -> tuple[Prefix, jax.Array]:
    lengths = np.linspace(shortest, args.prompt, count).round().astype(np.int32)
    vectors = rng.normal(size=(layers, count, *rest)).astype(np.float32)
    ids = rng.integers(0, count, args.rows).astype(np.int32)
    return jax.device_put((Prefix(vectors, lengths, np.zeros_like(lengths)), ids))

  shared = Prefix(jnp.asarray(rng.normal(size=(layers, *rest)), jnp.float32))
  prompts = {'none': (None, None), 'shared': (shared, None)}
  prompts |= {f'bank {count:,}': bank_of(count, args.prompt) for count in BANKS}
  prompts['lengths'] = bank_of(10, 0)

  @jax.jit
  def forward(params, adapter, ids):
    adapter = adapter if ids is None else adapter.choose(ids)
    return encoder.encode(MODEL, params, tokens, mask, adapter=adapter)[:, 0].sum()

  def gradient_of(vectors, params, adapter, ids):
    return forward(params, dataclasses.replace(adapter, vectors=vectors), ids)

  gradient = jax.jit(jax.grad(gradient_of))
  cases = {}
  for title, skipped in (('forward', ()), ('gradient', ('none',))):
    ways = {}
    for name, (prompt, ids) in prompts.items():
      if name in skipped:
        continue
      inputs = (params, prompt, ids)
      function = forward
      if title == 'gradient':
        function = gradient
        inputs = (prompt.vectors, *inputs)
      program = function.lower(*inputs).compile()
      working = program.memory_analysis().temp_size_in_bytes
      cases[f'{title}, {name}'] = {'scratch_megabytes': round(working / 1e6, 1)}
      ways[f'{title}, {name}'] = lambda run=program, inputs=inputs: jax.block_until_ready(
        run(*inputs)
      )
    seconds = timing.take_turns(ways, args.runs)
    for name, case in timing.summary(seconds, f'{title}, shared').items():
      cases[name] |= case
  timing.show(cases, ['milliseconds', 'fastest_and_slowest', 'ratio', 'scratch_megabytes'])
  record.write_jax('bank', cases, vars(args))


if __name__ == '__main__':
  main()
