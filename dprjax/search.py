"""Searches embeddings of passages for the queries in another folder, and writes a TREC run.

    python -m dprjax.search --retriever=mine --queries=queries.jsonl --out=run.trec
    python -m dprjax.search --corpus=embeddings/corpus --queries=embeddings/test --out=run.trec

dprjax.index fills a retriever, the folder of dprjax.export. dprjax.encode makes the two folders of
the second command, with the same backbone and prompt. run.trec.json has
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
import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

from dprjax.base import cli, compiled, files, flags, outputs
from dprjax.base.errors import InputError
from dprjax.base.flags import flag
from dprjax.encoding import embeddings
from dprjax.retrieval import hybrid, scann, searching
from dprjax.text import trec
from dprjax.text.fields import read_ids
from dprjax.text.texts import read_texts


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
  retriever: str | None = flag(
    'a folder of dprjax.export with an index: then --queries is a file of texts',
    None,
    metavar='DIR',
  )
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


def main(argv: Sequence[str] | None = None) -> None:
  cli.run(Flags, _command, argv)


def _command(args: Flags) -> None:
  import jax

  process, processes = jax.process_index(), jax.process_count()
  if processes > 1 and (args.index != 'exact' or args.engine.uri):
    raise InputError(f'--index={args.index} needs one process, not {processes}; use --index=exact')
  _check_hybrid(args)
  if args.retriever is not None:
    others = flags.given(
      *(args, 'corpus', 'index', 'index_dir', 'recall', 'recall_queries', 'dimensions', 'rescore'),
      *('rescore_factor', 'hybrid', 'like'),
    )
    if others or args.engine.uri:
      raise InputError(f'--{others[0] if others else "uri"} does not go with --retriever')
  args = dataclasses.replace(args, corpus=_folders(args.corpus))
  inputs = flags.paths(
    args, 'retriever', 'corpus', 'queries', 'like', 'rescore', 'hybrid', 'texts', 'bm25_index'
  )
  if args.engine.uri is not None:
    from dprjax import engines

    address = engines.address_of(args.engine.uri)
    inputs |= {'--uri': address.place} if address.is_local else {}
  with outputs.claim(args.out, inputs, also={'--index_dir': args.index_dir}, lock=not process):
    if args.index_dir:
      outputs.check_folder(args.index_dir, inputs, **searching.INDEX_FOLDER)
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


def _search(args: Flags, process: int, processes: int) -> None:
  compiled.keep()
  if args.retriever is not None:
    run, report = _search_retriever(args.retriever, args)
  elif args.engine.uri is not None:
    run, report = _search_engine(args)
  else:
    run, report = _search_embeddings(args, process, processes)
  if process:
    return
  how = report.get('kind', 'exact')
  if how == 'brute_force':
    how = f'exact, as ScaNN compares all of fewer than {scann.BRUTE_FORCE_BELOW:,} passages'
  else:
    for name, value in report.get('recall', {}).items():
      how += f', {name} {value:.4f}' if name.startswith('recall@') else ''
  trec.write_reported(args.out, run, f'dprjax-{report["index"]}', report, how)


def _search_retriever(retriever: str, args: Flags) -> tuple[trec.Run, dict[str, Any]]:
  with cli.loading():
    from dprjax.retrieval import folder
    from dprjax.retrieval.retriever import Retriever
  if not folder.has_index(retriever):
    raise InputError(
      f'--retriever={retriever} has no index; fill it: dprjax index --retriever={retriever} '
      '--input=corpus.jsonl'
    )
  found = Retriever.load(retriever)
  texts = {text.id: text.text for path in args.queries for text in read_texts(path, 'query')}
  started = time.perf_counter()
  results = found.search(texts, args.k + args.drop_same_id)
  seconds = time.perf_counter() - started
  rankings = {
    query.id: {hit.id: hit.score for hit in hits}
    for query, hits in zip(results.queries, results, strict=True)
  }
  run = trec.run_from_dict(rankings)
  if args.drop_same_id:
    run = run.keep(~run.same_id()).top(args.k)
  return run, {
    'index': 'retriever',
    'k': args.k,
    'queries': len(run),
    'truncated': results.truncated,
    'seconds': seconds,
    'queries_per_second': len(run) / seconds,
  }


def _search_engine(args: Flags) -> tuple[trec.Run, dict[str, Any]]:
  from dprjax.engines import searching as in_engine

  flags.refuse(args, ('corpus', 'rescore', 'index_dir'), 'index=scann or exact, without --uri')
  if len(args.queries) > 1:
    raise InputError('--uri takes only one --queries')
  if args.like and args.dimensions:
    raise InputError('--dimensions cuts --queries; --like searches with the stored vectors')
  queries = None
  ids = read_ids(args.like) if args.like else []
  if args.queries:
    queries = embeddings.load_embeddings(args.queries[0]).cut(args.dimensions, '--queries')
    queries.check_side('query', '--queries')
    ids = queries.ids
  weights = hybrid.read(args.hybrid) if args.hybrid else None
  assert args.engine.uri is not None
  run, report = in_engine.search(
    args.engine.uri,
    args.engine.collection,
    queries,
    ids,
    args.k,
    where=args.engine.where,
    settings=args.engine.search_param,
    drop_same_id=args.drop_same_id,
    weights=weights,
    texts=searching.query_texts(args.texts, ids) if weights and args.texts else (),
  )
  if weights is not None and args.hybrid is not None:
    report |= searching.hybrid_report(args.hybrid, weights)
  return run, report


def _search_embeddings(
  args: Flags, process: int, processes: int
) -> tuple[trec.Run, dict[str, Any]]:
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
  queries = loaded[len(args.corpus) :]
  rescore = queries.pop() if args.rescore else None
  fused = None
  if args.hybrid is not None and args.bm25_index is not None:
    fused = hybrid.load(hybrid.read(args.hybrid), args.bm25_index, corpus.ids)
  run, report = searching.search(
    corpus,
    queries,
    args.k if fused is None else fused.fusion.depth,
    index=args.index,
    drop_same_id=args.drop_same_id,
    dimensions=args.dimensions,
    index_dir=args.index_dir,
    recall=args.recall,
    recall_queries=args.recall_queries,
    rescore=rescore,
    rescore_factor=args.rescore_factor,
  )
  if fused is not None and not process and args.texts and args.hybrid:
    texts = searching.query_texts(args.texts, run.query_ids)
    run, report = searching.with_bm25(run, report, fused, texts, args.k, args.drop_same_id)
    report |= searching.hybrid_report(args.hybrid, fused.fusion)
  return run, report


if __name__ == '__main__':
  main()
