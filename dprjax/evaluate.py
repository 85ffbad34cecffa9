"""Measures runs against judgements, with ir_measures.

    python -m dprjax.evaluate --run=run.trec --qrels=qrels/test.tsv --out=metrics.json

Every judged query counts; one without results counts as 0. Equal scores are ranked by falling id,
as trec_eval does. Several runs on the same judgements make one table. So do several data sets, with
their average:

    python -m dprjax.evaluate --run=frozen=a.trec --run=best=b.trec --qrels=qrels/test.tsv
    python -m dprjax.evaluate --run=nq=nq.trec --qrels=nq=nq.tsv \\
        --run=fiqa=fiqa.trec --qrels=fiqa=fiqa.tsv --out=metrics.json

Measures have their names in ir_measures, or those of trec_eval (ndcg_cut_10, recip_rank). nAP@k is
average precision over min(k, R) for R relevant documents, as in sentence-transformers and
Topic-DPR.

Answer@k is the top-k accuracy of DPR for open-domain question answering. The id of a question is
its id, _id or query_id, or its place in the file, from 1:

    python -m dprjax.evaluate --run=nq.trec --answers=nq-test.qas.csv --corpus=psgs_w100.tsv \\
        --out=metrics.json

metrics.json: {"mean": {measure: value}, "per_query": {measure: {query: value}}, "counts": {...},
"settings": {...}, "command": text}. With several data sets these are averages, queries as SET/query
and sums, and "datasets" has each set.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from dprjax.base import cli, files, flags, outputs
from dprjax.base.errors import InputError
from dprjax.base.flags import flag
from dprjax.retrieval import answers, evaluation, measures
from dprjax.text import seen, trec
from dprjax.text.qrels import read_qrels

_FILES = ('run', 'qrels', 'answers', 'corpus', 'queries')  # flags with a file for each data set


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  run: tuple[tuple[str, str], ...] = flag(
    'a TREC run; with NAME= for several data sets',
    read=flags.maybe_named,
    metavar='[NAME=]run.trec',
  )
  qrels: tuple[tuple[str, str], ...] = flag(
    'judgements: a BEIR tsv, or the columns of TREC and MS MARCO',
    (),
    read=flags.maybe_named,
    metavar='[NAME=]FILE',
  )
  measure: tuple[str, ...] = flag(
    'names in ir_measures, one or several; may be repeated',
    measures.DEFAULT_MEASURES,
    split=' ',
    metavar='MEASURE',
  )
  out: str | None = flag(
    'file for the metrics, which are also printed', None, metavar='metrics.json'
  )
  drop_same_id: bool = flags.drop_same_id('is left out')
  answers: tuple[tuple[str, str], ...] = flag(
    'answers to questions: DPR json or csv, or jsonl with id and answers',
    (),
    read=flags.maybe_named,
    metavar='[NAME=]FILE',
  )
  corpus: tuple[tuple[str, str], ...] = flag(
    'passages (BEIR jsonl or DPR tsv), to look up answers and ids of judged documents',
    (),
    read=flags.maybe_named,
    metavar='[NAME=]FILE',
  )
  retriever: str | None = flag(
    'a folder of dprjax.export, in place of --backbone and --prompt', None, metavar='DIR'
  )
  backbone: str | None = flags.backbone(None, ', for --queries')
  prompt: str | None = flag('of --backbone, for --queries', None, metavar='prompt.npz')
  queries: tuple[tuple[str, str], ...] = flag(
    'texts of the queries, to count those that --backbone and --prompt were trained on',
    (),
    read=flags.maybe_named,
    metavar='[NAME=]FILE',
  )
  answer_k: tuple[int, ...] = flag(
    'numbers of passages to search for an answer', (5, 20, 100), split=' '
  )
  extra: dict[str, str] = flag(
    'a fact to record, such as the number of trained parameters: a column of dprjax.report',
    {},
    metavar='NAME=VALUE',
  )


def main(argv: Sequence[str] | None = None) -> None:
  cli.run(Flags, _command, argv)


def _command(args: Flags) -> None:
  if args.retriever is not None:
    flags.refuse(args, ('backbone', 'prompt'), 'queries, without --retriever')
  if bool(args.queries) != bool(args.backbone or args.prompt or args.retriever):
    raise InputError(
      '--queries goes with --retriever, --prompt or --backbone, the model that searched'
    )
  several = len(args.run) > 1
  named = {option: _by_name(option, getattr(args, option), several) for option in _FILES}
  runs = named['run']
  for option, by_name in named.items():
    if extra := next((name for name in by_name if name and name not in runs), None):
      raise InputError(
        f'--{option} has a file of {extra}, but the runs are of {", ".join(runs)}: add '
        f'--run={extra}=FILE'
      )
  inputs: dict[str, Any] = {f'--{option}': [*by_name.values()] for option, by_name in named.items()}
  _check_pipes(path for paths in inputs.values() for path in paths)
  with outputs.claim(args.out, inputs, endings=('',)):
    _measure(args, named, several)


def _evaluate(args: Flags, given: Mapping[str, str | None]) -> dict[str, Any]:
  """The metrics of the files of a data set, by their role."""
  run, qrels, corpus = given['run'], given['qrels'], given['corpus']
  if not qrels and not given['answers']:
    raise InputError(f'{run}: nothing to measure; give --qrels, or --answers and --corpus')
  if given['answers'] and corpus is None:
    raise InputError('--answers needs --corpus, the passages to search for answers')
  judged = read_qrels(qrels) if qrels else None
  questions = None
  if given['answers']:
    found = answers.read_answers(given['answers'])
    questions = evaluation.Questions(found, args.answer_k)
  assert run is not None
  return evaluation.evaluate(
    trec.read_run(run),
    judged,
    args.measure,
    questions=questions,
    corpus=corpus,
    drop_same_id=args.drop_same_id,
    queries=given['queries'],
    known=_seen(args) if given['queries'] else None,
    labels=(run, str(qrels)),
  )


def _seen(args: Flags) -> seen.Seen:
  """The queries that the model was trained on or chosen by."""
  known: list[seen.Seen] = []
  backbone, prompt = args.backbone, args.prompt
  if args.retriever:
    from dprjax.retrieval import folder  # imports JAX

    parts = folder.read(args.retriever)
    backbone, prompt = parts.backbone, parts.prompt
  if backbone:
    known.append(seen.read(epath.Path(backbone) / seen.FILE))
  if prompt:
    from dprjax.models import artifact  # imports JAX

    known.append(artifact.load_prompt(prompt).queries)
  return seen.join(*known)


def _measure(args: Flags, named: Mapping[str, Mapping[str, str]], several: bool) -> None:
  runs = named['run']
  # Small files first, so that their mistakes show before a large run is read.
  measures.parse_measures(args.measure)
  datasets = {
    name: _evaluate(
      args, {role: by_name.get(name, by_name.get('')) for role, by_name in named.items()}
    )
    for name in runs
  }
  metrics = evaluation.combine(datasets) if several else datasets['']
  metrics['command'] = _shown(args, named)
  if args.extra:
    metrics['extra'] = args.extra
  if args.out is not None:
    files.write_json(args.out, metrics)
  columns = list(metrics['mean'])

  def row(label: str, means: dict[str, float], queries: str) -> list[str]:
    return [label, *(f'{means[column]:.4f}' for column in columns), queries]

  rows = [
    row(name or runs[name], part['mean'], str(len(next(iter(part['per_query'].values())))))
    for name, part in datasets.items()
  ]
  if len(datasets) > 1 and '' not in {*named['qrels'], *named['answers']}:
    rows.append(row('average', metrics['mean'], ''))
  cli.print_table(['data set' if several else 'run', *columns, 'queries'], rows)


def _shown(args: Flags, named: Mapping[str, Mapping[str, str]]) -> str:
  """The command for a model card, with only the names of files, since folders are private."""
  words = ['python -m dprjax.evaluate']
  for option, by_name in named.items():
    for name, path in by_name.items():
      words.append(f'--{option}={f"{name}=" if name else ""}{epath.Path(path).name}')
  if flags.given(args, 'measure'):
    words.append(f'--measure {" ".join(args.measure)}')
  if args.drop_same_id:
    words.append('--drop_same_id=true')
  return ' '.join(words)


def _check_pipes(paths: Iterable[str]) -> None:
  pipes: set[str] = set()
  for path in paths:
    if files.is_special(path):
      if path in pipes:
        raise InputError(f'{path} is a pipe and can be read only once; write it to a file first')
      pipes.add(path)


def _by_name(option: str, values: Sequence[tuple[str, str]], several: bool) -> dict[str, str]:
  """Files by the name of their data set; '': of the single run, or of all."""
  result: dict[str, str] = {}
  for name, path in values:
    if several and not name and (len(values) > 1 or option == 'run'):
      raise InputError(f'--{option}={path}: several data sets need --{option}=NAME=FILE')
    name = name if several else ''
    if name in result:
      raise InputError(f'--{option}={path}: given twice{f" for {name}" if name else ""}')
    result[name] = path
  return result


if __name__ == '__main__':
  main()
