"""Articles of a MediaWiki dump."""

import pytest

from lab import mediawiki
from lab.mediawiki import Article, Section


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
    '{{Infobox|name={{lang|la|x}}}}It sits.<ref>A [[book]].</ref> It eats.<!-- no --> It sleeps.'
    '[[File:Cat.jpg|thumb|A [[cat]] sits]][[Kategorie:Katze]][[de:Katze]]',
    'It sits. It eats. It sleeps.',
  ),
  ('Before.\n{| class="wikitable"\n|-\n! Head\n|-\n| Cell\n|}\nAfter.', 'Before.\nAfter.'),
  ('One\npara.\n* tabby\n\nTwo.__NOTOC__', 'One\npara.\nTwo.'),
]


@pytest.mark.parametrize(('wikitext', 'text'), MARKUP)
def test_markup_leaves_the_running_text(tmp_path, wikitext, text):
  assert article(tmp_path, wikitext).sections[0] == Section('', text)
