"""The forward pass of the encoder and the prompt gradient, against transformers on PyTorch.

    pip install -e '.[bench]' && python benchmarks/encoder.py [--rows=32] [--tokens=128]
        [--prompt=16] [--runs=5]

Both have random weights in the shape of all-MiniLM-L6-v2 and take turns in one process. Prints
medians and ratios.
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

import made
import options
import timing
from dprjax.models import encoder, scratch
from dprjax.models.adapters.prefix import Prefix
from dprjax.models.encoder_config import EncoderOptions

MODEL = made.SHAPES['minilm']


def ours(tokens, mask, prompt, unroll):
  params = jax.device_put(scratch.init_params(MODEL, jax.random.key(0)))

  # The weights are an argument: the compiler would fold constants.
  def pooled(prompt, params):
    return jnp.sum(
      encoder.encode(
        MODEL,
        params,
        tokens,
        mask,
        adapter=Prefix(prompt),
        options=EncoderOptions(unroll=unroll),
      )[:, 0]
    )

  forward, gradient = jax.jit(pooled), jax.jit(jax.grad(pooled))
  return lambda: forward(prompt, params).block_until_ready(), lambda: gradient(
    prompt, params
  ).block_until_ready()


def theirs(tokens, mask, prompt):
  model = (
    transformers.BertModel(
      transformers.BertConfig(
        vocab_size=MODEL.vocab_size,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        attn_implementation='sdpa',
      ),
      add_pooling_layer=False,
    )
    .eval()
    .requires_grad_(False)
  )
  tokens = torch.tensor(np.asarray(tokens), dtype=torch.long)
  seen = torch.ones(len(tokens), prompt.shape[2] + tokens.shape[1], dtype=torch.long)
  positions = torch.arange(tokens.shape[1])[None].expand(len(tokens), -1)
  prefix = torch.tensor(np.asarray(prompt), requires_grad=True)  # [L, 2, P, N, D]

  def pooled():
    pairs = [
      tuple(one.permute(1, 0, 2)[None].expand(len(tokens), -1, -1, -1) for one in layer)
      for layer in prefix
    ]
    cache = transformers.DynamicCache(pairs)
    return (
      model(input_ids=tokens, attention_mask=seen, position_ids=positions, past_key_values=cache)
      .last_hidden_state[:, 0]
      .sum()
    )

  def forward():
    with torch.no_grad():
      pooled()

  def gradient():
    torch.autograd.grad(pooled(), prefix)

  return forward, gradient


def main():
  args = options.parser(__doc__, rows=32, tokens=128, prompt=16, runs=5).parse_args()
  rng = np.random.default_rng(0)
  tokens = jnp.asarray(rng.integers(1000, 30000, (args.rows, args.tokens)), jnp.int32)
  mask = jnp.ones(tokens.shape, bool)
  prompt = jnp.asarray(0.02 * rng.normal(size=(6, 2, args.prompt, 12, 32)), jnp.float32)
  systems = {
    'PyTorch': theirs(tokens, mask, prompt),
    'dprjax': ours(tokens, mask, prompt, 1),
    'dprjax, unrolled': ours(tokens, mask, prompt, 6),
  }
  for what, place in (('forward', 0), ('prompt gradient', 1)):
    seconds = timing.take_turns(
      {name: functions[place] for name, functions in systems.items()}, args.runs
    )
    timing.show(
      timing.summary(seconds, 'PyTorch'), ['milliseconds', 'fastest_and_slowest', 'ratio'], what
    )


if __name__ == '__main__':
  main()
