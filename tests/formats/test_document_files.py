"""Documents of every format, articles of wikitext, sentences of lines."""

import bz2
import gzip
import json
import lzma
import os
import tracemalloc
import zipfile

import pytest

from dprjax.formats import document_files, mediawiki, sentences
from dprjax.formats.document_files import Document
from dprjax.formats.mediawiki import Article, Section
from dprjax.formats.read_report import ReadReport
from tests.refusals import refused


def read(*paths):
  report = ReadReport()
  return list(document_files.read_documents(paths, report)), dict(report.counts)


def jsonl(path, *records):
  path.write_text(''.join(json.dumps(record) + '\n' for record in records))
  return path


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


def test_beir_folder_and_file(tmp_path):
  folder = tmp_path / 'beir'
  folder.mkdir()
  corpus = jsonl(
    folder / 'corpus.jsonl',
    {'_id': 'd1', 'title': 'Cats', 'text': 'They sit.'},
    {'_id': 'd2', 'title': 'Dogs', 'text': ' '},
    {'_id': 3, 'text': 'No title.'},
  )
  jsonl(folder / 'queries.jsonl', {'_id': 'q', 'text': 'not a document'})
  expected = (
    [Document('d1', 'Cats\nThey sit.'), Document('3', 'No title.')],
    {'documents': 2, 'documents without text: skipped': 1},
  )
  assert read(folder) == read(corpus) == expected


def test_collections_arxiv_and_other_records(tmp_path):
  collection = tmp_path / 'collection.tsv'
  collection.write_text('7\tOne passage.\n8\t\n')
  arxiv = jsonl(
    tmp_path / 'arxiv.jsonl',
    {'id': '1001.1', 'title': 'On Cats', 'abstract': 'We sit.', 'categories': ['cs.CL']},
  )
  other = jsonl(
    tmp_path / 'other.jsonl',
    {'text': 'Bare.'},
    {'docid': 'x', 'title': None, 'text': 'Named.', 'more': [1]},
  )
  documents, counts = read(collection, arxiv, other)
  assert documents == [
    Document('7', 'One passage.'),
    Document('1001.1', 'On Cats\nWe sit.'),
    Document('other.jsonl:1', 'Bare.'),
    Document('x', 'Named.'),
  ]
  assert counts == {'documents': 4, 'documents without text: skipped': 1}


def test_lines_of_a_text_file_form_paragraphs(tmp_path):
  (tmp_path / 'book.txt').write_text(
    '\n\nCHAPTER I.\n\nIt was a dark\n  and stormy\nnight.\n \n\nThe end.\n'
  )
  assert read(tmp_path / 'book.txt')[0] == [
    Document('book.txt', 'CHAPTER I.\nIt was a dark and stormy night.\nThe end.')
  ]


def test_a_large_text_file_is_split(tmp_path, monkeypatch):
  monkeypatch.setattr(document_files, '_PART', 10)
  (tmp_path / 'book.txt').write_text('one two\n\nthree\n\nfour')
  assert read(tmp_path / 'book.txt')[0] == [
    Document('book.txt~1', 'one two\nthree'),
    Document('book.txt~2', 'four'),
  ]


def test_compressed_files_zips_and_folders_in_order(tmp_path):
  text = 'Größe matters.\n'
  for name, pack in (
    ('a.txt.gz', gzip.compress),
    ('b.txt.xz', lzma.compress),
    ('c.txt.bz2', bz2.compress),
  ):
    (tmp_path / name).write_bytes(pack(text.encode()))
  with zipfile.ZipFile(tmp_path / 'd.zip', 'w') as archive:
    archive.writestr('in/z.txt', 'Last.')
    archive.writestr('in/a.txt', text)
    archive.writestr('in/README', 'no')
  (tmp_path / 'e').mkdir()
  (tmp_path / 'e' / 'wiki.xml.bz2').write_bytes(
    bz2.compress(dump(('Cat', 0, '', "A '''cat''' sits.")).encode())
  )
  (tmp_path / 'f.pdf').write_bytes(b'%PDF')
  (tmp_path / 'g.txt').touch()
  (tmp_path / '.hidden.txt').write_text('no')
  documents, counts = read(tmp_path)
  assert documents == [
    Document(name, text.strip()) for name in ('a.txt.gz', 'b.txt.xz', 'c.txt.bz2', 'd.zip/in/a.txt')
  ] + [Document('d.zip/in/z.txt', 'Last.'), Document('Cat', 'A cat sits.')]
  assert counts == {'documents': 6, 'files of another kind: skipped': 1, 'empty files: skipped': 1}


LATIN = 'Grö'.encode('latin-1')
BAD = [
  ('latin.txt', b'ok\n' + LATIN, 'latin.txt'),
  ('latin.jsonl', LATIN, ('latin.jsonl', 'line 1')),
  ('latin.xml', b'<mediawiki>' + LATIN, 'latin.xml'),
  ('cut.txt.bz2', bz2.compress(b'word ' * 999)[:-9], 'bz2'),
  ('not.txt.bz2', b'no such thing', 'not.txt.bz2'),
  ('not.txt.gz', b'no such thing', 'not.txt.gz'),
  ('not.zip', b'no such thing', 'not.zip'),
  ('cut.xml', b'<mediawiki>\n<page>', ('cut.xml', 'line 2', 'XML')),
  ('other.xml', b'<html></html>', 'XML'),
  ('keys.jsonl', b'{"text": "a"}\n{"body": "b"}\n', ('line 2', 'text')),
  ('number.jsonl', b'{"text": 3}\n', ('number.jsonl', 'line 1', 'text')),
  ('empty.txt', b'', 'empty.txt'),
  ('null.txt', b'one\n\0\n', ('null.txt', 'line 2')),
  ('id.jsonl', b'{"id": "a ", "text": "b"}\n', ('id.jsonl', 'line 1', 'a')),
  ('float.jsonl', b'{"id": 1.5, "text": "b"}\n', ('line 1', 'id')),
  ('a\nb.txt', b'text\n', ('a', 'b.txt')),
  (
    'laughs.xml',
    b'<!DOCTYPE a [<!ENTITY b "c">]><mediawiki></mediawiki>',
    ('XML', 'MediaWiki'),
  ),
  ('untitled.xml', dump(('', 0, '', 'Text.')).encode(), 'untitled.xml'),
  ('paper.pdf', b'%PDF', ('paper.pdf', '.jsonl')),
]


@pytest.mark.parametrize(('name', 'content', 'message'), BAD)
def test_files_that_cannot_be_used(tmp_path, name, content, message):
  (tmp_path / name).write_bytes(content)
  with refused(message):
    read(tmp_path / name)


def test_zips_and_folders_that_cannot_be_used(tmp_path):
  with zipfile.ZipFile(tmp_path / 'a.zip', 'w') as archive:
    archive.writestr('a.txt', 'Größe'.encode('latin-1'))
  with refused('a.zip', 'a.txt', 'line 1'):
    read(tmp_path / 'a.zip')
  with zipfile.ZipFile(tmp_path / 'a.zip', 'w') as archive:
    archive.writestr('README', 'no')
  with refused('a.zip', '.txt'):
    read(tmp_path / 'a.zip')
  (tmp_path / 'none').mkdir()
  with refused('none'):
    read(tmp_path / 'none')
  with refused('lost'):
    read(tmp_path / 'lost')


def laughs(start=''):
  """Entities of entities, and one of a file."""
  entities = '<!ENTITY a0 "ha"><!ENTITY file SYSTEM "file:///etc/passwd">' + ''.join(
    f'<!ENTITY a{i + 1} "{f"&a{i};" * 10}">' for i in range(11)
  )
  return f'{start}<!DOCTYPE a [{entities}]>'


@pytest.mark.parametrize('start', ['', '<!--' + 'x' * 100_000 + '-->'])
@pytest.mark.parametrize('entity', ['a11', 'file'])
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


def zipped(path, *members, harm=None):
  with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as archive:
    for name, text in members:
      archive.writestr(name, text)
  content = bytearray(path.read_bytes())
  if harm:
    offset, value = harm
    place = content.index(b'PK\x01\x02') + offset  # in the central directory
    content[place : place + len(value)] = value
    path.write_bytes(content)
  return path


@pytest.mark.parametrize(
  ('member', 'harm', 'message'),
  [
    (('a.txt', 'a\n' * (1 << 20)), None, '2,097,152'),
    (('a.txt', 'text'), (24, b'\xff\xff\xff\x7f'), '2,147,483,647'),
    (('a.txt', 'text'), (8, b'\x01'), ('a.zip', 'a.txt')),
    (('a.txt', 'text'), (10, b'\x63'), 'a.zip'),
    (('a.txt', 'text'), (16, b'\1\2\3\4'), 'CRC'),
    (('a.txt', 'text'), (42, b'\xff\xff\xff\x7f'), 'a.zip'),
    (('a\nb.txt', 'text'), None, ('a.zip', 'nb.txt')),
    (('a.txt', 'te\0xt'), None, ('a.zip', 'a.txt', 'line 1')),
  ],
)
def test_odd_members_of_zip_files(tmp_path, member, harm, message):
  with refused(message):
    read(zipped(tmp_path / 'a.zip', member, harm=harm))


def test_members_begin_with_a_byte_order_mark_or_not(tmp_path):
  path = zipped(tmp_path / 'a.zip', ('../b.txt', '\ufeffTwo.'), ('a.txt', 'One.'), ('a.txt/', ''))
  assert [document.text for document in read(path)[0]] == ['Two.', 'One.']
  assert not (tmp_path.parent / 'b.txt').exists()


def test_links_and_pipes_in_a_folder(tmp_path):
  folder = tmp_path / 'texts'
  (folder / 'inner').mkdir(parents=True)
  (folder / 'inner' / 'a.txt').write_text('One.')
  (folder / 'inner' / 'up').symlink_to('..')
  (folder / 'b.txt').symlink_to('lost')
  os.mkfifo(folder / 'c.txt')
  found, counts = read(folder)
  assert [document.text for document in found] == ['One.']
  assert counts['links to a folder above: skipped'] == 1
  assert counts['pipes, devices and broken links: skipped'] == 2
  with refused('c.txt'):
    read(folder / 'c.txt')


def test_newlines_end_sentences_and_white_space_becomes_one_space():
  assert sentences.split_sentences(
    'A title\nDr. Smith et al. (2019) saw  it. See Fig. 3.\n\n Then at 3.5 %, J. R. Smith\tleft.\n'
  ) == [
    'A title',
    'Dr. Smith et al. (2019) saw it.',
    'See Fig. 3.',
    'Then at 3.5 %, J. R. Smith left.',
  ]
  assert sentences.split_sentences('Er kam z. B. gestern. Dann ging er.', 'de') == [
    'Er kam z. B. gestern.',
    'Dann ging er.',
  ]
  assert sentences.split_sentences(' \n\n') == []


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
  assert read(tmp_path / 'dump.xml') == (
    [Document('Cat', 'One.')],
    {'documents': 1, 'documents without text: skipped': 1},
  )


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
  assert [section.heading for section in articles['Anarchism'].sections] == [
    '',
    'Etymology and terminology',
    'History',
    'Anarchist schools of thought',
    'Internal issues and debates',
    'Topics of interest',
    'Criticisms',
  ]
  assert (articles['Anarchism'].sections[0].text).startswith(
    'Anarchism is a political philosophy that advocates self-governed societies based on voluntary '
    'institutions. These are often described as stateless societies, although several authors'
  )
  text = '\n'.join(section.text for article in articles.values() for section in article.sections)
  assert len(text) > 2_400_000
  # Left-over markup: one line in a thousand at most.
  left = [
    line
    for line in text.splitlines()
    if any(mark in line for mark in ('[[', ']]', '{{', '}}', '<ref', 'style=', 'http'))
  ]
  assert len(left) <= 5
