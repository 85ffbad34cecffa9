"""Engines with mutable indexes: Milvus, Qdrant, pgvector.

A collection stores vectors under the ids of their documents, with texts and fields. It records the
settings of its vectors (`dprjax.encoding.manifest.Meta.space`) and refuses vectors with others.
Scores are inner products.

    engine = connect('qdrant:http://localhost:6333')
    collection = create(engine, 'passages', corpus.meta.space(), rows=len(corpus))
    collection.upsert(ids, vectors)                  # replaces the vectors of these ids
    collection.search(queries, k=10)                 # Found: ids, rows, scores
    collection.delete(['d7'])
"""

from dprjax.engines.collection import Collection, check_name, create, exists, open_collection
from dprjax.engines.engine import connect, parse_condition

__all__ = [
  'Collection',
  'check_name',
  'connect',
  'create',
  'exists',
  'open_collection',
  'parse_condition',
]
