"""Memory and time of mining, on runs and a corpus of random numbers.

    python benchmarks/mining.py [--case=QUERIES,PASSAGES,DEPTH] [--folder=DIR]

Each case writes four runs with DEPTH rows a query, half of which another run has as well, and runs
`python -m dprjax.mine` on them in a process of its own. Its peak memory is VmHWM of the kernel. The
size of MS MARCO, --case=500000,8841823,200, needs some 40 GB in --folder. Writes
benchmarks/results/mining-CPU.json.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv

import record
from dprjax.base import flags

RUNS = 4
# A small case; four times as many of everything; the queries of MS MARCO with shallow runs.
CASES = [(12_500, 250_000, 200), (50_000, 1_000_000, 200), (500_000, 250_000, 4)]
CHILD = """
import json, re, sys, time
from dprjax.mine import main
main(sys.argv[1:])
status = open('/proc/self/status').read()
print(json.dumps([int(re.search(r'VmHWM:\\s+(\\d+)', status)[1]), time.process_time()]))
"""


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    '--case',
    action='append',
    type=numbers,
    metavar='QUERIES,PASSAGES,DEPTH',
    help=f'may be repeated (default: {" and ".join(",".join(map(str, case)) for case in CASES)})',
  )
  parser.add_argument(
    '--texts',
    type=flags.boolean,
    default=True,
    help='whether the training file holds texts (default: true)',
  )
  folder_help = (
    'for the runs, the corpus and the files of mine (default: the temporary folder of the system)'
  )
  parser.add_argument('--folder', help=folder_help)
  args = parser.parse_args()
  cases = []
  for queries, passages, depth in args.case or CASES:
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
      cases.append(measure(pathlib.Path(folder), queries, passages, depth, args.texts))
    print(json.dumps(cases[-1]), flush=True)
  versions = {'numpy': np.__version__, 'pyarrow': pa.__version__}
  record.write('mining', cases, {'runs': RUNS, 'texts': args.texts}, versions)


def numbers(text: str) -> tuple[int, int, int]:
  queries, passages, depth = (flags.whole()(part) for part in text.split(','))
  return queries, passages, depth


def measure(
  folder: pathlib.Path, queries: int, passages: int, depth: int, texts: bool
) -> dict[str, Any]:
  make(folder, queries, passages, depth)
  size = sum(path.stat().st_size for path in folder.iterdir())
  began, loaded = time.perf_counter(), os.getloadavg()[0]
  done = subprocess.run(
    [
      sys.executable,
      '-c',
      CHILD,
      f'--queries={folder}/queries.tsv',
      f'--corpus={folder}/corpus.jsonl',
      f'--qrels={folder}/qrels.tsv',
      *(f'--run=r{number}={folder}/r{number}.trec' for number in range(RUNS)),
      f'--out={folder}/train.jsonl',
      f'--texts={str(texts).lower()}',
      f'--depth={depth}',
    ],
    check=True,
    stdout=subprocess.PIPE,
    text=True,
  )
  took = time.perf_counter() - began
  memory, cpu = json.loads(done.stdout.splitlines()[-1])
  lines = queries * RUNS * depth
  return {
    'queries': queries,
    'passages': passages,
    'depth': depth,
    'run_lines': lines,
    'input_gb': round(size / 1e9, 2),
    'output_gb': round((folder / 'train.jsonl').stat().st_size / 1e9, 2),
    'peak_memory_mb': round(memory / 1024),
    'seconds': round(took, 1),
    'cpu_seconds': round(cpu, 1),
    'run_lines_per_cpu_second': round(lines / cpu),
    'load_average_before': round(loaded, 1),
  }


def make(folder: pathlib.Path, queries: int, passages: int, depth: int) -> None:
  """Ids are numbers, as in MS MARCO; passages have 55 words on average, half of them unique."""
  rng = np.random.default_rng(0)
  letters = list('abcdefghijklmnopqrstuvwxyz')
  words = np.array([''.join(rng.choice(letters, size)) for size in rng.integers(2, 9, 5_000)])
  bodies = [' '.join(rng.choice(words, rng.integers(40, 70))) for _ in range(2_000)]
  with (folder / 'corpus.jsonl').open('w') as file:
    for number in range(passages):
      file.write(
        f'{{"_id": "{number}", "title": "", "text": "{number} {bodies[number % 2_000]}"}}\n'
      )
  (folder / 'queries.tsv').write_text(
    ''.join(
      f'{number + 1_000_000}\t{words[number % 5_000]} {number}\n' for number in range(queries)
    )
  )
  (folder / 'qrels.tsv').write_text(
    ''.join(f'{number + 1_000_000}\t0\t{number % passages}\t1\n' for number in range(queries))
  )
  for run in range(RUNS):
    options = csv.WriteOptions(include_header=False, delimiter=' ', quoting_style='none')
    with pa.OSFile(f'{folder}/r{run}.trec', 'wb') as sink:
      for start in range(0, queries, 10_000):
        write_rows(sink, options, start, min(start + 10_000, queries), run, passages, depth)


def write_rows(
  sink: Any, options: csv.WriteOptions, start: int, stop: int, run: int, passages: int, depth: int
) -> None:
  """A walk with an odd stride from a place that depends on the query.

  No passage comes twice, and neighbouring runs share half of their passages.
  """
  query = np.repeat(np.arange(start, stop), depth)
  place = np.tile(np.arange(depth), stop - start)
  stride = 2 * (query * 2_654_435_761 % (passages // 2 // depth // RUNS)) + 1
  doc = (query * 40_503 * 977 + (place * 7_919 % depth + run * depth // 2) * stride) % passages
  normal = np.random.default_rng([run, start]).normal(10, 3, (stop - start, depth))
  scores = np.sort(normal.astype(np.float32))[:, ::-1].ravel().astype(np.float64)
  constant = pa.array(np.zeros(len(query), np.int8))
  rows = {'query': query + 1_000_000, 'zero': constant, 'doc': doc}
  rows |= {'rank': place + 1, 'score': scores, 'tag': constant}
  csv.write_csv(pa.table(rows), sink, options)


if __name__ == '__main__':
  main()
