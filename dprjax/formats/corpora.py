"""Plain text in, to pretrain on: documents from the forms that corpora come in, and their
sentences.

| file | documents | |---|---| | .jsonl | BEIR's corpus, or any other objects with `text` and
perhaps `title` and an id; arXiv's `{id, title, abstract}` | | .tsv | MS MARCO's collection or
DPR's, see `dprjax.formats.records` | | .txt | one document; lines are joined to paragraphs, which
blank lines part | | .zip | its .txt files | | .xml | the articles of a MediaWiki dump, see
`read_articles` |

Any of them but .zip may be compressed (`.gz`, `.xz`, `.bz2`). A folder is read whole, in the order
of names, with the folders in it; of BEIR's or MS MARCO's the corpus alone. A newline in a
document's text ends a sentence; a title is a line of its own, before the text.
"""

import io
import itertools
import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, NamedTuple
from xml.etree import ElementTree

import mwparserfromhell
import sentencex
from etils import epath
from mwparserfromhell import nodes
from mwparserfromhell.wikicode import Wikicode

from dprjax.base import files
from dprjax.base.errors import InputError
from dprjax.formats import records as forms
from dprjax.formats.report import Report

_COMPRESSED = ('.gz', '.xz', '.bz2')
_PART = (
  1 << 20
  # characters; a longer text file is given out in several documents, so that memory need not hold
  # it
)
_IDS = ('_id', 'id', 'docid')

# What a tag encloses is not running text: notes, tables, pictures, formulas, code.
_NO_TEXT = frozenset(
  (
    'ref',
    'references',
    'table',
    'gallery',
    'math',
    'chem',
    'ce',
    'score',
    'timeline',
    'imagemap',
    'hiero',
    'graph',
    'templatedata',
    'source',
    'syntaxhighlight',
    'pre',
    'section',
    'inputbox',
    'categorytree',
    'style',
    'script',
  )
)
# Names that any wiki knows these by, next to the dump's own: media, files, categories.
_NO_TEXT_NAMESPACES = {'-2': 'media', '6': 'file', '14': 'category'}
_OTHER_LANGUAGE = re.compile(r'[a-z]{2,3}(-[a-z-]+)?:')
_HEADING = re.compile(r'^==([^=].*?)==[^\S\n]*$', re.MULTILINE)
_MARKS = re.compile(r"'{2,5}|__[A-Z]+__")  # of emphasis, and of what a page should look like
_EMPTY_BRACKETS = re.compile(r' ?\([\s,;]*\)')
_ITEM = '\0'  # stands at the start of a list's item until its line is left out
_LEFT_OUT = (_ITEM, '{|', '|', '!')  # the latter three are of tables too broken to be taken for one


class Document(NamedTuple):
  id: str
  text: str


class Section(NamedTuple):
  """Of the second level, with its subsections; what comes before the first one has no heading.

  Lines are paragraphs.
  """

  heading: str
  text: str


class Article(NamedTuple):
  title: str
  sections: list[Section]


def read_documents(paths: Sequence[files.PathLike], report: Report) -> Iterator[Document]:
  """The documents of files and folders, one after the other; those without text are counted and
  left out.

  Ids are the files' own, else the file's name and the line; nothing makes them unique over several
  files.

  Raises:
    InputError: a file is missing, empty, of no known form, broken, or not UTF-8.
  """
  for path in find_files(paths, report):
    for document in _read(path):
      if document.text.strip():
        report.count('documents')
        yield document
      else:
        report.count('documents without text: skipped', document.id)


def find_files(paths: Sequence[files.PathLike], report: Report) -> list[epath.Path]:
  """The files that these files and folders mean, in the order they are read in.

  Files in a folder that are of another kind or empty are counted; a file that is named itself has
  to be usable.

  Raises:
    InputError: a path is missing, empty, or of no known form, or a folder has no file of a known
      one.
  """
  found = []
  for path in paths:
    given = files.existing(path, 'text')
    inside = list(_walk(given, report)) if given.is_dir() else [given]
    if not inside:
      raise InputError(
        f'{given}: no text in this folder; expected .jsonl, .tsv, .txt, .zip or .xml (MediaWiki), '
        'perhaps compressed'
      )
    if not given.is_dir() and _kind(given) is None:
      raise InputError(
        f'{given}: not a form of text; expected .jsonl, .tsv, .txt, .zip or .xml (MediaWiki), '
        f'perhaps with {", ".join(_COMPRESSED)}'
      )
    found += inside
  return found


def split_sentences(text: str, language: str = 'en') -> list[str]:
  """The sentences of a text, in order, white space in them made one space each; a newline always
  ends one.

  By sentencex; docs/pretraining.md compares it with others. Nothing is left out, so what stands by
  itself, as a heading or a number does, is a sentence too.

  Args:
    language: an ISO 639 code, whose abbreviations and marks are used; English's for one that
      sentencex does not know.
  """
  spans = (
    sentence.split() for line in text.splitlines() for sentence in sentencex.segment(language, line)
  )
  return [' '.join(words) for words in spans if words]


def read_articles(path: files.PathLike) -> Iterator[Article]:
  """The articles of a MediaWiki dump (.xml, perhaps compressed), in its order, as running text.

  Pages outside the main namespace and redirects are left out. Of the markup, links and emphasis
  leave their text; notes, tables, lists, pictures, formulas, templates and comments leave nothing
  ("only the text passages": Devlin et al., 2019, section 3.1). Sections that have no text then are
  left out. One page at a time is in memory.

  Raises:
    InputError: the file is missing or empty, broken, not UTF-8, or no MediaWiki dump.
  """
  with files.open_text(path, 'dump') as file, files.decoding(str(path)):
    try:
      for title, text, hidden in _pages(file, path):
        yield Article(title, _sections(text, hidden))
    except ElementTree.ParseError as error:
      raise InputError(
        f'{path}, line {error.position[0]}: not XML, or cut off ({error}); expected a MediaWiki '
        'dump'
      ) from error


def _walk(folder: epath.Path, report: Report) -> Iterator[epath.Path]:
  for name in ('corpus.jsonl', 'collection.tsv'):
    for ending in ('', *_COMPRESSED):
      if (corpus := folder / f'{name}{ending}').exists():
        yield corpus
        return
  for child in sorted(folder.iterdir()):
    if child.name.startswith('.'):
      continue
    if child.is_dir():
      yield from _walk(child, report)
    elif _kind(child) is None:
      report.count('files of another kind: skipped', child.name)
    else:
      with child.open('rb') as file:
        empty = not file.read(1)
      if empty:
        report.count('empty files: skipped', child.name)
      else:
        yield child


def _kind(path: epath.Path) -> str | None:
  inner = path.stem if path.suffix in _COMPRESSED else path.name
  kind = epath.Path(inner).suffix
  if kind == '.zip':
    return kind if inner == path.name else None
  return kind if kind in ('.jsonl', '.tsv', '.txt', '.xml') else None


def _read(path: epath.Path) -> Iterator[Document]:
  kind = _kind(path)
  if kind == '.jsonl':
    yield from _read_records(path)
  elif kind == '.tsv':
    yield from (Document(*passage) for _, passage in forms.read_corpus('msmarco', path))
  elif kind == '.txt':
    with files.open_text(path, 'text') as file:
      yield from _read_text(file, path.name, str(path))
  elif kind == '.zip':
    yield from _read_zip(path)
  else:
    for article in read_articles(path):
      yield Document(article.title, '\n'.join(section.text for section in article.sections))


def _read_records(path: epath.Path) -> Iterator[Document]:
  for number, record in files.read_jsonl(path, 'text'):
    title = record.get('title') or ''
    text = (
      record['abstract'] if 'text' not in record and 'abstract' in record else record.get('text')
    )
    if not isinstance(text, str) or not isinstance(title, str):
      raise InputError(
        f'{path}, line {number}: keys {", ".join(map(repr, record)) or "none"}; expected text, or '
        "arXiv's abstract, "
        'and perhaps title, all three strings'
      )
    names = (record[key] for key in _IDS if isinstance(record.get(key), str | int))
    # A title without a text says nothing.
    yield Document(
      str(next(names, f'{path.name}:{number}')), f'{title}\n{text}'.strip() if text.strip() else ''
    )


def _read_zip(path: epath.Path) -> Iterator[Document]:
  with path.open('rb') as file:
    try:
      archive = zipfile.ZipFile(file)
      names = sorted(
        name
        for name in archive.namelist()
        if name.endswith('.txt') and not name.startswith('__MACOSX/')
      )
      if not names:
        raise InputError(f'{path}: no .txt file in it')
      for name in names:
        with archive.open(name) as member:
          yield from _read_text(_utf8(member), f'{path.name}/{name}', f'{path}, {name}')
    except zipfile.BadZipFile as error:
      raise InputError(f'{path}: broken or cut-off zip file ({error}); fetch it again') from error


def _utf8(member: IO[bytes]) -> IO[str]:
  return io.TextIOWrapper(member, encoding='utf-8')


def _read_text(lines: IO[str], identifier: str, name: str) -> Iterator[Document]:
  """One document, or several of about ``_PART`` characters, broken between paragraphs."""
  part, size, number = [], 0, 0
  for paragraph in _paragraphs(files.number_lines(lines, name)):
    part.append(paragraph)
    size += len(paragraph)
    if size > _PART:
      number += 1
      yield Document(f'{identifier}~{number}', '\n'.join(part))
      part, size = [], 0
  if part or not number:
    yield Document(f'{identifier}~{number + 1}' if number else identifier, '\n'.join(part))


def _paragraphs(lines: Iterable[tuple[int, str]]) -> Iterator[str]:
  """Numbered lines joined; where numbers are left out, blank lines were."""
  for _, block in itertools.groupby(enumerate(lines), key=lambda pair: pair[1][0] - pair[0]):
    yield ' '.join(line.strip() for _, (_, line) in block)


def _pages(file: IO[str], path: files.PathLike) -> Iterator[tuple[str, str, frozenset[str]]]:
  """(title, wikitext, namespaces whose links are no text) of every article."""
  hidden = set(_NO_TEXT_NAMESPACES.values()) | {'image'}
  root = None
  for event, element in ElementTree.iterparse(file, events=('start', 'end')):
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
      # The root would keep every page.
      root.clear()


def _sections(text: str, hidden: frozenset[str]) -> list[Section]:
  # Each section for itself: a mark that someone forgot to close would swallow the headings after
  # it.
  first, *others = _HEADING.split(text)
  raw = [('', first), *zip(others[::2], others[1::2], strict=True)]
  cleaned = (
    Section(' '.join(_running_text(heading, hidden).split()), _running_text(body, hidden))
    for heading, body in raw
  )
  return [section for section in cleaned if section.text]


def _running_text(wikitext: str, hidden: frozenset[str]) -> str:
  # Left to the parser, one emphasis that is not closed hides what follows; its marks are no word's,
  # so they can go afterwards.
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
