"""Time from the start of a command to its first training step or encoded batch.

    python benchmarks/startup.py [--size=minilm] [--runs=3] [--prompt=16] [--batch_size=8]
        [--tokens=128]

Runs `python -m dprjax.train` (configs/dptdr.py, one step) and `python -m dprjax.encode` (one batch)
on random weights and made-up texts with an existing token cache, and notes when they print certain
lines. Until `compiling` is printed, train imports modules and reads the backbone and the data; the
rest is compilation and the step. `cold` starts with an empty folder for compiled programs
(JAX_COMPILATION_CACHE_DIR), `kept` with that of an earlier run. `imports` imports the training
loop, and `JAX` compiles one addition: time that dprjax cannot save. All take turns. Writes
benchmarks/results/startup_SIZE-DEVICE.json.
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
import options
import record
import timing

ROOT = pathlib.Path(__file__).resolve().parent.parent


def main() -> None:
  parser = options.parser(__doc__, runs=3, prompt=16, batch_size=8, tokens=128)
  parser.add_argument('--size', choices=sorted(made.SHAPES), default='minilm')
  args = parser.parse_args()
  # A process of its own asks: this one must not hold the accelerator that the others need.
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
    'import pathlib, sys; sys.path.insert(0, sys.argv[1]); import made; '
    'from dprjax.text.vector_spec import same_length; '
    'made.backbone_folder(pathlib.Path(sys.argv[2]), made.SHAPES[sys.argv[3]], '
    "same_length(128, pooling='mean', normalize=True))"
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
    f'--config={ROOT}/configs/dptdr.py:beir,both',
    f'--config.backbone.path={backbone}',
    f'--config.data.dir={data}',
    f'--config.data.token_cache={scratch / "token_cache"}',
    '--config.data.hold_out=0.0',
    '--config.steps=1',
    f'--config.prompt.length={args.prompt}',
    f'--config.batch_size={args.batch_size}',
    f'--config.backbone.dtype={dtype}',
    f'--config.data.passage_buckets=({args.tokens},)',
    f'--config.data.passage_max_length={args.tokens}',
    f'--workdir={scratch / "run"}',
  ]
  encode = [
    '-m',
    'dprjax.encode',
    f'--backbone={backbone}',
    '--side=passage',
    f'--input={texts}',
    f'--max_length={args.tokens}',
    f'--batch_size={args.batch_size}',
    f'--dtype={dtype}',
    f'--out={scratch / "embeddings"}',
  ]
  kept, cold = scratch / 'kept', scratch / 'cold'
  until = {'train': ['step 1: compiling', 'step 1/1 '], 'encode': [' vectors in ']}
  commands = {
    'imports': (['-c', 'import dprjax.training.train'], [], kept),
    'JAX': (['-c', 'import jax; jax.jit(lambda x: x + 1)(1.0).block_until_ready()'], [], cold),
  }
  for name, folder in (('cold', cold), ('kept', kept)):
    commands |= {
      f'train, {name}': (train, until['train'], folder),
      f'encode, {name}': (encode, until['encode'], folder),
    }
  start('train once, for the cache', train, until['train'], kept)
  start('encode once', encode, until['encode'], kept)

  found: dict[str, list[float]] = {}
  for _ in range(args.runs):
    for name, (arguments, lines, folder) in commands.items():
      for old in (scratch / 'run', scratch / 'embeddings', cold):
        shutil.rmtree(old, ignore_errors=True)
      seconds = start(name, arguments, lines, folder)
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
  """Seconds from the start of a process to each of its printed lines; without any, to its end."""
  began = time.perf_counter()
  process = subprocess.Popen(
    [sys.executable, *arguments],
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
    env=os.environ | {'JAX_COMPILATION_CACHE_DIR': str(compiled), 'PYTHONUNBUFFERED': '1'},
  )
  seconds, output = [], []
  for line in process.stderr or ():
    output.append(line)
    if len(seconds) < len(lines) and lines[len(seconds)] in line:
      seconds.append(time.perf_counter() - began)
  if process.wait():
    raise RuntimeError(f'{name} failed:\n{"".join(output)}')
  assert len(seconds) == len(lines), (
    f'{name} did not print {lines[len(seconds)]!r}:\n{"".join(output)}'
  )
  return seconds or [time.perf_counter() - began]


if __name__ == '__main__':
  main()
