"""Relevance judgements, and folders of data sets with them (`write_dataset`).

A file is a BEIR tsv with a header, four columns (TREC, MS MARCO), or three columns.

A grade is a whole number of 32 bits, also written as 1.0. A grade above 0 is relevant; below 0, as
TREC marks junk, is not. Between tabs, ids may contain spaces, and an id that begins with a quote is
quoted as in CSV. The first line is a header if its last column is score, relevance, rel, label or
grade.
"""

import csv
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath

from dprjax.base import files, reading
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.text.fields import UniqueIds, check_id
from dprjax.text.records import split_rows

Qrels = dict[str, dict[str, int]]
"""Query id -> document id -> relevance (0: judged, not relevant)."""

_HEADER = ('score', 'relevance', 'rel', 'label', 'grade')  # names of the last column
_RELEVANCE = re.compile(r'([+-]?[0-9]{1,10})(\.0*)?')


def read_qrels(path: files.PathLike) -> Qrels:
  """Reads judgements. Columns are separated by tabs or, if the first line has no tab, by spaces."""
  qrels: Qrels = {}
  lines = reading.read_lines(path, 'qrels')
  first = next(lines, (0, ''))
  delimiter = '\t' if '\t' in first[1] else None
  # BEIR files are read and written by the csv module of Python.
  rows = split_rows(itertools.chain([first], lines), str(path), delimiter, quoted=bool(delimiter))
  for number, columns in rows:
    where = f'{path}, line {number}'
    if len(columns) not in (3, 4):
      raise InputError(
        f'{where}: {counted(len(columns), "columns")}; expected 3 (query, document, relevance) or '
        '4 (query, 0, document, relevance) between tabs, or between spaces'
      )
    query_id, doc_id, relevance = columns[0], columns[-2], columns[-1].strip()
    if number == first[0] and relevance.lower() in _HEADER:
      continue
    whole = _RELEVANCE.fullmatch(relevance)
    if not whole or not -(2**31) <= (grade := int(whole[1])) < 2**31:
      raise InputError(f'{where}: the relevance {relevance!r:.40} is not a whole number of 32 bits')
    judge(qrels, check_id(query_id, where), check_id(doc_id, where), grade, where)
  return qrels


def judge(qrels: Qrels, query: str, document: str, grade: int, where: str) -> None:
  """Adds a judgement. Raises InputError if an earlier one contradicts it."""
  if (before := qrels.setdefault(query, {}).setdefault(document, grade)) != grade:
    raise InputError(
      f'{where}: document {document} has grade {grade} for query {query}, and {before} before'
    )


def write_qrels(path: files.PathLike, qrels: Mapping[str, Mapping[str, int]]) -> None:
  """Writes judgements in the BEIR format."""
  with files.atomic_write(path) as file:
    rows = csv.writer(file, delimiter='\t', lineterminator='\n')
    rows.writerow(('query-id', 'corpus-id', 'score'))
    for query_id, judged in qrels.items():
      rows.writerows((query_id, doc_id, grade) for doc_id, grade in judged.items())


def write_dataset(
  folder: files.PathLike,
  passages: Iterable[Mapping[str, Any]],
  queries: Iterable[Mapping[str, Any]],
  judged: Mapping[str, Qrels],
) -> tuple[int, int]:
  """Writes a BEIR folder; returns the numbers of passages and queries.

  Args:
    passages: ``{_id, title, text, categories}``; title and categories are optional.
    queries: ``{_id, text}``.
  """
  root = epath.Path(folder)
  (root / 'qrels').mkdir(parents=True)
  counts = (
    write_lines(root / 'corpus.jsonl', passages),
    write_lines(root / 'queries.jsonl', queries),
  )
  for split, qrels in judged.items():
    write_qrels(root / 'qrels' / f'{split}.tsv', qrels)
  return counts


def write_lines(path: epath.Path, records: Iterable[Mapping[str, Any]]) -> int:
  """Writes records with an ``_id`` as JSON lines; returns their number."""
  ids, count = UniqueIds(path.name, 'the'), 0
  with files.no_room(path), path.open('wb') as file:
    for count, record in enumerate(records, 1):
      ids.add(record['_id'], count)
      file.write(json.dumps(record, ensure_ascii=False).encode() + b'\n')
  return count
