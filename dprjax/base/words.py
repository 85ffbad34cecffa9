"""Words of a text in any script, in lower case, for BM25 and topics.

| script | words |
|---|---|
| with spaces between words | letters, digits and `_`, with their marks |
| dense: Chinese, Japanese, Thai, Lao, Khmer, Burmese and the like; Korean | each letter with its \
marks, and each pair of neighbours |
| emoji | each |

Korean has spaces, but attaches particles to words.

- Letters are composed (NFC). Full-width, half-width and joined forms (U+FB00 to U+FFEF) become the
  usual letters.
- Dropped: joiners, soft hyphens, marks of direction; the tatweel and the vowel signs of Arabic,
  Hebrew and Syriac, which most writers omit.
- Dotted capital I and dotless small i become a plain i. Turkish keeps the small letters apart.
"""

import itertools
import re
import unicodedata

import regex

DENSE = (
  r'[[\p{L}\p{Nl}]&&[\p{Ideographic}\p{Han}\p{Hiragana}\p{Katakana}\p{Bopomofo}\p{Hangul}'
  r'\p{Yi}\p{Javanese}\p{Balinese}\p{Line_Break=SA}\u30fc]]'
)
"""A letter of a dense script, as a `regex` set (V1)."""

_LETTERS = rf'[\p{{L}}\p{{N}}_--{DENSE}]'
_PATTERN = regex.compile(
  rf'(?P<dense>(?:{DENSE}\p{{M}}*+)++)|{_LETTERS}[{_LETTERS}\p{{M}}]++|[\p{{Lo}}--\p{{Latin}}]'
  r'|[\p{Extended_Pictographic}&&[\u2600-\U0010ffff]]|\p{Regional_Indicator}{2}',
  regex.V1,
)
_LETTER = regex.compile(r'\P{M}\p{M}*+')
# Same words as the pattern, several times as fast, for text without `_OTHER` characters.
_SIMPLE = re.compile(r'\b\w\w+\b')
_OTHER = regex.compile(
  r'[\p{M}\p{Default_Ignorable_Code_Point}[\p{Lo}--\p{Latin}]\p{Nl}'
  r'[\p{Extended_Pictographic}&&[\u2600-\U0010ffff]]\p{Regional_Indicator}'
  r'\u0130\u0131\u0640\u30fc\ufb00-\uffef]',
  regex.V1,
)
_INVISIBLE = regex.compile(r'[\p{Default_Ignorable_Code_Point}--\u200b]+', regex.V1)
_DOTLESS = '\u0131'
_FORMS = re.compile('[\ufb00-\uffef]+')
_UNWRITTEN = regex.compile(
  r'[[[\p{M}&&[\p{scx=Arab}\p{scx=Hebr}\p{scx=Syrc}]]--[\u0300-\u036f]]\u0640]+', regex.V1
)


def words(text: str, turkish: bool = False) -> list[str]:
  """The words of a text. ``turkish``: I is the capital of the dotless i.

  Single digits and single letters with case are no words.
  """
  text = normalise(text, turkish)
  if is_simple(text):
    return _SIMPLE.findall(text)
  terms: list[str] = []
  for match in _PATTERN.finditer(text):
    if match['dense'] is None:
      terms.append(match[0])
    else:
      terms += [*letters_of(match[0]), *pairs_of(match[0])]
  return terms


def letters_of(run: str) -> list[str]:
  """The letters of a dense run, each with its marks."""
  return _LETTER.findall(run)


def pairs_of(run: str) -> list[str]:
  """Pairs of neighbours among them."""
  return [first + second for first, second in itertools.pairwise(letters_of(run))]


def normalise(text: str, turkish: bool = False) -> str:
  """The lower-case text, spelled as words are compared."""
  if not turkish and text.isascii():
    return text.lower()
  text = unicodedata.normalize('NFC', text)
  if turkish:
    text = text.replace('\u0130', 'i').replace('I', _DOTLESS)
  if is_simple(text):
    return text.lower()
  text = _FORMS.sub(lambda forms: unicodedata.normalize('NFKC', forms[0]), _INVISIBLE.sub('', text))
  text = unicodedata.normalize('NFC', text).lower()
  if not turkish:
    text = text.replace('i\u0307', 'i').replace(_DOTLESS, 'i')
  return _UNWRITTEN.sub('', text)


def is_simple(text: str) -> bool:
  """Whether a text has only characters that need no rules of their own."""
  return text.isascii() or not _OTHER.search(text)
