"""Sentence pairs with a score of how similar they are, in files of the STS benchmark.

| ending | a row |
|---|---|
| .csv | sentence1,sentence2,score; quoted where a sentence holds a comma |
| .tsv | the same between tabs, nothing quoted |
| .jsonl | `{"sentence1": ..., "sentence2": ..., "score": ...}` |

A table may begin with a header, which names the columns and may name others (STS-B of GLUE).
Any file may be compressed. Scores go from 0 (nothing in common) to 5 (the same).
"""

from typing import Any, NamedTuple

from dprjax.base import files
from dprjax.base.errors import InputError
from dprjax.text import records

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
  rows = records.read_columns(path, _COLUMNS, 'STS file')
  pairs = [_make_pair(values, f'{path}, line {number}') for number, values in rows]
  if not pairs:
    raise InputError(f'{path}: no pair in it')
  return pairs


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
