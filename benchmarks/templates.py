"""Encoding texts in templates, with and without fixed layers, against plain encoding.

    python benchmarks/templates.py [--rows=32] [--tokens=48] [--tasks=3] [--prompt=6] [--runs=9]

The weights are random, in the shape of all-MiniLM-L6-v2; a template has two slots of learned
vectors; rows are of several tasks.

- ``text``: only the texts
- ``as long``: plain texts as long as the templates
- ``n = 0`` and ``n = L - 1``: templates filled on the device with vectors of a table

Predicted are the ratio of tokens of ``text`` and ``as long``, and templates under 3 % above ``as
long``. Measures the forward pass and the gradient of the table. Writes
benchmarks/results/templates-DEVICE.json.
"""

import argparse
import types

import jax
import jax.numpy as jnp
import numpy as np

import made
import record
import timing
from dprjax.models import encoder, scratch
from dprjax.models.template import bare
from dprjax.papers.nir_prompt import task_templates
from dprjax.papers.nir_prompt.learned_tokens import LearnedTokens
from dprjax.papers.nir_prompt.task_templates import Spec, TaskTemplates
from dprjax.text.vector_spec import VectorSpec

MODEL = made.SHAPES['minilm']


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  for name, default in (('rows', 32), ('tokens', 48), ('tasks', 3), ('prompt', 6), ('runs', 9)):
    parser.add_argument(f'--{name}', type=int, default=default)
  args = parser.parse_args()
  params = jax.device_put(scratch.init_params(MODEL, jax.random.key(0)))
  lengths = {f'query/{name}': args.prompt for name in ('P1', 'P2')}
  templates = TaskTemplates.make(
    [Spec(('query',), {}, lengths)] * args.tasks,
    types.SimpleNamespace(
      opening=(1,), closing=(2,), mask_id=3, pad_id=MODEL.pad_token_id, encode_bare=lambda _: {}
    ),
    MODEL.vocab_size,
  )
  around = 2  # special tokens of a single text
  longer = args.tokens - around + templates.extra('query')
  rng = np.random.default_rng(0)
  numbers = jnp.asarray(rng.integers(args.tasks, size=args.rows), jnp.int32)
  table = jnp.asarray(
    rng.normal(size=(args.tasks * 2 * args.prompt, MODEL.hidden_size)), jnp.float32
  )

  def texts(length: int) -> tuple[jax.Array, jax.Array]:
    batch = made.batch(MODEL, args.rows, 1, length)
    return jnp.asarray(batch['passage_tokens'][:, 0]), jnp.asarray(batch['passage_mask'][:, 0])

  def plain(table, params, tokens, mask):
    return encoder.encode(MODEL, params, tokens, mask)[:, 0].sum() + table.sum()

  def filled(fixed_layers):
    def run(table, params, tokens, mask):
      text, adapter = bare(tokens, mask, 1, 1), LearnedTokens(table, fixed_layers)
      return task_templates.vectors(
        *(MODEL, params, templates, 'query', text, longer, numbers, [VectorSpec('mask')]),
        adapter=adapter,
      ).sum()

    return run

  short, long = texts(args.tokens), texts(longer)
  ways = {
    'text': (plain, short),
    'as long': (plain, long),
    'n = 0': (filled(0), short),
    'n = L - 1': (filled(MODEL.num_layers - 1), short),
  }
  cases = {}
  # Plain encoding has no table, so its gradient would be nothing to compare with.
  for title, chosen in (('forward', ways), ('gradient', ('n = 0', 'n = L - 1'))):
    programs = {}
    for name in chosen:
      function, inputs = ways[name]
      function = jax.jit(jax.grad(function) if title == 'gradient' else function)
      program = function.lower(table, params, *inputs).compile()
      programs[f'{title}, {name}'] = lambda run=program, inputs=inputs: jax.block_until_ready(
        run(table, params, *inputs)
      )
    base = 'forward, as long' if title == 'forward' else 'gradient, n = 0'
    cases |= timing.summary(timing.take_turns(programs, args.runs), base)
  cases['forward, text']['predicted'] = round(args.tokens / longer, 3)
  timing.show(cases, ['milliseconds', 'fastest_and_slowest', 'ratio', 'predicted'])
  record.write_jax('templates', cases, vars(args))


if __name__ == '__main__':
  main()
