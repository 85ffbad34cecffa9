"""Searches embeddings of passages for many queries, and says how."""

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from dprjax.base import cli, files, outputs
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.encoding import codes, embeddings, manifest
from dprjax.retrieval import best, scann
from dprjax.text import trec
from dprjax.text.fields import check_unique

logger = logging.getLogger('dprjax')

INDEX_FOLDER: Any = {'what': 'a ScaNN index', 'ours': scann.is_index, 'flag': '--index_dir'}
_CUTS = (10, 100, 1000)  # recall is also reported here
_SAMPLED = 200  # queries on which recall is measured
_GATHERED = 4096  # queries gathered from all processes at a time


def find_folders(names: Sequence[str]) -> tuple[str, ...]:
  """The folders that names and patterns such as ``corpus-*`` mean."""
  folders: list[str] = []
  for name in names:
    matching = [str(path) for path in files.matching(name)] if files.is_pattern(name) else [name]
    if not matching:
      raise InputError(f'--corpus={name}: no folder matches')
    folders += matching
  return tuple(folders)


def search_folders(
  corpus: Sequence[str],
  queries: Sequence[str],
  k: int,
  *,
  rescore: str | None = None,
  **options: Any,
) -> tuple[trec.Run, dict[str, Any]]:
  """Searches folders of embeddings, with the ``options`` of `search`.

  Of several processes, which need index='exact', each searches a part; all get the whole result.

  Args:
    corpus: parts of one corpus, which are searched as one.
  """
  import jax

  if not corpus:
    raise InputError('the search of embeddings needs --corpus')
  process, processes = jax.process_index(), jax.process_count()

  def load(folder: str) -> embeddings.Embeddings:
    return embeddings.load_embeddings(folder, process=process, processes=processes)

  parts = [load(folder) for folder in corpus]
  again = None if rescore is None else load(rescore)
  several = [load(folder) for folder in queries]
  return search(embeddings.join(parts, '--corpus'), several, k, rescore=again, **options)


def search(
  corpus: embeddings.Embeddings,
  queries: Sequence[embeddings.Embeddings],
  k: int,
  *,
  index: str = 'scann',
  drop_same_id: bool = False,
  dimensions: int | None = None,
  index_dir: str | None = None,
  recall: float = 0.95,
  rescore: embeddings.Embeddings | None = None,
  rescore_factor: int = 4,
) -> tuple[trec.Run, dict[str, Any]]:
  """Finds the k best passages for every query.

  Args:
    queries: embeddings of the same queries, comparable with the corpus. With several (one for each
      topic prompt), the best score of a passage counts.
    index: 'scann' or 'exact'.
    drop_same_id: leave out the passage with the id of its query.
    dimensions: compare only this many leading numbers.
    index_dir: keeps the ScaNN index.
    recall: the part of the exact best k that ScaNN should find, measured on some queries.
    rescore: other vectors of the same passages, comparable with the queries, that order the
      ``rescore_factor`` times k best.

  Returns:
    The run, and its report.
  """
  corpus.check_side('passage', '--corpus')
  if rescore is not None:
    _check_rescore(corpus, rescore, queries)
  corpus = corpus.cut(dimensions, '--corpus')
  several = [each.cut(dimensions, '--queries') for each in queries]
  for each in several:
    each.check_side('query', '--queries')
    manifest.check_same_space('--corpus', corpus.meta.space(), '--queries', each.meta.space())
    if each.ids != several[0].ids:
      raise InputError(f'--queries: {each.folder} and {several[0].folder} have different queries')
  # One more for the passage of the query itself, which is dropped.
  wanted = min(k + drop_same_id, len(corpus))
  depth = wanted if rescore is None else min(wanted * rescore_factor, len(corpus))
  vectors = np.concatenate([each.vectors() for each in several])
  if index == 'scann' and not scann.available():
    logger.info('ScaNN is not installed (Linux, Python below 3.14): the search is exact')
    index = 'exact'
  details: dict[str, Any] = {}
  seconds: dict[str, float] = {}
  started = time.perf_counter()
  if index == 'exact':
    top = _search_exact(vectors, corpus, depth)
  else:
    searcher = _scann_index(corpus, depth, index_dir)
    seconds['index'] = time.perf_counter() - started
    details = {'kind': searcher.kind, 'leaves': searcher.leaves}
    settings, reached = _tune(searcher, corpus, vectors, depth, recall)
    details['recall'] = reached
    if reached[f'recall@{depth}'] < recall:
      logger.info(
        'ScaNN finds %.4f of the exact best %d, below --recall=%g: use --index=exact',
        reached[f'recall@{depth}'],
        depth,
        recall,
      )
    details['settings'] = dataclasses.asdict(settings)
    started = time.perf_counter()
    top = searcher.search(vectors, depth, settings, corpus.ids_at)
  top = best.best_of(top, len(several), depth, corpus.ids_at)
  if rescore is not None:
    scores = [best.rescore(each.vectors(), top.rows, rescore.take) for each in queries]
    top = best.order(best.TopK(np.max(scores, axis=0), top.rows), wanted, corpus.ids_at)
    details['rescored'] = {'candidates': depth, 'manifest_sha256': rescore.sha256}
  seconds['search'] = time.perf_counter() - started
  # Look up only ids found, since all ids may exceed memory.
  rows = np.unique(top.rows[top.rows >= 0])
  places = np.where(top.rows >= 0, np.searchsorted(rows, top.rows), -1)
  run, report = result(
    several[0].ids,
    corpus.ids_at(rows),
    places,
    top.scores,
    k,
    drop_same_id,
    len(corpus),
    seconds,
  )
  return run, {
    'index': index,
    **details,
    **report,
    **corpus.meta.space(),
    **({'stored': corpus.meta.dtype} if corpus.meta.dtype in codes.LEVELS else {}),
    'corpus_manifest_sha256': corpus.sha256,
    'queries_manifest_sha256': '+'.join(each.sha256 for each in several),
  }


def method(report: Mapping[str, Any]) -> str:
  """How a search was done, in a few words."""
  kind = report.get('kind', 'exact')
  if kind == 'brute_force':
    return f'exact, as ScaNN compares all of fewer than {scann.BRUTE_FORCE_BELOW:,} passages'
  recalls = (one for one in report.get('recall', {}).items() if one[0].startswith('recall@'))
  return ', '.join([kind, *(f'{name} {value:.4f}' for name, value in recalls)])


def _check_rescore(
  corpus: embeddings.Embeddings,
  rescore: embeddings.Embeddings,
  queries: Sequence[embeddings.Embeddings],
) -> None:
  """Raises InputError if ``rescore`` cannot order the results of ``corpus``."""
  rescore.check_side('passage', '--rescore')
  if rescore.meta.dtype == 'binary':
    raise InputError(f'--rescore: {rescore.folder} has binary codes; use float or int8 vectors')
  if rescore.meta.input_sha256 != corpus.meta.input_sha256 or len(rescore) != len(corpus):
    raise InputError(
      f'--rescore: {rescore.folder} has other passages than --corpus={corpus.folder}'
    )
  for each in queries:
    manifest.check_same_space('--rescore', rescore.meta.space(), '--queries', each.meta.space())
  # --corpus may have shortened vectors.
  space = corpus.meta.space() | {'dimension': rescore.meta.dimension}
  manifest.check_same_space('--corpus', space, '--rescore', rescore.meta.space())


def _search_exact(queries: np.ndarray, corpus: embeddings.Embeddings, k: int) -> best.TopK:
  """Searches a part of the corpus in each process; all get the whole result."""
  with cli.loading():
    import jax

    from dprjax.base import distributed
    from dprjax.retrieval import exact
  process, processes = jax.process_index(), jax.process_count()
  if processes == 1:
    return exact.search(queries, corpus.shards, k, ids_at=corpus.ids_at)
  part = exact.search_part(queries, corpus.shards, k, process, processes, corpus.ids_at)
  merged = [
    exact.merge(
      distributed.gather(part.scores[start : start + _GATHERED]),
      distributed.gather(part.rows[start : start + _GATHERED]),
      corpus.ids_at,
    )
    for start in range(0, len(queries), _GATHERED)
  ]
  return best.TopK(*(np.concatenate(arrays) for arrays in zip(*merged, strict=True)))


def _scann_index(corpus: embeddings.Embeddings, k: int, index_dir: str | None) -> scann.ScannIndex:
  if not index_dir:
    return scann.build(corpus.vectors(), k)
  # Many commands may read an index, but only one may write it.
  if (searcher := scann.load(index_dir, corpus.fingerprint)) is not None:
    outputs.clear(index_dir)
  else:
    with outputs.claim_folder(index_dir, {}, **INDEX_FOLDER):
      # Another command may just have written it.
      if (searcher := scann.load(index_dir, corpus.fingerprint)) is None:
        searcher = scann.build(corpus.vectors(), k)
        scann.save(searcher, index_dir, corpus.fingerprint)
        return searcher
  logger.info('%s: index of %s', index_dir, counted(searcher.count, 'passages'))
  return searcher


def _tune(
  searcher: scann.ScannIndex,
  corpus: embeddings.Embeddings,
  queries: np.ndarray,
  k: int,
  target: float,
) -> tuple[scann.ScannSettings, dict[str, Any]]:
  """Settings that reach the target on a sample of queries, and their recall at several cutoffs."""
  sample = np.random.default_rng(0).permutation(len(queries))[:_SAMPLED]
  chosen = queries[np.sort(sample)]
  with cli.loading():
    from dprjax.retrieval import exact
  truth = exact.search(chosen, corpus.shards, k, ids_at=corpus.ids_at).rows
  settings, reached = searcher.tune(chosen, truth, target, corpus.ids_at)
  rows = searcher.search(chosen, k, settings, corpus.ids_at).rows
  report: dict[str, Any] = {'queries': len(chosen), 'target': target}
  for cut in _CUTS:
    if cut < k:
      report[f'recall@{cut}'] = scann.recall(rows[:, :cut], truth[:, :cut])
  return settings, report | {f'recall@{k}': reached}


def result(
  query_ids: list[str],
  doc_ids: list[str],
  rows: Int[np.ndarray, 'queries k'],
  scores: Float[np.ndarray, 'queries k'],
  k: int,
  drop_same_id: bool,
  passages: int,
  seconds: dict[str, float],
) -> tuple[trec.Run, dict[str, Any]]:
  """The run, and the part of the report common to all indexes."""
  check_unique(query_ids, 'the queries')
  check_unique(doc_ids, 'the passages')
  run = trec.run_from_rows(query_ids, doc_ids, rows, scores)
  if drop_same_id:
    run = run.keep(~run.same_id()).top(k)
  return run, {
    'k': k,
    'drop_same_id': drop_same_id,
    'queries': len(query_ids),
    'passages': passages,
    'seconds': seconds,
    'queries_per_second': len(query_ids) / seconds['search'],
  }
