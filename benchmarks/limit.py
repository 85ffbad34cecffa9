"""The least cost of a training step and of encoding, beside the cost of the XLA programs.

    python benchmarks/limit.py [--size=minilm|base|large] [--rows=16] [--tokens=128] [--prompt=16]
        [--runs=5]

All sequences have one length, without padding; an update has as many passages as queries. The first
table has FLOPs and bytes by formula, beside the count of XLA (of the compiled program with unrolled
layers; with --compile=false of the program before optimisation, which takes seconds even for the
large encoder). Then the DPT and FT updates of dprjax and its forward pass take turns with bare
matrix products in the shapes of the encoder. The limit is the published bfloat16 peak of the
accelerator, else the best of those products (on a processor by XLA and NumPy). MFU is FLOPs by
formula over seconds over the limit. The defaults are the large encoder with 64 rows and a prompt of
128 in bfloat16 on a GPU, and the shape of MiniLM with 16 rows and a prompt of 16 in float32 on a
processor. Writes benchmarks/results/limit_SIZE-DEVICE.json.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import made
import options
import record
import roofline
import timing
import updates
from dprjax.base import flags
from dprjax.models import encoder
from dprjax.models.adapters.prefix import Prefix
from dprjax.models.encoder_config import EncoderConfig, EncoderOptions

METHODS = ('encode', 'DPT', 'FT')


# Published limits: bfloat16 (T4: float16) FLOP/s and bytes/s.
PEAKS = {
  'TPU v4': (275e12, 1.228e12),
  'TPU v5 lite': (197e12, 0.819e12),
  'TPU v5': (459e12, 2.765e12),
  'TPU v6 lite': (918e12, 1.64e12),
  'NVIDIA H100 80GB HBM3': (989.4e12, 3.35e12),
  'NVIDIA A100-SXM4-80GB': (312e12, 2.039e12),
  'NVIDIA L4': (121e12, 0.3e12),
  'NVIDIA H200': (989.4e12, 4.8e12),
  'NVIDIA H100 PCIe': (756e12, 2.0e12),
  'NVIDIA A100-SXM4-40GB': (312e12, 1.555e12),
  'NVIDIA A100-PCIE-40GB': (312e12, 1.555e12),
  'Tesla T4': (65e12, 0.32e12),
}


def products(
  model: EncoderConfig, rows: int, dtype: str
) -> tuple[dict[str, Callable[[], Any]], float]:
  """The bare products of the encoder MLP, up and down, and the FLOPs of one call."""
  rng = np.random.default_rng(0)
  h, i = model.hidden_size, model.intermediate_size
  x, up, down = (
    rng.normal(size=shape).astype(np.float32) / shape[0] ** 0.5
    for shape in ((rows, h), (h, i), (i, h))
  )
  placed = [jnp.asarray(one, jnp.dtype(dtype)) for one in (x, up, down)]
  through = jax.jit(lambda x, up, down: x @ up @ down)
  ways: dict[str, Callable[[], Any]] = {
    'products, XLA': lambda: jax.block_until_ready(through(*placed))
  }
  if jax.default_backend() == 'cpu':
    ways['products, NumPy'] = lambda: x @ up @ down
  return ways, 4.0 * rows * h * i


def peak(dtype: str) -> tuple[float, float] | None:
  """The published FLOP/s and bytes/s of this accelerator; None for float32 and other devices."""
  return PEAKS.get(jax.devices()[0].device_kind) if dtype == 'bfloat16' else None


def main() -> None:
  parser = options.parser(__doc__, rows=(16, 64), tokens=128, prompt=(16, 128), runs=5)
  options.add_size(parser)
  options.add_dtype(parser)
  parser.add_argument(
    '--compile',
    type=flags.boolean,
    default=not options.accelerated(),
    metavar='true|false',
    help='count of XLA, compiled program',
  )
  parser.add_argument(
    '--run', type=flags.boolean, default=True, metavar='true|false', help='measure, or only count'
  )
  args = parser.parse_args()
  model = made.SHAPES[args.size]
  batch = made.batch(model, args.rows, args.tokens, args.tokens)
  width = jnp.dtype(args.dtype).itemsize
  rows = {
    'encode': [(args.rows, args.tokens)],
    'DPT': 2 * [(args.rows, args.tokens)],
    'FT': 2 * [(args.rows, args.tokens)],
  }
  prompts = {'encode': args.prompt, 'DPT': args.prompt, 'FT': 0}
  config = {method: updates.options(method, args.prompt, args.dtype) for method in ('DPT', 'FT')}

  cases: dict[str, dict[str, Any]] = {}
  for method in METHODS:
    must = roofline.cost(model, method, rows[method], prompts[method], width)
    cases[method] = {
      'gflop': _short(must.flops / 1e9),
      'gflop_a_sequence': _short(must.flops / 1e9 / sum(n for n, _ in rows[method])),
      'mb': _short(must.bytes / 1e6),
      'flop_a_byte': _short(must.flops / must.bytes),
    }
    if method != 'encode':
      lowered = updates.retrieval_flops(config[method], model, batch)
      found = (lowered.compile() if args.compile else lowered).cost_analysis()
      cases[method] |= {
        'xla_gflop': _short(found['flops'] / 1e9),
        'xla_mb': _short(found['bytes accessed'] / 1e6),
      }
  timing.show(
    cases,
    ['gflop', 'xla_gflop', 'gflop_a_sequence', 'mb', 'xla_mb', 'flop_a_byte'],
    f'{args.size}, {args.rows} x {args.tokens}',
  )
  print(
    f'DPT / FT: {cases["DPT"]["gflop"] / cases["FT"]["gflop"]:.3f} by formula, '
    f'{cases["DPT"]["xla_gflop"] / cases["FT"]["xla_gflop"]:.3f} by XLA',
    flush=True,
  )
  if args.run:
    cases |= measure(args, model, batch, config, cases)
  record.write_jax(f'limit_{args.size}', cases, vars(args))


def measure(
  args: argparse.Namespace,
  model: EncoderConfig,
  batch: Any,
  config: Any,
  counted: dict[str, dict[str, Any]],
) -> dict[str, Any]:
  """The seconds of the methods and of bare products, and their fractions of the limit."""
  params = updates.parameters(model)
  steps = {
    method: updates.retrieval(config[method], model, params, batch) for method in ('DPT', 'FT')
  }
  forward = encode_way(model, params, batch, args.prompt, args.dtype)
  bare, bare_flops = products(model, args.rows * args.tokens, args.dtype)
  seconds = timing.take_turns({'encode': forward, **steps, **bare}, args.runs)
  cases = timing.summary(seconds)
  for name in bare:
    cases[name]['gflop'] = _short(bare_flops / 1e9)
  for name in METHODS:
    cases[name] = counted[name] | cases[name]
  for case in cases.values():
    case['gflop_a_second'] = _short(case['gflop'] / case['milliseconds'] * 1e3)
  published = peak(args.dtype)
  limit = (
    published[0]
    if published
    else max(bare_flops / statistics.median(seconds[name]) for name in bare)
  )
  for case in cases.values():
    case['of_the_limit'] = _short(1e9 * case['gflop_a_second'] / limit)
    if published and 'mb' in case:
      case['least_milliseconds'] = _short(
        1e3 * max(1e9 * case['gflop'] / limit, 1e6 * case['mb'] / published[1])
      )
  timing.show(
    cases,
    ['milliseconds', 'fastest_and_slowest', 'gflop_a_second', 'of_the_limit'],
    f'limit {limit / 1e9:,.0f} GFLOP/s',
  )
  return cases


def encode_way(
  model: EncoderConfig, params: Any, batch: Any, prompt: int, dtype: str
) -> Callable[[], Any]:
  """A forward pass over the passages of the batch under a prompt."""
  tokens, mask = (jnp.asarray(batch[f'passage_{name}'][:, 0]) for name in ('tokens', 'mask'))
  held = jax.device_put(jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(dtype)), params))
  prefix = jnp.zeros((model.num_layers, 2, prompt, model.num_heads, model.head_dim), jnp.float32)
  encode = jax.jit(
    lambda params, prefix: encoder.encode(
      model,
      params,
      tokens,
      mask,
      adapter=Prefix(prefix),
      options=EncoderOptions(jnp.dtype(dtype)),
    )[:, 0]
  )
  return lambda: jax.block_until_ready(encode(held, prefix))


def _short(value: float) -> float:
  return float(f'{value:.4g}')


if __name__ == '__main__':
  main()
