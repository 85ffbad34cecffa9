"""Every format by a few handmade lines, every way it can be wrong, and the counts of real sets."""

import dataclasses
import gzip
import json
import lzma
import math
import os

import pytest

from dprjax.base import reading
from dprjax.text import sources
from dprjax.text.sources import Source, load_dataset
from tests.refusals import refused


def jsonl(path, rows):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(''.join(f'{json.dumps(row)}\n' for row in rows))
  return path


@pytest.fixture
def beir(tmp_path):
  """Three passages, one of them without title; three queries, judged 2, 1 and 0."""
  folder = tmp_path / 'beir'
  corpus = [('d1', 'Cats', 'purr'), ('d2', '', 'dogs bark'), ('d3', None, 'fish swim')]
  jsonl(
    folder / 'corpus.jsonl',
    [{'_id': id_, 'title': title, 'text': text} for id_, title, text in corpus],
  )
  queries = {'q1': 'who purrs', 'q2': 'who barks', 'q3': 'who flies'}
  jsonl(folder / 'queries.jsonl', [{'_id': id_, 'text': text} for id_, text in queries.items()])
  (folder / 'qrels').mkdir()
  (folder / 'qrels/train.tsv').write_text(
    'query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\td2\t0\nq2\td2\t1\nq3\td3\t0\n'
  )
  return folder


def read(*args, **kwargs):
  data = load_dataset(Source(*map(str, args), **kwargs))
  return data, {passage.id: passage.text for passage in data.passages}


@pytest.mark.parametrize(('ending', 'compress'), [('.gz', gzip.compress), ('.xz', lzma.compress)])
def test_compressed_files_read_the_same(beir, ending, compress):
  plain = read(beir)[1]
  for path in (beir / 'corpus.jsonl', beir / 'queries.jsonl', beir / 'qrels/train.tsv'):
    (path.parent / f'{path.name}{ending}').write_bytes(compress(path.read_bytes()))
    path.unlink()
  data, passages = read(beir)
  assert passages == plain and len(data.queries) == 2


JUDGED = 'query-id\tcorpus-id\tscore\nq1\tp2\t1\n'


@pytest.mark.parametrize(
  ('collection', 'qrels'),
  [
    ('p1\tcats purr\np2\tdogs "bark\np3\tfish swim\n', 'q1\t0\tp2\t1\n'),
    # RocketQA and coCondenser: titles before texts, with or without a header
    ('p1\tcats\tpurr\np2\tdogs\t"bark\np3\tfish\tswim\n', 'q1 0 p2 1\n'),
    (
      '\ufeffid\ttitle\ttext\r\np1\tcats\tpurr\r\np2\tdogs\t"bark\r\np3\tfish\tswim\r\n',
      JUDGED,
    ),
    # DPR: a header, and quotes as in CSV
    ('id\ttext\ttitle\np1\tpurr\tcats\np2\t"""bark"\tdogs\np3\tswim\tfish\n', JUDGED),
  ],
)
def test_msmarco(tmp_path, collection, qrels):
  (tmp_path / 'collection.tsv').write_text(collection)
  queries, judged = tmp_path / 'queries.dev.tsv', tmp_path / 'qrels.dev.tsv'
  queries.write_text('q1\twho barks\nq2\twho swims\n')
  judged.write_text(qrels)
  data, passages = read(tmp_path, split='dev')
  assert data.format == 'msmarco'
  assert passages == {'p1': 'cats purr', 'p2': 'dogs "bark', 'p3': 'fish swim'}
  assert data.queries == [('q1', 'who barks')] and data.positives('q1') == ['p2']
  # The same files under names that the user chose.
  named, _ = read(tmp_path, 'msmarco', 'anything', queries=str(queries), qrels=str(judged))
  assert named.qrels == data.qrels


CATS = {'title': 'Cats', 'text': 'purr', 'passage_id': '7'}
FISH = {'title': 'Fish', 'text': 'swim', 'passage_id': '9'}
DPR = [
  {
    'question': 'who purrs',
    'answers': ['cats'],
    'positive_ctxs': [CATS],
    'negative_ctxs': [FISH],
    'hard_negative_ctxs': [{'title': 'Dogs', 'text': 'bark', 'psg_id': 8}],
  },
  {
    'question': 'who swims',
    'positive_ctxs': [FISH, {'title': '', 'text': 'no id'}],
    'negative_ctxs': [CATS],
    'hard_negative_ctxs': [],
  },
]


@pytest.mark.parametrize(
  'text',
  [json.dumps(DPR, indent=2), '\n'.join(map(json.dumps, DPR))],
  ids=['array', 'jsonl'],
)
def test_dpr(tmp_path, text, monkeypatch):
  monkeypatch.setattr(reading, '_CHUNK', 40)  # an entry then spans several reads
  (tmp_path / 'train.json').write_text(text)
  data, passages = read(tmp_path)
  assert data.format == 'dpr'
  assert data.queries == [('1', 'who purrs'), ('2', 'who swims')]
  no_id = next(name for name in passages if name.startswith('text-'))
  assert passages == {'7': 'Cats purr', '8': 'Dogs bark', '9': 'Fish swim', no_id: 'no id'}
  assert data.positives('1') == ['7'] and data.positives('2') == ['9', no_id]
  # Plain negatives only where there is no hard one.
  assert [[negative.id for negative in data.negatives[id_]] for id_ in '12'] == [['8'], ['7']]


def test_tevatron_with_what_mining_adds(tmp_path):
  cats = {'docid': 'a', 'title': 'Cats', 'text': 'purr'}
  dogs = {'docid': 'b', 'title': '', 'text': 'bark'}
  path = jsonl(
    tmp_path / 'train.jsonl',
    [
      {
        'query_id': 12,
        'query': 'who purrs',
        'positive_passages': [cats],
        'negative_passages': [dogs | {'retriever': 'bm25', 'rank': 3, 'score': 7.5}, cats],
      },
      {
        'query_id': 'q2',
        'query': 'who swims',
        'positive_passages': [{'docid': 'c', 'text': 'fish'}],
        'negative_passages': [{'docid': 'b', 'text': 'another text'}],
      },
    ],
  )
  data, passages = read(path)
  assert data.format == 'tevatron'
  assert data.negatives['12'] == [('b', 'bm25', 3, 7.5, ('undenoised',))]
  assert data.report.counts['negatives that are positives of their query: ignored'] == 1
  # An id that stands for two texts makes two passages.
  (other,) = data.negatives['q2']
  assert other.id.startswith('b~')
  assert passages == {'a': 'Cats purr', 'b': 'bark', 'c': 'fish', other.id: 'another text'}


def papers(path, numbers):
  rows = [{'id': f'p{i}', 'title': f'title {i}', 'abstract': f'abstract {i}'} for i in numbers]
  return jsonl(path, rows)


def test_mined_negatives_join_a_folder(beir, tmp_path):
  mined = {'docid': 'd3', 'retriever': 'dpt', 'rank': 1, 'score': 2, 'sources': ['denoised']}
  negatives = {
    'q1': [{'docid': 'd1'}, mined, {'docid': 'd2'}],
    'elsewhere': [{'docid': 'd1'}],
    'q2': [{'docid': 'lost'}],
  }
  path = jsonl(
    tmp_path / 'mined.jsonl',
    [{'query_id': query, 'negative_passages': rows} for query, rows in negatives.items()],
  )
  data, _ = read(beir, negatives=str(path))
  assert data.negatives == {
    'q1': [('d3', 'dpt', 1, 2.0, ('denoised',)), ('d2', '', None, None, ('undenoised',))],
    'q2': [('lost', '', None, None, ('undenoised',))],
  }
  for count in (
    'negatives that are positives of their query: ignored',
    'queries with mined negatives that are not in this split: ignored',
    'negatives that are not in the corpus: ignored',
  ):
    assert data.report.counts[count] == 1


def test_unknown_ids_are_counted_and_listed(beir):
  with (beir / 'qrels/train.tsv').open('a') as file:
    file.writelines(f'q1\tlost{i}\t1\n' for i in range(7))
    file.write('nobody\td1\t1\n')
  data, _ = read(beir)
  assert data.report.counts['judgements of a passage that is not in the corpus: ignored'] == 7
  assert data.report.counts['judgements of a query that is not in the queries: ignored'] == 1
  line = next(line for line in str(data.report).splitlines() if 'corpus' in line)
  assert line.count('q1 lost') == 5 and line.endswith(', ...)')


def test_empty_texts(beir):
  passages = [('d1', ' ', ''), ('d2', '', 'dogs'), ('d3', '', 'fish')]
  jsonl(
    beir / 'corpus.jsonl',
    [{'_id': id_, 'title': title, 'text': text} for id_, title, text in passages],
  )
  jsonl(beir / 'queries.jsonl', [{'_id': 'q1', 'text': 'who purrs'}, {'_id': 'q2', 'text': '  '}])
  data, texts = read(beir)
  assert texts['d1'] == '' and data.queries == [('q1', 'who purrs')]
  assert data.report.examples['passages without text: kept, never a positive'] == ['d1']
  assert data.report.examples['queries without text: skipped'] == ['q2']


SPOILT = [  # file, number of the line that is appended (0: the only one), line, message
  (
    *('corpus.jsonl', 4, '{"_id": "d1", "text": "again"}'),
    ('corpus.jsonl', 'line 1', 'line 4'),
  ),
  ('queries.jsonl', 0, None, ('corpus.jsonl', 'qrels/')),
  ('qrels/train.tsv', 6, 'q1\td1\t0', ('line 6', 'd1', 'q1')),
]


@pytest.mark.parametrize(('name', 'number', 'line', 'message'), SPOILT)
def test_bad_files_are_named(beir, name, number, line, message):
  path = beir / name
  if line is None:
    path.unlink()
  else:
    path.write_text(f'{path.read_text()}{line}\n')
  with refused(message):
    read(beir)


EXAMPLE = '{"query_id": 1, "query": "x", "positive_passages": [{"docid": 1, "text": "y"}]}'
BAD_EXAMPLES = [
  (
    'a.jsonl',
    '{"query": "x", "pos": "cats"}',
    ('line 1', 'pos'),
  ),
  ('a.jsonl', f'{EXAMPLE}\n{EXAMPLE}', ('a.jsonl', 'line 1', 'line 2')),
  (
    'a.json',
    '[{"question": "x", "positive_ctxs": []}, {"question"',
    ('a.json', 'entry 2'),
  ),
  ('a.jsonl', '{"foo": 1}', ('foo', 'positive_passages')),
  ('a.csv', 'question,context,answer\nwhy,a,b\n', ('answer', 'context', 'positive=answer')),
  (
    'a.txt',
    'x',
    ('corpus.jsonl', 'BEIR', 'collection.tsv', 'MARCO'),
  ),
]


@pytest.mark.parametrize(('name', 'content', 'message'), BAD_EXAMPLES)
def test_bad_examples_are_named(tmp_path, name, content, message):
  (tmp_path / name).write_text(content)
  with refused(message):
    read(tmp_path / name if name != 'a.txt' else tmp_path)


def test_pipes_are_not_opened(tmp_path):
  """Each file is read more than once."""
  os.mkfifo(tmp_path / 'train.jsonl')
  for path in (tmp_path, tmp_path / 'train.jsonl'):
    with refused('train.jsonl'):
      read(path)


def names(path, **kwargs):
  return [query.id for query in load_dataset(Source(str(path), **kwargs)).queries]


def test_held_out_queries_are_a_stable_fraction(tmp_path):
  path = papers(tmp_path / 'papers.jsonl', range(2000))
  everything = names(path)
  train, dev = names(path, hold_out=(0.2, 0)), names(path, hold_out=(0.2, 0), held_out=True)
  assert sorted(train + dev) == sorted(everything) and not set(train) & set(dev)
  # Five standard deviations of a binomial around a fifth.
  assert abs(len(dev) - 400) < 5 * math.sqrt(2000 * 0.2 * 0.8)
  assert dev == [name for name in everything if name in set(dev)]  # the order of the file
  assert names(path, hold_out=(0.2, 1), held_out=True) != dev
  # A query stays where it is when others come and go.
  papers(path, range(1000, 3000))
  kept = {name for name in dev if int(name[1:]) >= 1000}
  assert set(names(path, hold_out=(0.2, 0), held_out=True)) & set(everything) == kept


def test_folds_are_equal_parts(tmp_path):
  path = papers(tmp_path / 'papers.jsonl', range(53))
  everything = names(path, max_queries=33)
  parts = []
  for number in range(5):
    fold = {'fold': (number, 5, 1), 'max_queries': 33}
    train, dev = names(path, **fold), names(path, **fold, held_out=True)
    assert sorted(train + dev) == sorted(everything) and not set(train) & set(dev)
    assert train == [name for name in everything if name in set(train)]  # the order of the file
    parts += [dev]
  assert sorted(map(len, parts)) == [6, 6, 7, 7, 7]
  assert sorted(name for part in parts for name in part) == sorted(everything)
  assert names(path, fold=(0, 5, 2), max_queries=33, held_out=True) != parts[0]


@pytest.mark.parametrize(
  ('name', 'passages', 'splits'),
  [
    ('scifact', 5183, {'train': (809, 919), 'test': (300, 339)}),
    ('cranfield', 1400, {'test': (225, 1612)}),
  ],
)
def test_real_beir_folders(data_dir, name, passages, splits):
  for split, (queries, positives) in splits.items():
    data = load_dataset(Source(str(data_dir / name), split=split))
    assert len(data.queries) == queries
    assert sum(len(data.positives(query.id)) for query in data.queries) == positives
  empty = [passage.id for passage in data.passages if not passage.text]
  assert empty == (['471', '995'] if name == 'cranfield' else [])
  counts = +data.report.counts
  assert counts['passages'] == passages
  assert not any('ignored' in what or 'skipped' in what for what in counts)


def table(path, text):
  path.write_text(text)
  return sources.load_dataset(sources.Source(str(path)))


def test_a_table_of_pairs(tmp_path):
  found = table(
    tmp_path / 'pairs.csv',
    'question,answer,negative\nwhy?,because,"no, never"\nwhy?,"for a\nreason",\nhow?,so,\n',
  )
  assert found.format == 'table' and [query.text for query in found.queries] == ['why?', 'how?']
  texts = {passage.id: passage.text for passage in found.passages}
  first, second = (query.id for query in found.queries)
  assert [texts[id_] for id_ in found.positives(first)] == ['because', 'for a\nreason']
  assert [texts[negative.id] for negative in found.negatives[first]] == ['no, never']
  assert second not in found.negatives


def test_a_table_with_labels_ids_and_other_names(tmp_path):
  (tmp_path / 'train.tsv').write_text(
    'qid\tfrage\tpid\tabsatz\trelevance\n1\twer\ta\teins\t2\n1\twer\tb\tzwei\t0\n2\twas\tb\tzwei\t1\n'
  )
  source = sources.Source(str(tmp_path), columns='query=frage,positive=absatz')
  found = sources.load_dataset(source)
  assert found.qrels == {'1': {'a': 2}, '2': {'b': 1}}
  assert [negative.id for negative in found.negatives['1']] == ['b']
  assert found.total_passages() == 2
  for columns, named in (
    ('query=nichts', 'nichts'),
    ('query', 'query'),
  ):
    with refused(named):
      sources.load_dataset(dataclasses.replace(source, columns=columns))
  with refused('c.csv', 'line 2', '0.5'):
    table(tmp_path / 'c.csv', 'query,passage,label\na,b,0.5\n')


def test_the_prompt_of_flagembedding(tmp_path):
  found = table(tmp_path / 'flag.jsonl', '{"query": "why", "prompt": "Find: ", "pos": ["p"]}\n')
  assert found.queries == [('1', 'why')]
  prompted = sources.Source(str(tmp_path / 'flag.jsonl'), columns='prompt=prompt')
  assert load_dataset(prompted).queries == [('1', 'Find: why')]


@pytest.mark.parametrize('ending', ['csv', 'jsonl'])
def test_a_table_of_ids_beside_its_corpus(tmp_path, ending):
  for name, rows in (
    ('corpus', [('nr', 'text'), ('p0', 'lift'), ('1', 'drag'), ('2', 'thrust')]),
    ('train', [('question', 'doc', 'label', 'negative'), ('why', 'p0', 2, '2'), ('how', 1, 1, '')]),
  ):
    head, *rest = rows
    if ending == 'csv':
      lines = [','.join(map(str, row)) for row in rows]
    else:
      lines = [json.dumps(dict(zip(head, row, strict=True))) for row in rest]
    (tmp_path / f'{name}.{ending}').write_text('\n'.join(lines))
  source = sources.Source(str(tmp_path), columns='positive_id=doc,id=nr')
  found = load_dataset(source)
  why, how = found.queries
  assert (found.format, why.text, how.text) == ('ids', 'why', 'how')
  assert found.qrels == {why.id: {'p0': 2}, how.id: {'1': 1}}
  assert [one.id for one in found.negatives[why.id]] == ['2']
  assert list(found.passages) == [('p0', 'lift'), ('1', 'drag'), ('2', 'thrust')]
  with refused('train', 'positive_id'):
    load_dataset(sources.Source(str(tmp_path), format='ids'))
  (tmp_path / f'queries.{ending}').write_text('')  # of a BEIR folder
  with refused('qrels'):
    load_dataset(source)


def test_a_pair_with_two_grades_is_refused(tmp_path):
  text = 'query,positive,label\nwhy,a,1\nwhy,b,1\nwhy,a,1\n'
  (judged,) = table(tmp_path / 'pairs.csv', text).qrels.values()
  assert [*judged.values()] == [1, 1]
  with refused('pairs.csv', '5'):
    table(tmp_path / 'pairs.csv', text + 'why,a,2\n')
