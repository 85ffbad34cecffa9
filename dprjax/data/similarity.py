"""Sentence pairs with a score of how similar they are: the STS benchmark's files.

| name ends in | a row |
|---|---|
| .csv | sentence1,sentence2,score; quoted where a sentence holds a comma |
| .tsv | the same between tabs, nothing quoted |
| .jsonl | `{"sentence1": ..., "sentence2": ..., "score": ...}` |

A table may begin with a header; its columns are then found by these names, and there may be others
(GLUE's STS-B). Any file may be compressed (`.gz`, `.xz`). Scores are those of the benchmark, 0
(nothing in common) to 5 (the same).
"""

import csv
from collections.abc import Iterator
from typing import Any, NamedTuple

from etils import epath

from dprjax.base import files
from dprjax.base.errors import InputError

TOP_SCORE = 5.0
_COLUMNS = ('sentence1', 'sentence2', 'score')


class Pair(NamedTuple):
  """Two sentences and how similar people found them, 0 to ``TOP_SCORE``."""

  first: str
  second: str
  score: float


def read_pairs(path: files.PathLike) -> list[Pair]:
  """The pairs of a file, in its order.

  Raises:
    InputError: the file is missing or empty, or a row is not two sentences with text and a score of
      0 to 5.
  """
  found = files.existing(path, 'STS file')
  kind = found.name.removesuffix('.gz').removesuffix('.xz').rpartition('.')[2].lower()
  rows = (
    _records(found) if kind in ('jsonl', 'json') else _table(found, '\t' if kind == 'tsv' else ',')
  )
  pairs = [_pair(values, f'{found}, line {number}') for number, values in rows]
  if not pairs:
    raise InputError(f'{found}: no pair in it')
  return pairs


def _records(path: epath.Path) -> Iterator[tuple[int, list[Any]]]:
  for number, record in files.read_jsonl(path, 'STS file'):
    absent = [name for name in _COLUMNS if name not in record]
    if absent:
      raise InputError(
        f'{path}, line {number}: {", ".join(absent)} missing; expected the keys '
        f'{", ".join(_COLUMNS)}'
      )
    yield number, [record[name] for name in _COLUMNS]


def _table(path: epath.Path, delimiter: str) -> Iterator[tuple[int, list[Any]]]:
  """(line on which it begins, [sentence, sentence, score]) of every row."""
  places, width = [0, 1, 2], 3
  first = True
  for number, cells in _rows(path, delimiter):
    names = [cell.strip().lower() for cell in cells]
    if first and set(_COLUMNS) <= set(names):
      places, width = [names.index(name) for name in _COLUMNS], len(cells)
    elif len(cells) != width:
      raise InputError(
        f'{path}, line {number}: {len(cells)} columns where there should be {width}: '
        f'{", ".join(_COLUMNS)}'
        f'{" and others, as in the header" if width > 3 else ""}'
      )
    else:
      yield number, [cells[place] for place in places]
    first = False


def _rows(path: epath.Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
  started = 0

  def lines() -> Iterator[str]:
    nonlocal started
    for number, line in files.read_lines(path, 'STS file'):
      started = started or number
      yield line + '\n'

  # Strict: a quote that is never closed is an error, not a sentence as long as the file.
  rows = csv.reader(
    lines(),
    delimiter=delimiter,
    strict=True,
    quoting=csv.QUOTE_MINIMAL if delimiter == ',' else csv.QUOTE_NONE,
  )
  try:
    for cells in rows:
      yield started, cells
      started = 0
  except csv.Error as error:
    raise InputError(
      f'{path}, line {started}: {error}; a sentence with a comma or a quote in it has to stand in '
      'quotes, '
      'and a quote within them be written twice'
    ) from error


def _pair(values: list[Any], where: str) -> Pair:
  first, second, score = values
  for name, sentence in zip(_COLUMNS, (first, second), strict=False):
    if not isinstance(sentence, str) or not sentence.strip():
      raise InputError(f'{where}: {name} is {sentence!r}; expected a sentence')
  try:
    number = float('nan') if isinstance(score, bool) else float(score)
  except (TypeError, ValueError):
    number = float('nan')
  if not 0 <= number <= TOP_SCORE:  # nor NaN
    raise InputError(f'{where}: the score is {score!r}; expected a number from 0 to {TOP_SCORE:g}')
  return Pair(first.strip(), second.strip(), number)
