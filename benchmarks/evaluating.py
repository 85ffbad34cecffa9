"""Memory and time of `dprjax.evaluate` on a run of millions of lines.

    python benchmarks/evaluating.py --queries=1000000 [--judged=10000] [--folder=DIR]

Makes a run of 100 documents a query, from 8.8 million, with one judgement for each judged query.
Prints peak memory and CPU seconds of the command, and its memory after the imports.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time

import numpy as np

K, DOCUMENTS = 100, 8_800_000
BLOCK = 10_000  # queries written at a time
IMPORTS = (
  'import ir_measures, pyarrow.csv, resource; from dprjax import evaluate; '
  'from dprjax.retrieval import measures; from dprjax.text import trec; '
  'print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)'
)


def digits(numbers: np.ndarray, width: int) -> np.ndarray:
  return (numbers[:, None] // 10 ** np.arange(width - 1, -1, -1) % 10 + ord('0')).astype(np.uint8)


def write(folder: str, queries: int, judged: int) -> None:
  """run.trec and qrels.tsv."""
  rng = np.random.default_rng(0)
  with open(f'{folder}/run.trec', 'wb') as run, open(f'{folder}/qrels.tsv', 'w') as qrels:
    qrels.write('query-id\tcorpus-id\tscore\n')
    for start in range(0, queries, BLOCK):
      some = np.arange(start, min(start + BLOCK, queries))
      docs = (rng.integers(0, DOCUMENTS, (len(some), 1)) + np.arange(K)) % DOCUMENTS
      scores = np.sort(rng.integers(0, 10**6, (len(some), K)))[:, ::-1]
      rows = docs.size

      def text(value: bytes, rows: int = rows) -> np.ndarray:
        return np.tile(np.frombuffer(value, np.uint8), (rows, 1))

      columns = (
        *(text(b'q'), digits(np.repeat(some, K), 7), text(b' Q0 d'), digits(docs.ravel(), 7)),
        *(text(b' '), digits(np.tile(np.arange(1, K + 1), len(some)), 3), text(b' 0.')),
        *(digits(scores.ravel(), 6), text(b' x\n')),
      )
      run.write(np.concatenate(columns, axis=1).tobytes())
      relevant = docs[np.arange(len(some)), rng.integers(0, K, len(some))]
      for query, doc in zip(some.tolist(), relevant.tolist(), strict=True):
        if query < judged:
          qrels.write(f'q{query:07d}\td{doc:07d}\t1\n')


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--queries', type=int, default=1_000_000)
  parser.add_argument('--judged', type=int, default=10_000)
  parser.add_argument('--folder', help='for the run')
  args = parser.parse_args()
  imports = int(subprocess.check_output([sys.executable, '-c', IMPORTS])) // 1024
  with tempfile.TemporaryDirectory(dir=args.folder) as folder:
    write(folder, args.queries, args.judged)
    files = [f'--run={folder}/run.trec', f'--qrels={folder}/qrels.tsv', f'--out={folder}/out.json']
    began = time.monotonic()
    subprocess.run(
      [sys.executable, '-m', 'dprjax.evaluate', *files], check=True, stdout=subprocess.DEVNULL
    )
    wall, used = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    with open(f'{folder}/out.json') as file:
      assert json.load(file)['counts']['queries'] == min(args.queries, args.judged)
  print(
    f'{args.queries:,} queries, {args.judged:,} judged: {used.ru_maxrss // 1024} MB at most, '
    f'{imports} MB after the imports; {used.ru_utime + used.ru_stime:.0f} CPU s, {wall:.0f} s, '
    f'load {os.getloadavg()[0]:.0f}'
  )


if __name__ == '__main__':
  main()
