"""Ranks passages by BM25, and writes a TREC run.

    python -m dprjax.bm25 --corpus=corpus.jsonl --queries=queries.jsonl --qrels=qrels/test.tsv
    --out=bm25.trec

Words are stemmed and stop words left out. Beside the run, bm25.trec.json says how it was made.
"""

import argparse
import logging
import time
from collections.abc import Sequence
from typing import Any

import jax

from dprjax.base import files
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
  k: int = 1000,
  qrels: str | None = None,
  strict: bool = False,
  drop_same_id: bool = False,
  k1: float = 1.5,
  b: float = 0.75,
  language: str = 'english',
  index_dir: str | None = None,
) -> tuple[trec.Run, dict[str, Any]]:
  """The best k passages for every query.

  Args:
    corpus, queries: files of texts, see ``formats.texts.read_texts``.
    k: passages a query.
    qrels: rank only for the queries that are judged here.
    strict: whether a judged query that is not among the queries is an error; else it is counted and
      listed.
    drop_same_id: BEIR's rule: a passage with the query's own id is never retrieved for it.
    k1, b, language: see ``retrieval.bm25.build``.
    index_dir: where the index is kept between runs; built there if it is missing or of other
      passages or settings.

  Returns:
    The run, and what is to be written beside it.

  Raises:
    InputError: bad files.
  """
  texts = {query.id: query.text for query in read_texts(queries, 'query')}
  unknown: list[str] = []
  if qrels is not None:
    judged = read_qrels(qrels)
    unknown = [query_id for query_id in judged if query_id not in texts]
    cli.tell(
      f'{qrels}: {len(unknown)} of {len(judged)} queries are not in {queries}',
      unknown,
      strict or len(unknown) == len(judged),
    )
    texts = {query_id: text for query_id, text in texts.items() if query_id in judged}
  settings = {'k1': k1, 'b': b, 'language': language}
  corpus_sha256 = files.sha256_file(files.existing(corpus, 'corpus'))
  started = time.perf_counter()
  fingerprint = f'{corpus_sha256} {sorted(settings.items())}'
  index = bm25.load(index_dir, fingerprint) if index_dir else None
  if index is None:
    passages = list(read_texts(corpus, 'passage'))
    index = bm25.build(
      [passage.id for passage in passages],
      [passage.text for passage in passages],
      k1=k1,
      b=b,
      language=language,
    )
    if index_dir:
      bm25.save(index, index_dir, fingerprint)
  indexed = time.perf_counter()
  found = index.search(list(texts.values()), k + drop_same_id)
  seconds = {'index': indexed - started, 'search': time.perf_counter() - indexed}
  run = trec.run_from_rows(list(texts), index.ids, found.rows, found.scores)
  nothing = [
    query_id
    for query_id, first in zip(run.query_ids, found.rows[:, 0].tolist(), strict=True)
    if first < 0
  ]
  cli.tell(
    f'{queries}: {len(nothing)} of {len(run)} queries share no word with any passage',
    nothing,
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
    'queries_without_passages': len(nothing),
    'seconds': seconds,
    'queries_per_second': len(run) / seconds['search'],
    'corpus_sha256': corpus_sha256,
  }


def main(argv: Sequence[str] | None = None) -> None:
  parser = cli.Parser('bm25', __doc__ or '')
  parser.add_argument(
    '--corpus',
    required=True,
    metavar='FILE',
    help='jsonl with _id, title and text, or a tsv of id and text; .gz and .xz too',
  )
  parser.add_argument(
    '--queries', required=True, metavar='FILE', help='likewise, with _id and text'
  )
  parser.add_argument(
    '--out',
    required=True,
    metavar='run.trec',
    help='the run; its report goes to the same name with .json behind it',
  )
  parser.add_argument(
    '--k',
    type=cli.positive,
    default=1000,
    help='passages a query, those that share a word with it (default: 1000)',
  )
  parser.add_argument('--qrels', metavar='FILE', help='rank for the queries judged here alone')
  parser.add_argument(
    '--strict',
    action='store_true',
    help='fail where the qrels name an unknown query, instead of counting it',
  )
  parser.add_argument(
    '--drop_same_id',
    type=cli.boolean,
    default=False,
    metavar='true|false',
    help="BEIR's rule: a passage with the query's own id is not retrieved for it (default: false)",
  )
  parser.add_argument(
    '--k1',
    type=float,
    default=1.5,
    help="how soon a word's repetition stops to count (default: 1.5)",
  )
  parser.add_argument(
    '--b', type=float, default=0.75, help='how much long passages are discounted (default: 0.75)'
  )
  parser.add_argument(
    '--language',
    default='english',
    help='whose stemmer and stop words; none for neither (default: english)',
  )
  parser.add_argument(
    '--index_dir',
    metavar='DIR',
    help='keep the index here, and use it again while the passages are the same',
  )

  def command(args: argparse.Namespace) -> None:
    files.output_file(args.out)
    run, report = search(
      args.corpus,
      args.queries,
      k=args.k,
      qrels=args.qrels,
      strict=args.strict,
      drop_same_id=args.drop_same_id,
      k1=args.k1,
      b=args.b,
      language=args.language,
      index_dir=args.index_dir,
    )
    trec.write_run(args.out, run, 'dprjax-bm25')
    files.write_json(f'{args.out}.json', report)
    logger.info(
      '%s: %s passages for %s queries, %.0f queries a second',
      args.out,
      f'{len(run.docs):,}',
      f'{len(run):,}',
      report['queries_per_second'],
    )

  cli.run(parser, command, argv)


if __name__ == '__main__':
  # bm25s starts JAX when it is imported, which would take the accelerator from whoever needs it.
  jax.config.update('jax_platforms', 'cpu')
  main()
