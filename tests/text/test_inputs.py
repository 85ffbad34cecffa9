"""Texts from every kind of file, from folders, patterns, pipes and data sets of the hub."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dprjax.text import fields, texts
from dprjax.text.texts import Text
from tests.refusals import refused

ROWS = [
  {'doc_id': 'd1', 'title': 'Wings', 'body': 'A wing makes lift.'},
  {'doc_id': 'd2', 'title': None, 'body': 'Shocks, "strong" ones;\nthey heat.'},
]
READ = [Text('d1', 'Wings A wing makes lift.'), Text('d2', 'Shocks, "strong" ones;\nthey heat.')]


def jsonl(path, rows):
  text = ''.join(json.dumps(row) + '\n' for row in rows).encode()
  match path.suffix:
    case '.gz':
      text = gzip.compress(text)
    case '.zst':
      half = len(text) // 2  # two frames, as parallel writers leave them
      text = b''.join(
        pa.compress(part, codec='zstd', asbytes=True) for part in (text[:half], text[half:])
      )
  path.write_bytes(text)


def csv_text(delimiter):
  quoted = '"Shocks, ""strong"" ones;\nthey heat."'
  lines = (
    ('doc_id', 'title', 'body'),
    ('d1', 'Wings', 'A wing makes lift.'),
    ('d2', '', quoted),
  )
  return ''.join(delimiter.join(line) + '\n' for line in lines)


def write(path, rows=ROWS):
  match path.name.partition('.')[2]:
    case 'parquet':
      pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=1)
    case 'csv':
      path.write_text(csv_text(','), encoding='utf-8-sig')
    case 'json':
      path.write_text(json.dumps(rows))
    case _:
      jsonl(path, rows)
  return path


def read(path, side='passage', **kwargs):
  return list(texts.read_texts(path, side, **kwargs))


@pytest.mark.parametrize('ending', ['jsonl', 'jsonl.gz', 'jsonl.zst', 'json', 'csv', 'parquet'])
def test_columns_are_found_by_usual_names_or_named(tmp_path, ending):
  path = write(tmp_path / f'c.{ending}')
  assert read(path) == READ
  assert read(path, columns={'text': 'title'}) == [Text('d1', 'Wings'), Text('d2', '')]
  with refused('colour', 'doc_id, title, body'):
    read(path, columns={'text': 'colour'})


@pytest.mark.parametrize(
  'text',
  [
    'doc_id\ttitle, if any\tbody\nd1\t\tA wing, so.\n',
    ',body\nd1,"A wing, so."\n',
    'Unnamed: 0;body\nd1;A wing, so.\n',
  ],
)
def test_tables_as_programs_write_them(tmp_path, text):
  (tmp_path / 'c.csv').write_text(text)
  assert read(tmp_path / 'c.csv') == [Text('d1', 'A wing, so.')]


@pytest.mark.parametrize('ending', ['csv', 'parquet'])
def test_the_index_of_pandas_has_the_ids(tmp_path, ending):
  pandas = pytest.importorskip('pandas')
  path = tmp_path / f'c.{ending}'

  def ids(frame):
    if ending == 'parquet':
      frame.to_parquet(path)
    else:
      frame.to_csv(path)
    return [one.id for one in read(path)]

  frame = pandas.DataFrame({'text': ['a', 'b', 'c']})
  assert ids(frame) == ['0', '1', '2'] and ids(frame[1:]) == ['1', '2']
  assert ids(frame.set_axis(['r1', 'r2', 'r3'])) == ['r1', 'r2', 'r3']
  assert ids(frame.assign(id=['x', 'y', 'z'])[1:]) == ['y', 'z']
  if ending == 'parquet':
    named = frame.set_axis(['r1', 'r2', 'r3']).rename_axis('name')
    assert ids(named) == ['r1', 'r2', 'r3']
    # The description of an index outlives the rows that others take out.
    pq.write_table(pa.Table.from_pandas(frame[1:]).slice(1), path)
    assert [one.id for one in read(path)] == ['0']


@pytest.mark.parametrize('ending', ['csv', 'parquet'])
def test_two_columns_that_could_be_the_text_are_refused(tmp_path, ending):
  path = tmp_path / f'c.{ending}'
  if ending == 'csv':
    path.write_text('id,body,content\np0,lift,wing\n')
  else:
    write(path, [{'id': 'p0', 'body': 'lift', 'content': 'wing'}])
  with refused(str(path), 'body', 'content', '--column', 'config.data.columns', 'text=content'):
    read(path)
  assert read(path, columns={'text': 'body'}) == [Text('p0', 'lift')]


def test_a_folder_gives_its_corpus_else_its_tables(tmp_path):
  inner = tmp_path / 'inner'
  inner.mkdir()
  (tmp_path / 'c.txt').write_text('Three.')
  with refused(str(tmp_path), '.jsonl'):
    read(tmp_path)
  write(inner / 'more.jsonl.gz', [{'_id': 'x', 'text': 'A row.'}])
  assert read(tmp_path) == [Text('x', 'A row.')]
  write(tmp_path / 'corpus.parquet')
  write(tmp_path / 'queries.csv')
  assert read(tmp_path) == READ
  assert read(tmp_path, 'query', columns={'text': 'body', 'id': 'doc_id'})[0].id == 'd1'


@pytest.mark.parametrize(
  ('name', 'content', 'named'),
  [
    ('c.csv', 'id,text\n1,a\n2\n', ('c.csv', 'line 3')),
    ('c.csv', 'id,colour\n1,a\n', ('c.csv', '--column', 'text=NAME')),
    ('c.csv', 'id,text\n1,a\n2,b\n1,c\n', ('c.csv', 'line 2', 'line 4')),
    ('c.jsonl', '{"id": 1, "text": "a"}\n{"id": 2, "text": 5}\n', ('c.jsonl', 'line 2')),
    ('c.parquet', 'PAR1 and no more', ('c.parquet',)),
    ('c.jsonl.zst', 'no frame', ('c.jsonl.zst',)),
  ],
)
def test_a_bad_file_is_named_with_its_place(tmp_path, name, content, named):
  (tmp_path / name).write_text(content)
  with refused(*named):
    read(tmp_path / name)


def test_cut_off_compression_is_refused(tmp_path):
  jsonl(tmp_path / 'c.jsonl.zst', ROWS * 1000)
  (tmp_path / 'c.jsonl.zst').write_bytes((tmp_path / 'c.jsonl.zst').read_bytes()[:-9])
  with refused('c.jsonl.zst'):
    read(tmp_path / 'c.jsonl.zst')


def test_without_ids_rows_are_numbered_through_all_files(tmp_path):
  for name, values in (('a', ('one', 'two')), ('b', ('three',))):
    write(tmp_path / f'{name}.parquet', [{'text': value} for value in values])
  expected = [Text('0', 'one'), Text('1', 'two'), Text('2', 'three')]
  assert read(tmp_path) == read(f'{tmp_path}/*.parquet') == expected


def test_inputs_that_are_not_there(tmp_path):
  for given in (tmp_path / 'no.csv', tmp_path / 'no-*.csv', tmp_path):
    with refused(str(given)):
      read(given)


def test_many_ids_are_compared_by_digests(tmp_path, monkeypatch):
  monkeypatch.setattr(fields.ManyIds, '_AT_ONCE', 8)
  rows = [{'_id': f'd{i}', 'text': 'x'} for i in range(100)]
  for name, some in (('a', rows[:60]), ('b', rows[60:])):
    write(tmp_path / f'{name}.jsonl', some)
  assert len(read(tmp_path)) == 100
  write(tmp_path / 'b.jsonl', [*rows[60:], rows[41]])
  with refused('a.jsonl', 'line 42', 'b.jsonl', 'line 41'):
    read(tmp_path)
  assert len(read(tmp_path, wanted={'d5', 'd6'})) == 2


@pytest.mark.slow
def test_data_sets_of_the_hub(tmp_path, monkeypatch):
  datasets = pytest.importorskip('datasets', reason="pip install 'dprjax[hub-data]'")
  monkeypatch.setenv('HF_DATASETS_OFFLINE', '1')
  monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'cache')
  (tmp_path / 'files').mkdir()
  write(tmp_path / 'files' / 'train.parquet')
  saved = datasets.DatasetDict({'test': datasets.Dataset.from_list(ROWS[:1])})
  saved.save_to_disk(tmp_path / 'saved')
  assert read(f'hf:{tmp_path}/files') == read(f'hf:{tmp_path}/files:train') == READ
  assert read(f'hf:{tmp_path}/saved:test') == READ[:1]
  for split in ('dev', 'a:b:c', ''):
    with refused(f'hf:{tmp_path}/saved'):
      read(f'hf:{tmp_path}/saved:{split}')
