"""Documents cut into passages.

| ending | content read |
|---|---|
| .txt | paragraphs, between blank lines |
| .md | paragraphs, items of lists, code and tables below their headings |
| .html, .htm | the main text of a page, without menus and footers, as .md (trafilatura) |
| .pdf | paragraphs of the text layer (pypdf); scanned pages are not read |

Rules:

- A passage has whole paragraphs in their order, of `WORDS` words at most.
- A longer paragraph is cut between sentences, and a longer sentence between words.
- A heading begins a new passage and is the title of the passages below it. The page title, if any,
  serves before the first heading.
- Passages do not overlap.
- The id of a passage is ``PATH#n``, n from 0, with %20 for a space.

Each letter of a script without spaces counts as a word.
"""

import io
import itertools
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import regex
import sentencex

from dprjax.base import files, reading
from dprjax.base.errors import InputError
from dprjax.text import records

WORDS = 150
"""Most words of a passage: with a title, most passages fit into the 256 tokens of MiniLM."""

_WITHOUT_SPACES = regex.compile(
  r'[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]'
)
# A word with the space after it.
_WORD = regex.compile(rf'{_WITHOUT_SPACES.pattern}\s*|(?:(?!{_WITHOUT_SPACES.pattern})\S)+\s*')
_HYPHEN = re.compile(r'(?<=[^\W\d_])-\n(?=[a-z])')
_SPACE = re.compile(r'\s')


class Paragraph(NamedTuple):
  """A paragraph and the heading above it, which may be empty."""

  heading: str
  text: str


class Passage(NamedTuple):
  id: str
  title: str
  text: str


def read_passages(path: files.PathLike, name: str) -> Iterator[Passage]:
  """The passages of a document, with ids from ``name``; none if it has no text."""
  quoted = _SPACE.sub(lambda space: urllib.parse.quote(space[0]), name)
  for number, (title, text) in enumerate(cut(read_paragraphs(path))):
    yield Passage(f'{quoted}#{number}', title, text)


def read_paragraphs(path: files.PathLike) -> Iterator[Paragraph]:
  match records.ending_of(path):
    case 'txt':
      for paragraph in paragraphs(reading.read_lines(path, 'document')):
        yield Paragraph('', paragraph)
    case 'md' | 'markdown':
      yield from _markdown(_content(path).decode('utf-8-sig', 'replace'))
    case 'html' | 'htm':
      yield from _html(path)
    case 'pdf':
      yield from _pdf(path)


def cut(paragraphs: Iterable[Paragraph], most: int = WORDS) -> Iterator[tuple[str, str]]:
  """(title, text) of every passage of at most ``most`` words, by the rules above."""
  title, waiting, count = '', list[str](), 0
  for heading, paragraph in paragraphs:
    for part in _parts(paragraph, most):
      size = _size(part)
      if waiting and (heading != title or count + size > most):
        yield title, '\n'.join(waiting)
        waiting, count = [], 0
      title = heading
      waiting.append(part)
      count += size
  if waiting:
    yield title, '\n'.join(waiting)


def _size(text: str) -> int:
  return sum(1 for _ in _WORD.finditer(text))


def _parts(paragraph: str, most: int) -> Iterator[str]:
  """A paragraph, cut into pieces where it is longer than a passage."""
  if _size(paragraph) <= most:
    yield paragraph
    return
  waiting, count = list[str](), 0
  for sentence in split_sentences(paragraph):
    size = _size(sentence)
    if waiting and count + size > most:
      yield ' '.join(waiting)
      waiting, count = [], 0
    if size > most:
      words = _WORD.findall(sentence)
      yield from (''.join(words[at : at + most]).strip() for at in range(0, len(words), most))
    else:
      waiting.append(sentence)
      count += size
  if waiting:
    yield ' '.join(waiting)


def _content(path: files.PathLike) -> bytes:
  with reading.open_bytes(path, 'document') as (file, _):
    return file.read()


def _markdown(text: str, heading: str = '') -> Iterator[Paragraph]:
  import markdown_it

  if (front := re.match(r'---\n.*?\n(---|\.\.\.)\n', text, re.DOTALL)) is not None:
    text = text[front.end() :]
  tokens = markdown_it.MarkdownIt('commonmark').enable('table').parse(text)
  row: list[str] | None = None  # the cells of the row of a table
  for before, token in zip([None, *tokens], tokens, strict=False):
    if token.type == 'tr_open':
      row = []
    elif token.type == 'tr_close' and row is not None:
      if line := ' | '.join(row).strip():
        yield Paragraph(heading, line)
      row = None
    elif token.type in ('fence', 'code_block') and token.content.strip():
      yield Paragraph(heading, token.content.strip('\n'))
    elif token.type == 'inline':
      content = _inline(token.children or ())
      if before is not None and before.type == 'heading_open':
        heading = content
      elif row is not None:
        row.append(content)
      elif content:
        yield Paragraph(heading, content)


def _inline(tokens: Sequence[Any]) -> str:
  """The text of links and emphasis, and the alternative text of pictures."""
  breaks = ('softbreak', 'hardbreak')
  kept = ('text', 'code_inline', 'image')
  parts = (
    ' ' if token.type in breaks else token.content if token.type in kept else '' for token in tokens
  )
  return ' '.join(''.join(parts).split())


def _html(path: files.PathLike) -> Iterator[Paragraph]:
  import trafilatura
  from trafilatura.settings import use_config

  content, settings = _content(path), use_config()
  for name in ('MIN_EXTRACTED_SIZE', 'MIN_OUTPUT_SIZE'):  # else short pages lose their structure
    settings.set('DEFAULT', name, '1')
  # It returns None for files that are not pages or have no text.
  found = trafilatura.extract(
    content, output_format='markdown', include_comments=False, favor_recall=True, config=settings
  )
  about = trafilatura.extract_metadata(content)
  title = (about and about.title) or ''
  text = found or trafilatura.html2txt(content) or ''
  yield from _markdown(text, ' '.join(title.split()))


def _pdf(path: files.PathLike) -> Iterator[Paragraph]:
  import pypdf

  try:
    reader = pypdf.PdfReader(io.BytesIO(_content(path)))
    for page in reader.pages:
      text = _HYPHEN.sub('', page.extract_text())
      yield from (
        Paragraph('', ' '.join(block.split()))
        for block in re.split(r'\n\s*\n', text)
        if block.strip()
      )
  except Exception as error:  # pypdf: "broken PDF files might cause other Exceptions"
    why = ' '.join(str(error).split())
    raise InputError(
      f'{path}: pypdf cannot read it ({type(error).__name__}: {why:.200}); save it again, or move '
      'it away'
    ) from error


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
