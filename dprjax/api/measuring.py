"""Evaluates, fuses and mines rankings in memory, as the commands of the same names do."""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from etils import epath

from dprjax.api import inputs, worker
from dprjax.base import files, flags, outputs, reading, tables
from dprjax.mine import Flags as MineFlags
from dprjax.mine import mine as _mine
from dprjax.retrieval import comparison, evaluation, fusing, fusion
from dprjax.retrieval import measures as _measures
from dprjax.retrieval.retriever import Results
from dprjax.text import trec
from dprjax.text.qrels import write_qrels

if TYPE_CHECKING:
  import pandas


@inputs.naming(qrels='relevant', measure='measures')
def evaluate(
  run: inputs.Run | Mapping[str, inputs.Run],
  relevant: inputs.Judgements,
  measures: Sequence[str] = _measures.DEFAULT_MEASURES,
  *,
  per_query: bool = False,
  drop_same_id: bool = False,
) -> 'pandas.DataFrame | tables.Records':
  """Evaluates a run against judgements, as `dprjax evaluate` does.

  Every judged query counts; one without results counts as 0.

  Args:
    run: the result of `Retriever.search` or `dprjax.fuse`, a mapping of query ids to mappings of
      passage ids to scores, a table with columns ``query_id``, ``passage_id`` and ``score``, or the
      path of a TREC run. To compare systems, a mapping of names to these.
    relevant: judgements: the path of a file, a mapping of query ids to passage ids or to grades, a
      list of tuples (query id, passage id[, grade]), or a table with columns ``query_id``,
      ``passage_id`` and perhaps ``score``; for the result of a search also a list with a passage
      id, or several, for each of its queries.
    measures: names of ir_measures.
    per_query: whether to return the values of single queries.
    drop_same_id: leave out the passage with the id of its query.

  Returns:
    A table: system, measure, mean, and its 95 % bootstrap interval over queries from ``low`` to
      ``high``. Systems after the first also have the ``difference`` from the first, with its
      interval from ``difference_low`` to ``difference_high``. With ``per_query``: system, query_id,
      and a column for each measure.

  Raises:
    InputError: a run or judgements in another form, or an unknown measure.
  """
  runs = _systems(run)
  judged = inputs.judgements(relevant, _asked(relevant, runs))
  labels = str(relevant) if inputs.is_path(relevant) else 'relevant'
  results = {}
  for name, one in runs.items():
    path = inputs.is_path(one)
    results[name] = evaluation.evaluate(
      inputs.read_run(one, f'run {name}'),
      judged,
      list(measures),
      drop_same_id=drop_same_id,
      labels=(str(one) if path else f'run {name}', labels),
    )
  names = list(next(iter(results.values()))['mean'])
  if per_query:
    rows = [
      (name, query, *(metrics['per_query'][measure][query] for measure in names))
      for name, metrics in results.items()
      for query in metrics['per_query'][names[0]]
    ]
    return _table(('system', 'query_id', *names), rows)
  rows = []
  for measure in names:
    for name, one in comparison.compare(results, measure).items():
      apart = one.difference or (None, None, None)
      rows.append((name, measure, one.mean, one.low, one.high, *apart))
  columns = ['system', 'measure', 'mean', 'low', 'high']
  differences = ['difference', 'difference_low', 'difference_high']
  if len(results) == 1:
    rows = [row[: len(columns)] for row in rows]
  return _table([*columns, *(differences if len(results) > 1 else ())], rows)


def _asked(relevant: Any, runs: Mapping[str, Any]) -> list[str] | None:
  """The ids of the queries of a search, whose order a list of judgements follows."""
  if not isinstance(relevant, list) or all(isinstance(one, tuple) for one in relevant):
    return None
  searched = next((one for one in runs.values() if isinstance(one, Results)), None)
  return None if searched is None else [query.id for query in searched.queries]


@inputs.naming(qrels='relevant', run='runs')
def fuse(
  runs: Mapping[str, inputs.Run],
  method: str = 'rrf',
  *,
  relevant: inputs.Judgements | None = None,
  weights: Mapping[str, float] | files.PathLike | None = None,
  weights_out: files.PathLike | None = None,
  k: int = 1000,
  depth: int = fusion.DEPTH,
  rrf_k: int = fusion.RRF_K,
) -> 'pandas.DataFrame | tables.Records':
  """Fuses several rankings, as `dprjax fuse` does.

  Args:
    runs: at least two, by name, as in `evaluate`.
    method: 'rrf', 'zscore', or 'learned': zscore with weights learnt on
      ``relevant``.
    relevant: with method='learned', judgements as in `evaluate`.
    weights: of each run, by name (default: 1); or a file from ``weights_out``.
    weights_out: write method and weights to this file, for `Retriever.load(hybrid=)` and `weights`.
    k: passages a query.
    depth: how many passages of each run and query count.
    rrf_k: the constant of rrf.

  Returns:
    A table: query_id, rank (from 1), passage_id, score. A run for `evaluate`.

  Raises:
    InputError: fewer than two runs, runs without a common query, an unknown method, or weights for
      other runs.
  """
  paths: dict[str, Any] = {name: run for name, run in runs.items() if inputs.is_path(run)}
  if weights_out is not None:
    outputs.check_apart(weights_out, {'runs': list(paths.values())}, 'weights_out')
  read = {name: inputs.read_run(run, f'run {name}').rankings() for name, run in runs.items()}
  how, learnt = fusing.choose(
    read,
    method=method,
    weights=weights,
    judged=None if relevant is None else inputs.judgements(relevant),
    depth=depth,
    rrf_k=rrf_k,
    files=paths,
  )
  rows = [
    (query, rank, passage, float(score))
    for query, ranking in fusing.fuse(read, how, k, paths)
    for rank, (passage, score) in enumerate(zip(*ranking, strict=True), start=1)
  ]
  if weights_out is not None:
    about = {} if learnt is None else {'learnt': learnt.about()}
    fusion.write(weights_out, how, **about)
  return _table(('query_id', 'rank', 'passage_id', 'score'), rows)


@inputs.naming(qrels='relevant', run='runs')
def mine(
  queries: inputs.Texts,
  corpus: inputs.Texts,
  relevant: inputs.Judgements,
  runs: Mapping[str, inputs.Run],
  *,
  out: files.PathLike | None = None,
  progress: bool = True,
  **options: Any,
) -> 'pandas.DataFrame | tables.Records':
  """Mines hard negatives from rankings, as `dprjax mine` does.

  Args:
    queries, corpus: as for `fit`, with ids.
    relevant: judgements as in `evaluate`.
    runs: rankings as in `evaluate`, by the name of their retriever.
    out: write the training file here, for `fit(negatives=)`.
    progress: whether to show a bar.
    options: ``depth``, ``sample``, ``reranker``, ``threshold``, ``seed`` and the other flags of
      `dprjax mine`.

  Returns:
    A table for `fit(negatives=)`: query_id, passage_id, retriever, rank and score of the run that
    ranks it best, sources ('undenoised', 'denoised' or both, separated by a comma), and text.
  """
  with _folder() as folder:
    inputs.write_queries(queries, folder / 'queries.jsonl')
    inputs.write_corpus(corpus, folder / 'corpus.jsonl')
    qrels: Any = relevant
    if not inputs.is_path(relevant):
      qrels = folder / 'qrels.tsv'
      write_qrels(qrels, inputs.judgements(relevant))
    paths: dict[str, Any] = {}
    for number, (name, run) in enumerate(runs.items()):
      paths[name] = run
      if not inputs.is_path(run):
        paths[name] = folder / f'{number}.trec'
        trec.write_run(paths[name], inputs.read_run(run, f'run {name}'), 'run')
    path = epath.Path(out) if out is not None else folder / 'train.jsonl'
    args = flags.of(
      MineFlags,
      queries=folder / 'queries.jsonl',
      corpus=folder / 'corpus.jsonl',
      qrels=qrels,
      run=[f'{name}={path}' for name, path in paths.items()],
      out=path,
      **options,
    )
    worker.apart(lambda: _mine(args), bar=progress, task='mine')
    rows = []
    for _, record in reading.read_jsonl(path, 'negatives', dict[str, Any]):
      for one in record['negative_passages']:
        text = f'{one.get("title", "")} {one.get("text", "")}'.strip()
        origin = (one.get('retriever'), one.get('rank'), one.get('score'))
        sources = ','.join(one.get('sources', ()))
        rows.append((record['query_id'], one['docid'], *origin, sources, text))
  names = ('query_id', 'passage_id', 'retriever', 'rank', 'score', 'sources', 'text')
  return _table(names, rows)


def _systems(run: Any) -> dict[str, Any]:
  """Runs by name; a single run has the name 'run'."""
  several = isinstance(run, Mapping) and run and not inputs.is_run(run)
  return dict(run) if several else {'run': run}


@contextlib.contextmanager
def _folder() -> Iterator[epath.Path]:
  with tempfile.TemporaryDirectory() as folder:
    yield epath.Path(folder)


def _table(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Any:
  return tables.table({name: [row[place] for row in rows] for place, name in enumerate(names)})
