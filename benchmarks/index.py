"""Recall and queries a second: exact search and ScaNN of dprjax; flat, IVF and HNSW of faiss.

    pip install -e '.[bench]' && python benchmarks/index.py [--vectors=100000] [--dimension=384]
        [--queries=1000] [--runs=3]
    python benchmarks/index.py --corpus=EMBEDDINGS --queries_from=EMBEDDINGS
        two folders of dprjax.encode

Made-up vectors lie in clusters of 100 on the unit sphere, with queries near some of them: vectors
without structure say nothing about indexes that rely on it. Every index searches all queries at
once, on all cores, for the best 100 by inner product; recall@k is the fraction of the exact best k
among the first k found. Each index is measured at several settings, and all settings of all indexes
take turns. IVF has as many lists as ScaNN has leaves. Below 20,000 vectors, ScaNN compares with all
of them. Writes benchmarks/results/index_SIZExDIMENSION-CPU.json.
"""

import time
from collections.abc import Callable
from typing import Any

import faiss
import numpy as np

import options
import record
import timing
from dprjax.encoding import embeddings
from dprjax.retrieval import exact, scann

K = 100
CLUSTER = 100


def main() -> None:
  parser = options.parser(
    __doc__, vectors=100_000, dimension=384, queries=1000, runs=3, construction=100
  )
  parser.add_argument('--corpus', help='a folder of embeddings in place of made-up vectors')
  parser.add_argument('--queries_from', help='likewise, of queries')
  args = parser.parse_args()
  if bool(args.corpus) != bool(args.queries_from):
    parser.error('--corpus and --queries_from go together')
  if args.corpus:
    corpus, queries = (
      np.asarray(embeddings.load_embeddings(folder).vectors(), np.float32)
      for folder in (args.corpus, args.queries_from)
    )
    queries = queries[: args.queries]
  else:
    corpus, queries = clustered(args.vectors, args.queries, args.dimension)
  count, dimension = corpus.shape
  lists = max(round(count**0.5), 1)

  cases: dict[str, dict[str, Any]] = {}
  ways: dict[str, Callable[[], np.ndarray]] = {
    'dprjax, exact': lambda: exact.search(queries, corpus, K).rows
  }

  def build(name: str, make: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    index = make()
    built[name] = round(time.perf_counter() - began, 2)
    print(f'{name}: built in {built[name]} s', flush=True)
    return index

  built: dict[str, float] = {}
  if scann.available():
    index = build('dprjax, ScaNN', lambda: scann.build(corpus, K))
    usual = index.settings(K)
    for factor in (0.25, 0.5, 1, 2, 4) if index.leaves else (1,):
      settings = scann.ScannSettings(
        min(index.leaves, max(1, round(factor * usual.leaves_to_search))), usual.reorder
      )
      ways[f'dprjax, ScaNN, {settings.leaves_to_search} of {index.leaves} leaves'] = (
        lambda settings=settings: index.search(queries, K, settings).rows
      )
  flat = build('faiss, flat', lambda: filled(faiss.IndexFlatIP(dimension), corpus))
  ways['faiss, flat'] = lambda: flat.search(queries, K)[1]
  ivf = build(
    'faiss, IVF',
    lambda: filled(
      faiss.IndexIVFFlat(
        faiss.IndexFlatIP(dimension), dimension, lists, faiss.METRIC_INNER_PRODUCT
      ),
      corpus,
    ),
  )
  for probes in (1, 4, 16, 64):
    if probes <= lists:
      ways[f'faiss, IVF, {probes} of {lists} lists'] = lambda probes=probes: ivf.search(
        queries, K, params=faiss.SearchParametersIVF(nprobe=probes)
      )[1]
  graph = faiss.IndexHNSWFlat(dimension, 32, faiss.METRIC_INNER_PRODUCT)
  graph.hnsw.efConstruction = args.construction
  hnsw = build('faiss, HNSW', lambda: filled(graph, corpus))
  for looked_at in (100, 200, 400):
    ways[f'faiss, HNSW, ef {looked_at}'] = lambda looked_at=looked_at: hnsw.search(
      queries, K, params=faiss.SearchParametersHNSW(efSearch=looked_at)
    )[1]

  truth = exact.search(queries, corpus, min(K, count)).rows
  found = {name: way() for name, way in ways.items()}
  assert scann.recall(found['faiss, flat'], truth) > 0.999, (
    'exact search and the flat index of faiss find different rows'
  )
  for name, case in timing.summary(
    timing.take_turns(ways, args.runs, warm=0), 'dprjax, exact'
  ).items():
    rows = found[name]
    cases[name] = {
      f'recall@{k}': round(scann.recall(rows[:, :k], truth[:, :k]), 4) for k in (10, K)
    }
    cases[name] |= {'queries_a_second': round(1e3 * len(queries) / case['milliseconds'], 1)} | case
    index_name = ', '.join(name.split(', ')[:2])
    if index_name in built:
      cases[name]['build_s'] = built[index_name]
  timing.show(
    cases,
    ['recall@10', 'recall@100', 'queries_a_second', 'fastest_and_slowest', 'build_s'],
    f'{count:,} x {dimension}',
  )
  settings = vars(args) | {
    'vectors': count,
    'dimension': dimension,
    'queries': len(queries),
    'k': K,
    'cluster': CLUSTER,
  }
  # The indexes run on the processor; exact search runs on the accelerator of JAX, if there is one.
  record.write_jax(
    f'index_{count}x{dimension}',
    cases,
    settings,
    {'faiss': faiss.__version__},
  )


def clustered(count: int, queries: int, dimension: int) -> tuple[np.ndarray, np.ndarray]:
  """Unit vectors around random directions, about 60 degrees from another of the same cluster, and
  queries like them.
  """
  rng = np.random.default_rng(0)

  def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

  centres = unit(rng.standard_normal((max(count // CLUSTER, 1), dimension), np.float32))

  def around(number: int) -> np.ndarray:
    return unit(
      centres[rng.integers(len(centres), size=number)]
      + rng.standard_normal((number, dimension), np.float32) / dimension**0.5
    )

  return around(count), around(queries)


def filled(index: Any, corpus: np.ndarray) -> Any:
  index.train(corpus)
  index.add(corpus)
  return index


if __name__ == '__main__':
  main()
