"""Memory and time of the masked-LM loss and its gradient: masked positions, or all of them.

    python benchmarks/mlm_head.py [--rows=32] [--tokens=128] [--vocabulary=30522] [--width=256]
        [--runs=5]

One way gathers the masked positions first, the other has logits of every token. The gradient is
with respect to the head, the word embeddings and the hidden states. Memory is the temporary memory
of the compiled program, without arguments and results. XLM-R has 250,002 words: try
--vocabulary=250002 --rows=8. The two take turns. Writes benchmarks/results/mlm_head-DEVICE.json.
"""

import jax
import jax.numpy as jnp
import numpy as np

import options
import record
import timing
from dprjax.models import heads
from dprjax.models.encoder_config import EncoderConfig
from dprjax.papers.condenser import losses


def main() -> None:
  args = options.parser(
    __doc__, rows=32, tokens=128, vocabulary=30522, width=256, runs=5
  ).parse_args()
  config = EncoderConfig('bert', args.vocabulary, args.width, 1, 1, args.width)
  keys = jax.random.split(jax.random.key(0), 4)
  head = heads.init_mlm_head(config, keys[0])
  embedding = 0.02 * jax.random.normal(keys[1], (args.vocabulary, args.width), jnp.float32)
  hidden = jax.random.normal(keys[2], (args.rows, args.tokens, args.width), jnp.float32)
  tokens = jnp.asarray(
    np.random.default_rng(0).integers(1000, args.vocabulary, (args.rows, args.tokens)), jnp.int32
  )
  words = (
    jnp.broadcast_to(jnp.arange(args.tokens, dtype=jnp.int32), tokens.shape).at[:, [0, -1]].set(-1)
  )
  masked = losses.mask_tokens(
    keys[3],
    tokens,
    words,
    mask_id=103,
    replacements=jnp.arange(1000, args.vocabulary, dtype=jnp.int32),
  )

  def gathered(head, embedding, hidden):
    total, _ = losses.mlm_loss(
      config, head, embedding, hidden, masked.positions, masked.targets, masked.weights
    )
    return total / jnp.sum(masked.weights)

  def everywhere(head, embedding, hidden):
    rows = jnp.arange(args.rows, dtype=jnp.int32)[:, None]
    weights = jnp.zeros(tokens.shape, jnp.float32).at[rows, masked.positions].add(masked.weights)
    logits = heads.mlm_logits(config, head, embedding, hidden)
    target = jnp.take_along_axis(logits, tokens[:, :, None], axis=2)[:, :, 0]
    return jnp.sum((jax.nn.logsumexp(logits, axis=2) - target) * weights) / jnp.sum(weights)

  arguments = (head, embedding, hidden)
  ways = {
    name: jax.jit(jax.value_and_grad(way, argnums=(0, 1, 2))).lower(*arguments).compile()
    for name, way in (('gathered', gathered), ('every token', everywhere))
  }
  (loss, gradient), (other_loss, other_gradient) = (way(*arguments) for way in ways.values())
  np.testing.assert_allclose(loss, other_loss, rtol=1e-5)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), gradient, other_gradient
  )
  calls = {
    name: lambda way=way: jax.block_until_ready(way(*arguments)) for name, way in ways.items()
  }
  cases = timing.summary(timing.take_turns(calls, args.runs, warm=0))
  for name, way in ways.items():
    cases[name]['temporary_mib'] = round(timing.temporary_mib(way), 1)
  timing.show(cases, ['temporary_mib', 'milliseconds', 'fastest_and_slowest'])
  settings = vars(args) | {'masked_per_row': masked.positions.shape[1]}
  record.write_jax('mlm_head', cases, settings)


if __name__ == '__main__':
  main()
