import numpy as np
import pyarrow as pa
import pytest

from dprjax.base import given
from tests.refusals import refused

TEXTS = ['one', 'zwei']


@pytest.mark.parametrize(
  'column',
  [
    {'one': 1, 'zwei': 2}.keys(),
    np.array(TEXTS, object),
    [np.str_(text) for text in TEXTS],
    pa.array(TEXTS),
    pa.chunked_array([['one'], ['zwei']], pa.large_string()),
    pa.array(TEXTS).dictionary_encode(),
  ],
)
def test_columns(column):
  assert given.texts(column) == TEXTS
  assert given.texts(iter(TEXTS)) == TEXTS


def test_columns_of_pandas():
  pandas = pytest.importorskip('pandas')
  series = pandas.Series(['no', *TEXTS])
  for column in (series[1:], series.astype('string')[1:], series.astype('category')[1:]):
    assert given.texts(column) == TEXTS
  table = pandas.DataFrame({'title': ['a', None, float('nan'), pandas.NaT]})
  for column in (table['title'], table['title'].astype('string')):
    missing = [given.is_missing(value) for value in given.values(column, 'title')]
    assert missing == [False, True, True, True]
  for value in (pandas.NA, pandas.NaT):
    assert given.is_missing(value)
    with refused('texts', 'number 0'):
      given.texts([value])
  with refused('texts'):
    given.texts(table)


@pytest.mark.parametrize(
  'value', [None, float('nan'), np.float32('nan'), np.datetime64('NaT', 's')]
)
def test_what_is_missing_is_no_text(value):
  assert given.is_missing(value)
  with refused('texts', 'number 1'):
    given.texts(['a', value])


@pytest.mark.parametrize('value', [5, False, b'x', '\ud800'])
def test_what_is_no_text(value):
  with refused('number 1'):
    given.texts(['a', value])


@pytest.mark.parametrize(
  'column',
  [
    *('one', b'one', 5, None, {'a': 'one'}, {'one'}),
    np.array('one'),
    np.array([TEXTS]),
    pa.table({}),
  ],
)
def test_what_is_no_column(column):
  with refused('texts'):
    given.texts(column)
