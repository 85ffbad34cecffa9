"""From a command's start to its first finished training step, and to its first encoded batch: cold,
and with compiled programs kept.

    python benchmarks/startup.py [--size=minilm] [--runs=3] [--prompt=16] [--batch_size=8]
    [--tokens=128]

Runs `python -m dprjax.train` (configs/dptdr.py, one step) and `python -m dprjax.encode` (one batch)
as processes of their own, on random weights and made-up texts whose token store is there already,
and notes when they say what: until `compiling` is printed, a run of train imports, reads the
backbone and the data; the rest is compilation and the step. `cold` has an empty folder for compiled
programs (JAX_COMPILATION_CACHE_DIR), `kept` that of an earlier run. `imports` is Python with
dprjax.train imported, `JAX` its first compiled addition: what no change of ours could save. All
take turns. Writes benchmarks/results/startup_SIZE-DEVICE.json.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax

import made
import record
import timing
from dprjax.runtime import cli

ROOT = pathlib.Path(__file__).resolve().parent.parent


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--size', choices=sorted(made.SHAPES), default='minilm')
  for name, default in (('runs', 3), ('prompt', 16), ('batch_size', 8), ('tokens', 128)):
    parser.add_argument(f'--{name}', type=cli.positive, default=default)
  args = parser.parse_args()
  # Asked of a process that ends: this one must not hold the accelerator while the others need it.
  ask = 'import jax; print(jax.devices()[0].device_kind)'
  device = subprocess.run(
    [sys.executable, '-c', ask], check=True, stdout=subprocess.PIPE, text=True
  ).stdout.strip()
  with tempfile.TemporaryDirectory() as scratch:
    cases = measure(args, pathlib.Path(scratch), bfloat16=device != 'cpu')
  record.write(f'startup_{args.size}', cases, vars(args), {'jax': jax.__version__}, device)


def measure(args: argparse.Namespace, scratch: pathlib.Path, bfloat16: bool) -> dict[str, Any]:
  backbone = scratch / 'model'
  make = (
    'import pathlib, sys; sys.path.insert(0, sys.argv[1]); import made; from dprjax.models import '
    'hub; '
    'made.backbone_folder(pathlib.Path(sys.argv[2]), made.SHAPES[sys.argv[3]], '
    "hub.SentenceSettings('mean', True, 128))"
  )
  subprocess.run(
    [sys.executable, '-c', make, str(ROOT / 'benchmarks'), str(backbone), args.size],
    check=True,
    env=os.environ | {'JAX_PLATFORMS': 'cpu'},
  )
  data = made.beir_folder(scratch / 'data', 200)
  texts = scratch / 'texts.tsv'
  texts.write_text(
    ''.join(f'd{i}\t{one}\n' for i, one in enumerate(made.texts(args.batch_size, 60, 61)))
  )
  dtype = 'bfloat16' if bfloat16 else 'float32'
  train = [
    '-m',
    'dprjax.train',
    f'--config={ROOT}/configs/dptdr.py',
    f'--config.backbone.path={backbone}',
    f'--config.data.dir={data}',
    f'--config.data.store={scratch / "store"}',
    '--config.data.hold_out=0.0',
    '--config.steps=1',
    f'--config.prompt.length={args.prompt}',
    f'--config.batch_size={args.batch_size}',
    f'--config.backbone.dtype={dtype}',
    f'--config.backbone.frozen_dtype={dtype}',
    f'--config.data.passage_buckets=({args.tokens},)',
    f'--config.data.passage_max_length={args.tokens}',
    f'--workdir={scratch / "run"}',
  ]
  encode = [
    '-m',
    'dprjax.encode',
    f'--backbone={backbone}',
    '--kind=passage',
    f'--input={texts}',
    f'--max_length={args.tokens}',
    f'--batch_size={args.batch_size}',
    f'--dtype={dtype}',
    f'--out={scratch / "embeddings"}',
  ]
  kept, cold = scratch / 'kept', scratch / 'cold'
  until = {'train': ['step 1: compiling', 'step 1/1 '], 'encode': [' vectors in ']}
  commands = {
    'imports': (['-c', 'import dprjax.train'], [], kept),
    'JAX': (['-c', 'import jax; jax.jit(lambda x: x + 1)(1.0).block_until_ready()'], [], cold),
  }
  for name, where in (('cold', cold), ('kept', kept)):
    commands |= {
      f'train, {name}': (train, until['train'], where),
      f'encode, {name}': (encode, until['encode'], where),
    }
  start('train once, so that the store is there', train, until['train'], kept)
  start('encode once', encode, until['encode'], kept)

  found: dict[str, list[float]] = {}
  for _ in range(args.runs):
    for name, (arguments, lines, where) in commands.items():
      for left in (scratch / 'run', scratch / 'embeddings', cold):
        shutil.rmtree(left, ignore_errors=True)
      seconds = start(name, arguments, lines, where)
      found.setdefault(name, []).append(seconds[-1])
      if len(seconds) > 1:
        found.setdefault(f'{name}: until it compiles', []).append(seconds[0])
  cases = timing.summary(found)
  for case in cases.values():
    case['seconds'] = round(case['milliseconds'] / 1e3, 2)
  timing.show(cases, ['seconds', 'fastest_and_slowest'], args.size)
  return cases


def start(
  name: str, arguments: Sequence[str], lines: Sequence[str], compiled: pathlib.Path
) -> list[float]:
  """Seconds from a process's start to each of the lines that it is to say, or to its end where
  there are none.
  """
  began = time.perf_counter()
  process = subprocess.Popen(
    [sys.executable, *arguments],
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
    env=os.environ | {'JAX_COMPILATION_CACHE_DIR': str(compiled), 'PYTHONUNBUFFERED': '1'},
  )
  seconds, said = [], []
  for line in process.stderr or ():
    said.append(line)
    if len(seconds) < len(lines) and lines[len(seconds)] in line:
      seconds.append(time.perf_counter() - began)
  if process.wait():
    raise RuntimeError(f'{name} failed:\n{"".join(said)}')
  assert len(seconds) == len(lines), f'{name} did not say {lines[len(seconds)]!r}:\n{"".join(said)}'
  return seconds or [time.perf_counter() - began]


if __name__ == '__main__':
  main()
