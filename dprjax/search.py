"""Searches embeddings of passages for the queries in another folder, and writes a TREC run.

    python -m dprjax.search --corpus=embeddings/corpus --queries=embeddings/test --out=run.trec

dprjax.encode makes both folders, with the same backbone and prompt. run.trec.json has
index, settings, recall against exact search, time, backbone and prompt.

ScaNN compares a query with every passage below 20,000 passages. Above, it searches as much of a
tree as --recall needs. Without ScaNN (Linux, Python below 3.14) the search is exact. Equal scores
are ranked by falling id, as trec_eval does.

--corpus may name several folders, such as from encode --part, one by one or by a pattern in quotes;
they are searched as one.

On several hosts, run the same command on each with --index=exact: every process searches a part of
the corpus.

An engine searches passages that dprjax.index stored:

    python -m dprjax.search --uri=milvus:index.db --queries=embeddings/test --out=run.trec
    python -m dprjax.search --uri=milvus:index.db --like=ids.txt --out=neighbours.trec

The second command finds neighbours of stored passages, without the passage itself.

--hybrid fuses the search with BM25, with weights from dprjax.fuse --weights_out:

    python -m dprjax.bm25 --corpus=corpus.jsonl --queries=train.jsonl --index_dir=bm25 --out=b.trec
    python -m dprjax.search --corpus=embeddings/corpus --queries=embeddings/test --out=run.trec \\
        --hybrid=fusion.json --texts=queries.jsonl --bm25_index=bm25

--dimensions=128 compares only the first 128 numbers of vectors. --rescore=DIR orders the best
passages by vectors of the same passages in another folder, which stay on disk.
"""

import argparse
import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from dprjax.base import cli, compiled, files, flags, outputs
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.base.flags import flag
from dprjax.base.progress import Progress
from dprjax.encoding import codes, embeddings, manifest
from dprjax.retrieval import best, fusion, hybrid, scann
from dprjax.text import trec
from dprjax.text.fields import in_all_forms, read_ids, report_ids
from dprjax.text.texts import read_texts

logger = logging.getLogger('dprjax')

_INDEX: Any = {'what': 'a ScaNN index', 'ours': scann.is_index, 'flag': '--index_dir'}
_CUTS = (10, 100, 1000)  # recall is also reported here
_GATHERED = 4096  # queries gathered from all processes at a time


def _setting(text: str) -> tuple[str, float]:
  name, value = flags.named(text)
  try:
    number = float(value)
  except ValueError:
    number = math.nan
  if not math.isfinite(number):
    raise argparse.ArgumentTypeError(f'expected NAME=NUMBER, not {text!r:.80}')
  return name, int(number) if number.is_integer() else number


def _condition(text: str) -> Any:
  from dprjax.engines import conditions

  try:
    return conditions.parse(text)
  except InputError as error:
    raise argparse.ArgumentTypeError(str(error)) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineFlags(flags.CollectionFlags):
  where: tuple[Any, ...] = flag(
    'only passages whose fields match a condition: lang=en or lang=en,de or year>=2020',
    (),
    read=_condition,
    metavar='CONDITION',
  )
  search_param: dict[str, float] = flag(
    'search effort, such as nprobe=64; may be repeated',
    {},
    read=_setting,
    metavar='NAME=NUMBER',
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  corpus: tuple[str, ...] = flag(
    'embeddings of the passages; several, or a pattern, for parts of a corpus', (), metavar='DIR'
  )
  queries: tuple[str, ...] = flag(
    'embeddings of the queries; with several for the same queries, the best score of a passage '
    'counts',
    (),
    metavar='DIR',
    either='queries',
  )
  like: str | None = flag(
    'with --uri: ids of stored passages as queries, one a line',
    None,
    metavar='IDS',
    either='queries',
  )
  out: str = flag('the run; its report goes to run.trec.json', metavar='run.trec')
  index: str = flag('', 'scann', choices=('scann', 'exact'))
  k: int = flag('passages a query', 1000, most=10**6)
  drop_same_id: bool = flags.drop_same_id()
  index_dir: str | None = flag(
    'keep the ScaNN index here while the embeddings are the same', None, metavar='DIR'
  )
  recall: float = flag('target fraction of the exact best k found by ScaNN', 0.95, most=1)
  recall_queries: int = flag('queries for measuring recall; 0 for none', 200, least=0, most=10**6)
  dimensions: int | None = flag(
    'compare only this many leading numbers of vectors (default: all)', None, most=2**20
  )
  rescore: str | None = flag(
    'order the best passages by these float or int8 embeddings', None, metavar='DIR'
  )
  rescore_factor: int = flag('order this many times --k passages with --rescore', 4, most=1000)
  hybrid: str | None = flag(
    'fuse the search with BM25, with this file from dprjax.fuse --weights_out', None, metavar='FILE'
  )
  texts: str | None = flag('with --hybrid: the texts of the queries', None, metavar='FILE')
  bm25_index: str | None = flag(
    'with --hybrid: the index of dprjax.bm25 --index_dir; engines have their own',
    None,
    metavar='DIR',
  )
  engine: EngineFlags = flags.group(EngineFlags, 'passages in an engine')
  job: flags.Job = flags.job()


def search(
  corpus: embeddings.Embeddings,
  queries: Sequence[embeddings.Embeddings],
  args: Flags,
  rescore: embeddings.Embeddings | None = None,
) -> tuple[trec.Run, dict[str, Any]]:
  """Finds the best passages for every query.

  Args:
    queries: embeddings of the same queries, comparable with the corpus. With several (one for each
      topic prompt), the best score of a passage counts.
    args: settings, with ``index`` 'scann' or 'exact'.
    rescore: other vectors of the same passages, comparable with the queries, that order the best.

  Returns:
    The run, and its report.
  """
  corpus.check_side('passage', '--corpus')
  if rescore is not None:
    _check_rescore(corpus, rescore, queries)
  corpus = corpus.cut(args.dimensions, '--corpus')
  several = [each.cut(args.dimensions, '--queries') for each in queries]
  for each in several:
    each.check_side('query', '--queries')
    manifest.check_same_space('--corpus', corpus.meta.space(), '--queries', each.meta.space())
    if each.ids != several[0].ids:
      raise InputError(f'--queries: {each.folder} and {several[0].folder} have different queries')
  # One more for the passage of the query itself, which is dropped.
  wanted = min(args.k + args.drop_same_id, len(corpus))
  depth = wanted if rescore is None else min(wanted * args.rescore_factor, len(corpus))
  vectors = np.concatenate([each.vectors() for each in several])
  index = args.index
  if index == 'scann' and not scann.available():
    logger.info('ScaNN is not installed (Linux, Python below 3.14): the search is exact')
    index = 'exact'
  details: dict[str, Any] = {}
  seconds: dict[str, float] = {}
  started = time.perf_counter()
  if index == 'exact':
    found = _search_exact(vectors, corpus, depth)
  else:
    searcher = _scann_index(corpus, depth, args.index_dir)
    seconds['index'] = time.perf_counter() - started
    settings = searcher.settings(depth)
    details = {'kind': searcher.kind, 'leaves': searcher.leaves}
    if args.recall_queries:
      settings, reached = _tune(searcher, corpus, vectors, depth, args)
      details['recall'] = reached
      if reached[f'recall@{depth}'] < args.recall:
        logger.info(
          'ScaNN finds %.4f of the exact best %d, below --recall=%g: use --index=exact',
          reached[f'recall@{depth}'],
          depth,
          args.recall,
        )
    details['settings'] = dataclasses.asdict(settings)
    started = time.perf_counter()
    found = searcher.search(vectors, depth, settings, corpus.ids_at)
  found = best.best_of(found, len(several), depth, corpus.ids_at)
  if rescore is not None:
    scores = [best.rescore(each.vectors(), found.rows, rescore.take) for each in queries]
    found = best.order(best.TopK(np.max(scores, axis=0), found.rows), wanted, corpus.ids_at)
    details['rescored'] = {'candidates': depth, 'manifest_sha256': rescore.sha256}
  seconds['search'] = time.perf_counter() - started
  # Look up only ids found, since all ids may exceed memory.
  rows = np.unique(found.rows[found.rows >= 0])
  places = np.where(found.rows >= 0, np.searchsorted(rows, found.rows), -1)
  run, report = _result(
    several[0].ids,
    corpus.ids_at(rows),
    places,
    found.scores,
    args.k,
    args.drop_same_id,
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


def _check_rescore(
  corpus: embeddings.Embeddings,
  rescore: embeddings.Embeddings,
  queries: Sequence[embeddings.Embeddings],
) -> None:
  """Raises InputError if ``rescore`` cannot order the results of ``corpus``."""
  rescore.check_side('passage', '--rescore')
  if rescore.meta.input_sha256 != corpus.meta.input_sha256 or len(rescore) != len(corpus):
    raise InputError(
      f'--rescore: {rescore.folder} has other passages than --corpus={corpus.folder}'
    )
  if rescore.meta.dtype == 'binary':
    raise InputError(f'--rescore: {rescore.folder} has binary codes; use float or int8 vectors')
  for each in queries:
    manifest.check_same_space('--rescore', rescore.meta.space(), '--queries', each.meta.space())
  # --corpus may have shortened vectors.
  space = corpus.meta.space() | {'dimension': rescore.meta.dimension}
  manifest.check_same_space('--corpus', space, '--rescore', rescore.meta.space())


def search_engine(args: Flags) -> tuple[trec.Run, dict[str, Any]]:
  """Searches a collection for queries, or for the neighbours of stored passages."""
  from dprjax import engines

  assert args.engine.uri is not None
  queries = None
  ids = read_ids(args.like) if args.like else []
  if args.queries:
    queries = embeddings.load_embeddings(args.queries[0]).cut(args.dimensions, '--queries')
    queries.check_side('query', '--queries')
    ids = queries.ids
  given, where = args.engine.search_param, args.engine.where
  drop_same_id = args.drop_same_id or queries is None
  weights = hybrid.read(args.hybrid) if args.hybrid else None
  texts = _query_texts(args, ids) if weights else []
  progress = Progress('queries', len(ids), 'searching')
  with contextlib.closing(engines.connect(args.engine.uri)) as engine:
    collection = engines.open_collection(engine, args.engine.collection)
    if collection.record.loading:
      logger.info(
        '%s is only partly loaded: repeat its dprjax.index --upsert to continue', collection.where
      )
    how: dict[str, Any] = {'settings': given, 'where': where}
    depth = args.k + drop_same_id
    if queries is None:
      found = collection.like(ids, args.k, progress=progress, **how)
      doc_ids, rows, scores = found
    else:
      collection.check_space(queries.meta.space(), '--queries')
      if weights is None:
        doc_ids, rows, scores = collection.search(
          queries.vectors(), depth, progress=progress, **how
        )
      else:
        if collection.bm25 is not None:
          hybrid.check_settings(weights, collection.bm25, f'collection {collection.name!r}')
        depth = min(weights.depth, engine.most)
        drop = ids if drop_same_id else ()
        fused = collection.hybrid(queries.vectors(), texts, weights, args.k, drop=drop, **how)
        run = trec.run_from_rankings(ids, fused)
    seconds = {'search': progress.seconds}
    count = len(collection)
    if weights is None:
      run, report = _result(ids, doc_ids, rows, scores, args.k, drop_same_id, count, seconds)
    else:
      report = _report(len(ids), args.k, drop_same_id, count, seconds)
      report['fused_by'] = engine.address.engine if collection.fuses(weights, drop) else 'dprjax'
    report |= {
      'index': engine.address.engine,
      'kind': collection.kind,
      'server': engine.version,
      'uri': str(engine.address),
      'collection': collection.name,
      'settings': collection.settings(depth, given),
      'where': [list(one) for one in where],
      **({'partly_loaded': True} if collection.record.loading else {}),
      **report,
      **collection.space,
      'queries_manifest_sha256': queries and queries.sha256,
    }
  if weights is not None:
    report |= _hybrid_report(args, weights)
  return run, report


def _result(
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
  embeddings.check_unique(query_ids, 'the queries')
  embeddings.check_unique(doc_ids, 'the passages')
  run = trec.run_from_rows(query_ids, doc_ids, rows, scores)
  if drop_same_id:
    run = run.keep(~run.same_id()).top(k)
  return run, _report(len(query_ids), k, drop_same_id, passages, seconds)


def _report(
  queries: int, k: int, drop_same_id: bool, passages: int, seconds: dict[str, float]
) -> dict[str, Any]:
  return {
    'k': k,
    'drop_same_id': drop_same_id,
    'queries': queries,
    'passages': passages,
    'seconds': seconds,
    'queries_per_second': queries / seconds['search'],
  }


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
  searcher = _kept_index(corpus, index_dir)
  if searcher is not None:
    outputs.clear(index_dir)
    return searcher
  with outputs.claim_folder(index_dir, {}, **_INDEX):
    searcher = _kept_index(corpus, index_dir)  # another command may just have written it
    if searcher is None:
      searcher = scann.build(corpus.vectors(), k)
      scann.save(searcher, index_dir, corpus.fingerprint)
  return searcher


def _kept_index(corpus: embeddings.Embeddings, index_dir: str) -> scann.ScannIndex | None:
  searcher = scann.load(index_dir, corpus.fingerprint)
  if searcher is not None:
    logger.info('%s: index of %s', index_dir, counted(searcher.count, 'passages'))
  return searcher


def _tune(
  searcher: scann.ScannIndex,
  corpus: embeddings.Embeddings,
  queries: np.ndarray,
  k: int,
  args: Flags,
) -> tuple[scann.ScannSettings, dict[str, Any]]:
  """Settings that reach the target on a sample of queries, and their recall at several cutoffs."""
  sample = np.random.default_rng(0).permutation(len(queries))[: args.recall_queries]
  chosen = queries[np.sort(sample)]
  with cli.loading():
    from dprjax.retrieval import exact
  truth = exact.search(chosen, corpus.shards, k, ids_at=corpus.ids_at).rows
  settings, reached = searcher.tune(chosen, truth, args.recall, corpus.ids_at)
  rows = searcher.search(chosen, k, settings, corpus.ids_at).rows
  report: dict[str, Any] = {'queries': len(chosen), 'target': args.recall}
  for cut in _CUTS:
    if cut < k:
      report[f'recall@{cut}'] = scann.recall(rows[:, :cut], truth[:, :cut])
  return settings, report | {f'recall@{k}': reached}


def main(argv: Sequence[str] | None = None) -> None:
  cli.run(Flags, _command, argv)


def _command(args: Flags) -> None:
  import jax

  process, processes = jax.process_index(), jax.process_count()
  if processes > 1 and (args.index != 'exact' or args.engine.uri):
    raise InputError(f'--index={args.index} needs one process, not {processes}; use --index=exact')
  _check_hybrid(args)
  args = dataclasses.replace(args, corpus=_folders(args.corpus))
  inputs = flags.paths(
    args, 'corpus', 'queries', 'like', 'rescore', 'hybrid', 'texts', 'bm25_index'
  )
  if args.engine.uri is not None:
    from dprjax import engines

    address = engines.address_of(args.engine.uri)
    inputs |= {'--uri': address.place} if address.is_local else {}
  with outputs.claim(args.out, inputs, also={'--index_dir': args.index_dir}, lock=not process):
    if args.index_dir:
      outputs.check_folder(args.index_dir, inputs, **_INDEX)
    _search(args, process, processes)


def _folders(given: Sequence[str]) -> tuple[str, ...]:
  """The folders in --corpus."""
  found: list[str] = []
  for one in given:
    matching = [str(path) for path in files.matching(one)] if files.is_pattern(one) else [one]
    if not matching:
      raise InputError(f'--corpus={one}: no folder matches')
    found += matching
  return tuple(found)


def _check_hybrid(args: Flags) -> None:
  if args.hybrid is None:
    flags.refuse(args, ('texts', 'bm25_index'), 'hybrid=FILE')
    return
  if not args.queries:
    raise InputError('--hybrid needs --queries; --like searches with stored vectors')
  if args.engine.uri:
    flags.refuse(args, ('bm25_index',), 'index=scann or exact')
  needed = ('texts',) if args.engine.uri else ('texts', 'bm25_index')
  if missing := [f'--{name}' for name in needed if getattr(args, name) is None]:
    raise InputError(f'--hybrid needs {" and ".join(missing)}')


def _query_texts(args: Flags, ids: Sequence[str]) -> list[str]:
  """The texts of these queries."""
  assert args.texts is not None
  texts = {query.id: query.text for query in read_texts(args.texts, 'query', in_all_forms(ids))}
  missing = [query_id for query_id in ids if query_id not in texts]
  report_ids(
    f'--texts={args.texts} lacks {len(missing):,} of {counted(len(ids), "queries")}',
    missing,
    True,
    known=texts,
  )
  return [texts[query_id] for query_id in ids]


def _hybrid(
  args: Flags, how: hybrid.Hybrid, run: trec.Run, report: dict[str, Any]
) -> tuple[trec.Run, dict[str, Any]]:
  """Fuses a run with ``how.fusion.depth`` passages a query with BM25."""
  queries = _query_texts(args, run.query_ids)
  started = time.perf_counter()
  drop = run.query_ids if args.drop_same_id else ()
  fused = how.rank(queries, run.rankings(), args.k, drop)
  seconds = report['seconds'] | {'hybrid': time.perf_counter() - started}
  report |= {
    'k': args.k,
    'seconds': seconds,
    'queries_per_second': len(run) / (seconds['search'] + seconds['hybrid']),
  }
  report |= _hybrid_report(args, how.fusion)
  return trec.run_from_rankings(run.query_ids, fused), report


def _hybrid_report(args: Flags, how: fusion.Fusion) -> dict[str, Any]:
  """The part of the report on a fusion."""
  assert args.hybrid is not None
  return {
    'hybrid': {
      'method': how.method,
      'weights': dict(how.weights),
      'depth': how.depth,
      'sha256': files.sha256_file(args.hybrid),
    },
  }


def _search(args: Flags, process: int, processes: int) -> None:
  compiled.keep()
  if args.engine.uri is not None:
    flags.refuse(args, ('corpus', 'rescore', 'index_dir'), 'index=scann or exact, without --uri')
    if len(args.queries) > 1:
      raise InputError('--uri takes only one --queries')
    if args.like and args.dimensions:
      raise InputError('--dimensions cuts --queries; --like searches with the stored vectors')
    run, report = search_engine(args)
  else:
    flags.refuse(args, ('like',), 'uri=ENGINE:PLACE')
    flags.refuse(args.engine, ('where', 'search_param', 'collection'), 'uri=ENGINE:PLACE')
    if not args.corpus:
      raise InputError(f'--index={args.index} needs --corpus')
    loaded = [
      embeddings.load_embeddings(folder, process=process, processes=processes)
      for folder in (*args.corpus, *args.queries, *([args.rescore] if args.rescore else []))
    ]
    for part in (parts := loaded[: len(args.corpus)]):
      part.check_side('passage', '--corpus')
    corpus = embeddings.join(parts, '--corpus')
    several = loaded[len(args.corpus) :]
    rescore = several.pop() if args.rescore else None
    if args.hybrid is None:
      run, report = search(corpus, several, args, rescore)
    else:
      assert args.bm25_index is not None
      fused = hybrid.load(args.hybrid, args.bm25_index, corpus.ids)
      deep = dataclasses.replace(args, k=fused.fusion.depth)
      run, report = search(corpus, several, deep, rescore)
      if not process:
        run, report = _hybrid(args, fused, run, report)
  if process:
    return
  how = report.get('kind', 'exact')
  if how == 'brute_force':
    how = f'exact, as ScaNN compares all of fewer than {scann.BRUTE_FORCE_BELOW:,} passages'
  else:
    for name, value in report.get('recall', {}).items():
      how += f', {name} {value:.4f}' if name.startswith('recall@') else ''
  trec.write_reported(args.out, run, f'dprjax-{report["index"]}', report, how)


if __name__ == '__main__':
  main()
