"""What each format of retrieval data looks like, record by record; `dprjax.data.sources` makes one
data set of them.

Every reader streams and yields (line number, record). A record that cannot be used raises
InputError with file, line and what was expected there. A passage's text is its title, a space, its
text.
"""

import csv
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from etils import epath

from dprjax.base import files
from dprjax.base.errors import InputError

FORMATS = ('beir', 'msmarco', 'dpr', 'tevatron', 'flagembedding', 'arxiv')
INLINE = ('dpr', 'tevatron', 'flagembedding')  # formats that carry the passages within the examples
ENDINGS = ('', '.gz', '.xz')
UNDENOISED, DENOISED = POOLS = ('undenoised', 'denoised')  # of mined negatives (DPTDR section 3.3)

_CHUNK = 1 << 20  # characters of a JSON array read at a time
_MAX_ENTRY = 1 << 26  # an entry longer than this is taken for a broken file
_PASSAGE_LIST = 'a list of {"docid", "title", "text"}'


class Passage(NamedTuple):
  id: str
  text: str


class Query(NamedTuple):
  id: str
  text: str


class Negative(NamedTuple):
  """A hard negative and, where it was mined by us, where it came from.

  ``rank`` counts from 1; nobody has denoised what names no pool.
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


class Paper(NamedTuple):
  id: str
  title: str
  abstract: str


def file_names(format: str, split: str) -> dict[str, str]:
  """The customary names in a folder of several files, by role."""
  if format == 'beir':
    return {'corpus': 'corpus.jsonl', 'queries': 'queries.jsonl', 'qrels': f'qrels/{split}.tsv'}
  return {
    'corpus': 'collection.tsv',
    'queries': f'queries.{split}.tsv',
    'qrels': f'qrels.{split}.tsv',
  }


def is_records(path: epath.Path) -> bool:
  return any(
    path.name.endswith(f'{kind}{ending}') for kind in ('.json', '.jsonl') for ending in ENDINGS
  )


def format_of_record(path: epath.Path) -> str:
  """The format of a file by its first record's keys. Raises InputError if they are none's."""
  for _, record in _records(path):
    for format, key in (
      ('tevatron', 'positive_passages'),
      ('flagembedding', 'pos'),
      ('dpr', 'positive_ctxs'),
      ('arxiv', 'abstract'),
    ):
      if key in record:
        return format
    raise InputError(
      f'{path}: the first record has {", ".join(map(repr, record)) or "no keys"}; expected '
      'positive_passages (Tevatron), '
      'pos (FlagEmbedding), positive_ctxs (DPR) or abstract (arXiv)'
    )
  raise InputError(f'{path}: no record in it')


def read_corpus(format: str, path: epath.Path) -> Iterator[tuple[int, Passage]]:
  """The passages of any format; those within examples come once each, at their first mention."""
  if format == 'beir':
    for number, record in files.read_jsonl(path, 'corpus file'):
      name, title, text = beir_parts(record, f'{path}, line {number}')
      yield number, Passage(name, f'{title} {text}'.strip())
  elif format == 'msmarco':
    yield from _read_collection(path)
  elif format == 'arxiv':
    for number, paper in read_arxiv(path):
      yield number, Passage(paper.id, paper.abstract)
  else:
    seen: set[str] = set()
    for number, example in read_examples(format, path):
      for passage in (*example.positives, *(passage for passage, _ in example.negatives)):
        if passage.id not in seen:
          seen.add(passage.id)
          yield number, passage


def beir_parts(record: dict[str, Any], where: str) -> tuple[str, str, str]:
  """Id, title and text of a record of corpus.jsonl.

  Raises InputError, naming ``where``, if one is missing (a title may be).
  """
  title, text = _string(record, 'title', where, ''), _string(record, 'text', where)
  return _identifier(record, where, '_id'), title, text


def collection_parts(line: str, quoted: bool, where: str) -> tuple[str, str, str]:
  """Id, title and text of a line of a collection; ``quoted`` as in DPR's psgs_w100.tsv.

  Raises InputError naming ``where``.
  """
  columns = next(csv.reader([line], delimiter='\t')) if quoted else line.split('\t')
  if len(columns) == 2:
    return columns[0], '', columns[1]
  if len(columns) == 3:
    return columns[0], columns[2], columns[1]
  if len(columns) == 4:
    return columns[0], columns[2], columns[3]
  raise InputError(
    f'{where}: {len(columns)} columns between tabs; expected id text, id text title, or id url '
    'title body'
  )


def is_quoted_header(line: str) -> bool:
  """The header of DPR's psgs_w100.tsv, whose lines have CSV's quotes; MS MARCO's collection has
  neither.
  """
  return line.split('\t')[:2] == ['id', 'text']


def read_queries(format: str, path: epath.Path) -> Iterator[tuple[int, Query]]:
  """The queries of a format that keeps them in a file of their own."""
  if format == 'beir':
    for number, record in files.read_jsonl(path, 'queries file'):
      where = f'{path}, line {number}'
      yield number, Query(_identifier(record, where, '_id'), _string(record, 'text', where).strip())
  else:
    for number, line in files.read_lines(path, 'queries file'):
      columns = line.split('\t')
      if len(columns) != 2:
        raise InputError(
          f'{path}, line {number}: {len(columns)} columns between tabs; expected 2, id and text'
        )
      yield number, Query(columns[0], columns[1].strip())


def read_qrels(path: epath.Path) -> Iterator[tuple[int, str, str, int]]:
  """(line number, query id, passage id, grade); BEIR's three columns with their header, or TREC's
  four.
  """
  for number, line in files.read_lines(path, 'qrels file'):
    columns = line.split('\t') if '\t' in line else line.split()
    if len(columns) not in (3, 4):
      raise InputError(
        f'{path}, line {number}: {len(columns)} columns; expected query, passage and grade, or '
        'those of TREC: query 0 passage grade'
      )
    query, passage, grade = columns[0], columns[-2], columns[-1]
    try:
      yield number, query, passage, int(grade)
    except ValueError:
      if number > 1:
        raise InputError(
          f'{path}, line {number}: the grade {grade!r} is not a whole number'
        ) from None


def read_arxiv(path: epath.Path) -> Iterator[tuple[int, Paper]]:
  for number, record in files.read_jsonl(path, 'arXiv file'):
    where = f'{path}, line {number}'
    title, abstract = (
      _string(record, 'title', where).strip(),
      _string(record, 'abstract', where).strip(),
    )
    yield number, Paper(_identifier(record, where, 'id'), title, abstract)


def read_examples(format: str, path: epath.Path) -> Iterator[tuple[int, Example]]:
  """Queries with their positives and negatives, of a format that keeps them together.

  A passage without an id is named by its text; one id with two texts makes two passages. A query
  without an id is named by its line.
  """
  parse = {'dpr': _dpr, 'tevatron': _tevatron, 'flagembedding': _flagembedding}[format]
  texts: dict[str, str] = {}

  def passage(identifier: str | None, title: str, text: str) -> Passage:
    text = f'{title} {text}'.strip()
    digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:16]
    identifier = identifier or f'text-{digest}'
    if texts.setdefault(identifier, digest) != digest:
      identifier = f'{identifier}~{digest}'
    return Passage(identifier, text)

  for number, record in _records(path):
    yield number, parse(record, f'{path}, line {number}', str(number), passage)


def read_mined(path: epath.Path) -> Iterator[tuple[int, str, list[Negative]]]:
  """(line number, query id, negatives) of a training file whose passages need no text, because a
  corpus has them.
  """
  for number, record in files.read_jsonl(path, 'negatives file'):
    where = f'{path}, line {number}'
    entries = _list(record, 'negative_passages', where, dict, _PASSAGE_LIST)
    yield (
      number,
      _identifier(record, where, 'query_id'),
      [_negative(_identifier(entry, where, 'docid'), entry, where) for entry in entries],
    )


_MakePassage = Callable[[str | None, str, str], Passage]


def _tevatron(record: dict[str, Any], where: str, number: str, passage: _MakePassage) -> Example:
  def read(entry: dict[str, Any]) -> Passage:
    return passage(
      _identifier(entry, where, 'docid'),
      _string(entry, 'title', where, ''),
      _string(entry, 'text', where),
    )

  positives = [
    read(entry) for entry in _list(record, 'positive_passages', where, dict, _PASSAGE_LIST)
  ]
  negatives = []
  for entry in _list(record, 'negative_passages', where, dict, _PASSAGE_LIST, optional=True):
    negative = read(entry)
    negatives.append((negative, _negative(negative.id, entry, where)))
  return Example(
    Query(_identifier(record, where, 'query_id'), _string(record, 'query', where).strip()),
    positives,
    negatives,
  )


def _dpr(record: dict[str, Any], where: str, number: str, passage: _MakePassage) -> Example:
  def read(key: str, optional: bool = True) -> list[Passage]:
    entries = _list(record, key, where, dict, 'a list of {"title", "text", "passage_id"}', optional)
    # NQ's files say passage_id, TriviaQA's psg_id.
    return [
      passage(
        _some_identifier(entry, where, 'passage_id', 'psg_id'),
        _string(entry, 'title', where, ''),
        _string(entry, 'text', where),
      )
      for entry in entries
    ]

  # As DPR trains: plain negatives stand in only where there is no hard one.
  negatives = read('hard_negative_ctxs') or read('negative_ctxs')
  query = Query(
    _some_identifier(record, where, 'id') or number, _string(record, 'question', where).strip()
  )
  return Example(
    query,
    read('positive_ctxs', optional=False),
    [(negative, Negative(negative.id)) for negative in negatives],
  )


def _flagembedding(
  record: dict[str, Any], where: str, number: str, passage: _MakePassage
) -> Example:
  query = Query(
    _some_identifier(record, where, 'query_id', 'id') or number,
    _string(record, 'query', where).strip(),
  )
  positives = [
    passage(None, '', text) for text in _list(record, 'pos', where, str, 'a list of texts')
  ]
  negatives = [
    passage(None, '', text)
    for text in _list(record, 'neg', where, str, 'a list of texts', optional=True)
  ]
  return Example(query, positives, [(negative, Negative(negative.id)) for negative in negatives])


def _read_collection(path: epath.Path) -> Iterator[tuple[int, Passage]]:
  quoted = False
  for number, line in files.read_lines(path, 'collection'):
    if number == 1 and is_quoted_header(line):
      quoted = True
      continue
    name, title, text = collection_parts(line, quoted, f'{path}, line {number}')
    yield number, Passage(name, f'{title} {text}'.strip())


def _records(path: epath.Path) -> Iterator[tuple[int, dict[str, Any]]]:
  """Objects of a jsonl file or of one JSON array, whose entries are counted as lines are."""
  with files.open_text(path, 'data file') as file:
    array = file.read(64).lstrip()[:1] == '['
  yield from _read_array(path) if array else files.read_jsonl(path, 'data file')


def _read_array(path: epath.Path) -> Iterator[tuple[int, dict[str, Any]]]:
  """Entries of a JSON array one at a time: DPR's training files are larger than most memories."""
  decoder, number = json.JSONDecoder(), 0
  with files.open_text(path, 'data file') as file:
    buffer = file.read(_CHUNK).lstrip()[1:]
    while True:
      buffer = buffer.lstrip()
      if buffer.startswith(',') and number:
        buffer = buffer[1:].lstrip()
      if buffer.startswith(']'):
        return
      try:
        value, end = decoder.raw_decode(buffer)
      except json.JSONDecodeError as error:
        more = file.read(max(_CHUNK, len(buffer))) if len(buffer) < _MAX_ENTRY else ''
        if not more:
          raise InputError(
            f'{path}, entry {number + 1}: not JSON, or cut off ({error.msg}); expected a list of '
            'objects'
          ) from error
        buffer += more
        continue
      number += 1
      if not isinstance(value, dict):
        raise InputError(
          f'{path}, entry {number}: expected a JSON object, found {type(value).__name__}'
        )
      yield number, value
      buffer = buffer[end:]


def _negative(identifier: str, entry: dict[str, Any], where: str) -> Negative:
  rank, score = entry.get('rank'), entry.get('score')
  if not isinstance(rank, int | None) or not isinstance(score, int | float | None):
    raise InputError(f'{where}: rank {rank!r} and score {score!r} of a negative; expected numbers')
  pools = (
    tuple(_list(entry, 'pools', where, str, f'a list of {" and ".join(POOLS)}'))
    if 'pools' in entry
    else (UNDENOISED,)
  )
  if not pools or not set(pools) <= set(POOLS):
    raise InputError(
      f'{where}: a negative with the pools {list(pools)}; expected {" or ".join(POOLS)}, or both'
    )
  return Negative(
    identifier,
    _string(entry, 'retriever', where, ''),
    rank,
    None if score is None else float(score),
    pools,
  )


def _identifier(record: dict[str, Any], where: str, key: str) -> str:
  value = record.get(key)
  if not isinstance(value, str | int) or value == '':
    raise InputError(
      f'{where}: {key!r} is {"missing" if value is None else f"{value!r:.40}"}; expected text or a '
      'number'
    )
  return str(value)


def _some_identifier(record: dict[str, Any], where: str, *keys: str) -> str | None:
  """The first of these keys that is there, if any is."""
  return next(
    (_identifier(record, where, key) for key in keys if record.get(key) is not None), None
  )


def _string(record: dict[str, Any], key: str, where: str, default: str | None = None) -> str:
  value = record.get(key, default)
  if value is None and default is not None:
    return default
  if not isinstance(value, str):
    raise InputError(
      f'{where}: {key!r} is {"missing" if value is None else f"{value!r:.40}"}; expected text'
    )
  return value


def _list(
  record: dict[str, Any], key: str, where: str, kind: type, expected: str, optional: bool = False
) -> list[Any]:
  value = record.get(key, [] if optional else None)
  if not isinstance(value, list) or not all(isinstance(entry, kind) for entry in value):
    raise InputError(
      f'{where}: {key!r} is {"missing" if value is None else f"{value!r:.40}"}; expected {expected}'
    )
  return value
