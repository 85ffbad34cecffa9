"""Title, text and other fields of passages."""

import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from dprjax.engines import storing
from dprjax.text import texts


def test_fields_of_json_lines(tmp_path):
  records = [
    {'_id': 'a', 'title': 'On a', 'text': 'cats', 'year': 2001, 'free': True, 'tags': ['x', 'y']},
    {
      '_id': 'b',
      'text': 'dogs',
      'metadata': {'year': 2.5, 'id': 7},
      'deep': {'x': 1},
      'none': None,
    },
    {'_id': 'c', 'title': '', 'text': '', 'a b': 1, 'vector': [1.0], 'a.b': 2, ' c': 3, 'year': 3},
  ]
  path = tmp_path / 'corpus.jsonl'
  path.write_text(''.join(f'{json.dumps(record)}\n' for record in records))
  a, b, c = storing.read_documents(path)
  first = {'title': 'On a', 'text': 'cats', 'year': 2001, 'free': True, 'tags': ['x', 'y']}
  assert (a.id, a.text, a.payload, a.omitted) == ('a', 'On a cats', first, [])
  assert b.payload == {'text': 'dogs', 'year': 2.5} and b.omitted == ['id', 'deep']
  assert c.payload == {'a b': 1, 'year': 3} and c.omitted == ['vector', 'a.b', ' c']
  assert [(one.id, one.text) for one in (a, b, c)] == list(texts.read_texts(path, 'passage'))


@pytest.mark.parametrize('kind', ['parquet', 'msmarco', 'csv'])
def test_fields_of_columns(tmp_path, kind):
  path = tmp_path / {'msmarco': 'corpus.tsv'}.get(kind, f'corpus.{kind}')
  expected = {'title': 'On a', 'text': 'cats'}
  if kind == 'parquet':
    table = pa.table({'docid': [7], 'title': ['On a'], 'text': ['cats'], 'year': [2001]})
    parquet.write_table(table, path)
    expected['year'] = 2001
  elif kind == 'msmarco':
    path.write_text('7\thttp://x/y\tOn a\tcats\n')
    expected['url'] = 'http://x/y'
  else:
    path.write_text('id,title,text,year\n7,On a,cats,2001\n')
    expected['year'] = '2001'
  (found,) = storing.read_documents(path)
  assert (found.id, found.text, found.payload) == ('7', 'On a cats', expected)
