"""Answer recall of open-domain question answering, as in DPR (dpr/data/qa_validation.py).

A passage is a hit if its text without the title contains an answer as a sequence of words, ignoring
case. A question is a hit at k if one of its first k passages is a hit.
"""

import ast
import math
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated

import msgspec
import regex

from dprjax.base.errors import InputError
from dprjax.base.files import PathLike
from dprjax.base.reading import plain_name, read_lines, read_records
from dprjax.retrieval.measures import Metrics
from dprjax.text.fields import Id, UniqueIds, check_id
from dprjax.text.records import split_rows
from dprjax.text.texts import Texts
from dprjax.text.trec import Run

# Raised by the Python parser, also for deep nesting.
_NO_LIST = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)
# The DPR SimpleTokenizer: a run of letters, digits and marks, or one other visible character.
_WORD = regex.compile(r'[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]')


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
  ks: Sequence[int] = (5, 20, 100),
) -> Metrics:
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
        _words(answer) == ' ' for given in answers.values() for answer in given
      ),
    },
  }


def questions_of(
  run: Run, answers: Mapping[str, Sequence[str]], depth: int
) -> dict[str, list[str]]:
  """The rankings for ``answer_recall``."""
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
    given = (id_ for id_ in (question.id, question.bare_id, question.query_id) if id_ is not None)
    id_ = check_id(next(given, number), where)
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
