"""Relevance judgements: a BEIR tsv with a header, four columns (TREC, MS MARCO), or three columns.

A grade is a whole number of 32 bits, also written as 1.0. A grade above 0 is relevant; below 0, as
TREC marks junk, is not. Between tabs, ids may contain spaces, and an id that begins with a quote is
quoted as in CSV. The first line is a header if its last column is score, relevance, rel, label or
grade.
"""

import csv
import re
from collections.abc import Mapping

from dprjax.base import files, reading
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.text.fields import check_id

Qrels = dict[str, dict[str, int]]
"""Query id -> document id -> relevance (0: judged, not relevant)."""

_HEADER = ('score', 'relevance', 'rel', 'label', 'grade')  # names of the last column
_RELEVANCE = re.compile(r'([+-]?[0-9]{1,10})(\.0*)?')


def read_qrels(path: files.PathLike) -> Qrels:
  """Reads judgements. Columns are separated by tabs or, if the first line has no tab, by spaces."""
  qrels: Qrels = {}
  width, delimiter = 0, None
  for number, line in reading.read_lines(path, 'qrels'):
    where = f'{path}, line {number}'
    if not width:
      delimiter = '\t' if '\t' in line else None
    # BEIR files are read and written by the csv module of Python.
    columns = _unquoted(line, where) if delimiter and '"' in line else line.split(delimiter)
    if not width:
      width = len(columns)
      if width in (3, 4) and columns[-1].strip().lower() in _HEADER:
        continue
    if width not in (3, 4) or len(columns) != width:
      known = '3 (query, document, relevance) or 4 (query, 0, document, relevance)'
      raise InputError(
        f'{where}: {counted(len(columns), "columns")}, expected '
        f'{width if width in (3, 4) else known} between '
        f'{"tabs" if delimiter else "tabs or spaces"}'
      )
    query_id, doc_id, relevance = columns[0], columns[-2], columns[-1].strip()
    whole = _RELEVANCE.fullmatch(relevance)
    if not whole or not -(2**31) <= (grade := int(whole[1])) < 2**31:
      raise InputError(f'{where}: the relevance {relevance!r:.40} is not a whole number of 32 bits')
    judged = qrels.setdefault(check_id(query_id, where), {})
    if judged.setdefault(check_id(doc_id, where), grade) != grade:
      raise InputError(
        f'{where}: document {doc_id} is judged {relevance} for query {query_id}, and '
        f'{judged[doc_id]} before'
      )
  return qrels


def _unquoted(line: str, where: str) -> list[str]:
  try:
    return next(csv.reader([line], delimiter='\t', strict=True))
  except csv.Error as error:
    raise InputError(
      f'{where}: {error}; put an id with a quote in quotes, and write each quote within them twice'
    ) from error


def write_qrels(path: files.PathLike, qrels: Mapping[str, Mapping[str, int]]) -> None:
  """Writes judgements in the BEIR format."""
  with files.atomic_write(path) as file:
    rows = csv.writer(file, delimiter='\t', lineterminator='\n')
    rows.writerow(('query-id', 'corpus-id', 'score'))
    for query_id, judged in qrels.items():
      rows.writerows((query_id, doc_id, grade) for doc_id, grade in judged.items())
