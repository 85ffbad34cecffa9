"""Queries together with their positives and negatives, in the formats that keep them so.

| format        | record                                                                          |
|---------------|---------------------------------------------------------------------------------|
| dpr           | `{question, positive_ctxs, negative_ctxs, hard_negative_ctxs}`, lists of         |
|               | `{title, text, passage_id}`                                                     |
| tevatron      | `{query_id, query, positive_passages, negative_passages}`, lists of              |
|               | `{docid, title, text}`; what mining writes adds `retriever`, `rank`, `score`,   |
|               | `pools` to a negative                                                           |
| flagembedding | `{query, pos, neg}`, lists of texts                                             |
| arxiv         | `{id, title, abstract}`: the title is the query, the abstract its passage       |

A file is jsonl or one JSON array. A record that cannot be used raises InputError with file, line
and what was expected there. A passage's text is its title, a space, its text.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from etils import epath

from dprjax.base import files
from dprjax.base.errors import InputError
from dprjax.formats import fields
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

  def passage(identifier: str | None, title: str, text: str) -> Passage:
    text = f'{title} {text}'.strip()
    digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:16]
    identifier = identifier or f'text-{digest}'
    if digests.setdefault(identifier, digest) != digest:
      identifier = f'{identifier}~{digest}'
    return Passage(identifier, text)

  for number, record in files.read_records(path, 'data file'):
    yield number, parse(record, f'{path}, line {number}', str(number), passage)


def read_passages(format: str, path: epath.Path) -> Iterator[tuple[int, Passage]]:
  """Yields (number, passage) of the passages in examples, each once, where it is first named."""
  seen: set[str] = set()
  for number, example in read_examples(format, path):
    for passage in (*example.positives, *(passage for passage, _ in example.negatives)):
      if passage.id not in seen:
        seen.add(passage.id)
        yield number, passage


def detect_format(path: epath.Path) -> str:
  """The format of a file, by its first record's keys. Raises InputError if none fits."""
  for _, record in files.read_records(path, 'data file'):
    for format, (_, key) in _FORMATS.items():
      if key in record:
        return format
    raise InputError(
      f'{path}: the first record has {", ".join(map(repr, record)) or "no keys"}; expected '
      'positive_passages (Tevatron), pos (FlagEmbedding), positive_ctxs (DPR) or abstract (arXiv)'
    )
  raise InputError(f'{path}: no record in it')


def read_mined(path: epath.Path) -> Iterator[tuple[int, str, list[Negative]]]:
  """Yields (line number, query id, negatives) of a tevatron jsonl whose texts are in a corpus."""
  for number, record in files.read_jsonl(path, 'negatives file'):
    where = f'{path}, line {number}'
    negatives = fields.entries(record, 'negative_passages', where, dict, _PASSAGES)
    yield (
      number,
      fields.identifier(record, 'query_id', where),
      [_negative(fields.identifier(entry, 'docid', where), entry, where) for entry in negatives],
    )


_MakePassage = Callable[[str | None, str, str], Passage]


def _tevatron(record: dict[str, Any], where: str, number: str, passage: _MakePassage) -> Example:
  def read(key: str, optional: bool = False) -> Iterator[tuple[Passage, dict[str, Any]]]:
    for entry in fields.entries(record, key, where, dict, _PASSAGES, optional):
      identifier = fields.identifier(entry, 'docid', where)
      title, text = fields.text(entry, 'title', where, ''), fields.text(entry, 'text', where)
      yield passage(identifier, title, text), entry

  return Example(
    Query(
      fields.identifier(record, 'query_id', where), fields.text(record, 'query', where).strip()
    ),
    [positive for positive, _ in read('positive_passages')],
    [
      (negative, _negative(negative.id, entry, where))
      for negative, entry in read('negative_passages', optional=True)
    ],
  )


def _dpr(record: dict[str, Any], where: str, number: str, passage: _MakePassage) -> Example:
  def read(key: str, optional: bool = True) -> list[Passage]:
    expected = 'a list of {"title", "text", "passage_id"}'
    return [
      passage(
        # NQ's files have passage_id, TriviaQA's psg_id.
        fields.first_identifier(entry, ('passage_id', 'psg_id'), where),
        fields.text(entry, 'title', where, ''),
        fields.text(entry, 'text', where),
      )
      for entry in fields.entries(record, key, where, dict, expected, optional)
    ]

  # As DPR trains: plain negatives stand in only where there is no hard one.
  negatives = read('hard_negative_ctxs') or read('negative_ctxs')
  identifier = fields.first_identifier(record, ('id',), where) or number
  return Example(
    Query(identifier, fields.text(record, 'question', where).strip()),
    read('positive_ctxs', optional=False),
    [(negative, Negative(negative.id)) for negative in negatives],
  )


def _flagembedding(
  record: dict[str, Any], where: str, number: str, passage: _MakePassage
) -> Example:
  def read(key: str, optional: bool) -> list[Passage]:
    texts = fields.entries(record, key, where, str, 'a list of texts', optional)
    return [passage(None, '', text) for text in texts]

  identifier = fields.first_identifier(record, ('query_id', 'id'), where) or number
  return Example(
    Query(identifier, fields.text(record, 'query', where).strip()),
    read('pos', optional=False),
    [(negative, Negative(negative.id)) for negative in read('neg', optional=True)],
  )


def _arxiv(record: dict[str, Any], where: str, number: str, passage: _MakePassage) -> Example:
  title = fields.text(record, 'title', where).strip()
  abstract = fields.text(record, 'abstract', where).strip()
  identifier = fields.identifier(record, 'id', where)
  return Example(Query(identifier, title), [Passage(identifier, abstract)], [])


_FORMATS = {
  'tevatron': (_tevatron, 'positive_passages'),
  'flagembedding': (_flagembedding, 'pos'),
  'dpr': (_dpr, 'positive_ctxs'),
  'arxiv': (_arxiv, 'abstract'),
}
FORMATS = tuple(_FORMATS)


def _negative(identifier: str, entry: dict[str, Any], where: str) -> Negative:
  rank, score = entry.get('rank'), entry.get('score')
  if not isinstance(rank, int | None) or not isinstance(score, int | float | None):
    raise InputError(f'{where}: rank {rank!r} and score {score!r} of a negative; expected numbers')
  pools = (UNDENOISED,)
  if 'pools' in entry:
    expected = f'a list of {" and ".join(POOLS)}'
    pools = tuple(fields.entries(entry, 'pools', where, str, expected))
  if not pools or not set(pools) <= set(POOLS):
    raise InputError(
      f'{where}: a negative with the pools {list(pools)}; expected {" or ".join(POOLS)}, or both'
    )
  return Negative(
    identifier,
    fields.text(entry, 'retriever', where, ''),
    rank,
    None if score is None else float(score),
    pools,
  )
