"""Peak memory and rate of exact search in corpora of growing size, made of random vectors.

    python benchmarks/exact_search.py [--case=PASSAGES,DIMENSION,DEVICES] [--queries=256] [--k=1000]
        [--folder=DIR]

Every case writes a folder of embeddings (in shards of 20,000 rows, as by dprjax.encode) and
searches it in its own process with the given number of fake devices. A first search of a few shards
compiles the programs. "Memory" is the peak of the process during the second search (VmHWM), minus
its memory before. There are three ways to read:

- `streamed`: one block at a time, as dprjax.search does
- `mapped`: all shards memory-mapped until the end; the kernel counts their pages until it needs the
  memory
- `loaded`: everything in an array

Writes benchmarks/results/exact_search-CPU.json.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import jax
import numpy as np

import options
import record
from dprjax.encoding import folders, manifest

CASES = [(100_000, 384, 1), (400_000, 384, 1), (1_600_000, 384, 1), (400_000, 384, 2)]
READS = ('streamed', 'mapped', 'loaded')
SHARD_ROWS = 20_000
CHILD = """
import json, re, sys, time
import numpy as np
from dprjax.encoding import embeddings
from dprjax.retrieval import exact

def held(name):
  return int(re.search(name + r':\\s+(\\d+)', open('/proc/self/status').read())[1]) / 1024

folder, read, queries, k = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
corpus = embeddings.load_embeddings(folder, verify=False)
asked = np.random.default_rng(1).standard_normal((queries, corpus.meta.dimension), np.float32)
exact.search(asked, corpus.shards[:4], k)
open('/proc/self/clear_refs', 'w').write('5')
before, began, spent = held('VmRSS'), time.perf_counter(), time.process_time()
if read == 'streamed':
  shards = corpus.shards
elif read == 'mapped':
  paths = sorted(__import__('pathlib').Path(folder).glob('*.npy'))
  shards = [np.load(path, mmap_mode='r') for path in paths]
else:
  shards = corpus.vectors()
found = exact.search(asked, shards, k)
print(json.dumps({'memory_mb': round(held('VmHWM') - before),
                  'seconds': round(time.perf_counter() - began, 2),
                  'cpu_seconds': round(time.process_time() - spent, 1),
                  'rows_sum': int(found.rows.astype(np.int64).sum())}))
"""


def main() -> None:
  parser = options.parser(__doc__, queries=256, k=1000)
  parser.add_argument(
    '--case',
    action='append',
    type=options.case,
    metavar='PASSAGES,DIMENSION,DEVICES',
    help='may be repeated (default: '
    + ' and '.join(','.join(map(str, case)) for case in CASES)
    + ')',
  )
  parser.add_argument(
    '--folder', help='for the embeddings (default: the temporary folder of the system)'
  )
  args = parser.parse_args()
  cases = []
  for passages, dimension, devices in args.case or CASES:
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
      write(pathlib.Path(folder) / 'corpus', passages, dimension)
      cases.append(
        measure(pathlib.Path(folder) / 'corpus', passages, dimension, devices, args.queries, args.k)
      )
    print(json.dumps(cases[-1]), flush=True)
  record.write(
    'exact_search',
    cases,
    {'queries': args.queries, 'k': args.k, 'shard_rows': SHARD_ROWS},
    {'jax': jax.__version__, 'numpy': np.__version__},
  )


def write(folder: pathlib.Path, passages: int, dimension: int) -> None:
  meta = manifest.Meta(
    dimension=dimension,
    dtype='float32',
    side='passage',
    backbone_sha256='',
    config_sha256='',
    tokenizer_sha256='',
    prompt_sha256=None,
    shift_positions=False,
    pooling='mean',
    normalize=False,
    prefix='',
    max_length=128,
    arithmetic='float32',
    input_sha256='',
  )
  ids = [str(row) for row in range(passages)]
  writer = folders.EmbeddingsWriter(folder, meta, folders.summary(ids), SHARD_ROWS)
  rng = np.random.default_rng(0)
  for shard in writer.pending():
    own = ids[shard.start : shard.stop]
    writer.write(shard, rng.standard_normal((len(own), dimension), np.float32), own)
  writer.finish()


def measure(
  folder: pathlib.Path, passages: int, dimension: int, devices: int, queries: int, k: int
) -> dict[str, Any]:
  flags = f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count={devices}'
  ways = {}
  for read in READS:
    done = subprocess.run(
      [sys.executable, '-c', CHILD, str(folder), read, str(queries), str(k)],
      check=True,
      stdout=subprocess.PIPE,
      text=True,
      env=os.environ | {'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu'},
    )
    ways[read] = json.loads(done.stdout.splitlines()[-1])
  assert len({way.pop('rows_sum') for way in ways.values()}) == 1, 'the three found different rows'
  products = 2 * passages * dimension * queries
  return {
    'passages': passages,
    'dimension': dimension,
    'devices': devices,
    'corpus_mb': round(passages * dimension * 4 / 2**20),
    'streamed_gflop_per_cpu_s': round(products / ways['streamed']['cpu_seconds'] / 1e9, 1),
    **ways,
  }


if __name__ == '__main__':
  main()
