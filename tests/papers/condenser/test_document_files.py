"""Documents of every format, articles of wikitext, sentences of lines."""

import bz2
import gzip
import json
import lzma
import os

import pytest

from dprjax.base.counts import ReadReport
from dprjax.papers.condenser import segments
from dprjax.papers.condenser.segments import Document
from tests.refusals import refused


def read(*paths):
  report = ReadReport()
  return list(segments.read_documents(paths, report)), dict(report.counts)


def jsonl(path, *records):
  path.write_text(''.join(json.dumps(record) + '\n' for record in records))
  return path


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


def test_a_large_text_file_is_split(tmp_path, monkeypatch):
  monkeypatch.setattr(segments, '_PART', 10)
  (tmp_path / 'book.txt').write_text('one two\n\nthree\n\nfour')
  assert read(tmp_path / 'book.txt')[0] == [
    Document('book.txt~1', 'one two\nthree'),
    Document('book.txt~2', 'four'),
  ]


def test_compressed_files_and_folders_in_order(tmp_path):
  text = 'Größe matters.\n'
  for name, pack in (
    ('a.txt.gz', gzip.compress),
    ('b.txt.xz', lzma.compress),
    ('c.txt.bz2', bz2.compress),
  ):
    (tmp_path / name).write_bytes(pack(text.encode()))
  (tmp_path / 'e').mkdir()
  (tmp_path / 'e' / 'cat.txt').write_text('A cat sits.')
  (tmp_path / 'f.pdf').write_bytes(b'%PDF')
  (tmp_path / 'g.txt').touch()
  (tmp_path / '.hidden.txt').write_text('no')
  documents, counts = read(tmp_path)
  assert documents == [
    Document(name, text.strip()) for name in ('a.txt.gz', 'b.txt.xz', 'c.txt.bz2')
  ] + [Document('cat.txt', 'A cat sits.')]
  assert counts == {'documents': 4, 'empty files, and files of another kind: skipped': 2}


LATIN = 'Grö'.encode('latin-1')
BAD = [
  ('latin.txt', b'ok\n' + LATIN, 'latin.txt'),
  ('cut.txt.bz2', bz2.compress(b'word ' * 999)[:-9], 'bz2'),
  ('keys.jsonl', b'{"text": "a"}\n{"other": "b"}\n', ('line 2', 'text')),
  ('empty.txt', b'', 'empty.txt'),
  ('id.jsonl', b'{"id": "a ", "text": "b"}\n', ('id.jsonl', 'line 1', 'a')),
]


@pytest.mark.parametrize(('name', 'content', 'message'), BAD)
def test_files_that_cannot_be_used(tmp_path, name, content, message):
  (tmp_path / name).write_bytes(content)
  with refused(message):
    read(tmp_path / name)


def test_folders_that_cannot_be_used(tmp_path):
  (tmp_path / 'none').mkdir()
  documents, counts = read(tmp_path / 'none')
  assert not documents and list(counts.values()) == [1]
  with refused('lost'):
    read(tmp_path / 'lost')


def test_links_and_pipes_in_a_folder(tmp_path):
  folder = tmp_path / 'texts'
  (folder / 'inner').mkdir(parents=True)
  (folder / 'inner' / 'a.txt').write_text('One.')
  (folder / 'inner' / 'up').symlink_to('..')
  (folder / 'b.txt').symlink_to('lost')
  os.mkfifo(folder / 'c.txt')
  found, counts = read(folder)
  assert [document.text for document in found] == ['One.']
  assert counts['empty files, and files of another kind: skipped'] == 2
  with refused('c.txt'):
    read(folder / 'c.txt')
