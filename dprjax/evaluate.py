"""Measures runs against judgements, with ir_measures.

    python -m dprjax.evaluate --run=run.trec --qrels=qrels/test.tsv --out=metrics.json

Every judged query counts; one without results in the run counts as 0. Equal scores are ranked by
falling id, as trec_eval ranks them, in every measure. Several data sets in one call
make one table with their average. Their judgements are given one by one, or found in BEIR folders
(DIR/qrels/SPLIT.tsv, named as the folder is):

    python -m dprjax.evaluate --run=nq=nq.trec --qrels=nq=nq.tsv \\
        --run=fiqa=fiqa.trec --qrels=fiqa=fiqa.tsv --out=metrics.json
    python -m dprjax.evaluate --beir=beir/scifact --beir=beir/fiqa \\
        --run=scifact=a.trec --run=fiqa=b.trec --out=metrics.json

Measures are named as ir_measures names them; nAP@k is average precision over min(k, R), where R
documents are relevant, as sentence-transformers and Topic-DPR have it.

Open-domain question answering is measured by the answers in the passages, Answer@k, as DPR counts
its top-k accuracy. A question's id is its id, _id or query_id, or its place in the file, from 1:

    python -m dprjax.evaluate --run=nq.trec --answers=nq-test.qas.csv --corpus=psgs_w100.tsv \\
        --out=metrics.json

A model is measured by mteb's tasks, or on folders as tasks of mteb; mteb brings PyTorch and keeps
its own results (pip install 'dprjax[mteb]'):

    python -m dprjax.evaluate --mteb=SciFact,NFCorpus --backbone=B --prompt=qa.npz --out=mteb.json

metrics.json: {"mean": {measure: value}, "per_query": {measure: {query: value}}, "counts": {...},
"settings": {...}, "command": text}. With several data sets these are the averages over the sets,
the queries as SET/query and the sums, and "datasets" has each set. Of mteb: {"mean":
{task: main score, "average": value}, "tasks": {task: {"main_score": name, "scores":
{split: [...]}}}, "model": {...}}.
"""

import argparse
import contextlib
import logging
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
from etils import epath

from dprjax.base import files, outputs
from dprjax.base.errors import InputError
from dprjax.formats import seen, trec
from dprjax.formats.qrels import Qrels, read_qrels
from dprjax.retrieval import answers, measures
from dprjax.runtime import cli

logger = logging.getLogger('dprjax')

_OF_MTEB = ('backbone', 'prompt', 'dimensions', 'training_datasets', 'adapted_from')


def evaluate(
  run: str,
  qrels: str | None,
  answer_file: str | None,
  corpus: str | None,
  *,
  names: Sequence[str],
  drop_same_id: bool,
  strict: bool,
  answer_k: Sequence[int],
  match: str,
) -> dict[str, Any]:
  """One run of one data set.

  Args:
    run: a TREC run.
    qrels: judgements; or ``answer_file``, or both.
    answer_file: see ``retrieval.answers.read_answers``.
    corpus: the passages' texts; needed for answers, else searched for the judged documents' ids.
    names: measures of ir_measures.
    drop_same_id: BEIR's rule: a document with the query's own id is taken out of the ranking, and
      out of the judgements, since it cannot be found.
    strict: fail on a judged query or a question that is missing from the run, and on a document
      that is missing from the corpus.
    answer_k, match: see ``retrieval.answers.answer_recall``.

  Returns:
    ``measures.Metrics`` and the settings.

  Raises:
    InputError: bad files, or what ``strict`` forbids.
  """
  # The small files first: a mistake in them should not wait for a large run.
  measures.parse_measures(names)
  if not qrels and not answer_file:
    raise InputError(f'nothing to measure {run} by: give --qrels, or --answers and --corpus')
  if answer_file and corpus is None:
    raise InputError('--answers needs --corpus, the passages to look for them in')
  judged = read_qrels(qrels) if qrels else {}
  questions = answers.read_answers(answer_file) if answer_file else {}
  ranked = trec.read_run(run)
  same = ranked.same_id()
  with_own_id = len(set(ranked.query_of_row()[same].tolist()))
  if drop_same_id:
    ranked = ranked.keep(~same)
    judged = _without_own_id(judged, qrels)
  elif 2 * _first_with_own_id(ranked, same, judged) > with_own_id:
    # A passage that is its own query is ranked first. Ids that only look alike are seldom there.
    logger.info(
      '%s: for %d of %d queries the document of the same id was found, mostly ranked first; where '
      'queries are passages of the corpus, --drop_same_id=true leaves it out, as BEIR does',
      run,
      with_own_id,
      len(ranked),
    )
  needed = answers.wanted(ranked, questions, max(answer_k))
  documents = {document for documents in judged.values() for document in documents}
  texts = answers.read_passages(corpus, needed | documents) if corpus else {}
  parts: list[measures.Metrics] = []

  def tell_missing(ids: Collection[str], what: str) -> None:
    missing = [id_ for id_ in ids if id_ not in retrieved_for]
    sentence = f'{run}: nothing for {len(missing)} of {len(ids)} {what}, which count as 0'
    cli.report_ids(sentence, missing, strict)

  retrieved_for = set(ranked.query_ids)
  measured = judged.keys() | questions.keys()
  trained = {role: sum(id_ in measured for id_ in ids) for role, ids in seen.of_run(run).items()}
  for role, count in trained.items():
    if count:
      logger.warning(
        '%s: the model %s %d of these %d queries (by hashes of their texts)%s',
        run,
        seen.ROLES[role],
        count,
        len(measured),
        '; measure it on others' if role == 'train' else ', which flatters it a little',
      )
  if qrels:
    parts.append(measures.measure(ranked, judged, names))
    tell_missing(judged, 'judged queries')
  if questions:
    parts.append(answers.answer_recall(ranked, questions, texts, answer_k, match))
    tell_missing(questions, 'questions')
    unknown = sorted(needed - set(texts))
    cli.report_ids(
      f'{run}: {len(unknown)} of its passages are not in {corpus}, and count as without an answer',
      unknown,
      strict,
    )
  counts = {name: count for part in parts for name, count in part['counts'].items()}
  counts['queries_with_own_id'] = with_own_id
  counts |= {f'queries_seen_in_{role}': count for role, count in trained.items() if count}
  if qrels and corpus:
    unknown = sorted(documents - set(texts))
    counts['unknown_documents'] = len(unknown)
    cli.report_ids(
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


def _first_with_own_id(ranked: trec.Run, same: np.ndarray, judged: Qrels) -> int:
  """The queries whose first document has their id, and was not judged to be an answer to them."""
  first = ranked.offsets[:-1][np.diff(ranked.offsets) > 0]
  rows = ranked.query_of_row()[first[same[first]]].tolist()
  ids = [ranked.query_ids[row] for row in rows]
  return sum(judged.get(id_, {}).get(id_, 0) < 1 for id_ in ids)


def _without_own_id(judged: Qrels, name: str | None) -> Qrels:
  """The judgements without those of a query's own id."""
  own = [query for query, documents in judged.items() if query in documents]
  if not own:
    return judged
  logger.info('%s: judgements of the query itself are left out too: %d', name, len(own))
  kept = {
    query: {document: grade for document, grade in documents.items() if document != query}
    for query, documents in judged.items()
  }
  return {query: documents for query, documents in kept.items() if documents}


def combine(datasets: dict[str, dict[str, Any]]) -> dict[str, Any]:
  """Several data sets' metrics as one; each set has the same weight in the means."""
  first, *others = datasets.values()
  names = [name for name in first['mean'] if all(name in other['mean'] for other in others)]
  counts = dict.fromkeys(count for metrics in datasets.values() for count in metrics['counts'])
  return {
    'mean': {
      name: sum(metrics['mean'][name] for metrics in datasets.values()) / len(datasets)
      for name in names
    },
    'per_query': {
      name: {
        f'{label}/{query_id}': value
        for label, metrics in datasets.items()
        for query_id, value in metrics['per_query'][name].items()
      }
      for name in names
    },
    'counts': {
      count: sum(metrics['counts'].get(count, 0) for metrics in datasets.values())
      for count in counts
    },
    'settings': first['settings'],
    'datasets': datasets,
  }


def main(argv: Sequence[str] | None = None) -> None:
  parser = cli.Parser('evaluate', __doc__ or '')
  flag = parser.add_argument
  named: dict[str, Any] = {'action': 'append', 'metavar': '[NAME=]FILE', 'default': []}
  flag(
    '--run',
    action='append',
    default=[],
    metavar='[NAME=]run.trec',
    help='a TREC run; with NAME= for several data sets',
  )
  flag('--qrels', **named, help="judgements: BEIR's tsv, or TREC's and MS MARCO's columns")
  flag(
    '--beir',
    action='append',
    default=[],
    metavar='DIR',
    help='a BEIR folder, whose judgements are those of the run of its name',
  )
  flag('--split', default='test', help='of the BEIR folders (default: test)')
  flag(
    '--measure',
    action='extend',
    nargs='+',
    metavar='MEASURE',
    help="ir_measures' names, one or several; may be repeated (default: "
    f'{" ".join(measures.DEFAULT_MEASURES)})',
  )
  flag('--out', metavar='metrics.json', help='the metrics; without it they are only printed')
  flag(
    '--drop_same_id',
    type=cli.boolean,
    default=False,
    metavar='true|false',
    help="BEIR's rule: a document with the query's own id is left out (default: false)",
  )
  flag(
    '--strict',
    action='store_true',
    help='fail where a judged query is missing from the run or, with --corpus, a document from the '
    'corpus; else they are counted',
  )
  flag(
    '--answers',
    **named,
    help="answers to questions: DPR's json or csv, or jsonl with id and answers",
  )
  flag(
    '--corpus',
    **named,
    help="passages, as BEIR's jsonl or DPR's tsv: searched for answers, and for the ids of judged "
    'documents',
  )
  flag(
    '--answer_k',
    type=cli.positive,
    nargs='+',
    default=[5, 20, 100],
    help='how many passages are searched for an answer (default: 5 20 100)',
  )
  flag(
    '--match',
    choices=answers.MATCHES,
    default='string',
    help='what an answer is; regex for CuratedTREC (default: string)',
  )
  flag(
    '--extra',
    type=cli.named,
    action='append',
    default=[],
    metavar='NAME=VALUE',
    help='a fact to keep with the metrics, such as the number of trained parameters: a column of '
    'dprjax.report',
  )
  flag(
    '--mteb',
    metavar='TASK,...',
    help="instead of runs: mteb's names of tasks, and folders of data, for --backbone and --prompt",
  )
  flag('--backbone', metavar='DIR', help='with --mteb: a Hugging Face directory, or package:NAME')
  flag('--prompt', metavar='prompt.npz', help='with --mteb: the prompt; none: the bare backbone')
  flag('--dimensions', type=cli.positive, help='with --mteb: the first numbers of a vector alone')
  flag(
    '--training_datasets',
    metavar='NAME,...',
    help="with --mteb: what the prompt was trained on, by mteb's names; without it that is unknown",
  )
  flag('--adapted_from', metavar='NAME', help="with --mteb: the backbone's name there")
  cli.run(parser, _command, argv)


def _command(args: argparse.Namespace) -> None:
  if args.mteb is not None:
    _measure_by_mteb(args)
    return
  for flag in _OF_MTEB:
    if getattr(args, flag) is not None:
      raise InputError(f'--{flag} goes with --mteb=TASK,...; a run was made with a model already')
  if not args.run:
    raise InputError('give --run=run.trec, or --mteb=TASK,... and a --backbone')
  several = len(args.run) > 1 or bool(args.beir)
  runs, qrels, answer_files, corpora = (
    _by_name(flag, getattr(args, flag), several) for flag in ('run', 'qrels', 'answers', 'corpus')
  )
  for folder in args.beir:
    name = epath.Path(folder).name
    if name in qrels:
      raise InputError(
        f'--beir={folder} and --qrels={name}=... give the judgements of {name} twice'
      )
    qrels[name] = str(files.existing(epath.Path(folder) / 'qrels' / f'{args.split}.tsv', 'qrels'))
  for flag, by_name in (
    ('a BEIR folder or --qrels', qrels),
    ('--answers', answer_files),
    ('--corpus', corpora),
  ):
    if extra := next((name for name in by_name if name not in runs), None):
      raise InputError(
        f'there is {flag} of {extra}, but no --run={extra}=FILE; there are runs of '
        f'{", ".join(runs)}'
      )
  with contextlib.ExitStack() as stack:
    named = (('run', runs), ('qrels', qrels), ('answers', answer_files), ('corpus', corpora))
    inputs: dict[str, Any] = {f'--{flag}': list(by_name.values()) for flag, by_name in named}
    _check_pipes(path for paths in inputs.values() for path in paths)
    if args.out is not None:
      stack.enter_context(outputs.claim(args.out, inputs | {'--beir': args.beir}, endings=('',)))
    _measure(args, runs, qrels, answer_files, corpora, several)


def _measure_by_mteb(args: argparse.Namespace) -> None:
  for flag in ('run', 'qrels', 'beir', 'answers', 'corpus', 'measure', 'drop_same_id', 'strict'):
    if getattr(args, flag):
      raise InputError(f'--{flag} does not go with --mteb: its tasks have their own')
  if args.backbone is None:
    raise InputError('--mteb needs --backbone, and a --prompt where one was trained')
  names = [name.strip() for name in args.mteb.split(',') if name.strip()]
  if not names:
    raise InputError(f'--mteb={args.mteb} names no task')
  # Imported here: JAX, and PyTorch by mteb.
  from dprjax import mteb
  from dprjax.runtime import compiled

  compiled.keep()
  given = args.training_datasets
  inputs: dict[str, Any] = {
    '--mteb': [name for name in names if epath.Path(name).is_dir()],
    '--backbone': args.backbone,
    '--prompt': args.prompt,
  }
  with contextlib.ExitStack() as stack:
    if args.out is not None:
      stack.enter_context(outputs.claim(args.out, inputs, endings=('',)))
    model = mteb.load(
      args.backbone,
      args.prompt,
      training_datasets=None if given is None else [part for part in given.split(',') if part],
      adapted_from=args.adapted_from,
      dimensions=args.dimensions,
    )
    metrics = mteb.measure(model, names, args.split)
    if args.extra:
      metrics['extra'] = dict(args.extra)
    if args.out is not None:
      files.write_json(args.out, metrics)
  rows = [[name, f'{value:.4f}'] for name, value in metrics['mean'].items()]
  cli.print_table(['task', 'main score'], rows)


def _measure(
  args: argparse.Namespace,
  runs: dict[str, str],
  qrels: dict[str, str],
  answer_files: dict[str, str],
  corpora: dict[str, str],
  several: bool,
) -> None:
  datasets = {
    name: evaluate(
      run,
      qrels.get(name),
      answer_files.get(name),
      corpora.get(name),
      names=args.measure or measures.DEFAULT_MEASURES,
      drop_same_id=args.drop_same_id,
      strict=args.strict,
      answer_k=args.answer_k,
      match=args.match,
    )
    for name, run in runs.items()
  }
  metrics = combine(datasets) if several else datasets['']
  metrics['command'] = _shown(args, runs, qrels, answer_files, corpora)
  if args.extra:
    metrics['extra'] = dict(args.extra)
  if args.out is not None:
    files.write_json(args.out, metrics)
  columns = list(metrics['mean'])

  def row(label: str, means: dict[str, float], queries: str) -> list[str]:
    return [label, *(f'{means[column]:.4f}' for column in columns), queries]

  rows = [
    row(name or runs[name], part['mean'], str(len(next(iter(part['per_query'].values())))))
    for name, part in datasets.items()
  ]
  if len(datasets) > 1:
    rows.append(row('average', metrics['mean'], ''))
  cli.print_table(['data set' if several else 'run', *columns, 'queries'], rows)


def _shown(args: argparse.Namespace, *files_by_name: dict[str, str]) -> str:
  """The command, for a model card: files by their names alone, since folders are a person's own."""
  words = ['python -m dprjax.evaluate']
  for flag, by_name in zip(('run', 'qrels', 'answers', 'corpus'), files_by_name, strict=True):
    for name, path in by_name.items():
      words.append(f'--{flag}={f"{name}=" if name else ""}{epath.Path(path).name}')
  if args.measure:
    words.append(f'--measure {" ".join(args.measure)}')
  if args.drop_same_id:
    words.append('--drop_same_id=true')
  return ' '.join(words)


def _check_pipes(paths: Iterable[str]) -> None:
  """Raises InputError for a pipe that is named twice: it can be read once."""
  pipes: set[str] = set()
  for path in paths:
    if files.is_special(path):
      if path in pipes:
        raise InputError(
          f'{path} is a pipe or a device, which can be read only once; write it to a file first'
        )
      pipes.add(path)


def _by_name(flag: str, values: Sequence[str], several: bool) -> dict[str, str]:
  """Name of the data set -> file; the name of a single data set is empty."""
  result: dict[str, str] = {}
  for value in values:
    name, equals, path = value.partition('=')
    # An equals sign after a slash belongs to the path.
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
