"""Searches embeddings of passages for the queries in another folder, and writes a TREC run.

    python -m dprjax.search --retriever=mine --queries=queries.jsonl --out=run.trec
    python -m dprjax.search --corpus=embeddings/corpus --queries=embeddings/test --out=run.trec

dprjax.index fills a retriever, the folder of dprjax.export. dprjax.encode makes the two folders of
the second command, with the same backbone and prompt. run.trec.json has settings, recall and time.

ScaNN compares a query with every passage below 20,000 passages. Above, it searches as much of a
tree as --recall needs. Without ScaNN (Linux, Python below 3.14) the search is exact. Equal scores
are ranked by falling id, as trec_eval does. On several hosts, run the same command on each with
--index=exact: every process searches a part of the corpus.

An engine searches passages that dprjax.index stored:

    python -m dprjax.search --uri=milvus:index.db --queries=embeddings/test --out=run.trec
    python -m dprjax.search --uri=milvus:index.db --retriever=mine --queries=queries.jsonl \\
        --out=run.trec

A retriever with BM25 fuses both rankings; an engine searches by vectors. dprjax.fuse fuses runs.
"""

import dataclasses
from typing import Any

from dprjax.base import cli, flags, machine, outputs
from dprjax.base.errors import InputError
from dprjax.base.flags import flag
from dprjax.retrieval import searching
from dprjax.text import trec

# Options of `searching.search`, for folders of embeddings only.
_OPTIONS = ('index', 'index_dir', 'recall', 'dimensions', 'rescore', 'rescore_factor')


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineFlags(flags.CollectionFlags):
  where: tuple[str, ...] = flag(
    'only passages whose fields match a condition: lang=en or lang=en,de or year>=2020',
    (),
    metavar='CONDITION',
  )
  search_param: dict[str, float] = flag(
    'search effort, such as nprobe=64; may be repeated', {}, metavar='NAME=NUMBER'
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  retriever: str | None = flags.folder(
    'a folder of dprjax.export with an index or, with --uri, without: then --queries is a file of '
    'texts'
  )
  corpus: tuple[str, ...] = flag(
    'embeddings of the passages; several, or a pattern in quotes, for parts of a corpus',
    (),
    metavar='DIR',
  )
  queries: tuple[str, ...] = flag(
    'embeddings of the queries; with several for the same queries, the best score of a passage '
    'counts',
    metavar='DIR',
  )
  out: str = flags.run_out()
  index: str = flag('', 'scann', choices=('scann', 'exact'))
  k: int = flag('passages a query', 1000, most=10**6)
  drop_same_id: bool = flags.drop_same_id()
  index_dir: str | None = flags.folder(
    'keep the ScaNN index here while the embeddings are the same'
  )
  recall: float = flag('target fraction of the exact best k found by ScaNN', 0.95, most=1)
  dimensions: int | None = flag(
    'compare only this many leading numbers of vectors (default: all)', None, most=2**20
  )
  rescore: str | None = flags.folder(
    'order the best passages by these float or int8 embeddings of them'
  )
  rescore_factor: int = flag('order this many times --k passages with --rescore', 4, most=1000)
  engine: EngineFlags = flags.group(EngineFlags, 'passages in an engine')
  job: flags.Job = flags.job()


def _command(args: Flags) -> None:
  import jax

  process, processes = jax.process_index(), jax.process_count()
  if processes > 1 and (args.index != 'exact' or args.engine.uri):
    raise InputError(f'--index={args.index} needs one process, not {processes}; use --index=exact')
  if args.retriever is not None and (others := flags.given(args, 'corpus', *_OPTIONS)):
    raise InputError(f'--{others[0]} does not go with --retriever')
  args = dataclasses.replace(args, corpus=searching.find_folders(args.corpus))
  inputs = flags.paths(args, 'retriever', 'corpus', 'queries', 'rescore')
  if args.engine.uri is not None:
    from dprjax.engines.engine import address_of

    address = address_of(args.engine.uri)
    inputs |= {'--uri': address.place} if address.is_local else {}
  with outputs.claim(args.out, inputs, also={'--index_dir': args.index_dir}, lock=not process):
    if args.index_dir:
      outputs.check_folder(args.index_dir, inputs, **searching.INDEX_FOLDER)
    machine.keep_programs()
    run, report = _search(args)
    if process:
      return
    trec.write_reported(
      args.out, run, f'dprjax-{report["index"]}', report, searching.method(report)
    )


def _search(args: Flags) -> tuple[trec.Run, dict[str, Any]]:
  uri = args.engine.uri
  if uri is None:
    flags.refuse(args.engine, ('where', 'search_param', 'collection'), 'uri=ENGINE:PLACE')
    if args.retriever is None:
      return searching.search_folders(
        *(args.corpus, args.queries, args.k),
        drop_same_id=args.drop_same_id,
        **{name: getattr(args, name) for name in _OPTIONS},
      )
    with cli.loading():
      from dprjax.retrieval import retriever
    return retriever.search_files(args.retriever, args.queries, args.k, args.drop_same_id)
  with cli.loading():
    from dprjax.engines import parse_condition
    from dprjax.engines import searching as in_engine

  flags.refuse(args, ('corpus', 'rescore', 'index_dir'), 'index=scann or exact, without --uri')
  how: dict[str, Any] = {
    'where': [parse_condition(one) for one in args.engine.where],
    'settings': args.engine.search_param,
    'drop_same_id': args.drop_same_id,
  }
  place = uri, args.engine.collection
  if args.retriever is not None:
    return in_engine.search_texts(*place, args.queries, args.k, args.retriever, **how)
  if len(args.queries) > 1:
    raise InputError('--uri takes only one --queries')
  return in_engine.search_folder(*place, args.queries[0], args.k, dimensions=args.dimensions, **how)


main = cli.main(Flags, _command)

if __name__ == '__main__':
  main()
