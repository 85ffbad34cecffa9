"""Measures runs against judgements, with ir_measures.

    python -m dprjax.evaluate --run=run.trec --qrels=qrels/test.tsv --out=metrics.json

Every judged query counts; one without results counts as 0. Equal scores are ranked by falling id,
as trec_eval does. Several runs make one table:

    python -m dprjax.evaluate --run=frozen=a.trec --run=best=b.trec --qrels=qrels/test.tsv

Measures have their names in ir_measures, or those of trec_eval (ndcg_cut_10, recip_rank). nAP@k is
average precision over min(k, R) for R relevant documents, as in sentence-transformers and
Topic-DPR. Answer@k is the top-k accuracy of DPR;
the id of a question is its id, _id or query_id, or its place in the file, from 1:

    python -m dprjax.evaluate --run=nq.trec --answers=nq-test.qas.csv --corpus=psgs_w100.tsv \\
        --out=metrics.json

metrics.json: {"mean": {measure: value}, "per_query": {measure: {query: value}}, "counts": {...},
"settings": {...}, "command": text}.
"""

import dataclasses
from collections.abc import Mapping

from etils import epath

from dprjax.base import cli, files, flags, outputs
from dprjax.base.errors import InputError
from dprjax.base.flags import flag
from dprjax.retrieval import evaluation, measures
from dprjax.text import trec
from dprjax.text.qrels import read_qrels


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  run: tuple[tuple[str, str], ...] = flags.runs('a TREC run; with NAME= in a table of several')
  qrels: str | None = flags.file('judgements: a BEIR tsv, or the columns of TREC and MS MARCO')
  measure: tuple[str, ...] = flag(
    'names in ir_measures, one or several; may be repeated',
    measures.DEFAULT_MEASURES,
    split=' ',
    metavar='MEASURE',
  )
  out: str | None = flag(
    'file for the metrics of one run, which are also printed', None, metavar='metrics.json'
  )
  drop_same_id: bool = flags.drop_same_id('is left out')
  answers: str | None = flags.file(
    'answers to questions: DPR json or csv, or jsonl with id and answers'
  )
  corpus: str | None = flags.file(
    'passages (BEIR jsonl or DPR tsv), to look up answers and judged documents'
  )
  retriever: str | None = flags.folder(
    'a folder of dprjax.export, in place of --backbone and --prompt'
  )
  backbone: str | None = flags.backbone(None, ', for --queries')
  prompt: str | None = flag('of --backbone, for --queries', None, metavar='prompt.npz')
  queries: str | None = flags.file(
    'texts of the queries, to count those that the model was trained on'
  )
  answer_k: tuple[int, ...] = flag(
    'numbers of passages to search for an answer', evaluation.DEPTHS, split=' '
  )
  extra: dict[str, str] = flag(
    'a fact to record, such as the number of trained parameters: a column of dprjax.report',
    {},
    metavar='NAME=VALUE',
  )


def _command(args: Flags) -> None:
  if args.retriever is not None:
    flags.refuse(args, ('backbone', 'prompt'), 'queries, without --retriever')
  if bool(args.queries) != bool(args.backbone or args.prompt or args.retriever):
    raise InputError('--queries goes with the model: --retriever, --prompt or --backbone')
  if not args.qrels and not args.answers:
    raise InputError('nothing to measure; give --qrels, or --answers and --corpus')
  if args.answers and args.corpus is None:
    raise InputError('--answers needs --corpus, the passages to search for answers')
  paths = [path for _, path in args.run]
  runs = {name or path: path for name, path in args.run}
  if len(runs) < len(paths):
    raise InputError(f'--run={paths[-1]}: two runs have one name; name them --run=NAME=FILE')
  if len(runs) > 1 and args.out:
    raise InputError(f'--out={args.out} takes the metrics of one run')
  inputs = {'--run': paths, **flags.paths(args, 'qrels', 'answers', 'corpus', 'queries')}
  read = (*paths, args.qrels, args.answers, args.corpus, args.queries)
  pipes = [path for path in read if path and files.is_special(path)]
  if len({*pipes}) < len(pipes):
    raise InputError(f'{pipes[0]} is a pipe and can be read only once; write it to a file first')
  with outputs.claim(args.out, inputs, endings=('',)):
    _measure(args, runs)


def _measure(args: Flags, runs: Mapping[str, str]) -> None:
  # Small inputs first, before a large run is read.
  measures.parse_measures(args.measure)
  judged = read_qrels(args.qrels) if args.qrels else None
  questions = evaluation.read_answers(args.answers) if args.answers else None
  model = (args.backbone, args.prompt, args.retriever)
  known = evaluation.queries_of_model(*model) if args.queries else None
  rows = []
  for name, path in runs.items():
    metrics = evaluation.evaluate(
      trec.read_run(path),
      judged,
      args.measure,
      questions=questions,
      depths=args.answer_k,
      corpus=args.corpus,
      drop_same_id=args.drop_same_id,
      queries=args.queries,
      known=known,
      labels=(path, str(args.qrels)),
    )
    values, queries = metrics['mean'], next(iter(metrics['per_query'].values()))
    rows.append([name, *(f'{value:.4f}' for value in values.values()), str(len(queries))])
  metrics['command'] = _shown(args)
  if args.extra:
    metrics['extra'] = args.extra
  if args.out is not None:
    files.write_json(args.out, metrics)
  cli.print_table(['run', *values, 'queries'], rows)


def _shown(args: Flags) -> str:
  """The command for a model card, with only the names of files, since folders are private."""
  words = ['python -m dprjax.evaluate', f'--run={epath.Path(args.run[0][1]).name}']
  for option in ('qrels', 'answers', 'corpus', 'queries'):
    if path := getattr(args, option):
      words.append(f'--{option}={epath.Path(path).name}')
  if flags.given(args, 'measure'):
    words.append(f'--measure {" ".join(args.measure)}')
  if args.drop_same_id:
    words.append('--drop_same_id=true')
  return ' '.join(words)


main = cli.main(Flags, _command)

if __name__ == '__main__':
  main()
