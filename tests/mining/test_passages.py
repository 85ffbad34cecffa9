import gzip
import json
import lzma

import numpy as np
import pytest

from dprjax.base import outofcore
from dprjax.mining import passages
from tests.refusals import refused

CORPUS = [
  ('d1', 'Cats', 'they  purr'),
  ('d2', '', 'Dogs bark.'),
  ('ünï', 'Ü', 'ß "quoted" \\ '),
  ('d3', '', 'Cats they\npurr '),
  ('d4', '', ''),
]


def beir(path):
  records = [{'_id': name, 'title': title, 'text': text} for name, title, text in CORPUS]
  path.write_text(''.join(json.dumps(record) + '\n' for record in records))
  return path


def look_up(indexed, ids):
  keys = outofcore.keys_of(ids)
  order = np.argsort(keys)
  offsets, digests = np.empty(len(keys), np.int64), np.empty(len(keys), np.uint64)
  offsets[order], digests[order] = indexed.look_up(keys[order])
  return offsets, digests


def check(indexed):
  names = [name for name, _, _ in CORPUS]
  offsets, digests = look_up(indexed, [*names, 'lost'])
  assert offsets[-1] == -1 and (offsets[:-1] >= 0).all()
  assert [tuple(parts) for parts in indexed.read(offsets[:-1])] == CORPUS
  # Apart from white space, d3 has the text of d1.
  assert digests[0] == digests[3] and digests[4] == passages.EMPTY
  assert len(set(digests[:-1].tolist())) == 4


def test_beir(tmp_path):
  check(passages.index_corpus(beir(tmp_path / 'corpus.jsonl'), tmp_path / 'index'))


@pytest.mark.parametrize(('ending', 'compress'), [('.gz', gzip.compress), ('.xz', lzma.compress)])
def test_compressed(tmp_path, ending, compress):
  path = tmp_path / f'corpus.jsonl{ending}'
  path.write_bytes(compress(beir(tmp_path / 'corpus.jsonl').read_bytes()))
  check(passages.index_corpus(path, tmp_path / 'index'))


@pytest.mark.parametrize(
  ('lines', 'expected'),
  [
    ('d1\tthey purr\nd2\tthey bark\n', [('d1', '', 'they purr'), ('d2', '', 'they bark')]),
    ('id\ttext\ttitle\nd1\t"they ""purr"""\tCats\n', [('d1', 'Cats', 'they "purr"')]),
    (
      '"id"\t"text"\t"title"\n"d1"\t"they\n\npurr"\t"Cats"\n"d2"\t"bark"\t"Dogs"\n',
      [('d1', 'Cats', 'they\n\npurr'), ('d2', 'Dogs', 'bark')],
    ),
    ('d1\thttp://x\tCats\tthey purr\n', [('d1', 'Cats', 'they purr')]),
  ],
)
def test_collections(tmp_path, lines, expected):
  (tmp_path / 'collection.tsv').write_text(lines)
  indexed = passages.index_corpus(tmp_path / 'collection.tsv', tmp_path / 'index')
  offsets, _ = look_up(indexed, [name for name, _, _ in expected])
  assert [tuple(parts) for parts in indexed.read(offsets)] == expected


@pytest.mark.parametrize('name', ['c.csv', 'c.jsonl', 'folder'])
def test_other_inputs_are_written_as_lines_first(tmp_path, name):
  path = tmp_path / name
  if name == 'folder':
    path.mkdir()
    (path / 'a.csv').write_text('docid,contents\nd1,they purr\n')
    (path / 'b.csv').write_text('docid,contents\nd2,they bark\n')
  elif name == 'c.csv':
    path.write_text('docid,contents\nd1,they purr\nd2,they bark\n')
  else:
    path.write_text(
      '{"id": "d1", "contents": "they purr"}\n{"id": "d2", "contents": "they bark"}\n'
    )
  indexed = passages.index_corpus(path, tmp_path / 'index')
  offsets, _ = look_up(indexed, ['d1', 'd2'])
  assert [parts.text for parts in indexed.read(offsets)] == ['they purr', 'they bark']


def test_more_passages_than_a_chunk(tmp_path, monkeypatch):
  monkeypatch.setattr(passages, '_CHUNK', 17)
  (tmp_path / 'collection.tsv').write_text(''.join(f'd{i}\ttext {i}\n' for i in range(1000)))
  calls = []
  indexed = passages.index_corpus(
    tmp_path / 'collection.tsv', tmp_path / 'index', lambda *call: calls.append(call)
  )
  offsets, _ = look_up(indexed, [f'd{i}' for i in range(1500)])
  assert (offsets[1000:] == -1).all()
  assert [parts.text for parts in indexed.read(offsets[:1000])] == [
    f'text {i}' for i in range(1000)
  ]
  assert [count for count, _ in calls] == list(range(17, 1000, 17)) and calls[-1][1] <= 1
  assert indexed.look_up(np.empty(0, np.uint64))[0].shape == (0,)


@pytest.mark.parametrize(
  ('name', 'content', 'message'),
  [
    (
      'c.jsonl',
      b'{"_id": "a", "text": "x"}\n{"_id": "b", "text": "y"}\n{"_id": "a", "text": "z"}\n',
      ('line 1', '_id', 'a', 'text', 'line 3'),
    ),
    ('c.jsonl', b'{"_id": "a", "text": "x"}\n{"_id": broken\n', ('c.jsonl', 'line 2')),
    ('c.jsonl', b'[1]\n', 'line 1'),
    ('c.jsonl', b'{"_id": "a"}\n', ('line 1', 'text')),
    ('c.jsonl', b'{"_id": "a", "text": "\xff"}\n', 'not UTF-8 text'),
    ('c.tsv', b'a\n', ('c.tsv', 'line 1')),
    ('c.tsv', b'a\tb\nc\td\te\n', ('c.tsv', 'line 2', '3')),
    ('c.tsv', b'id\ttext\ttitle\na\t"b\nc\tT\n', ('c.tsv', 'line 2')),
    ('c.jsonl', b'\n', 'c.jsonl'),
    ('c.jsonl', b'', 'c.jsonl'),
  ],
)
def test_bad_corpora(tmp_path, name, content, message):
  (tmp_path / name).write_bytes(content)
  with refused(message):
    passages.index_corpus(tmp_path / name, tmp_path / 'index')
