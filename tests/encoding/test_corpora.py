import pyarrow as pa
import pytest

from dprjax.encoding import corpora
from tests.refusals import refused

COLUMNS = {'title': ['Wings', None], 'text': ['lift', 'drag']}
ROWS = [{'title': 'Wings', 'text': 'lift'}, {'title': None, 'text': 'drag'}]
JOINED = ['Wings lift', 'drag']


@pytest.mark.parametrize(
  'corpus',
  [
    COLUMNS,
    {'title': None, 'text': JOINED},
    pa.RecordBatch.from_pydict(COLUMNS),
    ['Wings lift', {'text': 'drag', 'title': float('nan')}],
    JOINED,
  ],
)
def test_passages(corpus):
  assert corpora.passages(corpus) == [('0', 'Wings lift'), ('1', 'drag')]


def test_the_index_of_pandas_has_the_ids():
  pandas = pytest.importorskip('pandas')
  table = pandas.DataFrame({'text': ['lift', 'drag']})
  assert (
    corpora.passages(table) == corpora.passages(table['text']) == [('0', 'lift'), ('1', 'drag')]
  )
  table.index = ['r1', 'r2']
  for found in (table, table['text'], table.rename_axis('name'), pa.table(table)):
    assert corpora.passages(found) == [('r1', 'lift'), ('r2', 'drag')]
  assert corpora.passages(table.assign(id=[5, 6])) == [('5', 'lift'), ('6', 'drag')]
  twice = pandas.concat([table, table])
  with refused('r1', 'reset_index(drop=True)'):
    corpora.passages(twice['text'])
  assert len(corpora.passages(twice.reset_index(drop=True))) == 4


def test_columns_are_named():
  table = {'nr': [7], 'satz': ['lift'], 'text': ['no']}
  for found in (table, pa.table(table), pa.table(table).to_pylist()):
    assert corpora.passages(found, {'id': 'nr', 'text': 'satz'}) == [('7', 'lift')]
  with refused('corpus', 'wort'):
    corpora.passages(table, {'text': 'wort'})


@pytest.mark.parametrize(
  'corpus',
  [
    {'a': 'Wings lift', 'b': 'drag'},
    {'a': ROWS[0], 'b': ROWS[1]},
    [{'_id': 'a', **ROWS[0]}, {'id': 'b', **ROWS[1]}],
    pa.table({'_id': ['a', 'b'], **COLUMNS}),
  ],
)
def test_ids(corpus):
  assert corpora.passages(corpus) == [('a', 'Wings lift'), ('b', 'drag')]
  assert corpora.texts(corpus) == JOINED


@pytest.mark.parametrize(
  ('corpus', 'message'),
  [
    ([{'title': 'Wings'}], ('corpus', '0')),
    (pa.table({'bread': ['lift']}), ('corpus', 'bread')),
    ([{'title': 5, 'text': 'lift'}], ('title', 'number 0', '5')),
    ({'text': ['lift', float('nan')]}, ('text', 'number 1')),
    ([{'_id': 'a', 'text': 'lift'}] * 2, 'a'),
    ([{'_id': float('nan'), 'text': 'lift'}], ('corpus', '0')),
    (5, 'corpus'),
  ],
)
def test_what_is_no_corpus(corpus, message):
  with refused(message):
    corpora.passages(corpus)
