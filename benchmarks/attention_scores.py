"""Attention scores added up in float32 under bfloat16, against scores rounded to bfloat16.

    python benchmarks/attention_scores.py [--rows=16] [--tokens=64] [--prompt=16] [--runs=15]

Times the forward pass and the gradient of a prompt of an encoder with random weights, in bfloat16
both ways. They take turns in one process. Prints medians and ratios.
"""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import made
import options
import timing
from dprjax.models import encoder, layers, scratch
from dprjax.models.adapters.prefix import Prefix
from dprjax.models.encoder_config import EncoderOptions

MODEL = made.SHAPES['minilm']


def rounded(query, key):
  query *= query.shape[3] ** -0.5
  return jnp.einsum('bntd,bnsd->bnts', query, key).astype(jnp.float32)


def main():
  args = options.parser(__doc__, rows=16, tokens=64, prompt=16, runs=15).parse_args()
  rng = np.random.default_rng(0)
  tokens = jnp.asarray(rng.integers(1000, 30000, (args.rows, args.tokens)), jnp.int32)
  mask = jnp.ones(tokens.shape, bool)
  shape = (MODEL.num_layers, 2, args.prompt, MODEL.num_heads, MODEL.head_dim)
  prompt = jnp.asarray(0.02 * rng.normal(size=shape), jnp.float32)
  params = jax.device_put(scratch.init_params(MODEL, jax.random.key(0)))
  half = EncoderOptions(jnp.dtype('bfloat16'))

  def pooled(prompt, params):
    hidden = encoder.encode(MODEL, params, tokens, mask, adapter=Prefix(prompt), options=half)
    return jnp.sum(hidden[:, 0])

  for what, function in (('forward', pooled), ('prompt gradient', jax.grad(pooled))):
    ways = {}
    for name, scores in (('rounded', rounded), ('float32', layers.attention_scores)):
      with mock.patch.object(encoder, 'attention_scores', scores):
        compiled = jax.jit(function).lower(prompt, params).compile()
      ways[name] = functools.partial(
        lambda program: program(prompt, params).block_until_ready(), compiled
      )
    seconds = timing.take_turns(ways, args.runs)
    columns = ['milliseconds', 'fastest_and_slowest', 'ratio']
    timing.show(timing.summary(seconds, 'rounded'), columns, what)


if __name__ == '__main__':
  main()
