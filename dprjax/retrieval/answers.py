"""Answer recall of open-domain question answering, as in DPR (dpr/data/qa_validation.py).

A passage is a hit if its text without the title contains an answer: as a sequence of words,
ignoring case ('string'), or as a regular expression (CuratedTREC, 'regex'). A question is a hit at
k if one of its first k passages is a hit.
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
from dprjax.text.columns import split_rows
from dprjax.text.fields import Id, UniqueIds, check_id
from dprjax.text.texts import Texts
from dprjax.text.trec import Run

MATCHES = ('string', 'regex')

# Raised by the Python parser, also for deep nesting.
_NO_LIST = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)
_LONGEST_S = 20.0  # for one expression in one passage
_FLAGS = regex.IGNORECASE | regex.UNICODE | regex.MULTILINE
# The DPR SimpleTokenizer: a run of letters, digits and marks, or one other visible character.
_WORD = regex.compile(r'[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]', _FLAGS)


def has_answer(answers: Iterable[str], text: str, match: str = 'string') -> bool:
  """Whether the text contains an answer.

  As in DPR, an answer without words matches every text, and an invalid expression none.
  """
  text = unicodedata.normalize('NFD', text)
  if match == 'string':
    words = _words(text)
    return any(_words(unicodedata.normalize('NFD', answer)) in words for answer in answers)
  patterns = (_compile(answer) for answer in answers)
  return any(pattern is not None and _matches(pattern, text) for pattern in patterns)


def _matches(pattern: regex.Pattern[str], text: str) -> bool:
  try:
    return bool(pattern.search(text, timeout=_LONGEST_S))
  except TimeoutError as error:
    raise InputError(
      f'the answer {pattern.pattern!r:.80} takes more than {_LONGEST_S:g} s in one passage; avoid '
      'nested repetitions'
    ) from error


def _words(text: str) -> str:
  """The words between spaces, so that a sequence of words is a substring."""
  return ' ' + ''.join(f'{word.lower()} ' for word in _WORD.findall(text))


def _compile(answer: str) -> regex.Pattern[str] | None:
  try:
    return regex.compile(unicodedata.normalize('NFD', answer), _FLAGS)
  except (regex.error, RecursionError, OverflowError):
    return None


def answer_recall(
  rankings: Mapping[str, Sequence[str]],
  answers: Mapping[str, Sequence[str]],
  texts: Mapping[str, str],
  ks: Sequence[int] = (5, 20, 100),
  match: str = 'string',
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
        if doc_id in texts and has_answer(answers[query_id], texts[doc_id], match)
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
        _is_broken(answer, match) for given in answers.values() for answer in given
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


def _is_broken(answer: str, match: str) -> bool:
  """Whether an answer has no words or does not compile."""
  return _compile(answer) is None if match == 'regex' else _words(answer) == ' '


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
