"""Filters queries for training. Text from a generator or the web is not trusted.

| left out | reason |
|---|---|
| empty | no query |
| markup | tags, links, code, tokens of chat templates, invisible characters |
| talk | the generator addresses its user: "Sure, here are ..." |
| about the text itself | "according to the passage": a person who searches does not know it |
| too short, too long | by the number of words |
| another script | than the passage |
| copied | a run of words of the passage: word matches would suffice to find it |
| repeated | for the same passage |
| asked of several passages | its answer is ambiguous |

Of those that are used, `found` keeps the ones whose passages a retriever finds.
"""

import collections
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import regex

from dprjax.base import files, words
from dprjax.base.counts import ReadReport
from dprjax.text import trec
from dprjax.text.qrels import Qrels

COPIED_WORDS = 8
"""A query with this many words in a row from the passage is a copy."""

_FEWEST, _MOST = 2, 32  # words of a query
_WHOLE_COPY = 6  # fewest words of a copied query that the passage contains whole
_FOREIGN = 1 / 3  # share of letters in a script that the passage lacks
_MARKUP = re.compile(
  r'<\s*/?\s*[a-zA-Z!][^>]*>|</|https?://|www\.|```|`[^`]+`|!?\[[^\]]*\]\([^)]*\)|<\|[^|]*\|>'
  r'|\[/?INST\]|<</?SYS>>|\{\{|\}\}|&#?\w+;|\*\*|^\s*#{1,6}\s|^\s*\|'
)
_HIDDEN = regex.compile(
  r'[\p{Cc}\p{Co}\p{Cn}\u200b-\u200f\u202a-\u202e\u2060-\u2069\U000e0000-\U000e007f]'
)
_TALK = re.compile(
  r"(sure|certainly|of course|okay|ok)\b[,!.: ]|here (are|is|'s)\b|as an? (ai|language model)\b"
  r"|(i'm|i am) (sorry|unable|not able)\b|i (cannot|can't|can not|won't)\b|unfortunately\b"
  r'|(ignore|disregard) (all|any|the|previous|your)\b|you are an?\b.*\bassistant\b|none\W*$',
  re.IGNORECASE,
)
_ABOUT = re.compile(
  r'\b(this|the|given|above|provided|following) (passage|article|text|document|paragraph|excerpt'
  r'|abstract|snippet)s?\b',
  re.IGNORECASE,
)
_LABEL = re.compile(
  r'^\s*(?:[-*\u2022\u2013\u2014]+\s+|\(?\d{1,3}[.):]\s*'
  r'|(?:search )?(?:query|question|q)\s*\d*\s*[:.)]\s*)+',
  re.IGNORECASE,
)
_QUOTES = '"\'\u201c\u201d\u2018\u2019\u00ab\u00bb'
_SCRIPTS = {
  name: regex.compile(rf'\p{{Script={name}}}')
  for name in (
    *('Latin', 'Cyrillic', 'Greek', 'Han', 'Hiragana', 'Katakana', 'Hangul', 'Arabic', 'Hebrew'),
    *('Devanagari', 'Bengali', 'Tamil', 'Telugu', 'Thai', 'Georgian', 'Armenian', 'Ethiopic'),
  )
}


class Query(NamedTuple):
  """A query, and the id of its passage."""

  passage: str
  text: str


def tidy(line: str) -> str:
  """A line of an answer without its number, label, quotes and white space."""
  text = ' '.join(unicodedata.normalize('NFC', line).split())
  text = _LABEL.sub('', text).strip()
  if len(text) > 1 and text[0] in _QUOTES and text[-1] in _QUOTES:
    text = text[1:-1].strip()
  return text


def why_not(text: str, passage: str) -> str:
  """The reason to leave out a query; '' if it can be used."""
  query_words = words.words(text)
  if not query_words:
    return 'empty'
  if _HIDDEN.search(text) or _MARKUP.search(text):
    return 'markup'
  if _TALK.match(text):
    return 'talk'
  if _ABOUT.search(text):
    return 'about the text itself'
  if len(query_words) < _FEWEST:
    return 'too short'
  if len(text.split()) > _MOST or len(query_words) > 4 * _MOST:
    return 'too long'
  theirs = words.words(passage)
  if _is_foreign(text, passage):
    return 'another script'
  if _is_copy(query_words, theirs):
    return 'copied'
  return ''


def choose(
  queries: Iterable[Query],
  passages: dict[str, str],
  report: ReadReport,
  per_passage: int,
) -> list[Query]:
  """The queries that can be used for training, in order; others are counted.

  Args:
    per_passage: the most queries of a passage.
  """
  usable: dict[tuple[str, str], Query] = {}
  for query in queries:
    reason = why_not(query.text, passages[query.passage])
    key = query.passage, ' '.join(words.words(query.text))
    if not reason and key in usable:
      reason = 'repeated'
    if reason:
      report.count(f'queries left out: {reason}', _shown(query.text))
    else:
      usable[key] = query
  spread = collections.Counter(text for _, text in usable)
  counts: collections.Counter[str] = collections.Counter()
  chosen = []
  for (passage, text), query in usable.items():
    if spread[text] > 1:
      report.count('queries left out: asked of several passages', _shown(query.text))
    elif counts[passage] == per_passage:
      report.count('queries left out: more than a passage has')
    else:
      counts[passage] += 1
      chosen.append(query)
  return chosen


def found(qrels: Qrels, run: files.PathLike, within: int, report: ReadReport) -> Qrels:
  """The judgements of queries with a relevant passage among the first results of a run.

  Dai et al. (2023, Promptagator, section 3.2) call this round-trip consistency.

  Args:
    within: how many results of a query count.
  """
  kept: Qrels = {}
  rankings = trec.read_run(run).rankings()
  for query, judged in qrels.items():
    best = rankings[query].top(within).ids if query in rankings else []
    if any(judged.get(id_, 0) > 0 for id_ in best):
      report.count('queries that find their passages')
      kept[query] = judged
    elif best:
      report.count(f'queries left out: not among the first {within}', query)
    else:
      report.count('queries left out: not in the run', query)
  return kept


def _shown(text: str) -> str:
  return ascii(text[:60])[1:-1]


def _is_copy(query: Sequence[str], passage: Sequence[str]) -> bool:
  text = f' {" ".join(passage)} '
  if len(query) >= _WHOLE_COPY and f' {" ".join(query)} ' in text:
    return True
  runs = (query[start : start + COPIED_WORDS] for start in range(len(query) - COPIED_WORDS + 1))
  return any(f' {" ".join(run)} ' in text for run in runs)


def _is_foreign(text: str, passage: str) -> bool:
  letters = {name: len(script.findall(text)) for name, script in _SCRIPTS.items()}
  absent = sum(
    count for name, count in letters.items() if count and not _SCRIPTS[name].search(passage)
  )
  return absent > _FOREIGN * sum(letters.values())
