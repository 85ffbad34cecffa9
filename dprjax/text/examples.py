"""Queries with their positives and negatives, in the formats that keep the three together.

| format | record |
|---|---|
| dpr | `{question, positive_ctxs, negative_ctxs, hard_negative_ctxs}` |
| tevatron | `{query_id, query, positive_passages, negative_passages}` |
| flagembedding | `{query, pos: [text], neg: [text], prompt}` |
| arxiv | `{id, title, abstract, categories}`: the title is the query, the abstract its passage |
| table | columns such as query, positive, negative or label, by their names (`USUAL`) |
| ids | a table with ids of a corpus: columns such as query, positive_id, negative or label |

DPR passages are `{title, text, passage_id}`, Tevatron passages `{docid, title, text}`. Mining adds
`retriever`, `rank`, `score` and `sources` to Tevatron negatives. FlagEmbedding calls the text
before a query `prompt`. In a table, a column with the role `prompt` is put before the query, with a
space. `dprjax.text.records` lists the kinds of files. Errors name the file, the line and the
expected content.

A row of a table has a query, a passage or a list of passages in `positive`, and negatives in
`negative` or `negative_1`, `negative_2` and so on. A `label` is a whole number: the grade of the
passage, or 0 for a negative. Rows with the same query are joined.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from etils import epath

from dprjax.base import reading
from dprjax.base.errors import InputError
from dprjax.text import records
from dprjax.text.fields import Id, check_id
from dprjax.text.texts import Passage, Query

UNDENOISED, DENOISED = MINED_SOURCES = ('undenoised', 'denoised')  # DPTDR section 3.3


class Negative(NamedTuple):
  """A hard negative and, if dprjax mined it, its origin.

  ``rank`` counts from 1. A negative without a source is undenoised.
  """

  id: str
  retriever: str = ''
  rank: int | None = None
  score: float | None = None
  sources: tuple[str, ...] = (UNDENOISED,)


class Example(NamedTuple):
  """A query with some of its passages; a file may give a query in several parts.

  Attributes:
    grades: of the positives; empty where all are 1.
  """

  query: Query
  positives: list[Passage]
  negatives: list[tuple[Passage, Negative]]
  grades: tuple[int, ...] = ()


_Source = Literal['undenoised', 'denoised']


class _Mined(msgspec.Struct, kw_only=True):
  docid: Id
  retriever: str | None = None
  rank: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31)] | None = None
  score: float | None = None
  reranker_score: float | None = None
  sources: Annotated[tuple[_Source, ...], msgspec.Meta(min_length=1)] = ('undenoised',)

  def negative(self, id_: str) -> Negative:
    return Negative(id_, self.retriever or '', self.rank, self.score, self.sources)


class _TevatronPassage(_Mined, kw_only=True):
  text: str
  title: str | None = None


class _Tevatron(msgspec.Struct):
  query_id: Id
  query: str
  positive_passages: list[_TevatronPassage]
  negative_passages: list[_TevatronPassage] = []


class _MinedIds(msgspec.Struct):
  query_id: Id
  negative_passages: list[_Mined]


class _Scored(msgspec.Struct):
  query_id: Id
  positive_passages: list[_Mined] = []
  negative_passages: list[_Mined] = []


class _DprPassage(msgspec.Struct):
  text: str
  title: str | None = None
  passage_id: Id | None = None  # in files of NQ
  psg_id: Id | None = None  # in files of TriviaQA


class _Dpr(msgspec.Struct):
  question: str
  positive_ctxs: list[_DprPassage]
  negative_ctxs: list[_DprPassage] = []
  hard_negative_ctxs: list[_DprPassage] = []
  id: Id | None = None


class _FlagEmbedding(msgspec.Struct):
  query: str
  pos: list[str]
  neg: list[str] | None = None
  prompt: str | None = None
  query_id: Id | None = None
  id: Id | None = None


class _Arxiv(msgspec.Struct):
  id: Id
  title: str | None = None
  abstract: str | None = None


USUAL = {
  'query': ('query', 'anchor', 'question', 'query_text'),
  'positive': (
    *('positive', 'pos', 'passage', 'answer', 'document', 'context', 'text', 'contents', 'content'),
    *('positive_passage', 'response'),
  ),
  'negative': ('negative', 'neg', 'hard_negative', 'negative_passage'),
  'label': ('label', 'relevance', 'grade'),
  'title': ('title',),
  'query_id': ('query_id', 'query-id', 'qid'),
  'prompt': (),  # only if the user names the column
  'positive_id': ('positive_id', 'passage_id', 'docid', 'doc_id', 'pid', 'corpus_id', 'corpus-id'),
}
"""The usual column names of a table, in lower case; the first that exists counts."""


_TABLES = ('csv', 'tsv')  # values are never lists
_NUMBERED = re.compile(r'(?:hard_)?neg(?:ative)?_\d{1,3}')


class _Naming:
  """Names passages by their ids or, without ids, by their texts."""

  def __init__(self) -> None:
    self._digests: dict[str, str] = {}

  def __call__(self, raw_id: Id | None, title: str | None, text: str, where: str) -> Passage:
    text = f'{title or ""} {text}'.strip()
    digest = digest_of(text)
    id_ = f'text-{digest}' if raw_id is None else check_id(raw_id, where)
    if self._digests.setdefault(id_, digest) != digest:
      id_ = f'{id_}~{digest}'
    return Passage(id_, text)


def _of_corpus(_given: Any, _title: Any, id_: str, where: str) -> Passage:
  return Passage(check_id(id_, where), '')


def _naming(format: str) -> Callable[[Id | None, str | None, str, str], Passage]:
  return _of_corpus if format == 'ids' else _Naming()


def digest_of(text: str) -> str:
  """A name of 16 digits for a text."""
  return hashlib.sha1(text.encode('utf-8', 'surrogatepass'), usedforsecurity=False).hexdigest()[:16]


def read_examples(
  format: str, path: epath.Path, columns: Mapping[str, str] | None = None
) -> Iterator[tuple[int, Example]]:
  """Yields (line or entry number, example); several rows of a table may share a query.

  A passage without an id is named by its text; an id with two texts makes two passages. A query
  without an id is named by its number or, in a table, by its text.

  Args:
    columns: of a table, names chosen by the user, by role.
  """
  if format in TABLES:
    yield from _read_table(path, columns or {}, by_id=format == 'ids')
    return
  prompted = bool(columns and 'prompt' in columns)
  parse, type_, _ = _FORMATS[format]
  naming = _naming(format)
  record: Any
  for number, where, record in records.read_as(path, 'data file', type_):
    query_id, query, positives, negatives = parse(record)
    id_ = str(number) if query_id is None else check_id(query_id, where)
    if prompted and getattr(record, 'prompt', None):
      query = f'{record.prompt.strip()} {query}'
    others = [(naming(*raw, where), negative) for raw, negative in negatives]
    yield (
      number,
      Example(
        Query(id_, query.strip()),
        [naming(*raw, where) for raw in positives],
        [(passage, negative._replace(id=passage.id)) for passage, negative in others],
      ),
    )


def _read_table(
  path: epath.Path, columns: Mapping[str, str], by_id: bool
) -> Iterator[tuple[int, Example]]:
  positive, read = ('positive_id', records.id_of) if by_id else ('positive', records.text_of)
  naming = _naming('ids' if by_id else 'table')
  roles: dict[str, str] = {}
  negatives: list[str] = []
  for row in records.read(path, 'data file'):
    if not roles:
      names = list(row.values)
      needed = ('query', positive)
      roles = records.find_roles(names, USUAL, columns, str(path), needed, needed)
      negatives = [name for name in names if _NUMBERED.fullmatch(name.strip().lower())]
      negatives += [roles['negative']] if 'negative' in roles else []
    values, where = row.values, row.where
    text = records.text_of(values[roles['query']], where, roles['query']).strip()
    if 'prompt' in roles:
      text = f'{records.text_of(values[roles["prompt"]], where, "prompt").strip()} {text}'.strip()
    id_ = f'query-{digest_of(text)}'
    if 'query_id' in roles:
      id_ = check_id(records.id_of(values[roles['query_id']], where, roles['query_id']), where)
    relevant = _several(values[roles[positive]], where, roles[positive], read)
    title = records.text_of(values.get(roles.get('title', '')), where, 'title')
    passage_id = None
    if 'positive_id' in roles and len(relevant) == 1 and not by_id:
      passage_id = records.id_of(values[roles['positive_id']], where, roles['positive_id'])
    positives = [naming(passage_id, title, one, where) for one in relevant]
    grade = _grade(values[roles['label']], where, roles['label']) if 'label' in roles else 1
    others = [
      naming(None, None, one, where)
      for name in negatives
      for one in _several(values[name], where, name, read)
    ]
    if grade <= 0:
      yield row.number, Example(Query(id_, text), [], _unmined([*positives, *others]))
    else:
      grades = (grade,) * len(positives) if grade > 1 else ()
      yield row.number, Example(Query(id_, text), positives, _unmined(others), grades)


def _several(value: Any, where: str, name: str, read: Callable[[Any, str, str], str]) -> list[str]:
  """A value or a list of values as read; none for a missing one."""
  several = value if isinstance(value, list) else [value]
  texts = (read(one, where, name) for one in several if one is not None)
  return [text for text in texts if text.strip()]


def _grade(value: Any, where: str, name: str) -> int:
  """A label as a grade: true, 1, '1' and 1.0 are 1."""
  try:
    number = float({'true': 1, 'false': 0}.get(str(value).strip().lower(), value))
  except (TypeError, ValueError):
    number = math.nan
  if not number.is_integer() or abs(number) >= 2**31:
    raise InputError(
      f'{where}: {name} is {value!r:.40}; expected a whole number, 0 for a passage that is not '
      'relevant. Round scores first, or leave the column out'
    )
  return int(number)


def read_passages(
  format: str, path: epath.Path, columns: Mapping[str, str] | None = None
) -> Iterator[tuple[int, Passage]]:
  """Yields (number, passage) of the passages in examples, each where it first occurs."""
  seen: set[str] = set()
  for number, example in read_examples(format, path, columns):
    for passage in (*example.positives, *(passage for passage, _ in example.negatives)):
      if passage.id not in seen:
        seen.add(passage.id)
        yield number, passage


def detect_format(path: epath.Path, columns: Mapping[str, str] | None = None) -> str:
  """The format of a file, by the keys of its first record."""
  names = records.names_of(path, 'data file')
  chosen = columns or {}
  if not {'query', 'positive'} & chosen.keys() and records.ending_of(path) not in _TABLES:
    for format, (_, _, key) in _FORMATS.items():
      if key in names:
        return format
  roles = {role: name for role, name in chosen.items() if role in USUAL}
  if {'query', 'positive'} <= records.find_roles(names, USUAL, roles, str(path)).keys():
    return 'table'
  raise InputError(
    f'{path}: the first record has {", ".join(map(repr, names)) or "no keys"}; expected '
    'positive_passages (Tevatron), pos (FlagEmbedding), positive_ctxs (DPR), abstract (arXiv), or '
    'columns such as query and positive; if corpus or queries are in files beside it, name the '
    'folder'
  )


def read_mined(path: epath.Path) -> Iterator[tuple[int, str, list[Negative]]]:
  """Yields (line number, query id, negatives) of a tevatron jsonl whose texts are in a corpus."""
  for number, record in reading.read_jsonl(path, 'negatives file', _MinedIds):
    where = f'{path}, line {number}'
    negatives = [entry.negative(check_id(entry.docid, where)) for entry in record.negative_passages]
    yield number, check_id(record.query_id, where), negatives


def read_reranker_scores(path: epath.Path) -> Iterator[tuple[str, list[tuple[str, float]]]]:
  """Yields (query id, [(passage id, ``reranker_score``), ...]) of a Tevatron jsonl."""
  for number, record in reading.read_jsonl(path, 'teacher scores', _Scored):
    where = f'{path}, line {number}'
    scores = [
      (check_id(entry.docid, where), entry.reranker_score)
      for entry in (*record.positive_passages, *record.negative_passages)
      if entry.reranker_score is not None
    ]
    yield check_id(record.query_id, where), scores


# The parser of each format returns the query id, its text, positives and negatives, whose ids are
# not known yet. A passage is (id, title, text).
_Raw = tuple[Id | None, str | None, str]
_Parts = tuple[Id | None, str, Sequence[_Raw], Sequence[tuple[_Raw, Negative]]]


def _plain(passages: Iterable[_Raw]) -> list[tuple[_Raw, Negative]]:
  return [(passage, Negative('')) for passage in passages]


def _tevatron(record: _Tevatron) -> _Parts:
  positives, negatives = (
    [((one.docid, one.title, one.text), one.negative('')) for one in entries]
    for entries in (record.positive_passages, record.negative_passages)
  )
  return record.query_id, record.query, [passage for passage, _ in positives], negatives


def _dpr(record: _Dpr) -> _Parts:
  # As in DPR training: plain negatives only where there is no hard one.
  positives, negatives = (
    [
      (one.psg_id if one.passage_id is None else one.passage_id, one.title, one.text)
      for one in entries
    ]
    for entries in (record.positive_ctxs, record.hard_negative_ctxs or record.negative_ctxs)
  )
  return record.id, record.question, positives, _plain(negatives)


def _flagembedding(record: _FlagEmbedding) -> _Parts:
  texts: list[str] = record.neg or []
  negatives = _plain((None, None, text) for text in texts)
  id_ = record.id if record.query_id is None else record.query_id
  return id_, record.query, [(None, None, text) for text in record.pos], negatives


def _arxiv(record: _Arxiv) -> _Parts:
  # A paper without a title or an abstract is counted and skipped, not refused.
  return record.id, record.title or '', [(record.id, None, record.abstract or '')], []


def _unmined(passages: list[Passage]) -> list[tuple[Passage, Negative]]:
  return [(passage, Negative(passage.id)) for passage in passages]


_FORMATS: dict[str, tuple[Callable[[Any], _Parts], type, str]] = {
  'tevatron': (_tevatron, _Tevatron, 'positive_passages'),
  'flagembedding': (_flagembedding, _FlagEmbedding, 'pos'),
  'dpr': (_dpr, _Dpr, 'positive_ctxs'),
  'arxiv': (_arxiv, _Arxiv, 'abstract'),
}
TABLES = ('table', 'ids')  # rows may share a query
FORMATS = (*_FORMATS, *TABLES)
