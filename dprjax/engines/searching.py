"""Searches a collection of an engine for many queries, and says how."""

import contextlib
import logging
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from dprjax.base.progress import Progress
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
    where: conditions on fields, see `engine.parse_condition`.
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
