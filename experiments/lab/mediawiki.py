"""Running text of articles in a MediaWiki dump, such as Wikipedia."""

import re
from collections.abc import Iterator
from typing import IO, Any, NamedTuple
from xml.etree import ElementTree

import mwparserfromhell
from mwparserfromhell import nodes
from mwparserfromhell.wikicode import Wikicode

from dprjax.base import files, reading
from dprjax.base.errors import InputError

# Tags without running text: notes, tables, pictures, formulas, code.
_NO_TEXT = (
  *('ref', 'references', 'table', 'gallery', 'math', 'chem', 'ce', 'score', 'timeline', 'imagemap'),
  *('hiero', 'graph', 'templatedata', 'source', 'syntaxhighlight', 'pre', 'section', 'inputbox'),
  *('categorytree', 'style', 'script'),
)
# Namespaces of media, files and categories; every wiki knows these names besides its own.
_NO_TEXT_NAMESPACES = {'-2': 'media', '6': 'file', '14': 'category'}
_OTHER_LANGUAGE = re.compile(r'[a-z]{2,3}(-[a-z-]+)?:')
_BEGINNING = re.compile('<!DOCTYPE|<!ENTITY|<mediawiki', re.IGNORECASE)
_PIECE = 1 << 16  # characters parsed at a time
_LONGEST_PAGE = 1 << 28
_HEADING = re.compile(r'^==([^=].*?)==[^\S\n]*$', re.MULTILINE)
_MARKS = re.compile(r"'{2,5}|__[A-Z]+__")  # emphasis and page layout
_EMPTY_BRACKETS = re.compile(r' ?\([\s,;]*\)')
_ITEM = '\0'  # marks a list item, whose line is then dropped
_LEFT_OUT = (_ITEM, '{|', '|', '!')  # the last three from tables too broken to parse


class Section(NamedTuple):
  """A section of the second level, with its subsections; the lead has no heading.

  Lines are paragraphs.
  """

  heading: str
  text: str


class Article(NamedTuple):
  title: str
  sections: list[Section]


def read_articles(path: files.PathLike) -> Iterator[Article]:
  """Yields the articles of a MediaWiki dump (.xml, perhaps compressed), in its order.

  Pages outside the main namespace and redirects are left out. Links and emphasis become their text;
  notes, tables, lists, pictures, formulas, templates and comments are dropped ("only the text
  passages": Devlin et al., 2019, section 3.1), and so are sections without text. One page at a time
  is in memory.

  Raises:
    InputError: the file is missing, empty, broken, not UTF-8, or not a MediaWiki dump.
  """
  with reading.open_text(path, 'dump') as file:
    try:
      for title, text, hidden in _pages(file, path):
        yield Article(title, _sections(text, hidden))
    except ElementTree.ParseError as error:
      raise InputError(
        f'{path}, line {error.position[0]}: not XML, or cut off ({error}); expected a MediaWiki '
        'dump'
      ) from error


def _pages(file: IO[str], path: files.PathLike) -> Iterator[tuple[str, str, frozenset[str]]]:
  """Yields (title, wikitext, namespaces whose links are not text) of each article."""
  hidden = set(_NO_TEXT_NAMESPACES.values()) | {'image'}
  root = None
  for event, element in _events(file, path):
    name = element.tag.rpartition('}')[2]
    if root is None:
      root = element
      if name != 'mediawiki':
        raise InputError(
          f'{path}: the XML begins with <{name}>; expected <mediawiki>, a dump of pages'
        )
    elif event == 'end' and name == 'namespace' and element.get('key') in _NO_TEXT_NAMESPACES:
      hidden.add((element.text or '').strip().lower())
    elif event == 'end' and name == 'page':
      text = element.findtext('{*}revision/{*}text') or ''
      if (
        element.findtext('{*}ns') == '0'
        and element.find('{*}redirect') is None
        and not text.lstrip().lower().startswith('#redirect')
      ):
        yield element.findtext('{*}title') or '', text, frozenset(hidden)
      # Otherwise the root would keep every page.
      root.clear()


def _events(file: IO[str], path: files.PathLike) -> Iterator[tuple[str, Any]]:
  """The events of `ElementTree.iterparse`; refuses entities."""
  parser: Any = ElementTree.XMLPullParser(('start', 'end'))
  start = piece = file.read(_PIECE)
  if (found := _BEGINNING.search(start)) and found[0].startswith('<!'):
    raise InputError(f'{path}: the XML has a {found[0]}; expected a MediaWiki dump, which has none')
  size = 0  # since the last page ended
  while piece:
    parser.feed(piece)
    size += len(piece)
    for event, element in parser.read_events():
      if event == 'end' and element.tag.endswith('page'):
        size = 0
      yield event, element
    if size > _LONGEST_PAGE:
      raise InputError(f'{path}: a page of more than {_LONGEST_PAGE:,} characters')
    piece = file.read(_PIECE)
  parser.close()
  yield from parser.read_events()


def _sections(text: str, hidden: frozenset[str]) -> list[Section]:
  # Section by section: an unclosed mark would swallow the headings after it.
  first, *others = _HEADING.split(text)
  raw = [('', first), *zip(others[::2], others[1::2], strict=True)]
  cleaned = (
    Section(' '.join(_running_text(heading, hidden).split()), _running_text(body, hidden))
    for heading, body in raw
  )
  return [section for section in cleaned if section.text]


def _running_text(wikitext: str, hidden: frozenset[str]) -> str:
  # Emphasis is not left to the parser: an unclosed mark would hide the text after it.
  text = _MARKS.sub('', _plain(mwparserfromhell.parse(wikitext, skip_style_tags=True), hidden))
  lines = (
    _EMPTY_BRACKETS.sub('', ' '.join(line.split()))
    for line in text.splitlines()
    if not line.lstrip().startswith(_LEFT_OUT)
  )
  return '\n'.join(line for line in lines if line)


def _plain(code: Wikicode | None, hidden: frozenset[str]) -> str:
  return ''.join(_plain_node(node, hidden) for node in code.nodes) if code is not None else ''


def _plain_node(node: Any, hidden: frozenset[str]) -> str:
  """The running text of a piece of markup."""
  match node:
    case nodes.Text():
      return str(node.value)
    case nodes.Wikilink():
      title = str(node.title).strip().lower()
      if title.partition(':')[0].strip() in hidden or (
        node.text is None and _OTHER_LANGUAGE.match(title)
      ):
        return ''
      return _plain(node.title if node.text is None else node.text, hidden).removeprefix(':')
    case nodes.ExternalLink():
      return _plain(node.title, hidden)
    case nodes.HTMLEntity():
      return str(node.normalize())
    case nodes.Tag():
      tag = str(node.tag).strip().lower()
      if node.wiki_markup in ('*', '#', ':', ';'):
        return _ITEM
      if tag in ('br', 'p', 'div', 'hr', 'li', 'ul', 'ol', 'blockquote'):
        return f'\n{_plain(node.contents, hidden)}\n'
      return '' if tag in _NO_TEXT else _plain(node.contents, hidden)
    case nodes.Heading():
      return '\n'
  return ''
