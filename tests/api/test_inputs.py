import numpy as np
import pyarrow as pa
import pytest
from etils import epath

from dprjax.api import inputs
from dprjax.base.errors import InputError
from dprjax.retrieval.retriever import Hit, Results
from dprjax.text import trec
from dprjax.text.texts import Query, read_texts
from tests.refusals import refused

QUERIES, PASSAGES = ['a', 'b'], ['x', 'y', 'z']
QRELS = {'a': {'x': 1}, 'b': {'y': 1, 'z': 1}}
PAIRS = [('a', 'x'), ('b', 'y'), ('b', 'z')]
COLUMNS = {'query_id': ['a', 'b', 'b'], 'passage_id': ['x', 'y', 'z']}


@pytest.mark.parametrize(
  'relevant',
  [
    {'a': 'x', 'b': ['y', 'z']},
    {'a': {'x'}, 'b': {'y': 1, 'z': 1.0}},
    [(*pair, np.int64(1)) for pair in PAIRS],
    COLUMNS,
    [{'qid': query, 'docid': passage} for query, passage in PAIRS],
    pa.table({'query-id': ['a', 'b', 'b'], 'corpus-id': ['x', 'y', 'z'], 'score': [1, 1, 1]}),
  ],
)
def test_judgements(relevant):
  assert inputs.judgements(relevant, QUERIES, PASSAGES) == QRELS


def test_judgements_by_place():
  assert inputs.judgements(None, ['a', 'b'], ['x', 'y']) == {'a': {'x': 1}, 'b': {'y': 1}}
  # Ids are numbers where none were given.
  assert inputs.judgements([1, [0, 1]], ['0', '1'], ['0', '1']) == {
    '0': {'1': 1},
    '1': {'0': 1, '1': 1},
  }


@pytest.mark.parametrize('module', ['pandas', 'polars'])
def test_tables(module, tmp_path):
  frames = pytest.importorskip(module)
  table = frames.DataFrame({**COLUMNS, 'score': [3.0, 2.0, 1.0]})
  assert inputs.judgements(table, QUERIES, PASSAGES) == {'a': {'x': 3}, 'b': {'y': 2, 'z': 1}}
  assert dict(inputs.read_run(table)) == {'a': [('x', 3.0)], 'b': [('y', 2.0), ('z', 1.0)]}
  texts = frames.DataFrame({'question': ['how', 'why'], 'qid': [7, 8]})
  assert inputs.write_queries(texts, epath.Path(tmp_path / 'queries.jsonl')) == ['7', '8']


def test_the_index_of_a_column_has_the_queries():
  pandas = pytest.importorskip('pandas')
  for column in (
    pandas.Series(['y', 'x'], ['b', 'a']),
    pandas.Series([['y'], ['x']], ['b', 'a']),
    pandas.Series(['y', 'x', 'x'], ['b', 'a', 'a']),
  ):
    assert inputs.judgements(column, QUERIES, PASSAGES) == {'b': {'y': 1}, 'a': {'x': 1}}
  column = pandas.Series(['x', 'y'])  # counts the queries
  assert inputs.judgements(column, QUERIES, PASSAGES) == {'a': {'x': 1}, 'b': {'y': 1}}


def test_columns_are_named(tmp_path):
  columns = {'query_id': 'q', 'positive_id': 'p', 'label': 'g'}
  table = {'q': ['a'], 'p': ['x'], 'g': [2], 'score': [1]}
  for relevant in (table, pa.table(table), pa.table(table).to_pylist()):
    assert inputs.judgements(relevant, columns=columns) == {'a': {'x': 2}}
  assert inputs.judgements(COLUMNS, columns={'query_id': 'q'}) == QRELS  # of the queries
  texts = epath.Path(tmp_path / 'queries.csv')
  texts.write_text('q,frage,text\na,wer,no\n')
  for given in (texts, {'q': ['a'], 'frage': ['wer'], 'text': ['no']}):
    out = epath.Path(tmp_path / 'queries.jsonl')
    inputs.write_queries(given, out, {'query_id': 'q', 'query': 'frage', 'text': 'body'})
    assert list(read_texts(out, 'query')) == [Query('a', 'wer')]


@pytest.mark.slow
def test_a_data_set_of_the_hub_library(tmp_path):
  datasets = pytest.importorskip('datasets')
  texts = datasets.Dataset.from_dict(
    {'_id': ['d1', 'd2'], 'title': ['T', ''], 'text': ['one', 'two']}
  )
  out = epath.Path(tmp_path / 'corpus.jsonl')
  assert inputs.write_corpus(texts, out) == ['d1', 'd2']
  assert list(read_texts(out, 'passage')) == [('d1', 'T one'), ('d2', 'two')]


@pytest.mark.parametrize(
  ('relevant', 'named'),
  [
    (None, ('relevant', '3', '2')),
    ({'a': 'w'}, "'w'"),
    ([('a', 'x', 1), ('a', 'x', 1), ('a', 'x', 2)], ('relevant', 'a', 'x', '1', '2')),
  ],
)
def test_refused_judgements(relevant, named):
  with refused(named):
    inputs.judgements(relevant, QUERIES, PASSAGES)


@pytest.mark.parametrize(
  'run',
  [
    {'a': {'x': 0.5, 'y': np.float32(0.25)}},
    {'query_id': ['a', 'a'], 'passage_id': ['x', 'y'], 'score': [0.5, 0.25]},
    Results([[Hit('x', 0.5, 'X'), Hit('y', 0.25, 'Y')]], [Query('a', 'A')]),
  ],
)
def test_runs(run, tmp_path):
  found = inputs.read_run(run)
  assert dict(found) == {'a': [('x', 0.5), ('y', 0.25)]}
  trec.write_run(tmp_path / 'run.trec', found, 'x')
  assert dict(inputs.read_run(tmp_path / 'run.trec')) == dict(found)


@pytest.mark.parametrize(
  ('run', 'named'),
  [
    ({'a': {'x': float('nan')}}, 'nan'),
    ({'query_id': ['a', 'a'], 'passage_id': ['x', 'x'], 'score': [1, 2]}, ('a', 'x')),
  ],
)
def test_refused_runs(run, named):
  with refused(named):
    inputs.read_run(run)


def test_errors_name_arguments_in_place_of_flags():
  with (
    refused("data=x, options['a.b']: my/config.a or config.json; k") as found,
    inputs.naming(data__dir='data'),
  ):
    raise InputError('--config.data.dir=x, config.a.b: my/config.a or config.json; --k')
  assert '--' not in str(found.value)
