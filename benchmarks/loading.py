"""Memory of the host while a backbone is loaded and split over its devices.

    python benchmarks/loading.py [--backbone=qwen3-embedding-0.6b] [--stored=bfloat16] [--devices=8]
        [--dtype=bfloat16]

A folder of random weights has the shape of a backbone that `dprjax.plan` knows. Processes load it,
one after the other, on --devices devices of this processor: as `dprjax.encode` and `dprjax.serve`
do with --weight_parts, and as they did before, read whole in float32 and then split. `beside` is
the most anonymous memory of the process, sampled every millisecond, minus its memory before and the
placed weights, which would lie on the accelerators. File pages, which the system may drop at any
time, do not count. `of the rule` is `beside` over 1.5 x the largest tensor of the file x devices.
Writes benchmarks/results/loading_BACKBONE-DEVICE.json.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import record
import timing

WAYS = ('encode', 'serve', 'whole first')


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--backbone', default='qwen3-embedding-0.6b')
  parser.add_argument('--stored', choices=('bfloat16', 'float32'), default='bfloat16')
  parser.add_argument('--devices', type=int, default=8)
  parser.add_argument('--dtype', default='bfloat16', help='the arithmetic, auto on accelerators')
  parser.add_argument('--child', nargs=2, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.child:
    load(*args.child, args)
    return
  with tempfile.TemporaryDirectory() as place:
    folder = pathlib.Path(place, 'backbone')
    largest, total = make(folder, args.backbone, args.stored)
    cases = {}
    for way in WAYS:
      found = watch(way, folder, args.devices)
      rule = 1.5 * largest * args.devices
      cases[way] = {
        'placed_mb': round(found['placed'] / 1e6),
        'beside_mb': round(found['beside'] / 1e6),
        'of_the_rule': round(found['beside'] / rule, 3),
        'seconds': round(found['seconds'], 1),
      }
  print(f'{args.backbone}: {total / 1e6:,.0f} MB of {args.stored}, a tensor {largest / 1e6:,.0f}')
  timing.show(cases, [*cases['encode']], f'{args.devices} devices')
  settings = {key: value for key, value in vars(args).items() if key != 'child'}
  settings |= {'file_mb': round(total / 1e6), 'largest_tensor_mb': round(largest / 1e6)}
  record.write_jax(f'loading_{args.backbone.replace(".", "_")}', cases, settings)


def make(folder: pathlib.Path, backbone: str, stored: str) -> tuple[int, int]:
  """Writes a backbone of random weights; the bytes of its largest tensor, and of all."""
  import ml_dtypes  # noqa: F401 (numpy then knows bfloat16)
  import numpy as np
  import safetensors.numpy

  from dprjax.planning import backbones
  from dprjax.text import vocabularies

  config = backbones.named(backbone)
  folder.mkdir()
  vocabularies.train_wordpiece(['a few words of a vocabulary'], 100, folder)
  family = config.family
  (folder / 'config.json').write_text(
    json.dumps({'model_type': family.model_type, **family.write_config(config)})
  )
  rng = np.random.default_rng(0)
  some = rng.standard_normal(1 << 20, np.float32).astype(stored)
  arrays = {tensor.name: np.resize(some, tensor.shape) for tensor in family.tensors(config)}
  safetensors.numpy.save_file(arrays, folder / 'model.safetensors', {'format': 'pt'})
  sizes = [array.nbytes for array in arrays.values()]
  return max(sizes), sum(sizes)


def watch(way: str, folder: pathlib.Path, devices: int) -> dict[str, float]:
  """The most memory of a process that loads the folder."""
  environment = os.environ | {
    'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}',
    'JAX_PLATFORMS': 'cpu',
  }
  command = [sys.executable, str(pathlib.Path(__file__).resolve()), *sys.argv[1:]]
  with subprocess.Popen(
    [*command, '--child', way, str(folder)], stdout=subprocess.PIPE, text=True, env=environment
  ) as process:
    assert process.stdout is not None
    process.stdout.readline()  # it begins
    before = most = anonymous(process.pid)
    os.set_blocking(process.stdout.fileno(), False)
    said = ''
    while not said:
      most = max(most, anonymous(process.pid))
      said = process.stdout.readline()
      if process.poll() is not None and not said:
        raise SystemExit(f'{way}: the process ended with {process.returncode}')
      time.sleep(0.001)
    found = json.loads(said)
  return found | {'beside': most - before - found['placed']}


def anonymous(pid: int) -> int:
  """Bytes of process memory that are no pages of a file."""
  for line in pathlib.Path(f'/proc/{pid}/status').read_text().splitlines():
    if line.startswith('RssAnon:'):
      return 1024 * int(line.split()[1])
  return 0


def load(way: str, folder: str, args: argparse.Namespace) -> None:
  """Loads the folder; prints when it begins, and the bytes that it placed."""
  import jax

  from dprjax.encoding import embedder
  from dprjax.encoding.text_encoder import UNNAMED, BankEntry, Encoder
  from dprjax.models import hub
  from dprjax.serving.engine import Engine
  from dprjax.serving.options import ServerOptions
  from dprjax.text import tokenizing
  from dprjax.text.vector_spec import SIDES

  jax.block_until_ready(jax.numpy.zeros(1))  # devices are there
  print('begins', flush=True)
  began = time.monotonic()
  kept: Encoder | Engine
  if way == 'serve':
    kept = Engine(
      folder,
      f'{folder}-prompts',
      options=ServerOptions(rows=(1,), lengths=(32,), slots=2, dtype=args.dtype),
      mesh=embedder.server_mesh(args.devices),
    )
    params = kept._bank._params
  else:
    mesh = embedder.local_mesh(args.devices)
    if way == 'encode':
      kept = Encoder.load(folder, mesh=mesh, dtype=args.dtype)
    else:
      backbone = hub.load_backbone(folder)
      bank = {UNNAMED: BankEntry(None, backbone.spec)}
      both = dict.fromkeys(SIDES, backbone)
      kept = Encoder(both, tokenizing.load_tokenizer(folder), bank, mesh=mesh, dtype=args.dtype)
    params = kept._groups['query'][0].params[0]
  seconds = time.monotonic() - began
  placed = sum(
    piece.data.nbytes for leaf in jax.tree.leaves(params) for piece in leaf.addressable_shards
  )
  print(json.dumps({'placed': placed, 'seconds': seconds}), flush=True)
  os._exit(0)  # the server threads compile on


if __name__ == '__main__':
  main()
