"""Measures runs against judgements, with ir_measures.

    python -m dprjax.evaluate --run=run.trec --qrels=qrels/test.tsv --out=metrics.json

Every judged query counts; one that the run has nothing for counts as 0. Several data sets in one
call make one table, with their average, the judgements given one by one or found in BEIR folders
(DIR/qrels/SPLIT.tsv, named as the folder is):

    python -m dprjax.evaluate --run=nq=nq.trec --qrels=nq=nq.tsv --run=fiqa=fiqa.trec
    --qrels=fiqa=fiqa.tsv --out=metrics.json python -m dprjax.evaluate --beir=beir/scifact
    --beir=beir/fiqa --run=scifact=a.trec --run=fiqa=b.trec --out=metrics.json

Open-domain question answering is measured by the answers in the passages found, Answer@k, as DPR
counts its top-k accuracy; a question's id is its id, _id or query_id, or its place in the file,
from 1:

    python -m dprjax.evaluate --run=nq.trec --answers=nq-test.qas.csv --corpus=psgs_w100.tsv
    --out=metrics.json

metrics.json: {"mean": {measure: value}, "per_query": {measure: {query: value}}, "counts": {...},
"settings": {...}}; with several data sets these are the averages over the sets, the queries as
SET/query, the sums, and "datasets" has each.
"""

import argparse
import logging
from collections.abc import Sequence
from typing import Any

from etils import epath

from dprjax.base import files
from dprjax.base.errors import InputError
from dprjax.formats import trec
from dprjax.formats.qrels import read_qrels
from dprjax.retrieval import answers, measures
from dprjax.runtime import cli

logger = logging.getLogger('dprjax')


def evaluate(
  run: str,
  *,
  qrels: str | None = None,
  names: Sequence[str] = measures.DEFAULT_MEASURES,
  drop_same_id: bool = False,
  strict: bool = False,
  answer_file: str | None = None,
  corpus: str | None = None,
  answer_k: Sequence[int] = (5, 20, 100),
  match: str = 'string',
) -> dict[str, Any]:
  """One run of one data set.

  Args:
    run: a TREC run.
    qrels: judgements; or ``answer_file``, or both.
    names: measures of ir_measures.
    drop_same_id: BEIR's rule: a document with the query's own id is taken out of the ranking.
    strict: fail where a judged query or a question is missing from the run, or a document from the
      corpus.
    answer_file: see ``retrieval.answers.read_answers``.
    corpus: the passages' texts; needed for answers, and else looked at for the judged documents'
      ids alone.
    answer_k, match: see ``retrieval.answers.answer_recall``.

  Returns:
    ``measures.Metrics`` and the settings.

  Raises:
    InputError: bad files, or what ``strict`` forbids.
  """
  # The small files first: a slip in them should not wait for a large run.
  measures.parse_measures(names)
  if not qrels and not answer_file:
    raise InputError(f'nothing to measure {run} by: give --qrels, or --answers and --corpus')
  if answer_file and corpus is None:
    raise InputError('--answers needs --corpus, the passages to look for them in')
  judged = read_qrels(qrels) if qrels else {}
  given = answers.read_answers(answer_file) if answer_file else {}
  ranked = trec.read_run(run)
  same = ranked.same_id()
  touched = len(set(ranked.query_of_row()[same].tolist()))
  if drop_same_id:
    ranked = ranked.keep(~same)
  elif touched:
    logger.info(
      '%s: for %d of %d queries a document of the same id was found; BEIR leaves it out: '
      '--drop_same_id=true',
      run,
      touched,
      len(ranked),
    )
  parts: list[measures.Metrics] = []
  retrieved_for = set(ranked.query_ids)
  if qrels:
    parts.append(measures.measure(ranked, judged, names))
    missing = [query_id for query_id in judged if query_id not in retrieved_for]
    cli.tell(
      f'{run}: nothing for {len(missing)} of {len(judged)} judged queries, which count as 0',
      missing,
      strict,
    )
  if given and corpus:
    wanted = answers.wanted(ranked, given, max(answer_k))
    texts = answers.read_passages(corpus, wanted)
    parts.append(answers.answer_recall(ranked, given, texts, answer_k, match))
    missing = [question for question in given if question not in retrieved_for]
    cli.tell(
      f'{run}: nothing for {len(missing)} of {len(given)} questions, which count as 0',
      missing,
      strict,
    )
    unknown = sorted(wanted - set(texts))
    cli.tell(
      f'{run}: {len(unknown)} of its passages are not in {corpus}, and count as without an answer',
      unknown,
      strict,
    )
  counts = {name: count for part in parts for name, count in part['counts'].items()}
  counts['queries_with_own_id'] = touched
  if qrels and corpus:
    documents = {document for documents in judged.values() for document in documents}
    unknown = sorted(documents - set(answers.read_passages(corpus, documents)))
    counts['unknown_documents'] = len(unknown)
    cli.tell(
      f'{qrels}: {len(unknown)} of {len(documents)} judged documents are not in {corpus}',
      unknown,
      strict,
    )
  return {
    'mean': {name: value for part in parts for name, value in part['mean'].items()},
    'per_query': {name: values for part in parts for name, values in part['per_query'].items()},
    'counts': counts,
    'settings': {'drop_same_id': drop_same_id, **({'match': match} if answer_file else {})},
  }


def together(datasets: dict[str, dict[str, Any]]) -> dict[str, Any]:
  """Several data sets' metrics as one: each set weighs the same in the means, whatever its number
  of queries.
  """
  shared = [
    name
    for name in next(iter(datasets.values()))['mean']
    if all(name in one['mean'] for one in datasets.values())
  ]
  counted = {count: None for one in datasets.values() for count in one['counts']}
  return {
    'mean': {
      name: sum(one['mean'][name] for one in datasets.values()) / len(datasets) for name in shared
    },
    'per_query': {
      name: {
        f'{label}/{query_id}': value
        for label, one in datasets.items()
        for query_id, value in one['per_query'][name].items()
      }
      for name in shared
    },
    'counts': {
      count: sum(one['counts'].get(count, 0) for one in datasets.values()) for count in counted
    },
    'settings': next(iter(datasets.values()))['settings'],
    'datasets': datasets,
  }


def main(argv: Sequence[str] | None = None) -> None:
  parser = cli.Parser('evaluate', __doc__ or '')
  parser.add_argument(
    '--run',
    required=True,
    action='append',
    metavar='[NAME=]run.trec',
    help='a TREC run; with NAME= for several data sets',
  )
  parser.add_argument(
    '--qrels',
    action='append',
    default=[],
    metavar='[NAME=]FILE',
    help="judgements: BEIR's tsv, or TREC's and MS MARCO's columns",
  )
  parser.add_argument(
    '--beir',
    action='append',
    default=[],
    metavar='DIR',
    help='a BEIR folder, whose judgements are those of the run of its name',
  )
  parser.add_argument('--split', default='test', help='of the BEIR folders (default: test)')
  parser.add_argument(
    '--measure',
    action='extend',
    nargs='+',
    metavar='MEASURE',
    help="ir_measures' names, one or several; may be repeated (default: "
    f'{" ".join(measures.DEFAULT_MEASURES)})',
  )
  parser.add_argument(
    '--out', metavar='metrics.json', help='where the metrics go; without it they are only shown'
  )
  parser.add_argument(
    '--drop_same_id',
    type=cli.boolean,
    default=False,
    metavar='true|false',
    help="BEIR's rule: a document with the query's own id is left out (default: false)",
  )
  parser.add_argument(
    '--strict',
    action='store_true',
    help='fail where a judged query is missing from the run or, with --corpus, a document from the '
    'corpus; else they are counted',
  )
  parser.add_argument(
    '--answers',
    action='append',
    default=[],
    metavar='[NAME=]FILE',
    help="answers to questions: DPR's json or csv, or jsonl with id and answers",
  )
  parser.add_argument(
    '--corpus',
    action='append',
    default=[],
    metavar='[NAME=]FILE',
    help="passages, as BEIR's jsonl or DPR's tsv: looked through for answers, and for the ids of "
    'judged documents',
  )
  parser.add_argument(
    '--answer_k',
    type=cli.positive,
    nargs='+',
    default=[5, 20, 100],
    help='passages looked at for an answer (default: 5 20 100)',
  )
  parser.add_argument(
    '--match',
    choices=answers.MATCHES,
    default='string',
    help='what an answer is; regex for CuratedTREC (default: string)',
  )
  parser.add_argument(
    '--extra',
    type=cli.named,
    action='append',
    default=[],
    metavar='NAME=VALUE',
    help='a fact to keep with the metrics, such as the number of trained parameters: a column of '
    'dprjax.report',
  )
  cli.run(parser, _command, argv)


def _command(args: argparse.Namespace) -> None:
  if args.out:
    files.output_file(args.out)
  several = len(args.run) > 1 or bool(args.beir)
  given = {
    flag: _by_name(flag, getattr(args, flag), several)
    for flag in ('run', 'qrels', 'answers', 'corpus')
  }
  for folder in args.beir:
    name = epath.Path(folder).name
    if name in given['qrels']:
      raise InputError(
        f'--beir={folder} and --qrels={name}=... give the judgements of {name} twice'
      )
    given['qrels'][name] = str(
      files.existing(epath.Path(folder) / 'qrels' / f'{args.split}.tsv', 'qrels')
    )
  runs = given.pop('run')
  for flag, by_name in given.items():
    alone = [name for name in by_name if name not in runs]
    if alone:
      raise InputError(
        f'there is {"a BEIR folder or " if flag == "qrels" else ""}--{flag} of {alone[0]}, but no '
        f'--run={alone[0]}=FILE; '
        f'there are runs of {", ".join(runs)}'
      )
  datasets = {
    name: evaluate(
      run,
      qrels=given['qrels'].get(name),
      names=args.measure or measures.DEFAULT_MEASURES,
      drop_same_id=args.drop_same_id,
      strict=args.strict,
      answer_file=given['answers'].get(name),
      corpus=given['corpus'].get(name),
      answer_k=args.answer_k,
      match=args.match,
    )
    for name, run in runs.items()
  }
  metrics = together(datasets) if several else next(iter(datasets.values()))
  if args.extra:
    metrics['extra'] = dict(args.extra)
  if args.out:
    files.write_json(args.out, metrics)
  columns = list(metrics['mean'])
  rows = [
    [
      name or runs[name],
      *(f'{one["mean"][column]:.4f}' for column in columns),
      str(len(next(iter(one['per_query'].values())))),
    ]
    for name, one in datasets.items()
  ]
  if len(datasets) > 1:
    rows.append(['average', *(f'{metrics["mean"][column]:.4f}' for column in columns), ''])
  cli.print_table(['data set' if several else 'run', *columns, 'queries'], rows)


def _by_name(flag: str, values: Sequence[str], several: bool) -> dict[str, str]:
  """Name of the data set -> file; a single data set needs no name: its name is empty."""
  result: dict[str, str] = {}
  for value in values:
    name, equals, path = value.partition('=')
    # An equals sign deep in a path makes no name.
    if not equals or '/' in name:
      name, path = '', value
    if several and not name:
      raise InputError(f'--{flag}={value}: with several data sets give --{flag}=NAME=FILE')
    name = name if several else ''
    if name in result:
      raise InputError(f'--{flag}={value}: given twice{f" for {name}" if name else ""}')
    result[name] = path
  return result


if __name__ == '__main__':
  main()
