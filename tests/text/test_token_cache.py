"""The token cache: its content, that TFDS reads it, and when it is built again."""

import json
import logging
import os

import numpy as np
import pytest
import tensorflow_datasets as tfds

from dprjax.base.counts import counted
from dprjax.text import batches, table, token_cache, vocabularies
from dprjax.text.sources import Source
from tests.refusals import refused

CORPUS = {
  'd1': 'the cat sat on the mat',
  'd2': 'dogs bark at night',
  'copy': 'the cat sat on the mat',
  'blank': '',
  'd4': 'fish swim in the sea',
}
QUERIES = {'q1': 'who sat', 'q2': 'who barks', 'twin': 'who sat', 'q4': 'what is blank'}
QRELS = [
  ('q1', 'd1', 1),
  ('q2', 'd2', 2),
  ('q2', 'blank', 1),
  ('twin', 'd4', 1),
  ('q4', 'blank', 1),
]
NEGATIVES = {'q1': ['copy', 'd2', 'd4', 'd2'], 'q2': ['d4', 'd1', 'copy']}
MINED_SOURCES = {
  ('q2', 'd4'): {'sources': ['undenoised', 'denoised']},
  ('q2', 'copy'): {'sources': ['denoised']},
}


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
  return vocabularies.train_wordpiece(
    [*CORPUS.values(), *QUERIES.values()] * 20, 120, tmp_path_factory.mktemp('tokenizer')
  )


def write_jsonl(path, rows):
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))


@pytest.fixture
def folder(tmp_path):
  """Five passages (d1 and copy are one text, blank has none), four queries (q1 and twin are one
  text), mined negatives.
  """
  folder = tmp_path / 'data'
  (folder / 'qrels').mkdir(parents=True)
  for name, texts in (('corpus', CORPUS), ('queries', QUERIES)):
    rows = ({'_id': id_, 'text': words} for id_, words in texts.items())
    write_jsonl(folder / f'{name}.jsonl', rows)
  (folder / 'qrels/train.tsv').write_text(
    ''.join(f'{query}\t{passage}\t{grade}\n' for query, passage, grade in QRELS)
  )
  mined = (
    {
      'query_id': query,
      'negative_passages': [
        {'docid': name, **MINED_SOURCES.get((query, name), {})} for name in names
      ],
    }
    for query, names in NEGATIVES.items()
  )
  write_jsonl(folder / 'mined.jsonl', mined)
  return folder


def build(folder, tokenizer, **changes):
  options = {'query_max_length': 16, 'passage_max_length': 8} | changes
  return token_cache.build_cache(
    Source(str(folder), negatives=str(folder / 'mined.jsonl')),
    tokenizer,
    folder.parent / 'token_cache',
    **options,
  )


def test_rows(folder, tokenizer, caplog, monkeypatch):
  monkeypatch.setattr(token_cache, '_SHARD_ROWS', 2)
  caplog.set_level(logging.INFO)
  built = build(folder, tokenizer, passage_prefix='sea ')
  assert len(list((built.path / 'passages').glob('*array_record*'))) == 2
  assert built.passage_ids(np.arange(4)) == ['d1', 'd2', 'blank', 'd4']  # 'copy' shares d1's row
  assert built.query_ids(np.arange(3)) == ['q1', 'q2', 'twin']  # q4's one positive has no text
  expected, cut = tokenizer.encode(
    [f'sea {CORPUS[name]}' for name in ('d1', 'd2', 'blank', 'd4')], 8
  )
  assert cut > 0
  rows = np.array([3, 0, 2, 1, 0])  # any order, with repeats
  assert [row.tolist() for row in built.passage_tokens(rows)] == [
    expected[row].tolist() for row in rows
  ]
  assert built.passage_lengths.tolist() == [len(row) for row in expected]
  queries, _ = tokenizer.encode(['who sat', 'who barks', 'who sat'], 16)
  assert [row.tokens.tolist() for row in built.query_rows(np.arange(3))] == [
    row.tolist() for row in queries
  ]
  assert built.query_lengths.tolist() == [len(row) for row in queries]
  lists = [[values.tolist() for values in row[1:]] for row in built.query_rows(np.arange(3))]
  assert lists == [
    # positives, relevant, negatives, their sources. d4 is relevant to q1 because it is to its twin.
    # copy and d1 have one row; each is of one source, so the row is of both.
    [[0], [0, 3], [1], [1]],
    [[1], [1, 2], [3, 0], [3, 3]],
    [[3], [0, 3], [], []],
  ]
  assert built.undenoised_counts.tolist() == [1, 2, 0]
  assert built.denoised_counts.tolist() == [0, 2, 0]
  assert built.negative_counts.tolist() == [1, 2, 0]
  assert built.relevant_counts.tolist() == [2, 2, 2] and built.max_relevant == 2
  for line in (
    '1 passage with the text of another: one row for both (copy)',
    '1 passage without text: kept, never a positive (blank)',
    counted(cut, 'passages of more than 8 tokens: cut'),
    '1 query whose positives are unknown or have no text: skipped (q4)',
    '2 negatives with the text of a relevant passage: ignored',
    'token_cache: built',
  ):
    assert caplog.text.count(line) == 1, line


CATEGORIES = {
  'd1': ['cs.CL', 'stat.ML'],
  'd2': 'cs.CL math.AG cs.CL',
  'copy': ['hep-th', 'cs.CL'],
  'blank': ['hep-ex'],
}  # d4 has none


@pytest.fixture
def labelled(folder):
  """``folder`` with categories."""
  write_jsonl(
    folder / 'corpus.jsonl',
    (
      {'_id': id_, 'text': words}
      | ({'categories': CATEGORIES[id_]} if id_ in CATEGORIES else {'categories': None})
      for id_, words in CORPUS.items()
    ),
  )
  return folder


def build_with_categories(folder, tokenizer, out):
  source = Source(str(folder), negatives=str(folder / 'mined.jsonl'), categories=True)
  options = {'query_max_length': 16, 'passage_max_length': 8}
  return token_cache.build_cache(source, tokenizer, out, **options)


def test_categories(labelled, tokenizer, tmp_path, caplog):
  caplog.set_level(logging.INFO)
  built = build_with_categories(labelled, tokenizer, tmp_path / 'token_cache')
  assert built.category_names == ('cs.CL', 'stat.ML', 'math.AG', 'hep-th', 'hep-ex')
  # The row of d1 and its copy has the categories of both.
  assert built.categories.counts.tolist() == [3, 2, 1, 0]
  assert built.categories.flat.tolist() == [0, 1, 3, 0, 2, 4]
  # The one positive of the twin, d4, has no categories.
  assert built.query_ids(np.arange(built.num_queries)) == ['q1', 'q2']
  assert '1 passage without categories: kept, never a positive (d4)' in caplog.text
  assert '2 queries whose positives are unknown or have neither text nor categories: skipped' in (
    caplog.text
  )
  # Passages are the same as without them.
  plain = build(labelled, tokenizer)
  assert plain.categories is None and 'categories' not in plain.settings['source']
  for table_file in (plain.path / 'passages').iterdir():
    assert table_file.read_bytes() == (built.path / 'passages' / table_file.name).read_bytes()


@pytest.mark.parametrize('categories', [3, ['a', ' b']])
def test_bad_categories(folder, tokenizer, tmp_path, categories):
  write_jsonl(folder / 'corpus.jsonl', [{'_id': 'd1', 'text': 'x', 'categories': categories}])
  with refused('corpus.jsonl', 'line 1', 'categories'):
    build_with_categories(folder, tokenizer, tmp_path / 'token_cache')
  build(folder, tokenizer)  # who does not ask for them does not read them


def test_formats_without_categories(tokenizer, tmp_path):
  write_jsonl(tmp_path / 'data.jsonl', [{'query': 'a', 'pos': ['b'], 'neg': []}])
  source, lengths = Source(str(tmp_path / 'data.jsonl'), categories=True), {'query_max_length': 8}
  with refused('data.jsonl', 'categories'):
    token_cache.build_cache(source, tokenizer, tmp_path / 'out', passage_max_length=8, **lengths)


def test_tables_of_several_shards(tmp_path, monkeypatch):
  monkeypatch.setattr(table, '_SHARD_BYTES', 200)
  with table.TableWriter(tmp_path / 'table', 'rows', ('tokens',)) as writer:
    for i in range(50):
      writer.write(f'r{i}', {'tokens': np.arange(i, dtype=np.int32)})
  assert len(list((tmp_path / 'table').glob('*array_record*'))) > 5
  read = table.Table(tmp_path / 'table', 'rows')
  order = np.random.default_rng(0).permutation(50)
  names, tokens = read.read(order, ('id', 'tokens'))
  assert names == [b'r%d' % i for i in order] and read.ids(order) == [f'r{i}' for i in order]
  assert table.lists(tokens).counts.tolist() == order.tolist()
  rows = tfds.builder_from_directory(tmp_path / 'table').as_data_source('rows')
  assert [row['id'] for row in rows] == [b'r%d' % i for i in range(50)]
  for row in (-1, 50):
    with pytest.raises(IndexError, match='of a table of 50'):
      read.read(np.array([row]), ('tokens',))


def made(built):
  """The identity of a built cache: another inode means another cache."""
  written = os.stat(built.path / 'token_cache.json')
  return written.st_ino, written.st_mtime_ns


def test_other_settings_and_changed_files_rebuild_it(folder, tokenizer, caplog):
  caplog.set_level(logging.INFO)
  last = made(build(folder, tokenizer))
  settings = {}
  for name, value in (('query_max_length', 12), ('passage_prefix', 'passage: ')):
    settings[name] = value
    changed = build(folder, tokenizer, **settings)
    assert made(changed) != last and (changed.settings | settings) == changed.settings
    assert f'differs in {name}; building it again' in caplog.text
    last = made(changed)
    assert made(build(folder, tokenizer, **settings)) == last
  for name, old, new in (('corpus.jsonl', 'sat', 'bit'), ('mined.jsonl', 'd4', 'd2')):
    # The same size within the same second, which modification times cannot show.
    content = (folder / name).read_text()
    assert old in content
    (folder / name).write_text(content.replace(old, new))
    changed = made(build(folder, tokenizer, **settings))
    assert changed != last, name
    last = changed
  other = vocabularies.train_wordpiece(
    [*CORPUS.values(), 'zebra'] * 20, 60, folder.parent / 'other'
  )
  changed = build(folder, other, **settings)
  assert made(changed) != last
  (tokens,) = changed.passage_tokens(np.array([1]))
  assert tokens.tolist() == other.encode([f'passage: {CORPUS["d2"]}'], 8)[0][0].tolist()


def test_no_query_is_left(folder, tokenizer):
  (folder / 'qrels/train.tsv').write_text('q1\tlost\t1\n')
  with refused('train.tsv'):
    build(folder, tokenizer)
  assert not (folder.parent / 'token_cache').exists()


def test_texts_with_the_same_tokens_are_one_passage_for_the_loss(tmp_path, tokenizer):
  """`long` and `longer` differ after the cut; so do the queries `a` and `b`."""
  folder = tmp_path / 'data'
  (folder / 'qrels').mkdir(parents=True)
  same = ' '.join(['the cat sat'] * 4)
  corpus = {'other': 'a dog', 'long': f'{same} here', 'longer': f'{same} there', 'last': 'the sea'}
  queries = {'a': f'{same} one', 'b': f'{same} two', 'c': 'a dog'}
  for name, texts in (('corpus', corpus), ('queries', queries)):
    rows = ({'_id': id_, 'text': words} for id_, words in texts.items())
    write_jsonl(folder / f'{name}.jsonl', rows)
  judged = (('a', 'longer'), ('b', 'last'), ('c', 'other'))
  (folder / 'qrels/train.tsv').write_text(''.join(f'{q}\t{p}\t1\n' for q, p in judged))
  mined = [('a', ['long', 'other', 'last']), ('c', ['long', 'longer'])]
  write_jsonl(
    folder / 'mined.jsonl',
    ({'query_id': q, 'negative_passages': [{'docid': p} for p in some]} for q, some in mined),
  )
  built = build(folder, tokenizer, query_max_length=8, passage_max_length=8)
  assert built.passage_ids(np.arange(4)) == list(corpus)  # an evaluation asks for all ids
  assert built.canonical.tolist() == [0, 1, 1, 3]
  assert built.distinct_passages().tolist() == [0, 1, 3]
  lists = [[values.tolist() for values in row[1:4]] for row in built.query_rows(np.arange(3))]
  assert lists == [
    # positives, relevant, negatives: `long` is the positive of `a`, `last` that of its equal `b`
    [[1], [2, 3], [0]],
    [[3], [2, 3], []],
    [[0], [0], [1]],
  ]
  feed = {'query_buckets': [8], 'passage_buckets': [8], 'seed': 0, 'batch_size': 3}
  for step in range(20):
    batch = batches.make_batches(built, negatives=1, **feed)[step]
    assert not (batch['passage_index'] == 2).any()
    for passages, relevant in zip(batch['passage_index'], batch['relevant'], strict=True):
      assert passages[0] in relevant and passages[1] not in relevant
  with refused('config.negatives'):  # of three passages, two are relevant
    batches.make_batches(built, negatives=2, **feed)


def test_texts_in_another_case_or_form_are_one_passage_for_the_loss(tmp_path):
  folder = tmp_path / 'data'
  (folder / 'qrels').mkdir(parents=True)
  corpus = {
    'other': 'a dog',
    'nfc': 'the caf\u00e9',
    'nfd': 'the cafe\u0301',
    'upper': 'THE  CAF\u00c9',
  }
  queries = {'a': 'where', 'b': 'Where', 'c': 'what'}
  for name, texts in (('corpus', corpus), ('queries', queries)):
    write_jsonl(folder / f'{name}.jsonl', ({'_id': i, 'text': text} for i, text in texts.items()))
  judged = (('a', 'nfc'), ('b', 'other'), ('c', 'other'))
  (folder / 'qrels/train.tsv').write_text(''.join(f'{q}\t{p}\t1\n' for q, p in judged))
  mined = {'query_id': 'c', 'negative_passages': [{'docid': name} for name in ('nfd', 'upper')]}
  write_jsonl(folder / 'mined.jsonl', [mined])
  words = [*corpus.values(), *queries.values()] * 20
  cased = vocabularies.train_wordpiece(words, 60, tmp_path / 'cased', lowercase=False)
  tokens, _ = cased.encode([*corpus.values()], 16)
  assert len({ids.tobytes() for ids in tokens}) == 4
  built = build(folder, cased, passage_max_length=16)
  assert built.canonical.tolist() == [0, 1, 1, 1]
  lists = [[values.tolist() for values in row[1:4]] for row in built.query_rows(np.arange(3))]
  # positives, relevant, negatives: those of `b` are relevant to `a`
  assert lists == [[[1], [1, 0], []], [[0], [1, 0], []], [[0], [0], [1]]]
