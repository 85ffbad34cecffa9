"""Searches a collection of an engine for many queries, and says how."""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from dprjax.base.progress import Progress
from dprjax.engines import connect, open_collection
from dprjax.retrieval import searching
from dprjax.text import trec

logger = logging.getLogger('dprjax')


def search(
  uri: str,
  name: str,
  ids: list[str],
  k: int,
  vectors: Float[np.ndarray, 'n H'],
  space: Mapping[str, Any],
  *,
  where: Sequence[Any],
  settings: Mapping[str, float],
  drop_same_id: bool,
) -> tuple[trec.Run, dict[str, Any]]:
  """Searches a collection for queries.

  Args:
    ids: of the queries.
    space: the settings that made their vectors.
    where: conditions on fields, see `engine.parse_condition`.
    settings: search effort, by the names of the engine.
  """
  progress = Progress('queries', len(ids), 'searching')
  with contextlib.closing(connect(uri)) as engine:
    collection = open_collection(engine, name)
    if collection.record.loading:
      logger.info(
        '%s is only partly loaded: repeat its dprjax.index --upsert to continue', collection.where
      )
    depth = k + drop_same_id
    collection.check_space(space, '--queries')
    found = collection.search(vectors, depth, settings=settings, where=where, progress=progress)
    seconds, count = {'search': progress.seconds}, len(collection)
    run, report = searching.result(ids, *found, k, drop_same_id, count, seconds)
    return run, {
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
