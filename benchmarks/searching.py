"""Time and memory of `dprjax.search --index=exact` over many folders, for millions of passages.

    python benchmarks/searching.py [--passages=10000000] [--folders=10] [--queries=100] [--k=100]
        [--dimension=64] [--folder=DIR]

Vectors are random whole numbers from -127 to 127, stored as float16, so that every order of
additions gives the same inner product. The command streams all folders. numpy searches the same
files; ids and scores of all queries must be equal. Prints wall and CPU seconds and peak memory of
the command, beside its memory after the imports. Writes
benchmarks/results/searching_PASSAGESxDIMENSION-CPU.json.
"""

import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

import numpy as np

import options
import record
from dprjax.encoding import embeddings, folders, manifest

SHARD_ROWS = 100_000
IMPORTS = (
  'import resource, dprjax.search; from dprjax.retrieval import exact; '
  'print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)'
)


def ids_of(start: int, stop: int) -> list[str]:
  return [f'p{row:09d}' for row in range(start, stop)]


def write(folder: pathlib.Path, start: int, stop: int, dimension: int, side: str) -> None:
  """A folder of vectors as `dprjax.encode` writes it."""
  meta = manifest.Meta(
    dimension=dimension,
    dtype='float16' if side == 'passage' else 'float32',
    side=side,
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
  ids = ids_of(start, stop)
  writer = folders.EmbeddingsWriter(folder, meta, folders.summary(ids), SHARD_ROWS)
  rng = np.random.default_rng((start, stop))
  for shard in writer.pending():
    values = rng.integers(-127, 128, (shard.stop - shard.start, dimension), np.int8)
    writer.write(shard, values.astype(np.float32), ids[shard.start : shard.stop])
  writer.finish()


def best(folders: list[pathlib.Path], queries: np.ndarray, k: int) -> list[list[tuple[str, float]]]:
  """The k best passages of each query by numpy: falling score, then falling id."""
  found: list[list[tuple[str, float]]] = [[] for _ in queries]
  start = 0
  for path in (path for folder in folders for path in sorted(folder.glob('*.npy'))):
    rows = np.load(path).astype(np.float32)
    for own, scores in zip(found, queries @ rows.T, strict=True):
      least = np.partition(scores, -k)[-k] if len(scores) > k else -np.inf
      if len(own) >= k:
        least = max(least, own[k - 1][1])
      own += [
        (f'p{start + row:09d}', float(scores[row])) for row in np.flatnonzero(scores >= least)
      ]
      own.sort(key=lambda one: (one[1], one[0]), reverse=True)
      del own[k:]
    start += len(rows)
  return found


def main() -> None:
  parser = options.parser(
    __doc__, passages=10_000_000, folders=10, queries=100, k=100, dimension=64
  )
  parser.add_argument('--folder', help='for the embeddings')
  args = parser.parse_args()
  imports = int(subprocess.check_output([sys.executable, '-c', IMPORTS])) // 1024
  with tempfile.TemporaryDirectory(dir=args.folder) as name:
    folder = pathlib.Path(name)
    edges = [args.passages * part // args.folders for part in range(args.folders + 1)]
    parts = [folder / f'part-{part:03d}' for part in range(args.folders)]
    for part, start, stop in zip(parts, edges, edges[1:], strict=False):
      write(part, start, stop, args.dimension, 'passage')
    write(folder / 'queries', 0, args.queries, args.dimension, 'query')
    began = time.monotonic()
    subprocess.run(
      [
        *(sys.executable, '-m', 'dprjax.search', '--index=exact', f'--k={args.k}'),
        *(f'--corpus={folder}/part-*', f'--queries={folder}/queries', f'--out={folder}/run.trec'),
      ],
      env=os.environ | {'JAX_PLATFORMS': 'cpu'},
      check=True,
    )
    wall, used = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    report = json.loads((folder / 'run.trec.json').read_text())
    asked = embeddings.load_embeddings(folder / 'queries').vectors()
    expected = [
      (f'p{query:09d}', id_, score)
      for query, ranked in enumerate(best(parts, asked, args.k))
      for id_, score in ranked
    ]
    with open(folder / 'run.trec') as file:
      rows = [line.split() for line in file]
    assert [(row[0], row[2], float(row[4])) for row in rows] == expected
  case = {
    'corpus_mb': round(args.passages * args.dimension * 2 / 2**20),
    'wall_seconds': round(wall, 1),
    'search_seconds': round(report['seconds']['search'], 1),
    'cpu_seconds': round(used.ru_utime + used.ru_stime, 1),
    'peak_mb': used.ru_maxrss // 1024,
    'imports_mb': imports,
    'results_equal_to_numpy': len(expected),
  }
  print(json.dumps(case))
  settings = {
    name: getattr(args, name) for name in ('passages', 'folders', 'queries', 'k', 'dimension')
  }
  record.write(
    f'searching_{args.passages}x{args.dimension}',
    case,
    settings | {'dtype': 'float16', 'shard_rows': SHARD_ROWS},
    {'numpy': np.__version__},
  )


if __name__ == '__main__':
  main()
