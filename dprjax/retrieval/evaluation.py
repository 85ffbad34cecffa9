"""Measures a run against judgements, and against answers to questions as DPR does.

Answer recall (dpr/data/qa_validation.py): a passage is a hit if its text without the title contains
an answer as a sequence of words, ignoring case. A question is a hit at k if one of its first k
passages is a hit.
"""

import ast
import logging
import math
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import regex
from etils import epath

from dprjax.base.errors import InputError
from dprjax.base.files import PathLike
from dprjax.base.reading import plain_name, read_lines, read_records
from dprjax.retrieval import measures
from dprjax.text import seen, trec
from dprjax.text.fields import Id, UniqueIds, check_id, report_ids
from dprjax.text.qrels import Qrels
from dprjax.text.records import split_rows
from dprjax.text.texts import Texts, read_texts

logger = logging.getLogger('dprjax')

DEPTHS = (5, 20, 100)
"""Numbers of passages to search for an answer, by default."""

# Raised by the Python parser, also for deep nesting.
_NO_LIST = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)
# The DPR SimpleTokenizer: a run of letters, digits and marks, or one other visible character.
_WORD = regex.compile(r'[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]')


def evaluate(
  run: trec.Run,
  judged: Qrels | None,
  names: Sequence[str] = measures.DEFAULT_MEASURES,
  *,
  questions: Mapping[str, Sequence[str]] | None = None,
  depths: Sequence[int] = DEPTHS,
  corpus: PathLike | None = None,
  drop_same_id: bool = False,
  queries: PathLike | None = None,
  known: seen.Seen | None = None,
  labels: tuple[str, str] = ('run', 'the judgements'),
) -> dict[str, Any]:
  """Evaluates a run on a data set.

  Args:
    judged: every judged query counts, one without results as 0; None with ``questions`` only.
    names: measures, as in ir_measures.
    questions: the answers to each, see `read_answers`, for Answer@k of these ``depths``.
    corpus: the passages, for answers and for ids of judged documents.
    drop_same_id: leave out the document with the id of its query.
    queries, known: texts of the queries and those that the model has seen, which are counted.
    labels: names of the run and of the judgements in messages.

  Returns:
    ``measures.Metrics`` and the settings.
  """
  answers, grades = questions or {}, judged or {}
  same = run.same_id()
  with_own_id = len(np.unique(run.query_of_row()[same]))
  if drop_same_id:
    grades = _without_own_id(grades, labels[1])
    run = run.keep(~same)
  elif 2 * _first_with_own_id(run, same, grades) > with_own_id:
    # A passage that equals its query ranks first; passages whose id is equal by chance seldom do.
    logger.info(
      '%s: %d of %d queries found the document with their own id; if queries are passages of the '
      'corpus, --drop_same_id=true leaves it out, as BEIR does',
      labels[0],
      with_own_id,
      len(run),
    )
  rankings = questions_of(run, answers, max(depths)) if answers else {}
  needed = {document for ranking in rankings.values() for document in ranking}
  documents = {document for by_document in grades.values() for document in by_document}
  texts = read_passages(corpus, needed | documents) if corpus else {}
  parts: list[measures.Metrics] = []
  searched = set(run.query_ids)

  def tell_missing(ids: Collection[str], what: str) -> None:
    missing = [id_ for id_ in ids if id_ not in searched]
    sentence = f'{labels[0]}: nothing for {len(missing)} of {len(ids)} {what}, which count as 0'
    report_ids(sentence, missing)

  def tell_unknown(sentence: str, ids: set[str]) -> int:
    unknown = sorted(ids - set(texts))
    report_ids(sentence.format(len(unknown), corpus), unknown)
    return len(unknown)

  measured = grades.keys() | answers.keys()
  trained = {} if queries is None else _seen(queries, measured, known or {})
  for role, count in trained.items():
    if count:
      logger.warning(
        '%s: the model %s %d of these %d queries%s',
        labels[0],
        seen.ROLES[role],
        count,
        len(measured),
        '; use other queries' if role == 'train' else ', so scores are slightly too high',
      )
  if judged is not None:
    parts.append(measures.measure(run, grades, names))
    tell_missing(grades, 'judged queries')
    if not any(doc in grades.get(query, ()) for query, ranking in run for doc, _ in ranking):
      logger.warning('%s: no document is judged by %s', *labels)
  if questions is not None:
    parts.append(answer_recall(rankings, questions, texts, depths))
    tell_missing(questions, 'questions')
    tell_unknown(
      f'{labels[0]}: {{}} of its passages are not in {{}} and count as without answers', needed
    )
  counts = {name: count for part in parts for name, count in part['counts'].items()}
  counts['queries_with_own_id'] = with_own_id
  counts |= {f'queries_seen_in_{role}': count for role, count in trained.items() if count}
  if judged is not None and corpus:
    counts['unknown_documents'] = tell_unknown(
      f'{labels[1]}: {{}} of {len(documents)} judged documents are not in {{}}', documents
    )
  return {
    'mean': {name: value for part in parts for name, value in part['mean'].items()},
    'per_query': {name: values for part in parts for name, values in part['per_query'].items()},
    'counts': counts,
    'settings': {'drop_same_id': drop_same_id},
  }


def queries_of_model(
  backbone: PathLike | None, prompt: PathLike | None = None, retriever: PathLike | None = None
) -> seen.Seen:
  """The queries that a backbone and prompt, or a retriever, were trained on or chosen by."""
  known: list[seen.Seen] = []
  if retriever:
    from dprjax.retrieval import folder  # imports JAX

    parts = folder.read(retriever)
    backbone, prompt = parts.backbone, parts.prompt
  if backbone:
    known.append(seen.read(epath.Path(backbone) / seen.FILE))
  if prompt:
    from dprjax.models import artifact  # imports JAX

    known.append(artifact.load_prompt(prompt).queries)
  return seen.join(*known)


def _seen(queries: PathLike, measured: Collection[str], known: seen.Seen) -> dict[str, int]:
  """By role, the number of measured queries that the model was trained on or chosen by."""
  texts = (text for text in read_texts(queries, 'query') if text.id in measured)
  return {role: len(ids) for role, ids in seen.ids(texts, known).items()}


def _first_with_own_id(ranked: trec.Run, same: np.ndarray, judged: Qrels) -> int:
  """The number of queries whose first document has the same id and was not judged relevant."""
  first = ranked.offsets[:-1][np.diff(ranked.offsets) > 0]
  rows = ranked.query_of_row()[first[same[first]]].tolist()
  ids = [ranked.query_ids[row] for row in rows]
  return sum(judged.get(id_, {}).get(id_, 0) < 1 for id_ in ids)


def _without_own_id(judged: Qrels, name: str) -> Qrels:
  queries = [query for query, documents in judged.items() if query in documents]
  if not queries:
    return judged
  logger.info('%s: left out %d judgements of a query with its own id', name, len(queries))
  kept = {
    query: {document: grade for document, grade in documents.items() if document != query}
    for query, documents in judged.items()
  }
  return {query: documents for query, documents in kept.items() if documents}


def has_answer(answers: Iterable[str], text: str) -> bool:
  """Whether the text contains an answer. As in DPR, one without words is in every text."""
  words = _words(text)
  return any(_words(answer) in words for answer in answers)


def _words(text: str) -> str:
  """The words between spaces, so that a sequence of words is a substring."""
  words = _WORD.findall(unicodedata.normalize('NFD', text))
  return ' ' + ''.join(f'{word.lower()} ' for word in words)


def answer_recall(
  rankings: Mapping[str, Sequence[str]],
  answers: Mapping[str, Sequence[str]],
  texts: Mapping[str, str],
  ks: Sequence[int] = DEPTHS,
) -> measures.Metrics:
  """``Answer@k``, the DPR top-k accuracy: the fraction of questions with a hit in the first k.

  Args:
    rankings: passage ids by question id, best first, at least ``max(ks)`` if that many were found.
    texts: without titles, by passage id, at least for passages in ``rankings``.
  """
  rankings = {
    query_id: ranking[: max(ks)] for query_id, ranking in rankings.items() if query_id in answers
  }
  if not rankings:
    raise InputError(
      f'none of the {len(answers)} questions is in the run: {", ".join(list(answers)[:3])}, ...'
    )
  first_hit = {
    query_id: next(
      (
        rank
        for rank, doc_id in enumerate(ranking, start=1)
        if doc_id in texts and has_answer(answers[query_id], texts[doc_id])
      ),
      math.inf,
    )
    for query_id, ranking in rankings.items()
  }
  per_query = {
    f'Answer@{k}': {query_id: float(first_hit.get(query_id, math.inf) <= k) for query_id in answers}
    for k in ks
  }
  unknown = {doc_id for ranking in rankings.values() for doc_id in ranking if doc_id not in texts}
  return {
    'mean': {name: sum(values.values()) / len(values) for name, values in per_query.items()},
    'per_query': per_query,
    'counts': {
      'questions': len(answers),
      'questions_missing': sum(not rankings.get(query_id) for query_id in answers),
      'passages_without_text': len(unknown),
      'broken_answers': sum(
        _words(answer) == ' ' for several in answers.values() for answer in several
      ),
    },
  }


def questions_of(
  run: trec.Run, answers: Mapping[str, Sequence[str]], depth: int
) -> dict[str, list[str]]:
  return {
    query_id: [doc_id for doc_id, _ in ranking]
    for query_id, ranking in run.top(depth)
    if query_id in answers
  }


def read_answers(path: PathLike) -> dict[str, list[str]]:
  """Answers by question id.

  - ``.csv``, ``.tsv``: the DPR ``question TAB ['answer', ...]``.
  - Other: jsonl or a JSON array of objects with ``answers``.

  The id is ``_id``, ``id`` or ``query_id``, or the number of the line or entry, from 1.
  """
  table = plain_name(path).endswith(('.csv', '.tsv'))
  unique = UniqueIds(path, 'question')
  answers: dict[str, list[str]] = {}
  for number, where, question in (
    _read_table(path) if table else read_records(path, 'answers', _Question)
  ):
    ids = (id_ for id_ in (question.id, question.bare_id, question.query_id) if id_ is not None)
    id_ = check_id(next(ids, number), where)
    unique.add(id_, number)
    answers[id_] = question.answers
  return answers


class _Question(msgspec.Struct):
  answers: Annotated[list[str], msgspec.Meta(min_length=1)]
  bare_id: Id | None = msgspec.field(default=None, name='id')
  id: Id | None = msgspec.field(default=None, name='_id')
  query_id: Id | None = None


def _read_table(path: PathLike) -> Iterator[tuple[int, str, _Question]]:
  lines = read_lines(path, 'answers', blank=True)
  for number, cells in split_rows(lines, str(path), quoted=True):
    where = f'{path}, line {number}'
    try:
      _, literal = cells
      question = msgspec.convert({'answers': ast.literal_eval(literal)}, _Question)
    except _NO_LIST as error:
      raise InputError(f"{where}: expected question TAB ['answer', ...] ({error})") from error
    yield number, where, question


def read_passages(path: PathLike, ids: set[str]) -> dict[str, str]:
  """Texts, without titles, of these passages of a corpus."""
  passages: dict[str, str] = {}
  for entry in Texts(path, 'passage', ids).entries():
    passages[entry.record.id] = entry.record.text.strip('"')  # as DPR
  return passages
