"""Ranks passages by BM25, and writes a TREC run.

    python -m dprjax.bm25 --corpus=corpus.jsonl --queries=queries.jsonl --qrels=qrels/test.tsv \\
        --out=bm25.trec

Words are stemmed and stop words left out. Text may be in any script: where words have no spaces
between them (Chinese, Japanese, Thai, ...), and in Korean, each letter and each two neighbours are
words. Beside the run, bm25.trec.json says how it was made.
"""

import argparse
import contextlib
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

from dprjax.base import files, outputs
from dprjax.base.counts import counted, rate
from dprjax.base.errors import InputError
from dprjax.formats import trec
from dprjax.formats.qrels import read_qrels
from dprjax.formats.texts import read_texts
from dprjax.retrieval import bm25
from dprjax.runtime import cli

logger = logging.getLogger('dprjax')


def search(
  corpus: str,
  queries: str,
  *,
  k: int,
  qrels: str | None,
  strict: bool,
  drop_same_id: bool,
  k1: float,
  b: float,
  language: str,
  index_dir: str | None,
) -> tuple[trec.Run, dict[str, Any]]:
  """The best k passages for every query.

  Args:
    corpus, queries: files of texts, see ``formats.texts``.
    k: passages a query.
    qrels: rank only for the queries that are judged here.
    strict: fail on a judged query that is not among the queries, instead of counting it.
    drop_same_id: BEIR's rule: a passage with the query's own id is never retrieved for it.
    k1, b, language: see ``retrieval.bm25.build``.
    index_dir: keeps the index between runs; rebuilt for other passages or settings.

  Returns:
    The run, and the report that is written beside it.

  Raises:
    InputError: bad files or settings.
  """
  bm25.check_settings(k1, b, language)
  found_corpus = files.regular_file(corpus, 'corpus')  # it is read twice
  texts = {query.id: query.text for query in read_texts(queries, 'query')}
  unknown: list[str] = []
  if qrels is not None:
    judged = read_qrels(qrels)
    unknown = [query_id for query_id in judged if query_id not in texts]
    cli.report_ids(
      f'{qrels}: {len(unknown):,} of {counted(len(judged), "queries")} not in {queries}',
      unknown,
      strict or len(unknown) == len(judged),
    )
    texts = {query_id: text for query_id, text in texts.items() if query_id in judged}
  settings = {'k1': k1, 'b': b, 'language': language}
  corpus_sha256 = files.sha256_file(found_corpus)
  started = time.perf_counter()
  fingerprint = f'{corpus_sha256} {sorted(settings.items())} words {bm25.WORDS}'
  index = bm25.load(index_dir, fingerprint) if index_dir else None
  if index is not None:
    # What a command left that was killed before it could; another one may hold it, or it is shared
    # and cannot be written to.
    with contextlib.suppress(InputError, OSError), _claim(index_dir, {}):
      pass
  if index is None:
    passages = {passage.id: passage.text for passage in read_texts(corpus, 'passage')}
    index = bm25.build(list(passages), list(passages.values()), k1=k1, b=b, language=language)
    if index_dir:
      inputs = {'--corpus': corpus, '--queries': queries, '--qrels': qrels}
      with _claim(index_dir, inputs):
        bm25.save(index, index_dir, fingerprint)
  indexed = time.perf_counter()
  found = index.search(list(texts.values()), k + drop_same_id)
  seconds = {'index': indexed - started, 'search': time.perf_counter() - indexed}
  run = trec.run_from_rows(list(texts), index.ids, found.rows, found.scores)
  empty = [query_id for query_id, ranking in run if not ranking]
  cli.report_ids(
    f'{queries}: {len(empty):,} of {counted(len(run), "queries")} without a word of any passage',
    empty,
    False,
  )
  if drop_same_id:
    run = run.keep(~run.same_id()).top(k)
  return run, {
    'index': 'bm25s',
    'settings': settings,
    'k': k,
    'drop_same_id': drop_same_id,
    'queries': len(run),
    'passages': len(index.ids),
    'unknown_queries': len(unknown),
    'queries_without_passages': len(empty),
    'seconds': seconds,
    'queries_per_second': len(run) / seconds['search'],
    'corpus_sha256': corpus_sha256,
  }


def _claim(index_dir: str | None, inputs: outputs.Inputs) -> Any:
  return outputs.claim_folder(
    index_dir or '', inputs, what='a BM25 index', ours=bm25.is_index, flag='--index_dir'
  )


def main(argv: Sequence[str] | None = None) -> None:
  parser = cli.Parser('bm25', __doc__ or '')
  flag = parser.add_argument
  flag(
    '--corpus',
    required=True,
    metavar='FILE',
    help='jsonl with _id, title and text, or a tsv of id and text; .gz and .xz too',
  )
  flag('--queries', required=True, metavar='FILE', help='likewise, with _id and text')
  flag(
    '--out',
    required=True,
    metavar='run.trec',
    help='the run; its report goes to the same name with .json added',
  )
  flag(
    '--k',
    type=cli.positive,
    default=1000,
    help='passages a query, those that share a word with it (default: 1000)',
  )
  flag('--qrels', metavar='FILE', help='rank only for the queries that are judged here')
  flag(
    '--strict',
    action='store_true',
    help='fail where the qrels name an unknown query, instead of counting it',
  )
  flag(
    '--drop_same_id',
    type=cli.boolean,
    default=False,
    metavar='true|false',
    help="BEIR's rule: a passage with the query's own id is not retrieved for it (default: false)",
  )
  flag(
    '--k1',
    type=float,
    default=1.5,
    help='how soon the repetition of a word stops counting (default: 1.5)',
  )
  flag(
    '--b', type=float, default=0.75, help='how much long passages are discounted (default: 0.75)'
  )
  flag(
    '--language',
    default='english',
    help='of the stemmer and the stop words; none for neither (default: english)',
  )
  flag(
    '--index_dir',
    metavar='DIR',
    help='keep the index here, and use it again while passages and settings stay the same',
  )
  cli.run(parser, _command, argv)


def _command(args: argparse.Namespace) -> None:
  inputs = {f'--{name}': getattr(args, name) for name in ('corpus', 'queries', 'qrels')}
  with outputs.claim(args.out, inputs) as out:
    if args.index_dir is not None:
      outputs.check_name(args.index_dir, '--index_dir')
      outputs.check_apart(args.index_dir, inputs, '--index_dir')
      report_file = f'{files.resolved(out)}.json'
      outputs.check_outputs_apart({'--out': out, '--index_dir': args.index_dir})
      outputs.check_outputs_apart({'--out': report_file, '--index_dir': args.index_dir})
    run, report = search(**{k: v for k, v in vars(args).items() if k not in ('out', 'debug')})
    trec.write_run(out, run, 'dprjax-bm25')
    outputs.write_report(out, report)
  logger.info(
    '%s: %s for %s, %s queries a second',
    out,
    counted(len(run.docs), 'passages'),
    counted(len(run), 'queries'),
    rate(report['queries_per_second']),
  )


if __name__ == '__main__':
  # Importing bm25s starts JAX, which must not take the accelerator from another process.
  os.environ['JAX_PLATFORMS'] = 'cpu'
  main()
