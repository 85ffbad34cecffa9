"""Queries without a generator, extracted from passages.

| kind | query | removed from the passage |
|---|---|---|
| title | the title | the title |
| heading | a short line before a longer one | the line |
| question | a question in the text | the question |
| first | the first sentence | the sentence |
| keyphrases | the three phrases with the largest tf-idf | |
| crop | a random run of words of a sentence | the sentence |

The text of a query is removed from its passage, which would otherwise be found by the copy. A tenth
of the passages keep it, as in the Inverse Cloze Task (Lee et al., 2019, section 9.2).
"""

import collections
import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from dprjax.asking import filters
from dprjax.base import draws, words
from dprjax.formats.sentences import split_sentences
from dprjax.formats.texts import PassageRecord

KINDS = ('title', 'heading', 'question', 'first', 'keyphrases', 'crop')
KEEP = 0.1
"""Share of passages that keep the text of their queries."""

_LEFT = 8  # fewest words left in a passage
_HEADING_WORDS = 12
_PHRASES, _PHRASE_WORDS = 3, 3
_COMMON = 0.1  # words in a larger share of passages are too common for a phrase
_CROP = (5, 14)  # words
_MARK = re.compile(r'^\s{0,3}#{1,6}\s+')
_ENDS = ('.', '!', '?', ';', ':', ',')


class Extracted(NamedTuple):
  """A query and its kind."""

  kind: str
  text: str


class Asked(NamedTuple):
  """The queries of a passage, and the passage without their text."""

  queries: list[Extracted]
  passage: PassageRecord


class Rarity:
  """The rarity of words in passages."""

  def __init__(self, texts: Iterable[str]):
    self._spread: collections.Counter[str] = collections.Counter()
    self._texts = 0
    self._empty = frozenset[str]().union(*filters.function_words().values())
    for text in texts:
      self._spread.update(set(words.words(text)))
      self._texts += 1

  def of(self, word: str) -> float:
    """The inverse document frequency of a word; 0 for function words and too common words."""
    spread = self._spread.get(word, 0)
    if spread > max(_COMMON * self._texts, 2) or word.isdecimal() or word in self._empty:
      return 0.0
    return math.log((1 + self._texts) / (1 + spread))


def extract(
  passage: PassageRecord,
  rarity: Rarity,
  *,
  kinds: Sequence[str] = KINDS,
  most: int = 3,
  words_of_query: tuple[int, int] = (2, 32),
  seed: int = 0,
  language: str = 'en',
  keep: float = KEEP,
) -> Asked:
  """One query of each kind, in the order of ``kinds``, up to ``most``.

  Args:
    passage: with its original text.
    rarity: of words in the sample.
    kinds: some of ``KINDS``.
    most: queries.
    words_of_query: the fewest and the most words.
    seed: of the lots.
    language: whose rules split sentences (ISO 639).
    keep: share of passages without removal.
  """
  fewest, largest = words_of_query
  lines = [' '.join(line.split()) for line in passage.text.splitlines() if line.strip()]
  sentences = [
    sentence
    for number, line in enumerate(lines)
    if not _is_heading(lines, number)
    for sentence in split_sentences(line, language)
  ]
  found: list[Extracted] = []
  without: set[str] = set()
  title = passage.title
  for kind in kinds:
    if len(found) == most:
      break
    left = [sentence for sentence in sentences if sentence not in without]
    taken = query = ''
    match kind:
      case 'title':
        query = title
      case 'heading':
        names = (_MARK.sub('', line) for n, line in enumerate(lines) if _is_heading(lines, n))
        query = taken = next(names, '')
      case 'question':
        asked = (s for s in left if s.endswith(('?', '\uff1f')) and _fits(s, fewest, largest))
        query = taken = next(asked, '')
      case 'first':
        query = taken = left[0] if left else ''
      case 'keyphrases':
        query = keyphrases(' '.join(left), rarity)
      case 'crop':
        taken, query = _crop(left, passage.id, seed)
    if not _fits(query, fewest, largest):
      continue
    if kind == 'title':
      title = ''
    if taken:
      rest = [sentence for sentence in left if sentence != taken]
      if sum(len(words.words(sentence)) for sentence in rest) < _LEFT:
        continue
      without.add(taken)
    elif kind == 'title' and sum(len(words.words(sentence)) for sentence in left) < _LEFT:
      title = passage.title
      continue
    found.append(Extracted(kind, query))
  if draws.fraction(passage.id, seed, 'asking whole') < keep:
    return Asked(found, passage)
  return Asked(found, PassageRecord(passage.id, title, _without(passage.text, without, language)))


def keyphrases(text: str, rarity: Rarity) -> str:
  """Three phrases: runs of words that are rare elsewhere, best first by tf-idf of words."""
  counts = collections.Counter(words.words(text))
  found: set[tuple[str, ...]] = set()
  for part in re.split(r'[^\w\s\'-]+', text):
    run: list[str] = []
    for word in (*words.words(part), ''):
      if word and rarity.of(word) > 0 and len(run) < _PHRASE_WORDS:
        run.append(word)
        continue
      if run:
        found.add(tuple(run))
      run = [word] if word and rarity.of(word) > 0 else []
  ranked = sorted(
    found, key=lambda run: (-sum(counts[word] * rarity.of(word) for word in run), run)
  )
  chosen: list[tuple[str, ...]] = []
  for phrase in ranked:
    if not any(set(phrase) & set(other) for other in chosen):
      chosen.append(phrase)
    if len(chosen) == _PHRASES:
      break
  return ' '.join(word for phrase in chosen for word in phrase)


def _is_heading(lines: Sequence[str], number: int) -> bool:
  line = lines[number]
  if number + 1 == len(lines):
    return False
  if _MARK.match(line):
    return True
  size = len(line.split())
  return (
    size <= _HEADING_WORDS
    and not line.endswith(_ENDS)
    and len(lines[number + 1].split()) > max(size, _LEFT)
  )


def _fits(query: str, fewest: int, most: int) -> bool:
  return fewest <= len(words.words(query)) and len(query.split()) <= most


def _crop(sentences: Sequence[str], id_: str, seed: int) -> tuple[str, str]:
  """A sentence, and a run of its words."""
  if not sentences:
    return '', ''
  lot = int.from_bytes(draws.draw(id_, seed, 'asking crop')[:12])
  lot, place = divmod(lot, len(sentences))
  own = sentences[place].split()
  lot, size = divmod(lot, _CROP[1] - _CROP[0] + 1)
  size = min(size + _CROP[0], len(own))
  start = lot % (len(own) - size + 1)
  return sentences[place], ' '.join(own[start : start + size])


def _without(text: str, taken: Collection[str], language: str) -> str:
  """The text without these lines and sentences; unchanged if it has none of them."""
  if not taken:
    return text
  lines = []
  for line in text.splitlines():
    plain = ' '.join(line.split())
    if _MARK.sub('', plain) in taken:
      continue
    kept = [sentence for sentence in split_sentences(plain, language) if sentence not in taken]
    if kept:
      lines.append(' '.join(kept))
  return '\n'.join(lines)
