"""Searches a collection of an engine for many queries, and says how."""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from dprjax.base.progress import Progress
from dprjax.encoding import embeddings
from dprjax.engines import connect, open_collection
from dprjax.retrieval import searching
from dprjax.text import trec

logger = logging.getLogger('dprjax')


def search_folder(
  uri: str, name: str, folder: str, k: int, *, dimensions: int | None = None, **how: Any
) -> tuple[trec.Run, dict[str, Any]]:
  """`search` for a folder of embeddings of queries, cut to ``dimensions``."""
  queries = embeddings.load_embeddings(folder).cut(dimensions, '--queries')
  queries.check_side('query', '--queries')
  run, report = search(uri, name, queries.ids, k, queries.vectors(), queries.meta.space(), **how)
  return run, report | {'queries_manifest_sha256': queries.sha256}


def search_texts(
  uri: str, name: str, files: Sequence[str], k: int, retriever: str, **how: Any
) -> tuple[trec.Run, dict[str, Any]]:
  """`search` for files of queries, which a retriever encodes; by vectors, also if it fuses."""
  from dprjax.encoding import manifest
  from dprjax.retrieval import folder
  from dprjax.text.texts import read_several

  texts = read_several(files, 'query')
  parts, encoder = folder.load_encoder(retriever)
  if parts.fusion is not None:
    logger.warning(
      '--retriever=%s ranks by vectors and BM25, an engine by vectors only: to rank alike, '
      'fuse this run with one of dprjax bm25 (dprjax fuse --weights=%s/fusion.json)',
      retriever,
      retriever,
    )
  vectors = encoder.encode(texts.values(), 'query')
  space = manifest.describe(encoder, 'query', 'float32', '').space()
  return search(uri, name, [*texts], k, vectors, space, **how)


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
    best = collection.search(vectors, depth, settings=settings, where=where, progress=progress)
    seconds, count = {'search': progress.seconds}, len(collection)
    run, report = searching.result(ids, *best, k, drop_same_id, count, seconds)
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
