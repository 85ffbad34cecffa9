"""Splits lines into paragraphs, and texts into sentences."""

import itertools
from collections.abc import Iterable, Iterator

import sentencex


def split_sentences(text: str, language: str = 'en') -> list[str]:
  """The sentences of a text, with single spaces; a newline ends a sentence, and no words are lost.

  ``language`` is an ISO 639 code; sentencex takes English rules for an unknown one.
  """
  spans = (
    sentence.split() for line in text.splitlines() for sentence in sentencex.segment(language, line)
  )
  return [' '.join(words) for words in spans if words]


def paragraphs(lines: Iterable[tuple[int, str]]) -> Iterator[str]:
  """Joins numbered lines; a gap in the numbers is a blank line, which ends a paragraph."""
  for _, block in itertools.groupby(enumerate(lines), key=lambda pair: pair[1][0] - pair[0]):
    yield ' '.join(line.strip() for _, (_, line) in block)
