"""Measures a run against judgements and answers to questions."""

import dataclasses
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dprjax.base.files import PathLike
from dprjax.retrieval import answers, measures
from dprjax.text import seen, trec
from dprjax.text.fields import report_ids
from dprjax.text.qrels import Qrels
from dprjax.text.texts import read_texts

logger = logging.getLogger('dprjax')


class Questions(NamedTuple):
  """Questions for Answer@k, the top-k accuracy of DPR.

  Attributes:
    answers: by question, see `answers.read_answers`.
  """

  answers: Mapping[str, Sequence[str]]
  depths: Sequence[int]


def evaluate(
  run: trec.Run,
  judged: Qrels | None,
  names: Sequence[str] = measures.DEFAULT_MEASURES,
  *,
  questions: Questions | None = None,
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
    corpus: the passages, for answers and for ids of judged documents.
    drop_same_id: leave out the document with the id of its query.
    queries, known: texts of the queries and those that the model has seen, which are counted.
    labels: names of the run and of the judgements in messages.

  Returns:
    ``measures.Metrics`` and the settings.
  """
  measures.parse_measures(names)
  asked = {} if questions is None else questions.answers
  has_judgements, judged = judged is not None, judged or {}
  if drop_same_id:
    judged = _without_own_id(judged, labels[1])
  read = _read(run.pieces(), judged, names, questions, drop_same_id)
  if not drop_same_id and 2 * read.first_with_own_id > read.with_own_id:
    # A passage that equals its query ranks first; passages whose id is equal by chance seldom do.
    logger.info(
      '%s: %d of %d queries found the document with their own id; if queries are passages of the '
      'corpus, --drop_same_id=true leaves it out, as BEIR does',
      labels[0],
      read.with_own_id,
      read.queries,
    )
  needed = {document for ranking in read.rankings.values() for document in ranking}
  documents = {document for documents in judged.values() for document in documents}
  texts = answers.read_passages(corpus, needed | documents) if corpus else {}
  parts: list[measures.Metrics] = []

  def tell_missing(ids: Collection[str], what: str) -> None:
    missing = [id_ for id_ in ids if id_ not in read.found]
    sentence = f'{labels[0]}: nothing for {len(missing)} of {len(ids)} {what}, which count as 0'
    report_ids(sentence, missing)

  def tell_unknown(sentence: str, ids: set[str]) -> int:
    unknown = sorted(ids - set(texts))
    report_ids(sentence.format(len(unknown), corpus), unknown)
    return len(unknown)

  measured = judged.keys() | asked.keys()
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
  if has_judgements:
    parts.append(read.measured.metrics())
    tell_missing(judged, 'judged queries')
    if not read.measured.any_judged:
      logger.warning('%s: no document is judged by %s', *labels)
  if questions is not None:
    found = answers.answer_recall(read.rankings, asked, texts, questions.depths)
    parts.append(found)
    tell_missing(asked, 'questions')
    tell_unknown(
      f'{labels[0]}: {{}} of its passages are not in {{}} and count as without answers', needed
    )
  counts = {name: count for part in parts for name, count in part['counts'].items()}
  counts['queries_with_own_id'] = read.with_own_id
  counts |= {f'queries_seen_in_{role}': count for role, count in trained.items() if count}
  if has_judgements and corpus:
    counts['unknown_documents'] = tell_unknown(
      f'{labels[1]}: {{}} of {len(documents)} judged documents are not in {{}}', documents
    )
  return {
    'mean': {name: value for part in parts for name, value in part['mean'].items()},
    'per_query': {name: values for part in parts for name, values in part['per_query'].items()},
    'counts': counts,
    'settings': {'drop_same_id': drop_same_id},
  }


def _seen(queries: PathLike, measured: Collection[str], known: seen.Seen) -> dict[str, int]:
  """By role, the number of measured queries that the model was trained on or chosen by."""
  texts = (text for text in read_texts(queries, 'query') if text.id in measured)
  return {role: len(ids) for role, ids in seen.ids(texts, known).items()}


@dataclasses.dataclass
class _Read:
  """Results of reading a run.

  Attributes:
    queries: their number, judged or not.
    with_own_id: queries that found the document with their own id; for ``first_with_own_id`` of
      them it ranks first and was not judged relevant.
    found: judged queries and questions that are in the run.
    rankings: of questions.
  """

  measured: measures.Measuring
  queries: int = 0
  with_own_id: int = 0
  first_with_own_id: int = 0
  found: set[str] = dataclasses.field(default_factory=set)
  rankings: dict[str, list[str]] = dataclasses.field(default_factory=dict)


def _read(
  pieces: Iterable[trec.Run],
  judged: Qrels,
  names: Sequence[str],
  questions: Questions | None,
  drop_same_id: bool,
) -> _Read:
  read = _Read(measures.Measuring(judged, names))
  asked = {} if questions is None else questions.answers
  for run in pieces:
    read.queries += len(run)
    read.found.update(id_ for id_ in run.query_ids if id_ in judged or id_ in asked)
    same = run.same_id()
    read.with_own_id += len(np.unique(run.query_of_row()[same]))
    if drop_same_id:
      run = run.keep(~same)
    else:
      read.first_with_own_id += _first_with_own_id(run, same, judged)
    if questions is not None:
      read.rankings |= answers.questions_of(run, asked, max(questions.depths))
    read.measured.add(run)
  return read


def _first_with_own_id(ranked: trec.Run, same: np.ndarray, judged: Qrels) -> int:
  """The number of queries whose first document has the same id and was not judged relevant."""
  first = ranked.offsets[:-1][np.diff(ranked.offsets) > 0]
  rows = ranked.query_of_row()[first[same[first]]].tolist()
  ids = [ranked.query_ids[row] for row in rows]
  return sum(judged.get(id_, {}).get(id_, 0) < 1 for id_ in ids)


def _without_own_id(judged: Qrels, name: str) -> Qrels:
  own = [query for query, documents in judged.items() if query in documents]
  if not own:
    return judged
  logger.info('%s: left out %d judgements of a query with its own id', name, len(own))
  kept = {
    query: {document: grade for document, grade in documents.items() if document != query}
    for query, documents in judged.items()
  }
  return {query: documents for query, documents in kept.items() if documents}
