"""Milvus: an index that can change. Stores vectors under the ids of their documents.

The same code serves milvus-lite, in this process on a local folder (``index.db``), and a server
(``http://host:19530``). Both need ``pip install 'dprjax[milvus]'``. A collection records what made
its vectors (`dprjax.retrieval.manifest.Meta.space`) and refuses others. Scores are inner products.

    server = Server('index.db', new=True)
    collection = server.create('passages', corpus.meta.space(), rows=len(corpus))
    collection.upsert(ids, vectors)                  # replaces the vectors of these ids
    collection.search(queries, k=10)                 # Found: ids, rows, scores
    collection.like(['d7'], k=10)                    # neighbours of a stored document
    collection.delete(['d7'])
"""

from dprjax.milvus.collection import (
  INDEX_TYPES,
  MAX_K,
  Collection,
  Found,
  Server,
  check_index_type,
  check_name,
  check_uri,
  is_index,
  is_local,
)

__all__ = [
  'INDEX_TYPES',
  'MAX_K',
  'Collection',
  'Found',
  'Server',
  'check_index_type',
  'check_name',
  'check_uri',
  'is_index',
  'is_local',
]
