"""Ranks passages by BM25, and writes a TREC run.

    python -m dprjax.bm25 --corpus=corpus.jsonl --queries=queries.jsonl --qrels=qrels/test.tsv \\
        --out=bm25.trec

Words are stemmed, and stop words left out. In scripts without spaces between words (Chinese,
Japanese, Thai, ...) and in Korean, each letter and each pair of neighbours is a word.
bm25.trec.json has the settings.
"""

import dataclasses
import logging
import os
import time
from typing import Any

from dprjax.base import cli, flags, outputs
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.base.flags import flag
from dprjax.retrieval import bm25_index
from dprjax.text import trec
from dprjax.text.fields import report_ids
from dprjax.text.qrels import read_qrels
from dprjax.text.texts import Texts, columns_of, read_texts
from dprjax.text.vector_spec import SIDES

logger = logging.getLogger('dprjax')

_INDEX: Any = {'what': 'a BM25 index', 'ours': bm25_index.is_index, 'flag': '--index_dir'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  corpus: str = flags.texts_file('_id, title and text')
  queries: str = flags.texts_file('_id and text')
  column: dict[str, str] = flags.columns('id, title or text of the corpus, query_id or query')
  out: str = flag('the run; its report goes to run.trec.json', metavar='run.trec')
  k: int = flag('passages a query, those that share a word with it', 1000)
  qrels: str | None = flag('rank only for queries judged here', None, metavar='FILE')
  drop_same_id: bool = flags.drop_same_id()
  k1: float = flag(
    'saturation of repeated words: smaller values saturate sooner', bm25_index.K1, read=float
  )
  b: float = flag('strength of the discount of long passages', bm25_index.B, read=float)
  language: str = flag(
    'language of the stemmer and stop words; none for neither', bm25_index.LANGUAGE
  )
  index_dir: str | None = flag(
    'keep the index here and reuse it while passages and settings are the same',
    None,
    metavar='DIR',
  )


def _search(args: Flags) -> tuple[trec.Run, dict[str, Any]]:
  bm25_index.check_settings(args.k1, args.b, args.language)
  columns = {side: columns_of(side, args.column) for side in SIDES}
  corpus = Texts(args.corpus, 'passage', columns=columns['passage'])
  read = read_texts(args.queries, 'query', columns=columns['query'])
  texts = {query.id: query.text for query in read}
  unknown: list[str] = []
  if args.qrels is not None:
    judged = read_qrels(args.qrels)
    unknown = [query_id for query_id in judged if query_id not in texts]
    report_ids(
      f'{args.qrels}: {len(unknown):,} of {counted(len(judged), "queries")} not in {args.queries}',
      unknown,
    )
    texts = {query_id: text for query_id, text in texts.items() if query_id in judged}
    if not texts:
      raise InputError(f'{args.qrels}: it judges no query of {args.queries}')
  settings: dict[str, Any] = {'k1': args.k1, 'b': args.b, 'language': args.language}
  corpus_sha256 = corpus.sha256()
  started = time.perf_counter()
  fingerprint = f'{corpus_sha256} {sorted(settings.items())} words {bm25_index.WORDS}'
  index = bm25_index.load(args.index_dir, fingerprint) if args.index_dir else None
  if index is not None and args.index_dir:
    outputs.clear(args.index_dir)
  if index is None:
    index = bm25_index.build_texts(corpus, **settings)
    if args.index_dir:
      with outputs.claim_folder(args.index_dir, {}, **_INDEX):
        bm25_index.save(index, args.index_dir, fingerprint)
  indexed = time.perf_counter()
  found = index.search(list(texts.values()), args.k + args.drop_same_id)
  seconds = {'index': indexed - started, 'search': time.perf_counter() - indexed}
  run = trec.run_from_rows(list(texts), index.ids, found.rows, found.scores)
  empty = [query_id for query_id, ranking in run if not ranking]
  report_ids(
    f'{args.queries}: {len(empty):,} of {counted(len(run), "queries")} share no word with a '
    'passage',
    empty,
  )
  if args.drop_same_id:
    run = run.keep(~run.same_id()).top(args.k)
  return run, {
    'index': 'bm25s',
    'settings': settings,
    'k': args.k,
    'drop_same_id': args.drop_same_id,
    'queries': len(run),
    'passages': len(index.ids),
    'unknown_queries': len(unknown),
    'queries_without_passages': len(empty),
    'seconds': seconds,
    'queries_per_second': len(run) / seconds['search'],
    'corpus_sha256': corpus_sha256,
  }


def _command(args: Flags) -> None:
  inputs = flags.paths(args, 'corpus', 'queries', 'qrels')
  with outputs.claim(args.out, inputs, also={'--index_dir': args.index_dir}):
    if args.index_dir is not None:
      outputs.check_folder(args.index_dir, inputs, **_INDEX)
    run, report = _search(args)
    trec.write_reported(args.out, run, 'dprjax-bm25', report)


main = cli.main(Flags, _command)

if __name__ == '__main__':
  # Importing bm25s starts JAX, which must not take the accelerator from another process.
  os.environ['JAX_PLATFORMS'] = 'cpu'
  main()
