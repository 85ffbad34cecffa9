"""Queries together with their positives and negatives, in the formats that keep them so.

| format | record |
|---|---|
| dpr | `{question, positive_ctxs, negative_ctxs, hard_negative_ctxs}` |
| tevatron | `{query_id, query, positive_passages, negative_passages}` |
| flagembedding | `{query, pos: [text], neg: [text]}` |
| arxiv | `{id, title, abstract, categories}`: the title is the query, the abstract its passage |

DPR's passages are `{title, text, passage_id}`, Tevatron's `{docid, title, text}`. To Tevatron's
negatives mining adds `retriever`, `rank`, `score` and `pools`. A file is jsonl or one JSON array.
Errors name file, line and what was expected there.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from etils import epath

from dprjax.base import reading
from dprjax.base.errors import InputError
from dprjax.formats.fields import Record
from dprjax.formats.texts import Passage, Query

UNDENOISED, DENOISED = POOLS = ('undenoised', 'denoised')  # of mined negatives (DPTDR section 3.3)

_PASSAGES = 'a list of {"docid", "title", "text"}'


class Negative(NamedTuple):
  """A hard negative and, if dprjax mined it, its origin.

  ``rank`` counts from 1. A negative that names no pool is undenoised.
  """

  id: str
  retriever: str = ''
  rank: int | None = None
  score: float | None = None
  pools: tuple[str, ...] = (UNDENOISED,)


class Example(NamedTuple):
  query: Query
  positives: list[Passage]
  negatives: list[tuple[Passage, Negative]]


def read_examples(format: str, path: epath.Path) -> Iterator[tuple[int, Example]]:
  """Yields (line or entry number, example).

  A passage without an id is named by its text; one id with two texts makes two passages. A query
  without an id is named by its number.
  """
  parse, _ = _FORMATS[format]
  digests: dict[str, str] = {}

  def passage(id_: str | None, title: str, text: str) -> Passage:
    text = f'{title} {text}'.strip()
    digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:16]
    id_ = id_ or f'text-{digest}'
    if digests.setdefault(id_, digest) != digest:
      id_ = f'{id_}~{digest}'
    return Passage(id_, text)

  for number, where, values in reading.read_records(path, 'data file'):
    yield number, parse(Record(values, where), str(number), passage)


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
  for number, where, values in reading.read_records(path, 'data file'):
    record = Record(values, where)
    yield number, record.id('id'), record.labels('categories')


def detect_format(path: epath.Path) -> str:
  """The format of a file, by its first record's keys. Raises InputError if none fits."""
  for _, _, values in reading.read_records(path, 'data file'):
    for format, (_, key) in _FORMATS.items():
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
  for number, values in reading.read_jsonl(path, 'negatives file'):
    record = Record(values, f'{path}, line {number}')
    entries = record.records('negative_passages', _PASSAGES)
    yield number, record.id('query_id'), [_negative(entry.id('docid'), entry) for entry in entries]


def read_reranker_scores(path: epath.Path) -> Iterator[tuple[str, list[tuple[str, float]]]]:
  """Yields (query id, (passage id, its ``reranker_score``)) of a tevatron jsonl that has scores."""
  for number, values in reading.read_jsonl(path, 'teacher scores'):
    record = Record(values, f'{path}, line {number}')
    entries = [
      entry
      for key in ('positive_passages', 'negative_passages')
      for entry in record.records(key, _PASSAGES, optional=True)
    ]
    yield (
      record.id('query_id'),
      [
        (entry.id('docid'), entry.number('reranker_score'))
        for entry in entries
        if entry.values.get('reranker_score') is not None
      ],
    )


_MakePassage = Callable[[str | None, str, str], Passage]


def _tevatron(record: Record, number: str, passage: _MakePassage) -> Example:
  def read(entry: Record) -> Passage:
    return passage(entry.id('docid'), entry.text('title', ''), entry.text('text'))

  negatives = [
    (read(entry), entry) for entry in record.records('negative_passages', _PASSAGES, optional=True)
  ]
  return Example(
    Query(record.id('query_id'), record.text('query').strip()),
    [read(entry) for entry in record.records('positive_passages', _PASSAGES)],
    [(negative, _negative(negative.id, entry)) for negative, entry in negatives],
  )


def _dpr(record: Record, number: str, passage: _MakePassage) -> Example:
  def read(key: str, optional: bool = True) -> list[Passage]:
    # NQ's files have passage_id, TriviaQA's psg_id.
    return [
      passage(entry.first_id('passage_id', 'psg_id'), entry.text('title', ''), entry.text('text'))
      for entry in record.records(key, 'a list of {"title", "text", "passage_id"}', optional)
    ]

  # As DPR trains: plain negatives stand in only where there is no hard one.
  negatives = read('hard_negative_ctxs') or read('negative_ctxs')
  return Example(
    Query(record.first_id('id') or number, record.text('question').strip()),
    read('positive_ctxs', optional=False),
    [(negative, Negative(negative.id)) for negative in negatives],
  )


def _flagembedding(record: Record, number: str, passage: _MakePassage) -> Example:
  positives = [passage(None, '', text) for text in record.texts('pos')]
  negatives = [passage(None, '', text) for text in record.texts('neg', optional=True)]
  return Example(
    Query(record.first_id('query_id', 'id') or number, record.text('query').strip()),
    positives,
    [(negative, Negative(negative.id)) for negative in negatives],
  )


def _arxiv(record: Record, number: str, passage: _MakePassage) -> Example:
  id_ = record.id('id')
  # A paper without a title or an abstract is counted and skipped, not refused.
  abstract = Passage(id_, record.text('abstract', '').strip())
  return Example(Query(id_, record.text('title', '').strip()), [abstract], [])


_FORMATS = {
  'tevatron': (_tevatron, 'positive_passages'),
  'flagembedding': (_flagembedding, 'pos'),
  'dpr': (_dpr, 'positive_ctxs'),
  'arxiv': (_arxiv, 'abstract'),
}
FORMATS = tuple(_FORMATS)


def _negative(id_: str, entry: Record) -> Negative:
  rank = None if entry.values.get('rank') is None else entry.whole('rank', -(2**31), 2**31)
  score = None if entry.values.get('score') is None else entry.number('score')
  pools: tuple[str, ...] = (UNDENOISED,)
  if 'pools' in entry.values:
    pools = tuple(entry.texts('pools', f'a list of {" and ".join(POOLS)}'))
  if not pools or not set(pools) <= set(POOLS):
    raise InputError(
      f'{entry.where}: a negative with the pools {list(pools)}; expected {" or ".join(POOLS)}, or '
      'both'
    )
  return Negative(id_, entry.text('retriever', ''), rank, score, pools)
