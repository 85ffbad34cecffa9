"""Time and memory of attention over a long text, in one piece and in blocks of queries.

    python benchmarks/long_texts.py [--lengths=2048,8192] [--runs=3] [--most_gib=4]
    python benchmarks/long_texts.py --target=v5e:1x1

Measures the forward pass and the prompt gradient of one text and a prompt of 16, in three narrow
layers of ModernBERT (one of them without a window) and of SmolLM2. `memory` is the temporary memory
of the compiled program, without arguments and results; a program with more than --most_gib is not
run. With a target of `dprjax.plan`, programs are compiled in bfloat16 for its first device and not
run. Writes benchmarks/results/long_texts-DEVICE.json.
"""

import argparse
import dataclasses
import math
import os

import record
import timing

SMALL = {
  'vocab_size': 1000,
  'hidden_size': 192,
  'num_layers': 3,
  'num_heads': 3,
  'intermediate_size': 512,
}
BACKBONES = ('modernbert-base', 'smollm2-135m')
WAYS = {
  'one piece': ('plain', math.inf),
  'blocks': ('plain', 0),
  'library': ('library', math.inf),
  'library in blocks': ('library', 0),  # as `config.backbone.attention=library`
}


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--lengths', default='2048,8192', help='tokens (default: 2048,8192)')
  parser.add_argument('--runs', type=int, default=3)
  parser.add_argument('--most_gib', type=float, default=4, help='of a program that is run')
  parser.add_argument('--target', default='', help='a machine that need not be there')
  args = parser.parse_args()
  if args.target:
    from dprjax.planning import targets

    os.environ.update(targets.environment(targets.parse(args.target)))
  cases = {}
  for backbone in BACKBONES:
    for length in map(int, args.lengths.split(',')):
      for gradient in (False, True):
        title = f'{backbone}, {length} tokens, {"gradient" if gradient else "forward"}'
        cases[title] = compare(title, backbone, length, gradient, args)
  if args.target:
    import jax

    record.write('long_texts', cases, vars(args), {'jax': jax.__version__}, args.target)
  else:
    record.write_jax('long_texts', cases, vars(args))


def compare(
  title: str, backbone: str, length: int, gradient: bool, args: argparse.Namespace
) -> dict[str, dict[str, float]]:
  """Milliseconds and MiB of each way."""
  import jax

  from dprjax.models import reach, scratch
  from dprjax.planning import backbones, programs

  config = backbones.named(backbone)
  config = dataclasses.replace(
    config,
    windowed=config.windowed[: SMALL['num_layers']],
    num_kv_heads=3 * config.num_kv_heads // config.num_heads,
    **SMALL,
  )
  params = scratch.init_encoder(config, jax.random.key(0))
  ways, memory = {}, {}
  for name, (attention, reach.LONG) in WAYS.items():
    lowered, arguments = program(config, params, length, attention, gradient, args.target)
    try:
      compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:  # a target has too little memory
      memory[name] = round(programs.failure(error, 0)['needs'] / 2**20)
      continue
    memory[name] = round(timing.temporary_mib(compiled), 1)
    if not args.target and memory[name] < 1024 * args.most_gib:
      ways[name] = lambda run=compiled, given=arguments: jax.block_until_ready(run(*given))
  found = timing.summary(timing.take_turns(ways, args.runs)) if ways else {}
  found = {name: found.get(name, {}) | {'memory_mib': memory[name]} for name in WAYS}
  timing.show(found, ['milliseconds', 'fastest_and_slowest', 'memory_mib'], title)
  return found


def program(config, params, length, attention, gradient, target):
  """The lowered program and its arguments."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  from dprjax.base import mesh as meshes
  from dprjax.models import encoder
  from dprjax.models.adapters.prefix import Prefix
  from dprjax.models.encoder_config import EncoderOptions
  from dprjax.planning import programs, targets

  mesh = meshes.make_mesh(
    {'data': 1}, (programs.devices_of(targets.parse(target)) if target else jax.devices())[:1]
  )
  dtype = jnp.dtype('bfloat16' if target else 'float32')
  heads = meshes.activations(mesh)[1]

  def run(prompt, params, tokens):
    hidden = encoder.encode(
      config,
      params,
      tokens,
      tokens > 0,
      adapter=Prefix(prompt),
      options=EncoderOptions(dtype, attention=attention, heads=heads),
    )
    return jnp.mean(jnp.square(hidden))

  width = config.num_layers, 2, 16, config.num_kv_heads, config.head_dim
  rng = np.random.default_rng(0)
  arguments = (
    rng.standard_normal(width).astype(np.float32),
    jax.tree.map(lambda leaf: np.asarray(leaf, dtype), params),
    rng.integers(1, config.vocab_size, (1, length)).astype(np.int32),
  )
  whole = meshes.replicated(mesh)
  shapes = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), arguments
  )
  lowered = jax.jit(jax.grad(run) if gradient else run).lower(*shapes)
  if not target:
    arguments = meshes.put(arguments, jax.tree.map(lambda _: whole, arguments))
  return lowered, arguments


if __name__ == '__main__':
  main()
