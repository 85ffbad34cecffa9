"""Queries together with their positives and negatives, in the formats that keep them so.

| format | record |
|---|---|
| dpr | `{question, positive_ctxs, negative_ctxs, hard_negative_ctxs}` |
| tevatron | `{query_id, query, positive_passages, negative_passages}` |
| flagembedding | `{query, pos: [text], neg: [text]}` |
| arxiv | `{id, title, abstract, categories}`: the title is the query, the abstract its passage |

DPR's passages are `{title, text, passage_id}`, Tevatron's `{docid, title, text}`. To Tevatron's
negatives mining adds `retriever`, `rank`, `score` and `sources`. A file is jsonl or one JSON array.
Errors name file, line and what was expected there.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from etils import epath

from dprjax.base import reading
from dprjax.base.errors import InputError
from dprjax.formats.fields import Id, Labels, check_id, labels
from dprjax.formats.texts import Passage, Query

UNDENOISED, DENOISED = MINED_SOURCES = ('undenoised', 'denoised')  # DPTDR section 3.3


class Negative(NamedTuple):
  """A hard negative and, if dprjax mined it, its origin.

  ``rank`` counts from 1. A negative that names no source is undenoised.
  """

  id: str
  retriever: str = ''
  rank: int | None = None
  score: float | None = None
  sources: tuple[str, ...] = (UNDENOISED,)


class Example(NamedTuple):
  query: Query
  positives: list[Passage]
  negatives: list[tuple[Passage, Negative]]


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
  passage_id: Id | None = None  # in NQ's files
  psg_id: Id | None = None  # in TriviaQA's


class _Dpr(msgspec.Struct):
  question: str
  positive_ctxs: list[_DprPassage]
  negative_ctxs: list[_DprPassage] = []
  hard_negative_ctxs: list[_DprPassage] = []
  id: Id | None = None


class _FlagEmbedding(msgspec.Struct):
  query: str
  pos: list[str]
  neg: list[str] = []
  query_id: Id | None = None
  id: Id | None = None


class _Arxiv(msgspec.Struct):
  id: Id
  title: str | None = None
  abstract: str | None = None
  categories: Labels = None


_MakePassage = Callable[[Id | None, str | None, str], Passage]


def read_examples(format: str, path: epath.Path) -> Iterator[tuple[int, Example]]:
  """Yields (line or entry number, example).

  A passage without an id is named by its text; one id with two texts makes two passages. A query
  without an id is named by its number.
  """
  parse, type_, _ = _FORMATS[format]
  digests: dict[str, str] = {}
  where = ''
  record: Any

  def passage(given: Id | None, title: str | None, text: str) -> Passage:
    text = f'{title or ""} {text}'.strip()
    digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:16]
    id_ = f'text-{digest}' if given is None else check_id(given, where)
    if digests.setdefault(id_, digest) != digest:
      id_ = f'{id_}~{digest}'
    return Passage(id_, text)

  for number, where, record in reading.read_records(path, 'data file', type_):
    query_id, query, positives, negatives = parse(record, passage)
    id_ = str(number) if query_id is None else check_id(query_id, where)
    yield number, Example(Query(id_, query.strip()), positives, negatives)


def read_passages(format: str, path: epath.Path) -> Iterator[tuple[int, Passage]]:
  """Yields (number, passage) of the passages in examples, each once, where it first comes."""
  seen: set[str] = set()
  for number, example in read_examples(format, path):
    for passage in (*example.positives, *(passage for passage, _ in example.negatives)):
      if passage.id not in seen:
        seen.add(passage.id)
        yield number, passage


def read_categories(path: epath.Path) -> Iterator[tuple[int, str, tuple[str, ...]]]:
  """Yields (number, id, categories) of the papers of an arXiv file."""
  for number, where, record in reading.read_records(path, 'data file', _Arxiv):
    yield number, check_id(record.id, where), labels(record.categories, where)


def detect_format(path: epath.Path) -> str:
  """The format of a file, by its first record's keys. Raises InputError if none fits."""
  for _, _, values in reading.read_records(path, 'data file', dict[str, Any]):
    for format, (_, _, key) in _FORMATS.items():
      if key in values:
        return format
    raise InputError(
      f'{path}: the first record has {", ".join(map(repr, values)) or "no keys"}; expected '
      'positive_passages (Tevatron), pos (FlagEmbedding), positive_ctxs (DPR) or abstract (arXiv); '
      'for a BEIR data set name its folder'
    )
  raise InputError(f'{path}: no record in it')


def read_mined(path: epath.Path) -> Iterator[tuple[int, str, list[Negative]]]:
  """Yields (line number, query id, negatives) of a tevatron jsonl whose texts are in a corpus."""
  for number, record in reading.read_jsonl(path, 'negatives file', _MinedIds):
    where = f'{path}, line {number}'
    negatives = [entry.negative(check_id(entry.docid, where)) for entry in record.negative_passages]
    yield number, check_id(record.query_id, where), negatives


def read_reranker_scores(path: epath.Path) -> Iterator[tuple[str, list[tuple[str, float]]]]:
  """Yields (query id, (passage id, its ``reranker_score``)) of a tevatron jsonl that has scores."""
  for number, record in reading.read_jsonl(path, 'teacher scores', _Scored):
    where = f'{path}, line {number}'
    scores = [
      (check_id(entry.docid, where), entry.reranker_score)
      for entry in (*record.positive_passages, *record.negative_passages)
      if entry.reranker_score is not None
    ]
    yield check_id(record.query_id, where), scores


# What each format's parser returns: the query's id, its text, positives, negatives.
_Parts = tuple[Id | None, str, list[Passage], list[tuple[Passage, Negative]]]


def _tevatron(record: _Tevatron, passage: _MakePassage) -> _Parts:
  positives, negatives = (
    [(passage(entry.docid, entry.title, entry.text), entry) for entry in entries]
    for entries in (record.positive_passages, record.negative_passages)
  )
  return (
    record.query_id,
    record.query,
    [positive for positive, _ in positives],
    [(negative, entry.negative(negative.id)) for negative, entry in negatives],
  )


def _dpr(record: _Dpr, passage: _MakePassage) -> _Parts:
  # As DPR trains: plain negatives stand in only where there is no hard one.
  positives, negatives = (
    [
      passage(
        entry.psg_id if entry.passage_id is None else entry.passage_id, entry.title, entry.text
      )
      for entry in entries
    ]
    for entries in (record.positive_ctxs, record.hard_negative_ctxs or record.negative_ctxs)
  )
  return record.id, record.question, positives, _unmined(negatives)


def _flagembedding(record: _FlagEmbedding, passage: _MakePassage) -> _Parts:
  positives, negatives = (
    [passage(None, None, text) for text in texts] for texts in (record.pos, record.neg)
  )
  id_ = record.id if record.query_id is None else record.query_id
  return id_, record.query, positives, _unmined(negatives)


def _arxiv(record: _Arxiv, passage: _MakePassage) -> _Parts:
  # A paper without a title or an abstract is counted and skipped, not refused.
  abstract = Passage(str(record.id), (record.abstract or '').strip())
  return record.id, record.title or '', [abstract], []


def _unmined(passages: list[Passage]) -> list[tuple[Passage, Negative]]:
  return [(passage, Negative(passage.id)) for passage in passages]


_FORMATS: dict[str, tuple[Callable[[Any, _MakePassage], _Parts], type, str]] = {
  'tevatron': (_tevatron, _Tevatron, 'positive_passages'),
  'flagembedding': (_flagembedding, _FlagEmbedding, 'pos'),
  'dpr': (_dpr, _Dpr, 'positive_ctxs'),
  'arxiv': (_arxiv, _Arxiv, 'abstract'),
}
FORMATS = tuple(_FORMATS)
