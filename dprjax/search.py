"""Searches embeddings of passages for every query of another folder, and writes a TREC run.

    python -m dprjax.search --corpus=embeddings/corpus --queries=embeddings/test --out=run.trec

Both folders come from dprjax.encode, with the same backbone and prompt. Beside the run,
run.trec.json says how it was made: the index and its settings, its recall against exact search, the
time, and the backbone and the prompt.

Below 20,000 passages, ScaNN compares a query with every passage. Above, it searches a tree, as
much of it as --recall asks for. Without ScaNN (it is for Linux and Python below 3.14) the search is
exact.

Equal scores are ranked by falling id, as trec_eval ranks them, also where k cuts between them.

On several hosts, run the same command on each with --index=exact: every process searches a part of
the corpus.

Milvus searches passages that dprjax.index put into a local folder or on a server:

    python -m dprjax.search --index=milvus --uri=index.db --queries=embeddings/test --out=run.trec
    python -m dprjax.search --index=milvus --uri=index.db --like=ids.txt --out=neighbours.trec

The second command searches for the neighbours of stored passages. A passage is not its own
neighbour.

--dimensions=128 compares the first numbers of the vectors alone. --rescore=DIR takes the best
passages that were found so, or in int8 or binary codes, and orders them by the vectors of another
folder of the same passages; these stay on disk.
"""

import argparse
import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from jaxtyping import Float, Int

from dprjax.base import outputs
from dprjax.base.counts import counted, rate
from dprjax.base.errors import InputError
from dprjax.base.progress import Progress
from dprjax.formats import seen, trec
from dprjax.formats.fields import read_ids
from dprjax.retrieval import best, codes, embeddings, manifest, milvus, scann
from dprjax.runtime import cli, compiled

logger = logging.getLogger('dprjax')

_CUTS = (10, 100, 1000)  # where recall is reported besides k
_GATHERED = 4096  # queries whose results are gathered from all processes at a time


def search(
  corpus: embeddings.Embeddings,
  queries: embeddings.Embeddings | Sequence[embeddings.Embeddings],
  *,
  k: int = 1000,
  index: str = 'scann',
  drop_same_id: bool = False,
  index_dir: str | None = None,
  recall: float = 0.95,
  recall_queries: int = 200,
  dimensions: int | None = None,
  rescore: embeddings.Embeddings | None = None,
  rescore_factor: int = 4,
) -> tuple[trec.Run, dict[str, Any]]:
  """The best k passages for every query.

  Args:
    corpus, queries: of one backbone, prompt, pooling and normalisation. Several embeddings of the
      same queries, as under the prompts of several topics: a passage's best score counts.
    k: passages a query.
    index: 'scann' or 'exact'.
    drop_same_id: BEIR's rule: a passage with the query's own id is not retrieved for it.
    index_dir: where ScaNN's index is kept between searches; built there if it is missing or holds
      other vectors.
    recall: the part of the exact best k that ScaNN should find.
    recall_queries: the number of queries to measure it on; 0: not measured, and ScaNN keeps its
      first settings.
    dimensions: compare the first numbers of the vectors alone.
    rescore: other vectors of the same passages, in the queries' own space. The best are ordered
      by them.
    rescore_factor: how many times k are rescored.

  Returns:
    The run, and the report that is written beside it.

  Raises:
    InputError: embeddings that do not belong together, or bad vectors.
  """
  corpus.check_kind('passage', '--corpus')
  whole = [queries] if isinstance(queries, embeddings.Embeddings) else list(queries)
  if rescore is not None:
    _check_rescore(corpus, rescore, whole)
  corpus = corpus.cut(dimensions, '--corpus')
  several = [each.cut(dimensions, '--queries') for each in whole]
  for each in several:
    each.check_kind('query', '--queries')
    manifest.check_same_space('--corpus', corpus.meta.space(), '--queries', each.meta.space())
    if each.ids != several[0].ids:
      raise InputError(
        f'--queries: {each.folder} and {several[0].folder} hold different queries; encode the same '
        'file for each'
      )
  inputs = {'--corpus': corpus.folder, '--queries': [each.folder for each in several]}
  # One more, so that k are left when the query's own is dropped.
  wanted = min(k + drop_same_id, len(corpus))
  depth = wanted if rescore is None else min(wanted * rescore_factor, len(corpus))
  vectors = np.concatenate([each.vectors() for each in several])
  if index == 'scann' and not scann.available():
    logger.info(
      'ScaNN is not installed (it is for Linux and Python below 3.14): the search is exact'
    )
    index = 'exact'
  details: dict[str, Any] = {}
  seconds: dict[str, float] = {}
  started = time.perf_counter()
  if index == 'exact':
    found = _search_exact(vectors, corpus, depth)
  else:
    searcher = _scann_index(corpus, depth, index_dir, inputs)
    seconds['index'] = time.perf_counter() - started
    settings = searcher.settings(depth)
    details = {'kind': searcher.kind, 'leaves': searcher.leaves}
    if recall_queries:
      settings, reached = _tune(searcher, corpus, vectors, depth, recall, recall_queries)
      details['recall'] = reached
      if reached[f'recall@{depth}'] < recall:
        logger.info(
          'ScaNN finds %.4f of the exact best %d, less than --recall=%g: --index=exact finds all',
          reached[f'recall@{depth}'],
          depth,
          recall,
        )
    details['settings'] = dataclasses.asdict(settings)
    started = time.perf_counter()
    found = searcher.search(vectors, depth, settings, corpus.ids_at)
  found = best.best_of(found, len(several), depth, corpus.ids_at)
  if rescore is not None:
    scores = [best.rescore(each.vectors(), found.rows, rescore.take) for each in whole]
    found = best.order(best.TopK(np.max(scores, axis=0), found.rows), wanted, corpus.ids_at)
    details['rescored'] = {'candidates': depth, 'manifest_sha256': rescore.sha256}
  seconds['search'] = time.perf_counter() - started
  # Only the ids of documents that were found: all of them may exceed memory.
  rows = np.unique(found.rows[found.rows >= 0])
  places = np.where(found.rows >= 0, np.searchsorted(rows, found.rows), -1)
  run, report = _result(
    several[0].ids, corpus.ids_at(rows), places, found.scores, k, drop_same_id, len(corpus), seconds
  )
  return run, {
    'index': index,
    **details,
    **report,
    **corpus.meta.space(),
    **_seen(several),
    **({'stored': corpus.meta.dtype} if corpus.meta.dtype in codes.LEVELS else {}),
    'corpus_manifest_sha256': corpus.sha256,
    'queries_manifest_sha256': '+'.join(each.sha256 for each in several),
  }


def _check_rescore(
  corpus: embeddings.Embeddings,
  rescore: embeddings.Embeddings,
  queries: Sequence[embeddings.Embeddings],
) -> None:
  """Raises InputError where ``rescore`` cannot order what is found in ``corpus``."""
  rescore.check_kind('passage', '--rescore')
  if rescore.meta.input_sha256 != corpus.meta.input_sha256 or len(rescore) != len(corpus):
    raise InputError(
      f'--rescore: {rescore.folder} holds other passages than --corpus={corpus.folder}, or in '
      'another order; encode the same file for both'
    )
  if rescore.meta.dtype == 'binary':
    raise InputError(
      f'--rescore: {rescore.folder} holds codes of 1 bit; encode the passages with '
      '--store=float16, float32 or int8'
    )
  for each in queries:
    manifest.check_same_space('--rescore', rescore.meta.space(), '--queries', each.meta.space())
  # Those of --corpus may have been cut.
  space = corpus.meta.space() | {'dimension': rescore.meta.dimension}
  manifest.check_same_space('--corpus', space, '--rescore', rescore.meta.space())


def search_milvus(
  collection: milvus.Collection,
  queries: embeddings.Embeddings | Sequence[str],
  *,
  k: int = 1000,
  drop_same_id: bool = False,
  settings: Mapping[str, Any] | None = None,
) -> tuple[trec.Run, dict[str, Any]]:
  """The best k passages of a Milvus collection.

  Args:
    collection: what to search.
    queries: of the collection's backbone, prompt, pooling and normalisation; or ids of passages
      that are stored in it.
    k: passages a query.
    drop_same_id: as for `search`; always true for stored passages.
    settings: Milvus's own, for the collection's index; override `milvus.Collection.settings`.

  Returns:
    As `search`.

  Raises:
    InputError: queries of another kind or space, an unknown id, or an error of Milvus.
  """
  progress = Progress('queries', len(queries), 'searching')
  if isinstance(queries, embeddings.Embeddings):
    queries.check_kind('query', '--queries')
    collection.check_space(queries.meta.space(), '--queries')
    ids, sha256, known = queries.ids, queries.sha256, _seen([queries])
    found = collection.search(
      queries.vectors(), k + drop_same_id, settings=settings, progress=progress
    )
  else:
    ids, sha256, known, drop_same_id = list(queries), None, {}, True
    found = collection.like(ids, k, settings=settings, progress=progress)
  run, report = _result(ids, *found, k, drop_same_id, len(collection), {'search': progress.seconds})
  return run, {
    'index': 'milvus',
    'kind': collection.index_type,
    'server': collection.server.version,
    'uri': collection.server.uri,
    'collection': collection.name,
    'settings': collection.settings(min(k + drop_same_id, milvus.MAX_K)) | dict(settings or {}),
    **report,
    **known,
    **collection.space,
    'queries_manifest_sha256': sha256,
  }


def _seen(queries: Sequence[embeddings.Embeddings]) -> dict[str, dict[str, list[str]]]:
  """The part of the report about queries that the model was trained on, or chosen by."""
  known = {role: {id_ for one in queries for id_ in one.seen.get(role, ())} for role in seen.ROLES}
  found = {role: [id_ for id_ in queries[0].ids if id_ in ids] for role, ids in known.items()}
  found = {role: ids for role, ids in found.items() if ids}
  return {'seen': found} if found else {}


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
  """The run, and the part of the report that all indexes share."""
  embeddings.check_unique(query_ids, 'the queries')
  embeddings.check_unique(doc_ids, 'the passages')
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


def _search_exact(queries: np.ndarray, corpus: embeddings.Embeddings, k: int) -> best.TopK:
  """Every process searches its part of the corpus; all have the result."""
  with cli.loading():
    import jax

    from dprjax.retrieval import exact
    from dprjax.runtime import distributed
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


def _scann_index(
  corpus: embeddings.Embeddings, k: int, index_dir: str | None, inputs: outputs.Inputs
) -> scann.Index:
  if not index_dir:
    return scann.build(corpus.vectors(), k)  # of codes their values: ScaNN has codes of its own
  # Any number of commands may read an index; one writes it.
  searcher = _kept_index(corpus, index_dir)
  if searcher is not None:
    outputs.clear(index_dir)
    return searcher
  with _claim_index(index_dir, inputs, lock=True):
    searcher = _kept_index(corpus, index_dir)  # another command may just have written it
    if searcher is None:
      searcher = scann.build(corpus.vectors(), k)
      scann.save(searcher, index_dir, corpus.fingerprint)
  return searcher


def _kept_index(corpus: embeddings.Embeddings, index_dir: str) -> scann.Index | None:
  searcher = scann.load(index_dir, corpus.fingerprint)
  if searcher is not None:
    if searcher.count != len(corpus):
      raise InputError(
        f'--index_dir={index_dir} has {searcher.count:,} passages, the corpus {len(corpus):,}; '
        f'remove {index_dir}, and it is made again'
      )
    logger.info('%s: index of %s', index_dir, counted(searcher.count, 'passages'))
  return searcher


def _claim_index(
  index_dir: str, inputs: outputs.Inputs, lock: bool
) -> contextlib.AbstractContextManager[epath.Path]:
  return outputs.claim_folder(
    index_dir, inputs, what='a ScaNN index', ours=scann.is_index, flag='--index_dir', lock=lock
  )


def _tune(
  searcher: scann.Index,
  corpus: embeddings.Embeddings,
  queries: np.ndarray,
  k: int,
  target: float,
  sample: int,
) -> tuple[scann.Settings, dict[str, Any]]:
  """Settings that reach the target on a sample of the queries, and their recall at several cuts."""
  chosen = queries[np.sort(np.random.default_rng(0).permutation(len(queries))[:sample])]
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


def main(argv: Sequence[str] | None = None) -> None:
  parser = cli.Parser('search', __doc__ or '', processes=True)
  parser.add_argument(
    '--corpus', metavar='DIR', help='embeddings of the passages; not with --index=milvus'
  )
  source = parser.add_mutually_exclusive_group(required=True)
  source.add_argument(
    '--queries',
    metavar='DIR',
    action='append',
    help='embeddings of the queries; repeated, of the same queries: the best score of a passage '
    'counts',
  )
  source.add_argument(
    '--like',
    metavar='IDS',
    help='with --index=milvus: a file of ids of stored passages, one a line, to search with',
  )
  parser.add_argument(
    '--out', required=True, metavar='run.trec', help='the run; its report goes to run.trec.json'
  )
  parser.add_argument(
    '--index', choices=('scann', 'exact', 'milvus'), default='scann', help='default: scann'
  )
  parser.add_argument(
    '--k', type=cli.up_to(10**6), default=1000, help='passages a query (default: 1000)'
  )
  parser.add_argument(
    '--drop_same_id',
    type=cli.boolean,
    default=False,
    metavar='true|false',
    help="BEIR's rule: a passage with the query's own id is not retrieved for it (default: false)",
  )
  parser.add_argument(
    '--index_dir',
    metavar='DIR',
    help='keep the ScaNN index here, and use it again while the embeddings are the same',
  )
  parser.add_argument(
    '--recall',
    type=_fraction,
    default=0.95,
    help='the part of the exact best k that ScaNN should find (default: 0.95)',
  )
  parser.add_argument(
    '--recall_queries',
    type=cli.up_to(10**6, least=0),
    default=200,
    help='queries to measure the recall on, 0: do not measure (default: 200)',
  )
  parser.add_argument(
    '--dimensions',
    type=cli.up_to(2**20),
    help='compare the first numbers of the vectors alone (default: all)',
  )
  parser.add_argument(
    '--rescore',
    metavar='DIR',
    help='order the best passages by these embeddings of them, in float or int8',
  )
  parser.add_argument(
    '--rescore_factor',
    type=cli.up_to(1000),
    default=4,
    help='with --rescore: how many times --k passages are ordered (default: 4)',
  )
  group = parser.add_argument_group('with --index=milvus')
  milvus.add_arguments(group, required=False)
  group.add_argument(
    '--search_param',
    type=_setting,
    action='append',
    default=[],
    metavar='NAME=NUMBER',
    help='how much of the index to search, for instance nprobe=64; may be repeated',
  )
  cli.run(parser, _command, argv)


def _command(args: argparse.Namespace) -> None:
  import jax

  process, processes = jax.process_index(), jax.process_count()
  if processes > 1 and args.index != 'exact':
    raise InputError(
      f'--index={args.index} searches in one process; {processes} of them search with --index=exact'
    )
  inputs = {f'--{name}': getattr(args, name) for name in ('corpus', 'queries', 'like', 'rescore')}
  if args.uri and milvus.is_local(args.uri):
    inputs['--uri'] = args.uri
  with outputs.claim(args.out, inputs, lock=not process):
    if args.index_dir:
      outputs.check_outputs_apart({'--out': args.out, '--index_dir': args.index_dir})
      with _claim_index(args.index_dir, inputs, lock=False):
        pass
    _search(args, process, processes)


def _search(args: argparse.Namespace, process: int, processes: int) -> None:
  compiled.keep()
  if args.index == 'milvus':
    if args.uri is None or args.corpus is not None:
      raise InputError(
        '--index=milvus searches what dprjax.index put at --uri=...; it takes no --corpus'
      )
    if args.queries and len(args.queries) > 1:
      raise InputError('--index=milvus takes one --queries')
    if args.rescore:
      raise InputError(
        '--rescore orders what --index=scann or exact finds; Milvus orders by what it holds'
      )
    if args.like and args.dimensions:
      raise InputError('--dimensions cuts --queries; --like searches with the stored vectors')
    queries: Any = read_ids(args.like) if args.like else None
    if args.queries:
      queries = embeddings.load_embeddings(args.queries[0]).cut(args.dimensions, '--queries')
    with contextlib.closing(milvus.Server(args.uri, args.token)) as server:
      run, report = search_milvus(
        server.open(args.collection),
        queries,
        k=args.k,
        drop_same_id=args.drop_same_id,
        settings=dict(args.search_param),
      )
  else:
    if args.corpus is None or args.queries is None or args.uri is not None:
      raise InputError(
        f'--index={args.index} needs --corpus and --queries; --uri and --like go with '
        '--index=milvus'
      )
    corpus, *several = [
      embeddings.load_embeddings(folder, process=process, processes=processes)
      for folder in (args.corpus, *args.queries, *([args.rescore] if args.rescore else []))
    ]
    rescore = several.pop() if args.rescore else None
    run, report = search(
      corpus,
      several,
      k=args.k,
      index=args.index,
      drop_same_id=args.drop_same_id,
      index_dir=args.index_dir,
      recall=args.recall,
      recall_queries=args.recall_queries,
      dimensions=args.dimensions,
      rescore=rescore,
      rescore_factor=args.rescore_factor,
    )
  if process:
    return
  trec.write_run(args.out, run, f'dprjax-{report["index"]}')
  outputs.write_report(args.out, report)
  for role, ids in report.get('seen', {}).items():
    logger.info('%s: the model %s %d of these queries', args.out, seen.ROLES[role], len(ids))
  recalls = ''.join(
    f', {name} {value:.4f}'
    for name, value in report.get('recall', {}).items()
    if name.startswith('recall@')
  )
  logger.info(
    '%s: %s for %s (%s%s), %s queries a second',
    args.out,
    counted(len(run.docs), 'passages'),
    counted(len(run), 'queries'),
    report.get('kind', 'exact'),
    recalls,
    rate(report['queries_per_second']),
  )


def _fraction(text: str) -> float:
  try:
    value = float(text)
  except ValueError:
    value = -1.0
  if not 0 < value <= 1:
    raise argparse.ArgumentTypeError(f'expected a number above 0 and up to 1, not {text!r}')
  return value


def _setting(text: str) -> tuple[str, float]:
  name, value = cli.named(text)
  try:
    number = float(value)
  except ValueError:
    number = math.nan
  if not math.isfinite(number):
    raise argparse.ArgumentTypeError(f'expected NAME=NUMBER, not {text!r:.80}')
  return name, int(number) if number.is_integer() else number


if __name__ == '__main__':
  main()
