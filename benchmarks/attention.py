"""Attention as written, and by `jax.nn.dot_product_attention`, which is cuDNN on a GPU in bfloat16.

    python benchmarks/attention.py [--lengths=128,512,4096] [--tokens=16384] [--layers=4] [--runs=7]

Measures the forward pass and the gradient of a prompt of 32 in layers of the width of RoBERTa-base,
with as many texts as make --tokens. States of both ways, and of the first in float32, are compared:
`difference` is the largest one to float32, relative to the largest state. A GPU computes in
bfloat16. Writes benchmarks/results/attention-DEVICE.json.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import made
import options
import record
import timing
import updates
from dprjax.models import encoder
from dprjax.models.adapters.prefix import Prefix
from dprjax.models.encoder_config import EncoderConfig, EncoderOptions

WAYS = ('plain', 'library')


def main() -> None:
  parser = options.parser(__doc__, tokens=(512, 16_384), layers=(2, 4), prompt=32, runs=(3, 7))
  options.add_dtype(parser)
  parser.add_argument(
    '--lengths', default='128,512,4096' if options.accelerated() else '128,512', help='of texts'
  )
  args = parser.parse_args()
  model = dataclasses.replace(
    made.SHAPES['base'], num_layers=args.layers, max_positions=4200, vocab_size=1000
  )
  params = updates.parameters(model)
  cases: dict[str, Any] = {}
  for length in map(int, args.lengths.split(',')):
    cases |= measure(model, params, max(args.tokens // length, 1), length, args)
  record.write_jax('attention', cases, vars(args))


def measure(
  model: EncoderConfig, params: Any, rows: int, length: int, args: Any
) -> dict[str, dict[str, Any]]:
  """Both passes by both ways, for texts of one length."""
  rng = np.random.default_rng(0)
  tokens = jnp.asarray(rng.integers(5, model.vocab_size, (rows, length)).astype(np.int32))
  shape = model.num_layers, 2, args.prompt, model.num_heads, model.head_dim
  prompt = jnp.asarray(rng.standard_normal(shape).astype(np.float32))

  def states(attention: str, dtype: str, params: Any, prompt: jax.Array) -> jax.Array:
    settings = EncoderOptions(jnp.dtype(dtype), attention=attention)
    mask = jnp.ones(tokens.shape, jnp.bool_)
    hidden = encoder.encode(model, params, tokens, mask, adapter=Prefix(prompt), options=settings)
    return hidden.astype(jnp.float32)

  def loss(attention: str, params: Any, prompt: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(states(attention, args.dtype, params, prompt)))

  with jax.default_matmul_precision('highest'):
    exact = np.asarray(jax.jit(functools.partial(states, 'plain', 'float32'))(params, prompt))
  held = jax.device_put(jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(args.dtype)), params))
  cases: dict[str, dict[str, Any]] = {}
  differences, ways = {}, {}
  for attention in WAYS:
    forward = jax.jit(functools.partial(states, attention, args.dtype))
    gradient = jax.jit(jax.grad(functools.partial(loss, attention), argnums=1))
    found = np.asarray(forward(held, prompt))
    differences[attention] = float(np.abs(found - exact).max() / np.abs(exact).max())
    for name, run in (('forward', forward), ('gradient', gradient)):
      ways[name, attention] = lambda run=run: jax.block_until_ready(run(held, prompt))
  for name in ('forward', 'gradient'):
    title = f'{rows} x {length}, {name}'
    seconds = timing.take_turns({one: ways[name, one] for one in WAYS}, args.runs)
    cases[title] = timing.summary(seconds, 'plain')
    for attention in WAYS:
      cases[title][attention]['difference'] = float(f'{differences[attention]:.2g}')
    columns = ['milliseconds', 'fastest_and_slowest', 'ratio', 'difference']
    timing.show(cases[title], columns, title)
  return cases


if __name__ == '__main__':
  main()
