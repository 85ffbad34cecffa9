"""Articles of a MediaWiki dump."""

import tracemalloc

import pytest

from lab import mediawiki
from lab.mediawiki import Article, Section
from tests.refusals import refused

LATIN = 'Grö'.encode('latin-1')


def read(path):
  return list(mediawiki.read_articles(path))


def dump(
  *pages, namespaces='<namespace key="6">Datei</namespace><namespace key="14">Kategorie</namespace>'
):
  body = ''.join(
    f'<page><title>{title}</title><ns>{ns}</ns>{extra}<revision><text>{text}</text></revision></page>'
    for title, ns, extra, text in pages
  )
  return (
    '<mediawiki '
    f'xmlns="http://www.mediawiki.org/xml/export-0.10/"><siteinfo><namespaces>{namespaces}</namespaces></siteinfo>{body}</mediawiki>'
  )


def article(tmp_path, wikitext):
  (tmp_path / 'dump.xml').write_text(
    dump(('Cat', 0, '', wikitext.replace('&', '&amp;').replace('<', '&lt;')))
  )
  (page,) = mediawiki.read_articles(tmp_path / 'dump.xml')
  return page


BAD = [
  ('latin.xml', b'<mediawiki>' + LATIN, 'latin.xml'),
  ('cut.xml', b'<mediawiki>\n<page>', ('cut.xml', 'line 2', 'XML')),
  ('other.xml', b'<html></html>', 'XML'),
  (
    'laughs.xml',
    b'<!DOCTYPE a [<!ENTITY b "c">]><mediawiki></mediawiki>',
    ('XML', 'MediaWiki'),
  ),
]


@pytest.mark.parametrize(('name', 'content', 'message'), BAD)
def test_files_that_cannot_be_used(tmp_path, name, content, message):
  (tmp_path / name).write_bytes(content)
  with refused(message):
    read(tmp_path / name)


def laughs(start=''):
  """Entities of entities, and one of a file."""
  entities = '<!ENTITY a0 "ha"><!ENTITY file SYSTEM "file:///etc/passwd">' + ''.join(
    f'<!ENTITY a{i + 1} "{f"&a{i};" * 10}">' for i in range(11)
  )
  return f'{start}<!DOCTYPE a [{entities}]>'


@pytest.mark.parametrize(
  ('start', 'entity'), [('', 'a11'), ('', 'file'), ('<!--' + 'x' * 100_000 + '-->', 'a11')]
)
def test_entities_are_not_replaced(tmp_path, start, entity):
  """A dump has none; behind a long comment expat itself stops them."""
  (tmp_path / 'a.xml').write_text(laughs(start) + dump(('Cat', 0, '', f'&{entity};')))
  with refused('a.xml'):
    read(tmp_path / 'a.xml')


def test_a_page_without_end(tmp_path, monkeypatch):
  monkeypatch.setattr(mediawiki, '_LONGEST_PAGE', 200_000)
  (tmp_path / 'a.xml').write_text(dump(('Cat', 0, '', 'A cat. ' * 99_999)))
  with refused('a.xml', '200,000'):
    read(tmp_path / 'a.xml')


def test_articles_are_those_of_the_main_namespace(tmp_path):
  (tmp_path / 'dump.xml').write_text(
    dump(
      ('Cat', 0, '', 'One.'),
      ('Talk:Cat', 1, '', 'Two.'),
      ('Kitty', 0, '<redirect title="Cat" />', '#REDIRECT [[Cat]]'),
      ('Old', 0, '', '#redirect [[Cat]]'),
      ('Nothing', 0, '', '{{stub}}'),
    )
  )
  assert list(mediawiki.read_articles(tmp_path / 'dump.xml')) == [
    Article('Cat', [Section('', 'One.')]),
    Article('Nothing', []),
  ]


def test_sections_are_of_the_second_level(tmp_path):
  wikitext = (
    "Lead.\n== First & ''foremost'' ==\nOne.\n=== Sub "
    '===\nTwo.\n==Empty==\n{{stub}}\n==Last==\nThree.'
  )
  assert article(tmp_path, wikitext) == Article(
    'Cat',
    [Section('', 'Lead.'), Section('First & foremost', 'One.\nTwo.'), Section('Last', 'Three.')],
  )


MARKUP = [
  (
    "The '''cat''' (''Felis'') is a [[mammal]], a [[pet|house pet]] &amp; more.",
    'The cat (Felis) is a mammal, a house pet & more.',
  ),
  (
    'It sits.<ref>A [[book]].</ref> It eats.<ref name="x"/><!-- secret --> It sleeps.',
    'It sits. It eats. It sleeps.',
  ),
  ('{{Infobox|name={{lang|la|x}}}}It ({{IPA|kæt}}) sits.', 'It sits.'),
  ('[[File:Cat.jpg|thumb|A [[cat]] sits]]It sits.[[Kategorie:Katze]][[Image:x.png]]', 'It sits.'),
  ('It sits.[[de:Katze]][[Datei:x.png|mini]]', 'It sits.'),
  (
    'See [[:Category:Cats]] and [http://x.org a site] and [http://y.org].',
    'See Category:Cats and a site and .',
  ),
  ('Before.\n{| class="wikitable"\n|-\n! Head\n|-\n| Cell\n|}\nAfter.', 'Before.\nAfter.'),
  ('Cats:\n* tabby\n# calico\n; term\n: meaning\nThey sit.', 'Cats:\nThey sit.'),
  (
    'Energy <math>E = mc^2</math> is kept. H<sub>2</sub>O<br/>flows.',
    'Energy is kept. H2O\nflows.',
  ),
  ("An ''unclosed mark.\nNext line.\n== Head ==\nText.", 'An unclosed mark.\nNext line.'),
  ('One\npara.\n\nTwo.__NOTOC__', 'One\npara.\nTwo.'),
]


@pytest.mark.parametrize(('wikitext', 'text'), MARKUP)
def test_markup_leaves_the_running_text(tmp_path, wikitext, text):
  assert article(tmp_path, wikitext).sections[0] == Section('', text)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_dump(tmp_path):
  page = ('Cat', 0, '', 'It sits on the mat. ' * 500)
  peaks = []
  for pages in (20, 200):
    (tmp_path / 'dump.xml').write_text(dump(*[page] * pages))
    tracemalloc.start()
    assert sum(1 for _ in mediawiki.read_articles(tmp_path / 'dump.xml')) == pages
    peaks.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
  assert peaks[1] < 1.2 * peaks[0]


@pytest.mark.slow
def test_real_wikipedia(data_dir):
  path = data_dir / 'text' / 'enwiki' / 'enwiki-shortened.xml.bz2'
  if not path.exists():
    pytest.skip(f'no {path}')
  articles = {article.title: article for article in mediawiki.read_articles(path)}
  assert len(articles) == 106
  sections = articles['Anarchism'].sections
  assert [section.heading for section in sections[:3]] == [
    '',
    'Etymology and terminology',
    'History',
  ]
  assert sections[0].text.startswith('Anarchism is a political philosophy that advocates self-')
  text = '\n'.join(section.text for article in articles.values() for section in article.sections)
  assert len(text) > 2_400_000
  # Left-over markup: one line in a thousand at most.
  left = [
    line
    for line in text.splitlines()
    if any(mark in line for mark in ('[[', ']]', '{{', '}}', '<ref', 'style=', 'http'))
  ]
  assert len(left) <= 5
