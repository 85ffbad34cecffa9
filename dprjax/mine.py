"""Mines hard negatives from any number of runs, and writes a training file (unified negative
mining, DPTDR section 3.3).

    python -m dprjax.mine --queries=queries.jsonl --corpus=corpus.jsonl --qrels=qrels/train.tsv
    --run=bm25.trec --run=dpt=dpt.trec --out=train.jsonl

The best 200 of every run, less the positives and copies of them, are a query's un-denoised pool; 30
of it, drawn at random, go to the file. With --reranker=DIR (a cross-encoder) or --reranked=FILE (a
run that `python -m dprjax.rerank` has rescored) up to 30 of those whose probability is below 0.1
make the denoised pool besides. Every negative keeps its retrievers, ranks and scores:
docs/mining.md describes the file. The same inputs and seed give the same file, byte for byte;
train.jsonl.json beside it says what was counted.

Train with it: --config.data.train=train.jsonl, and --config.mix.denoised and its like for the share
of each pool.
"""

import argparse
import logging
from collections.abc import Sequence

from etils import epath

from dprjax.base import files
from dprjax.base.errors import InputError
from dprjax.formats import runs
from dprjax.mining import negatives as mining
from dprjax.runtime import cli

logger = logging.getLogger('dprjax')


def name_retrievers(values: Sequence[str]) -> dict[str, str]:
  """``[NAME=]FILE`` -> name of the retriever -> file. Without a name it is what the run's tag says,
  or, if two say the same, the file's stem.

  Raises:
    InputError: two of one name, or a run that is not there.
  """
  given: list[tuple[str, str]] = []
  for value in values:
    name, equals, path = value.partition('=')
    # An equals sign deep in a path makes no name.
    given.append((name, path) if equals and name and '/' not in name else ('', value))
  tags = [name or runs.read_tag(path) for name, path in given]
  named: dict[str, str] = {}
  for (name, path), tag in zip(given, tags, strict=True):
    chosen = name or (tag if tags.count(tag) == 1 else epath.Path(path).name.split('.')[0])
    if chosen in named:
      raise InputError(
        f'--run={path}: a retriever called {chosen} is there already ({named[chosen]}); give '
        f'--run=NAME={path}'
      )
    named[chosen] = path
  return named


def main(argv: Sequence[str] | None = None) -> None:
  default = mining.Options()
  parser = cli.Parser('mine', __doc__ or '')
  parser.add_argument(
    '--queries',
    required=True,
    metavar='FILE',
    help='jsonl with _id and text, or a tsv of id and text; .gz and .xz too',
  )
  parser.add_argument(
    '--corpus', required=True, metavar='FILE', help='likewise, with _id, title and text'
  )
  parser.add_argument(
    '--qrels',
    required=True,
    metavar='FILE',
    help='the training judgements: what is graded above 0 is a positive',
  )
  parser.add_argument(
    '--run',
    required=True,
    action='append',
    metavar='[NAME=]run.trec',
    help='a TREC run; may be repeated. NAME: of its retriever',
  )
  parser.add_argument('--out', required=True, metavar='train.jsonl', help='the training file')
  parser.add_argument(
    '--depth',
    type=cli.positive,
    default=default.depth,
    help=f'of every run, a query (default: {default.depth})',
  )
  parser.add_argument(
    '--sample',
    type=cli.positive,
    default=default.sample,
    help=f'negatives a query of each pool (default: {default.sample})',
  )
  parser.add_argument(
    '--reranker',
    metavar='DIR',
    help='a cross-encoder that scores candidates, for the denoised pool',
  )
  parser.add_argument(
    '--reranked',
    metavar='run.trec',
    help='a run with its scores (logits), in place of the cross-encoder itself',
  )
  parser.add_argument(
    '--threshold',
    type=float,
    default=default.threshold,
    help='a candidate whose probability, the sigmoid of its score, is below it is denoised '
    f'(default: {default.threshold})',
  )
  parser.add_argument(
    '--max_length',
    type=cli.positive,
    help="tokens of a pair, for --reranker (default: the cross-encoder's)",
  )
  parser.add_argument(
    '--batch_size',
    type=cli.positive,
    default=64,
    help='pairs at a time, for --reranker (default: 64)',
  )
  parser.add_argument('--seed', type=int, default=default.seed, help='of the samples (default: 0)')
  parser.add_argument(
    '--texts',
    type=cli.boolean,
    default=True,
    metavar='true|false',
    help='false: passages by their ids alone, for a training run that reads the corpus as well '
    '(default: true)',
  )
  parser.add_argument(
    '--drop_same_id',
    type=cli.boolean,
    default=False,
    metavar='true|false',
    help="BEIR's rule: a passage with the query's own id is no negative of it (default: false)",
  )
  parser.add_argument(
    '--strict',
    action='store_true',
    help='fail where an id is unknown, a rank comes twice or a query has no candidate; else they '
    'are counted and listed',
  )
  parser.add_argument(
    '--tmp_dir',
    metavar='DIR',
    help="for the runs' rows and the corpus' index, 24 bytes each (default: the folder of --out)",
  )
  cli.run(parser, _command, argv)


def _command(args: argparse.Namespace) -> None:
  files.output_file(args.out)
  if not 0 < args.threshold < 1:
    raise InputError(f'--threshold={args.threshold}: a probability between 0 and 1 is needed')
  if args.seed < 0:
    raise InputError(f'--seed={args.seed}: a whole number from 0 on is needed')
  retrievers = name_retrievers(args.run)
  score = None
  if args.reranker:
    # Loading JAX and a model is for those who asked for it.
    from dprjax.inference.reranker import CrossEncoder
    from dprjax.runtime import compiled

    compiled.keep()
    score = CrossEncoder.load(
      args.reranker, max_length=args.max_length, batch_size=args.batch_size
    ).score
  report = mining.mine(
    queries=args.queries,
    corpus=args.corpus,
    qrels=args.qrels,
    retrievers=retrievers,
    out=args.out,
    reranked=args.reranked,
    score=score,
    options=mining.Options(
      depth=args.depth,
      sample=args.sample,
      threshold=args.threshold,
      seed=args.seed,
      texts=args.texts,
      drop_same_id=args.drop_same_id,
      strict=args.strict,
      scratch=args.tmp_dir,
    ),
  )
  files.write_json(f'{args.out}.json', report | {'reranker': args.reranker})


if __name__ == '__main__':
  main()
