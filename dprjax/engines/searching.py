"""Searches a collection of an engine for many queries, and says how."""

import contextlib
import logging
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from dprjax.base.progress import Progress
from dprjax.encoding import embeddings
from dprjax.engines import connect, open_collection
from dprjax.retrieval import fusion, hybrid, searching
from dprjax.text import trec

logger = logging.getLogger('dprjax')

_NONE: Mapping[str, float] = types.MappingProxyType({})


class Queries(NamedTuple):
  """Vectors of queries, and the settings that made them.

  Attributes:
    texts: for a fusion with BM25.
  """

  vectors: Float[np.ndarray, 'n H']
  space: Mapping[str, Any]
  texts: Sequence[str] = ()


def search_folder(
  uri: str, name: str, folder: str, k: int, *, dimensions: int | None = None, **how: Any
) -> tuple[trec.Run, dict[str, Any]]:
  """`search` for a folder of embeddings of queries, cut to ``dimensions``."""
  queries = embeddings.load_embeddings(folder).cut(dimensions, '--queries')
  queries.check_side('query', '--queries')
  asked = Queries(queries.vectors(), queries.meta.space())
  run, report = search(uri, name, queries.ids, k, asked, **how)
  return run, report | {'queries_manifest_sha256': queries.sha256}


def search_texts(
  uri: str, name: str, files: Sequence[str], k: int, retriever: str, **how: Any
) -> tuple[trec.Run, dict[str, Any]]:
  """`search` for files of queries, which a retriever encodes, with its fusion."""
  from dprjax.encoding import folders
  from dprjax.retrieval import folder
  from dprjax.text.texts import read_several

  texts = read_several(files, 'query')
  parts, encoder = folder.load_encoder(retriever)
  vectors = encoder.encode(texts.values(), 'query')
  space = folders.describe(encoder, 'query', 'float32', '').space()
  asked = Queries(vectors, space, [*texts.values()])
  return search(uri, name, [*texts], k, asked, weights=parts.fusion, **how)


def search(
  uri: str,
  name: str,
  ids: Sequence[str],
  k: int,
  queries: Queries,
  *,
  where: Sequence[Any] = (),
  settings: Mapping[str, float] = _NONE,
  drop_same_id: bool = False,
  weights: fusion.Fusion | None = None,
) -> tuple[trec.Run, dict[str, Any]]:
  """Searches a collection for queries.

  Args:
    ids: of the queries.
    where: conditions on fields, see `conditions.parse`.
    settings: search effort, by the names of the engine.
    weights: a fusion with BM25 of the texts of the queries.
  """
  ids = list(ids)
  progress = Progress('queries', len(ids), 'searching')
  with contextlib.closing(connect(uri)) as engine:
    collection = open_collection(engine, name)
    if collection.record.loading:
      logger.info(
        '%s is only partly loaded: repeat its dprjax.index --upsert to continue', collection.where
      )
    how: dict[str, Any] = {'settings': settings, 'where': where}
    depth = k + drop_same_id
    collection.check_space(queries.space, '--queries')
    if weights is None:
      doc_ids, rows, scores = collection.search(queries.vectors, depth, progress=progress, **how)
    else:
      if collection.bm25 is not None:
        hybrid.check_settings(weights, collection.bm25, f'collection {collection.name!r}')
      depth = min(weights.depth, engine.most)
      drop = ids if drop_same_id else ()
      fused = collection.hybrid(queries.vectors, queries.texts, weights, k, drop=drop, **how)
      run = trec.run_from_rankings(ids, fused)
    seconds = {'search': progress.seconds}
    count = len(collection)
    if weights is None:
      run, report = searching.result(ids, doc_ids, rows, scores, k, drop_same_id, count, seconds)
    else:
      report = searching.report(len(ids), k, drop_same_id, count, seconds)
      report['weights'] = dict(weights.weights)
    report |= {
      'index': engine.address.engine,
      'kind': collection.kind,
      'server': engine.version,
      'uri': str(engine.address),
      'collection': collection.name,
      'settings': collection.settings(depth, settings),
      'where': [list(one) for one in where],
      **({'partly_loaded': True} if collection.record.loading else {}),
      **report,
      **collection.space,
    }
  return run, report
