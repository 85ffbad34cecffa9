"""Writes queries, corpora, judgements and runs of Python programs to files for commands."""

import contextlib
import json
import os
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from dprjax.base import files, given
from dprjax.base.errors import InputError
from dprjax.encoding import corpora
from dprjax.retrieval.retriever import Results
from dprjax.text import records, trec
from dprjax.text.qrels import Qrels, read_qrels
from dprjax.text.texts import Text, columns_of, read_texts

Texts = corpora.Corpus | files.PathLike
Judgements = Mapping[Any, Any] | Iterable[Any] | files.PathLike
Run = Results | Mapping[Any, Mapping[Any, float]] | Iterable[Any] | files.PathLike

_NONE: Mapping[str, str] = types.MappingProxyType({})
_RANKED = {
  'query_id': ('query_id', 'query-id', 'qid', 'query'),
  'positive_id': (*('passage_id', 'corpus-id', 'corpus_id', 'doc_id', 'docid', 'docno', 'pid'),),
  'score': ('score',),
}
_JUDGED = {
  **{role: names for role, names in _RANKED.items() if role != 'score'},
  'label': ('score', 'relevance', 'rel', 'label', 'grade'),
}


@contextlib.contextmanager
def naming(**arguments: str) -> Iterator[None]:
  """Errors name ``arguments`` (by flag or config key, with ``__`` for a dot) and options."""

  def of_key(match: re.Match[str]) -> str:
    return arguments.get(match[1].replace('.', '__'), f"options['{match[1]}']")

  try:
    yield
  except InputError as error:
    text = re.sub(r'(?<![\w./])(?:--)?config\.(?!json\b|py\b)(\w+(?:\.\w+)*)', of_key, str(error))
    text = re.sub(r'(?<![\w-])--(\w+)', lambda flag: arguments.get(flag[1], flag[1]), text)
    error.args = (text,)
    raise


def is_path(value: Any) -> bool:
  return isinstance(value, str | os.PathLike)


def write_queries(queries: Texts, out: epath.Path, columns: Mapping[str, str] = _NONE) -> list[str]:
  """Writes queries as BEIR queries.jsonl; returns their ids."""
  roles = columns_of('query', columns)
  if is_path(queries):
    return _write_texts(read_texts(queries, 'query', columns=roles), out)  # type: ignore[arg-type]
  return _write_texts(corpora.queries(queries, roles), out)  # type: ignore[arg-type]


def write_corpus(corpus: Texts, out: epath.Path, columns: Mapping[str, str] = _NONE) -> list[str]:
  """Writes passages as BEIR corpus.jsonl; returns their ids."""
  roles = columns_of('passage', columns)
  if is_path(corpus):
    return _write_texts(read_texts(corpus, 'passage', columns=roles), out)  # type: ignore[arg-type]
  return _write_texts(corpora.passages(corpus, roles), out)  # type: ignore[arg-type]


def _write_texts(rows: Iterable[Text], out: epath.Path) -> list[str]:
  ids = []
  with files.atomic_write(out) as file:
    for one in rows:
      ids.append(one.id)
      file.write(json.dumps({'_id': one.id, 'text': one.text}, ensure_ascii=False) + '\n')
  return ids


def judgements(
  relevant: Judgements | None,
  queries: list[str] | None = None,
  passages: list[str] | None = None,
  name: str = 'relevant',
  columns: Mapping[str, str] = _NONE,
) -> Qrels:
  """Reads the relevant passages of queries.

  Args:
    relevant: one of
      - the path of a file of judgements;
      - a mapping of query ids to a passage id, to several, or to passage ids and grades;
      - a list with a passage id, or a list of them, for each query in order; a pandas Series has
        query ids in its index, unless that counts from 0;
      - a list of tuples (query id, passage id) or (query id, passage id, grade);
      - a table with the columns ``query_id``, ``passage_id`` and perhaps ``score`` (or other usual
        names, such as the BEIR ``query-id`` and ``corpus-id``);
      - None: the i-th passage is relevant to the i-th query.
    queries, passages: all ids in order; None if unknown.
    columns: of a table, by the roles `query_id`, `positive_id` and `label`.
  """
  if is_path(relevant):
    return read_qrels(relevant)  # type: ignore[arg-type]
  qrels: Qrels = {}
  known = [None if ids is None else set(ids) for ids in (queries, passages)]
  for query, passage, grade in _judged(relevant, queries, passages, name, columns):
    query_id = given.identifier(query, f'{name}: the id of a query')
    passage_id = given.identifier(passage, f'{name}: the id of a passage of query {query_id}')
    for what, id_, ids in zip(('query', 'passage'), (query_id, passage_id), known, strict=True):
      if ids is not None and id_ not in ids:
        raise InputError(f'{name}: query {query_id}: {id_!r:.60} is not the id of a {what}')
    grades = qrels.setdefault(query_id, {})
    if grades.setdefault(passage_id, int(grade)) != grade:
      raise InputError(
        f'{name}: passage {passage_id} of query {query_id} has the grade {grade!r:.40}; expected '
        f'one whole number, such as {grades[passage_id]}'
      )
  if not qrels:
    raise InputError(f'{name}: there are no judgements')
  return qrels


def _judged(
  relevant: Any,
  queries: list[str] | None,
  passages: list[str] | None,
  name: str,
  columns: Mapping[str, str],
) -> Iterator[tuple[Any, Any, Any]]:
  """Query ids, passage ids and grades; arguments as for `judgements`."""
  table = _table(relevant, name, _JUDGED, columns)
  rows: Any = passages if relevant is None else table
  if rows is None and not isinstance(relevant, Mapping):
    rows = given.values(relevant, name)
  if table is not None or (rows and all(isinstance(row, tuple) for row in rows)):
    yield from ((*row, 1)[:3] for row in rows)
    return
  if isinstance(relevant, Mapping):
    entries = [*relevant.items()]
  else:
    ids = given.index_of(relevant) if relevant is not None else None
    ids = queries if ids is None else ids
    if ids is None or rows is None or len(ids) != len(rows):
      raise InputError(
        f'{name}: {len(rows or ()):,} entries for {len(ids or ()):,} queries; give one for each, '
        'tuples (query id, passage id), or a mapping'
      )
    entries = [*zip(ids, rows, strict=True)]
  for query, entry in entries:
    for passage, grade in _graded(entry):
      yield query, passage, grade


def _graded(entry: Any) -> list[tuple[Any, Any]]:
  """Passage ids and grades of one query."""
  if isinstance(entry, Mapping):
    return list(entry.items())
  if isinstance(entry, str) or not isinstance(entry, Iterable):
    return [(entry, 1)]
  return [(passage, 1) for passage in (entry.tolist() if hasattr(entry, 'tolist') else entry)]


def is_run(value: Mapping[Any, Any]) -> bool:
  """Whether a mapping is one run: a table, or passage ids and scores by query id."""
  if _table(value, 'run', _RANKED) is not None:
    return True
  return all(
    isinstance(scores, Mapping) and all(isinstance(score, int | float) for score in scores.values())
    for scores in value.values()
  )


def read_run(run: Run, name: str = 'run') -> trec.Run:
  """A run in memory.

  Args:
    run: the path of a TREC run; the result of `Retriever.search`; a mapping of query ids to passage
      ids and scores; or a table with columns ``query_id``, ``passage_id`` and ``score`` (or other
      usual names).
  """
  if is_path(run):
    return trec.read_run(run)  # type: ignore[arg-type]
  rankings: dict[str, dict[str, float]] = {}

  def add(query: Any, passage: Any, score: Any) -> None:
    query_id = given.identifier(query, f'{name}: the id of a query')
    passage_id = given.identifier(passage, f'{name}: the id of a passage of query {query_id}')
    ranked = rankings.setdefault(query_id, {})
    if passage_id in ranked or not np.isfinite(score):
      raise InputError(
        f'{name}: query {query_id} has passage {passage_id} twice, or a score that is not finite: '
        f'{score!r:.40}'
      )
    ranked[passage_id] = float(score)

  if isinstance(run, Results):
    for query, hits in zip(run.queries, run, strict=True):
      for hit in hits:
        add(query.id, hit.id, hit.score)
  elif (table := _table(run, name, _RANKED)) is not None:
    for row in table:
      add(*row)
  elif isinstance(run, Mapping) and all(isinstance(one, Mapping) for one in run.values()):
    for query, scores in run.items():
      for passage, score in scores.items():
        add(query, passage, score)
  else:
    raise InputError(
      f'{name}: expected a table, passage ids and scores by query id, or a path, not {run!r:.60}'
    )
  if not rankings:
    raise InputError(f'{name}: there are no rankings')
  return trec.run_from_dict(rankings)


def _table(
  value: Any, what: str, usual: Mapping[str, Sequence[str]], columns: Mapping[str, str] = _NONE
) -> list[tuple[Any, ...]] | None:
  """The values of each row by the roles of ``usual``; None for another form than a table.

  A mapping is a table if it has columns of queries and passages. Only `label` may be absent.
  """
  if isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value):
    value = {name: [row.get(name) for row in value] for row in value for name in row}
  table = value if isinstance(value, Mapping) else given.table(value)
  if table is None:
    return None
  names = [name for name in table if not isinstance(table[name], Mapping)]
  # The queries alone may have the column query_id.
  chosen = {
    r: name for r, name in columns.items() if r in usual and (r != 'query_id' or name in names)
  }
  roles = records.find_roles([*map(str, names)], usual, chosen, what)
  absent = [role for role in usual if role not in roles and role != 'label']
  if isinstance(value, Mapping) and {'query_id', 'positive_id'} & {*absent}:
    return None
  if absent:
    raise InputError(
      f'{what}: no column {usual[absent[0]][0]} in a table of {", ".join(names)}; rename it'
    )
  values = (given.values(table[roles[role]], role) for role in usual if role in roles)
  return list(zip(*values, strict=True))
