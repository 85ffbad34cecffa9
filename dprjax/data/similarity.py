"""Sentence pairs with a score of how similar they are: the STS benchmark's files.

| ending | a row |
|---|---|
| .csv | sentence1,sentence2,score; quoted where a sentence holds a comma |
| .tsv | the same between tabs, nothing quoted |
| .jsonl | `{"sentence1": ..., "sentence2": ..., "score": ...}` |

A table may begin with a header, which then names the columns and may name others (GLUE's STS-B).
Any file may be compressed. Scores go from 0 (nothing in common) to 5 (the same).
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
  """Two sentences and how similar people find them, 0 to ``TOP_SCORE``."""

  first: str
  second: str
  score: float


def read_pairs(path: files.PathLike) -> list[Pair]:
  """The pairs of a file, in its order.

  Raises:
    InputError: the file is missing or empty, or a row is not two sentences with text and a score
      from 0 to 5.
  """
  file = files.existing(path, 'STS file')
  ending = files.plain_name(file).rpartition('.')[2].lower()
  if ending in ('jsonl', 'json'):
    rows = _read_records(file)
  else:
    rows = _read_table(file, '\t' if ending == 'tsv' else ',')
  pairs = [_make_pair(values, f'{file}, line {number}') for number, values in rows]
  if not pairs:
    raise InputError(f'{file}: no pair in it')
  return pairs


def _read_records(path: epath.Path) -> Iterator[tuple[int, list[Any]]]:
  for number, record in files.read_jsonl(path, 'STS file'):
    absent = [name for name in _COLUMNS if name not in record]
    if absent:
      raise InputError(
        f'{path}, line {number}: {", ".join(absent)} missing; expected the keys '
        f'{", ".join(_COLUMNS)}'
      )
    yield number, [record[name] for name in _COLUMNS]


def _read_table(path: epath.Path, delimiter: str) -> Iterator[tuple[int, list[Any]]]:
  """(number of its first line, [sentence, sentence, score]) of every row."""
  start = 0

  def lines() -> Iterator[str]:
    nonlocal start
    for number, line in files.read_lines(path, 'STS file'):
      start = start or number
      yield line + '\n'

  # Strict, so that a quote that is never closed is an error, not a sentence as long as the file.
  rows = csv.reader(
    lines(),
    delimiter=delimiter,
    strict=True,
    quoting=csv.QUOTE_MINIMAL if delimiter == ',' else csv.QUOTE_NONE,
  )
  places, width, first = [0, 1, 2], 3, True
  try:
    for cells in rows:
      number, start = start, 0
      names = [cell.strip().lower() for cell in cells]
      if first and set(_COLUMNS) <= set(names):
        places, width = [names.index(name) for name in _COLUMNS], len(cells)
      elif len(cells) != width:
        others = ' and others, as in the header' if width > 3 else ''
        raise InputError(
          f'{path}, line {number}: {len(cells)} columns, expected {width}: '
          f'{", ".join(_COLUMNS)}{others}'
        )
      else:
        yield number, [cells[place] for place in places]
      first = False
  except csv.Error as error:
    raise InputError(
      f'{path}, line {start}: {error}; put a sentence with a comma or a quote in quotes, and write '
      'each quote within them twice'
    ) from error


def _make_pair(values: list[Any], place: str) -> Pair:
  first, second, score = values
  for name, sentence in zip(_COLUMNS, (first, second), strict=False):
    if not isinstance(sentence, str) or not sentence.strip():
      raise InputError(f'{place}: {name} is {sentence!r:.40}; expected a sentence')
  try:
    number = float('nan') if isinstance(score, bool) else float(score)
  except (TypeError, ValueError, OverflowError):
    number = float('nan')
  if not 0 <= number <= TOP_SCORE:  # nor NaN
    raise InputError(
      f'{place}: the score is {score!r:.40}; expected a number from 0 to {TOP_SCORE:g}'
    )
  return Pair(first.strip(), second.strip(), number)
