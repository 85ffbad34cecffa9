"""Every form of data by a few handmade lines, every way in which it can be wrong, and the real
sets' known counts.
"""

import collections
import gzip
import json
import lzma
import math

import pytest

from dprjax.base import files
from dprjax.base.errors import InputError
from dprjax.data.sources import Source, detect_format, load_dataset
from dprjax.formats.texts import read_texts


def jsonl(path, rows):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(''.join(f'{row if isinstance(row, str) else json.dumps(row)}\n' for row in rows))
  return path


@pytest.fixture
def beir(tmp_path):
  """Three passages, one of them without title; three queries, judged 2, 1 and 0."""
  folder = tmp_path / 'beir'
  jsonl(
    folder / 'corpus.jsonl',
    [
      {'_id': 'd1', 'title': 'Cats', 'text': 'purr'},
      {'_id': 'd2', 'title': '', 'text': 'dogs bark'},
      {'_id': 'd3', 'text': 'fish swim'},
    ],
  )
  jsonl(
    folder / 'queries.jsonl',
    [
      {'_id': 'q1', 'text': 'who purrs'},
      {'_id': 'q2', 'text': 'who barks'},
      {'_id': 'q3', 'text': 'who flies'},
    ],
  )
  (folder / 'qrels').mkdir()
  (folder / 'qrels/train.tsv').write_text(
    'query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\td2\t0\nq2\td2\t1\nq3\td3\t0\n'
  )
  return folder


def read(*args, **kwargs):
  data = load_dataset(Source(*map(str, args), **kwargs))
  return data, {passage.id: passage.text for passage in data.passages}


def test_beir(beir):
  data, passages = read(beir)
  assert data.format == 'beir'
  assert passages == {'d1': 'Cats purr', 'd2': 'dogs bark', 'd3': 'fish swim'}
  assert data.queries == [('q1', 'who purrs'), ('q2', 'who barks')]
  assert data.qrels == {'q1': {'d1': 2, 'd2': 0}, 'q2': {'d2': 1}}
  assert data.positives('q1') == ['d1'] and data.negatives == {}
  assert data.total_passages() == 3
  assert dict(data.report.counts) == {
    'queries without a positive: skipped': 1,
    'queries': 2,
    'passages': 3,
  }
  assert '1 queries without a positive: skipped (q3)' in str(data.report)
  # A second pass counts afresh.
  assert sum(1 for _ in data.passages) == data.report.counts['passages'] == 3


@pytest.mark.parametrize(('ending', 'compress'), [('.gz', gzip.compress), ('.xz', lzma.compress)])
def test_compressed_files_read_the_same(beir, ending, compress):
  plain = read(beir)[1]
  for path in (beir / 'corpus.jsonl', beir / 'queries.jsonl', beir / 'qrels/train.tsv'):
    (path.parent / f'{path.name}{ending}').write_bytes(compress(path.read_bytes()))
    path.unlink()
  data, passages = read(beir)
  assert passages == plain and len(data.queries) == 2


@pytest.mark.parametrize(
  'collection',
  [
    'p1\tcats purr\np2\tdogs "bark\np3\tfish swim\n',
    'p1\tpurr\tcats\np2\t"bark\tdogs\np3\tswim\tfish\n',
    'p1\thttp://a\tcats\tpurr\np2\thttp://b\tdogs\t"bark\np3\thttp://c\tfish\tswim\n',
    # DPR's: a header, and quotes as CSV has them
    'id\ttext\ttitle\np1\tpurr\tcats\np2\t"""bark"\tdogs\np3\tswim\tfish\n',
  ],
)
@pytest.mark.parametrize(
  'qrels', ['q1\t0\tp2\t1\n', 'q1 0 p2 1\n', 'query-id\tcorpus-id\tscore\nq1\tp2\t1\n']
)
def test_msmarco(tmp_path, collection, qrels):
  (tmp_path / 'collection.tsv').write_text(collection)
  (tmp_path / 'queries.dev.tsv').write_text('q1\twho barks\nq2\twho swims\n')
  (tmp_path / 'qrels.dev.tsv').write_text(qrels)
  data, passages = read(tmp_path, split='dev')
  assert data.format == 'msmarco'
  assert passages == {'p1': 'cats purr', 'p2': 'dogs "bark', 'p3': 'fish swim'}
  assert data.queries == [('q1', 'who barks')] and data.positives('q1') == ['p2']
  # The same files under names of the user's own.
  named = load_dataset(
    Source(
      str(tmp_path),
      format='msmarco',
      split='anything',
      queries=str(tmp_path / 'queries.dev.tsv'),
      qrels=str(tmp_path / 'qrels.dev.tsv'),
    )
  )
  assert named.qrels == data.qrels


DPR = [
  {
    'question': 'who purrs',
    'answers': ['cats'],
    'positive_ctxs': [{'title': 'Cats', 'text': 'purr', 'passage_id': '7'}],
    'negative_ctxs': [{'title': 'Fish', 'text': 'swim', 'passage_id': '9'}],
    'hard_negative_ctxs': [{'title': 'Dogs', 'text': 'bark', 'psg_id': 8}],
  },
  {
    'question': 'who swims',
    'positive_ctxs': [
      {'title': 'Fish', 'text': 'swim', 'passage_id': '9'},
      {'title': '', 'text': 'no id'},
    ],
    'negative_ctxs': [{'title': 'Cats', 'text': 'purr', 'passage_id': '7'}],
    'hard_negative_ctxs': [],
  },
]


@pytest.mark.parametrize(
  'text',
  [json.dumps(DPR), json.dumps(DPR, indent=2), '\n'.join(map(json.dumps, DPR))],
  ids=['array', 'indented', 'jsonl'],
)
def test_dpr(tmp_path, text, monkeypatch):
  monkeypatch.setattr(files, '_CHUNK', 40)  # an entry then spans several reads
  (tmp_path / 'train.json').write_text(text)
  data, passages = read(tmp_path)
  assert data.format == 'dpr'
  assert [query.text for query in data.queries] == ['who purrs', 'who swims']
  first, second = (query.id for query in data.queries)
  no_id = next(name for name in passages if name.startswith('text-'))
  assert passages == {'7': 'Cats purr', '8': 'Dogs bark', '9': 'Fish swim', no_id: 'no id'}
  assert data.positives(first) == ['7'] and data.positives(second) == ['9', no_id]
  # Plain negatives only where there is no hard one.
  assert [n.id for n in data.negatives[first]] == ['8'] and [
    n.id for n in data.negatives[second]
  ] == ['7']


def test_tevatron_with_what_mining_adds(tmp_path):
  path = jsonl(
    tmp_path / 'train.jsonl',
    [
      {
        'query_id': 12,
        'query': 'who purrs',
        'positive_passages': [{'docid': 'a', 'title': 'Cats', 'text': 'purr'}],
        'negative_passages': [
          {'docid': 'b', 'title': '', 'text': 'bark', 'retriever': 'bm25', 'rank': 3, 'score': 7.5},
          {'docid': 'a', 'title': 'Cats', 'text': 'purr'},
        ],
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
  assert other.id.startswith('b~') and passages == {
    'a': 'Cats purr',
    'b': 'bark',
    'c': 'fish',
    other.id: 'another text',
  }


def test_flagembedding(tmp_path):
  path = jsonl(
    tmp_path / 'mine.jsonl',
    [
      {'query': 'who purrs', 'pos': ['cats', 'lions'], 'neg': ['dogs']},
      {'query': 'who barks', 'pos': ['dogs']},
    ],
  )
  data, passages = read(path)
  assert data.format == 'flagembedding'
  assert [passages[name] for name in data.positives('1')] == ['cats', 'lions']
  assert data.negatives['1'][0].id == data.positives('2')[0] and len(passages) == 3


def test_arxiv(tmp_path):
  path = jsonl(
    tmp_path / 'papers.jsonl',
    [{'id': '1', 'title': 'On cats', 'abstract': 'They purr.', 'categories': 'q-bio'}],
  )
  data, passages = read(path)
  assert (
    data.format == 'arxiv'
    and data.queries == [('1', 'On cats')]
    and passages == {'1': 'They purr.'}
    and data.positives('1') == ['1']
  )


def test_mined_negatives_join_a_folder(beir, tmp_path):
  mined = jsonl(
    tmp_path / 'mined.jsonl',
    [
      {
        'query_id': 'q1',
        'negative_passages': [
          {'docid': 'd1'},
          {'docid': 'd3', 'retriever': 'dpt', 'rank': 1, 'score': 2, 'pools': ['denoised']},
          {'docid': 'd2'},
        ],
      },
      {'query_id': 'elsewhere', 'negative_passages': [{'docid': 'd1'}]},
      {'query_id': 'q2', 'negative_passages': [{'docid': 'lost'}]},
    ],
  )
  data, _ = read(beir, negatives=str(mined))
  assert data.negatives == {
    'q1': [('d3', 'dpt', 1, 2.0, ('denoised',)), ('d2', '', None, None, ('undenoised',))],
    'q2': [('lost', '', None, None, ('undenoised',))],
  }
  counts = data.report.counts
  assert counts['negatives that are positives of their query: ignored'] == 1
  assert counts['queries with mined negatives that are not in this split: ignored'] == 1
  assert counts['negatives that are not in the corpus: ignored'] == 1
  with pytest.raises(
    InputError, match=r'mined\.jsonl: 1 negatives that are not in the corpus, for instance q2 lost'
  ):
    read(beir, negatives=str(mined), strict=True)


def test_unknown_ids_are_counted_listed_or_refused(beir):
  with (beir / 'qrels/train.tsv').open('a') as file:
    file.writelines(f'q1\tlost{i}\t1\n' for i in range(7))
    file.write('nobody\td1\t1\n')
  data, _ = read(beir)
  assert data.report.counts['judgements of a passage that is not in the corpus: ignored'] == 7
  assert data.report.counts['judgements of a query that is not in the queries: ignored'] == 1
  line = next(line for line in str(data.report).splitlines() if 'corpus' in line)
  assert line.count('q1 lost') == 5 and line.endswith(', ...)')
  with pytest.raises(
    InputError,
    match=r'train\.tsv: 1 judgements of a query that is not in the queries, for instance nobody d1',
  ):
    read(beir, strict=True)


def test_texts_that_are_empty(beir):
  jsonl(
    beir / 'corpus.jsonl',
    [
      {'_id': 'd1', 'title': ' ', 'text': ''},
      {'_id': 'd2', 'text': 'dogs'},
      {'_id': 'd3', 'text': 'fish'},
    ],
  )
  jsonl(beir / 'queries.jsonl', [{'_id': 'q1', 'text': 'who purrs'}, {'_id': 'q2', 'text': '  '}])
  data, passages = read(beir)
  assert passages['d1'] == '' and data.queries == [('q1', 'who purrs')]
  assert data.report.examples['passages without text: kept, never a positive'] == ['d1']
  assert data.report.examples['queries without text: skipped'] == ['q2']


def replace(name, line):
  def change(folder):
    lines = (folder / name).read_text().splitlines()
    lines[1] = line
    (folder / name).write_text('\n'.join(lines))

  return change


def append(name, line):
  def change(folder):
    with (folder / name).open('a') as file:
      file.write(f'{line}\n')

  return change


@pytest.mark.parametrize(
  ('spoil', 'message'),
  [
    (
      lambda folder: (folder / 'corpus.jsonl').write_text(''),
      r'corpus file is empty: .*corpus\.jsonl',
    ),
    (
      lambda folder: (folder / 'queries.jsonl').unlink(),
      r'queries file not found: .*queries\.jsonl .*in that folder: corpus\.jsonl, qrels',
    ),
    (
      lambda folder: (folder / 'qrels/train.tsv').rename(folder / 'qrels/dev.tsv'),
      r'qrels file not found: .*train\.tsv .*in that folder: dev\.tsv',
    ),
    (replace('corpus.jsonl', '{"_id": "d2", "text": '), r'corpus\.jsonl, line 2: not JSON'),
    (
      replace('corpus.jsonl', '["d2"]'),
      r'corpus\.jsonl, line 2: expected a JSON object, found list',
    ),
    (
      replace('corpus.jsonl', '{"text": "dogs"}'),
      r"corpus\.jsonl, line 2: '_id' is missing; expected text or a number",
    ),
    (
      replace('corpus.jsonl', '{"_id": "d2", "text": 5}'),
      r"corpus\.jsonl, line 2: 'text' is 5; expected text",
    ),
    (
      append('corpus.jsonl', '{"_id": "d1", "text": "again"}'),
      r"corpus\.jsonl: passage id 'd1' is on line 1 and again on line 4",
    ),
    (
      append('queries.jsonl', '{"_id": "q2", "text": "again"}'),
      r"queries\.jsonl: query id 'q2' is on line 2 and again on line 4",
    ),
    (replace('queries.jsonl', '{"_id": "q2"}'), r"queries\.jsonl, line 2: 'text' is missing"),
    (
      replace('qrels/train.tsv', 'q1\td1'),
      r'train\.tsv, line 2: 2 columns, expected 3',
    ),
    (
      replace('qrels/train.tsv', 'q1\td1\tyes'),
      r"train\.tsv, line 2: the relevance 'yes' is not a whole number",
    ),
    (
      append('qrels/train.tsv', 'q1\td1\t0'),
      r'train\.tsv, line 6: document d1 is judged 0 for query q1, and 2 before',
    ),
    (
      lambda folder: (folder / 'qrels/train.tsv').write_text('q1\td1\t0\n'),
      r'train\.tsv: no query with text and a passage graded above 0',
    ),
    (
      lambda folder: (folder / 'corpus.jsonl').write_bytes(b'{"_id": "d1", "text": "\xff"}\n'),
      r'corpus\.jsonl, line 1 or after it: not UTF-8',
    ),
  ],
)
def test_bad_files_are_named(beir, spoil, message):
  spoil(beir)
  with pytest.raises(InputError, match=message):
    read(beir)


@pytest.mark.parametrize(
  ('name', 'content', 'message'),
  [
    (
      'a.jsonl',
      '{"query": "x", "pos": "cats"}',
      r"a\.jsonl, line 1: 'pos' is 'cats'; expected a list of texts",
    ),
    (
      'a.jsonl',
      '{"query": "x", "pos": ["y"]}\n{"pos": ["y"]}',
      r"a\.jsonl, line 2: 'query' is missing; expected text",
    ),
    (
      'a.jsonl',
      '{"query_id": 1, "query": "x", "positive_passages": [{"docid": 1}]}',
      r"a\.jsonl, line 1: 'text' is missing; expected text",
    ),
    (
      'a.jsonl',
      '{"query_id": 1, "query": "x", "positive_passages": [1]}',
      r"'positive_passages' is \[1\]; expected a list of {\"docid\"",
    ),
    (
      'a.jsonl',
      '\n'.join(
        ['{"query_id": 1, "query": "x", "positive_passages": [{"docid": 1, "text": "y"}]}'] * 2
      ),
      "query id '1' is on line 1",
    ),
    (
      'a.json',
      '[{"question": "x", "positive_ctxs": []}, {"question"',
      r'a\.json, entry 2: not JSON, or cut off',
    ),
    (
      'a.json',
      '[{"question": "x", "positive_ctxs": []}, 5]',
      r'a\.json, entry 2: expected a JSON object, found int',
    ),
    (
      'a.jsonl',
      '{"foo": 1}',
      r"a\.jsonl: the first record has 'foo'; expected positive_passages \(Tevatron\)",
    ),
    (
      'a.txt',
      'x',
      r'neither corpus\.jsonl \(BEIR\) nor collection\.tsv \(MS MARCO\) nor any \.json or \.jsonl '
      r'file',
    ),
  ],
)
def test_bad_examples_are_named(tmp_path, name, content, message):
  (tmp_path / name).write_text(content)
  with pytest.raises(InputError, match=message):
    read(tmp_path / name if name != 'a.txt' else tmp_path)


def test_bad_columns(tmp_path):
  (tmp_path / 'collection.tsv').write_text('p1\tcats\np2\n')
  (tmp_path / 'queries.train.tsv').write_text('q1\twho\tpurrs\n')
  (tmp_path / 'qrels.train.tsv').write_text('q1\tp1\t1\n')
  with pytest.raises(
    InputError, match=r'queries\.train\.tsv, line 1: 3 columns between tabs; expected 2'
  ):
    read(tmp_path)
  (tmp_path / 'queries.train.tsv').write_text('q1\twho purrs\n')
  with pytest.raises(
    InputError, match=r'collection\.tsv, line 2: 1 columns between tabs; expected id text'
  ):
    read(tmp_path)


def test_bad_arguments(beir):
  with pytest.raises(InputError, match=r"no format of data is called 'beri'; there are beir, "):
    read(beir, format='beri')
  with pytest.raises(InputError, match='hold_out: a fraction between 0 and 1'):
    read(beir, hold_out=(20, 0))
  with pytest.raises(InputError, match='hold_out is not set'):
    read(beir, held_out=True)
  with pytest.raises(InputError, match='data not found'):
    detect_format(beir / 'nowhere')


def test_held_out_queries_are_a_stable_share(tmp_path):
  path = jsonl(
    tmp_path / 'papers.jsonl',
    [{'id': f'p{i}', 'title': f'title {i}', 'abstract': f'abstract {i}'} for i in range(2000)],
  )
  names = lambda **kwargs: [query.id for query in load_dataset(Source(str(path), **kwargs)).queries]  # noqa: E731
  everything = names()
  train, dev = names(hold_out=(0.2, 0)), names(hold_out=(0.2, 0), held_out=True)
  assert sorted(train + dev) == sorted(everything) and not set(train) & set(dev)
  # Five standard deviations of a binomial around a fifth.
  assert abs(len(dev) - 400) < 5 * math.sqrt(2000 * 0.2 * 0.8)
  assert dev == [name for name in everything if name in set(dev)]  # the file's order
  assert names(hold_out=(0.2, 1), held_out=True) != dev
  # A query stays where it is when others come and go.
  jsonl(
    path,
    [
      {'id': f'p{i}', 'title': f'title {i}', 'abstract': f'abstract {i}'} for i in range(1000, 3000)
    ],
  )
  assert set(names(hold_out=(0.2, 0), held_out=True)) & set(everything) == {
    name for name in dev if int(name[1:]) >= 1000
  }


def test_max_queries(tmp_path):
  path = jsonl(
    tmp_path / 'papers.jsonl',
    [{'id': f'p{i}', 'title': f'title {i}', 'abstract': f'abstract {i}'} for i in range(200)],
  )
  names = lambda **kwargs: [query.id for query in load_dataset(Source(str(path), **kwargs)).queries]  # noqa: E731
  few, more = names(max_queries=10), names(max_queries=20)
  assert len(few) == 10 and set(few) < set(more) and few != names()[:10]
  limited = load_dataset(Source(str(path), hold_out=(0.5, 0), max_queries=10))
  assert len(limited.queries) == len(limited.qrels) == 10 and {q.id for q in limited.queries} < set(
    names(hold_out=(0.5, 0))
  )


@pytest.mark.parametrize(
  ('name', 'split', 'passages', 'queries', 'positives'),
  [
    ('scifact', 'train', 5183, 809, 919),
    ('scifact', 'test', 5183, 300, 339),
    ('cranfield', 'test', 1400, 225, 1612),
    ('medquad', 'train', 16407, 14721, 14721),
    ('medquad', 'dev', 16407, 903, 903),
  ],
)
def test_real_beir_folders(data_dir, name, split, passages, queries, positives):
  data, texts = read(data_dir / name, split=split)
  assert (len(texts), len(data.queries)) == (passages, queries)
  assert sum(len(data.positives(query.id)) for query in data.queries) == positives
  assert not any('ignored' in what or 'skipped' in what for what in +data.report.counts)


def test_real_passages_without_text(data_dir):
  data, texts = read(data_dir / 'cranfield', split='test')
  assert data.report.examples['passages without text: kept, never a positive'] == ['471', '995']
  assert [name for name, text in texts.items() if not text] == ['471', '995']


@pytest.mark.parametrize(
  ('name', 'rows'),
  [
    ('retrieval_nq.jsonl', 10),
    ('retrieval_msmarco.jsonl', 10),
    ('sts.jsonl', 10),
    ('llara_toy_finetune_data.jsonl', 11),
    ('llm_embedder_qa.json', 8),
  ],
)
def test_real_flagembedding_samples(data_dir, name, rows):
  path = data_dir / 'flagembedding-examples/raw' / name
  data, passages = read(path)
  assert data.format == 'flagembedding' and len(data.queries) == rows
  records = [json.loads(line) for line in path.read_text().splitlines()]
  expected = collections.Counter(
    {text.strip(): 1 for record in records for text in record['pos'] + record['neg']}
  )
  assert collections.Counter(passages.values()) == expected
  assert [query.text for query in data.queries] == [record['query'].strip() for record in records]


@pytest.mark.slow
def test_real_arxiv(data_dir):
  data, passages = read(data_dir / 'arxiv/arxiv_sample.jsonl.xz')
  assert data.format == 'arxiv' and len(data.queries) == len(passages) == 29431


@pytest.mark.parametrize('pools', [[], ['clean'], 'denoised', [1]])
def test_pools_that_there_are_not(beir, tmp_path, pools):
  mined = jsonl(
    tmp_path / 'mined.jsonl',
    [{'query_id': 'q1', 'negative_passages': [{'docid': 'd3', 'pools': pools}]}],
  )
  with pytest.raises(InputError, match=r'mined\.jsonl, line 1: .*pools.*expected .*undenoised'):
    read(beir, negatives=str(mined))


def test_the_texts_that_are_wanted(tmp_path):
  path = tmp_path / 'corpus.jsonl'
  lines = [
    {'_id': 'a', 'title': 'T', 'text': 'one'},
    {'_id': 'b', 'text': 'two'},
    {'_id': 'b', 'text': 'three'},
    {'_id': 'c', 'text': 'four'},
  ]
  path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
  assert [tuple(one) for one in read_texts(path, 'passage', {'c', 'a', 'x'})] == [
    ('a', 'T one'),
    ('c', 'four'),
  ]
  assert list(read_texts(path, 'passage', {'x'})) == []
  # What nobody asked for may be there twice; what is asked for may not, and a bad line is bad
  # wherever it is.
  with pytest.raises(InputError, match="passage id 'b' is on line 2 and again on line 3"):
    list(read_texts(path, 'passage', {'b'}))
  with pytest.raises(InputError, match="passage id 'b'"):
    list(read_texts(path, 'passage'))
  path.write_text(path.read_text() + '{}\n')
  with pytest.raises(InputError, match='line 5'):
    list(read_texts(path, 'passage', {'a'}))
