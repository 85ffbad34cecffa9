"""Mines hard negatives from any number of runs, and writes a training file (unified negative
mining, DPTDR section 3.3).

    python -m dprjax.mine --queries=queries.jsonl --corpus=corpus.jsonl --qrels=qrels/train.tsv \\
        --run=bm25.trec --run=dpt=dpt.trec --out=train.jsonl

A query's un-denoised pool is the best 200 of every run without the positives and copies of them; 30
of it, drawn at random, go to the file. With --reranker=DIR (a cross-encoder) or --reranked=FILE (a
run that `python -m dprjax.rerank` has rescored), those with a probability below 0.1 are the
denoised pool, and up to 30 of them go to the file too. Every negative keeps its retrievers, ranks
and scores: docs/mining.md describes the file. The same inputs and seed give the same file, byte for
byte. train.jsonl.json beside it has the counts.

Train with --config.data.train=train.jsonl; --config.mix.denoised and its like set the share of each
pool.
"""

import argparse
import logging
from collections.abc import Sequence

from etils import epath

from dprjax.base import files, outputs
from dprjax.base.errors import InputError
from dprjax.formats import runs
from dprjax.formats.fields import check_id
from dprjax.mining import negatives as mining
from dprjax.runtime import cli

logger = logging.getLogger('dprjax')


def name_retrievers(values: Sequence[str]) -> dict[str, str]:
  """``[NAME=]FILE`` -> name of the retriever -> file. Without a name it is the run's tag or, if two
  runs have the same tag, the file's stem.

  Raises:
    InputError: two of one name, a missing run, or a pipe.
  """
  given: list[tuple[str, str]] = []
  for value in values:
    name, equals, path = value.partition('=')
    # An equals sign in a path does not end a name.
    given.append((name, path) if equals and name and '/' not in name else ('', value))
  for _, path in given:
    files.regular_file(path, 'run')  # it is read twice
  tags = [name or runs.read_tag(path) for name, path in given]
  named: dict[str, str] = {}
  for (name, path), tag in zip(given, tags, strict=True):
    chosen = name or (tag if tags.count(tag) == 1 else epath.Path(path).name.split('.')[0])
    check_id(chosen, f'--run={path}: the name of the retriever')
    if chosen in named:
      raise InputError(
        f'--run={path}: there is already a retriever called {chosen} ({named[chosen]}); give '
        f'--run=NAME={path}'
      )
    named[chosen] = path
  return named


def main(argv: Sequence[str] | None = None) -> None:
  default = mining.Options()
  parser = cli.Parser('mine', __doc__ or '')
  flag = parser.add_argument
  flag(
    '--queries',
    required=True,
    metavar='FILE',
    help='jsonl with _id and text, or a tsv of id and text; .gz and .xz too',
  )
  flag('--corpus', required=True, metavar='FILE', help='likewise, with _id, title and text')
  flag('--qrels', required=True, metavar='FILE', help='judgements; a grade above 0 is a positive')
  flag(
    '--run',
    required=True,
    action='append',
    metavar='[NAME=]run.trec',
    help='a TREC run, and the name of its retriever; may be repeated',
  )
  flag('--out', required=True, metavar='train.jsonl', help='the training file')
  flag(
    '--depth',
    type=cli.positive,
    default=default.depth,
    help='rows of every run, a query (default: %(default)s)',
  )
  flag(
    '--sample',
    type=cli.positive,
    default=default.sample,
    help='negatives a query of each pool (default: %(default)s)',
  )
  flag('--reranker', metavar='DIR', help='a cross-encoder that scores for the denoised pool')
  flag(
    '--reranker_prompt',
    metavar='prompt.npz',
    help='a prompt of pairs; --reranker is then its backbone, with a masked-LM head. Scores '
    'here are differences of logits, whatever its meta says',
  )
  flag('--reranked', metavar='run.trec', help="in its place, a run with a reranker's logits")
  flag(
    '--threshold',
    type=float,
    default=default.threshold,
    help='a candidate is denoised if its probability, the sigmoid of its score, is below it '
    '(default: %(default)s)',
  )
  flag(
    '--max_length',
    type=cli.positive,
    help="tokens of a pair, for --reranker (default: the cross-encoder's, or the prompt's)",
  )
  flag(
    '--batch_size',
    type=cli.positive,
    default=64,
    help='pairs at a time, for --reranker (default: %(default)s)',
  )
  cli.add_dtype(parser, ', for --reranker')
  flag('--seed', type=cli.count, default=default.seed, help='of the samples (default: %(default)s)')
  flag(
    '--texts',
    type=cli.boolean,
    metavar='true|false',
    default=True,
    help='false: passages by their ids alone, for a training run that reads the corpus as well '
    '(default: true)',
  )
  flag(
    '--drop_same_id',
    type=cli.boolean,
    metavar='true|false',
    default=False,
    help="BEIR's rule: a passage with the query's own id is no negative of it (default: false)",
  )
  flag(
    '--score_positives',
    type=cli.boolean,
    metavar='true|false',
    default=False,
    help='true: the file has scores of the positives too, as config.distillation needs them; with '
    '--reranker or --reranked (default: false)',
  )
  flag(
    '--strict',
    action='store_true',
    help='fail if an id is unknown, a rank comes twice or a query has no candidate; otherwise they '
    'are counted and listed',
  )
  flag(
    '--tmp_dir',
    metavar='DIR',
    help='for the rows of the runs and the index of the corpus, 24 bytes each (default: the folder '
    'of --out)',
  )
  cli.run(parser, _command, argv)


def _command(args: argparse.Namespace) -> None:
  if not 0 < args.threshold < 1:  # nor NaN
    raise InputError(f'--threshold={args.threshold}: a probability between 0 and 1 is needed')
  if args.reranker_prompt and not args.reranker:
    raise InputError(
      f'--reranker_prompt={args.reranker_prompt} needs --reranker=DIR, the backbone that it was '
      'trained on'
    )
  if args.score_positives and not (args.reranker or args.reranked):
    raise InputError('--score_positives=true needs scores: give --reranker=DIR or --reranked=FILE')
  for path, what in ((args.queries, 'queries'), (args.qrels, 'qrels')):
    files.existing_file(path, what)
  files.regular_file(args.corpus, 'corpus')
  retrievers = name_retrievers(args.run)
  inputs: outputs.Inputs = {
    '--queries': args.queries,
    '--corpus': args.corpus,
    '--qrels': args.qrels,
    '--run': retrievers.values(),
    '--reranker': args.reranker,
    '--reranker_prompt': args.reranker_prompt,
    '--reranked': args.reranked,
  }
  if args.tmp_dir is not None:
    outputs.check_name(args.tmp_dir, '--tmp_dir')
    outputs.check_apart(mining.scratch_folder(args.out, args.tmp_dir), inputs, '--tmp_dir')
  with outputs.claim(args.out, inputs):
    _mine(args, retrievers)


def _mine(args: argparse.Namespace, retrievers: dict[str, str]) -> None:
  score = None
  if args.reranker:
    # JAX and a model take seconds to load.
    from dprjax.inference import reranker
    from dprjax.runtime import compiled

    compiled.keep()
    options = {
      'max_length': args.max_length,
      'batch_size': args.batch_size,
      'dtype': args.dtype,
    }
    if args.reranker_prompt:
      options['score'] = 'logit'  # its sigmoid is compared with the threshold
    score = reranker.load(args.reranker, args.reranker_prompt, **options).score
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
      score_positives=args.score_positives,
      strict=args.strict,
      scratch=args.tmp_dir,
    ),
  )
  if args.reranker_prompt:
    report = {**report, 'reranker_prompt': args.reranker_prompt}
  outputs.write_report(args.out, report | {'reranker': args.reranker})


if __name__ == '__main__':
  main()
