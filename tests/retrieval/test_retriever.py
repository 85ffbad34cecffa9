import doctest

import numpy as np
import pyarrow as pa
import pytest

from dprjax import Retriever
from dprjax.base.errors import InputError
from dprjax.base.ranking import ranked
from dprjax.retrieval import bm25_index, exact, fusion, retriever
from tests.refusals import named_in, refused

TEXTS = [
  'Decode a JSON document.',
  'Send a message over HTTP.',
  'Parse an XML file into a tree.',
  'Run a coroutine.',
  'json',
  '',
]


@pytest.fixture(scope='session')
def small(trained, prompt):
  """The small backbone with its prompt."""
  return Retriever.load(trained / 'backbone', prompt)


def by_hand(retriever, queries, texts, k):
  scores = (
    retriever.encode(queries, 'query').astype(np.float64)
    @ retriever.encode(texts, 'passage').astype(np.float64).T
  )
  order = np.argsort(-scores, axis=1)[:, :k]
  return order, np.take_along_axis(scores, order, axis=1)


def test_search_equals_numpy(small):
  small.index(TEXTS)
  queries = ['read json', 'fetch a page']
  order, scores = by_hand(small, queries, TEXTS, 3)
  for hits, rows, values in zip(small.search(queries, k=3), order, scores, strict=True):
    assert [hit.id for hit in hits] == [str(row) for row in rows]
    assert [hit.text for hit in hits] == [TEXTS[row] for row in rows]
    np.testing.assert_allclose([hit.score for hit in hits], values, atol=1e-5)


@pytest.mark.slow
def test_a_hybrid_search_fuses_with_bm25(trained, prompt, small, tmp_path):
  settings = {'k1': 1.2, 'b': 0.3, 'language': 'none'}
  how = fusion.Fusion(weights={'bm25': 0.4, 'dense': 0.6}, method='zscore', depth=4, bm25=settings)
  fusion.write(tmp_path / 'w.json', how)
  both = Retriever.load(trained / 'backbone', prompt, hybrid=tmp_path / 'w.json')
  queries = ['read json', 'fetch a page', 'an http message']
  for one in (small, both):
    one.index(TEXTS)
  words = bm25_index.build([str(row) for row in range(len(TEXTS))], TEXTS, **settings)
  lexical = words.rankings(queries, 4)
  for hits, alone, other in zip(
    both.search(queries, 3), small.search(queries, 4), lexical, strict=True
  ):
    dense = ranked([hit.id for hit in alone], np.array([hit.score for hit in alone]))
    expected = how.fuse({'bm25': other, 'dense': dense}, 3)
    assert [hit.id for hit in hits] == expected.ids
    np.testing.assert_allclose([hit.score for hit in hits], expected.scores, atol=1e-5)
    assert [hit.text for hit in hits] == [TEXTS[int(hit.id)] for hit in hits]


def _fail(*_, **__):
  raise MemoryError('no room')


@pytest.mark.slow
@pytest.mark.parametrize(
  'corpus, harm, message',
  [
    ([], None, 'corpus'),
    ('nowhere.jsonl', None, 'nowhere.jsonl'),
    (['a', None], None, ('texts', 'number 1', 'None')),
    (['a'], (exact, 'ExactIndex'), 'no room'),
  ],
)
def test_an_index_that_fails_leaves_the_one_before(small, monkeypatch, corpus, harm, message):
  small.index({'x': 'Decode a JSON document.', 'y': 'Run a coroutine.'})
  before = small.search(['json', 'run'], k=2)
  with monkeypatch.context() as patch, refused(message, error=(InputError, MemoryError)):
    if harm:
      patch.setattr(*harm, _fail)
    small.index(corpus)
  assert small.search(['json', 'run'], k=2) == before


@pytest.mark.parametrize(
  ('name', 'value'),
  [('query_max_length', 0), ('passage_max_length', '8'), ('batch_size', True), ('dimensions', 2.5)],
)
def test_sizes_are_whole_numbers_from_1(trained, name, value):
  with refused(name, f'{value!r}'):
    Retriever.load(trained / 'backbone', **{name: value})


@pytest.mark.parametrize('k', [0, 2.5])
def test_k_is_a_whole_number_from_1(small, k):
  small.index(['one', 'two'])
  with refused('k'):
    small.search(['one'], k)


@pytest.mark.slow
def test_cut_texts_are_counted_with_one_warning_a_side(small, caplog):
  long = 'json ' * 1000
  small.index([long, 'xml', long])
  found = small.search(['json', long])
  assert found.truncated == {'query': 1, 'passage': 2}
  assert small.search(['json']).truncated == {'query': 0, 'passage': 2}
  for record, words in zip(
    caplog.records, (('2', '3', 'passage_max_length'), ('1', '2', 'query_max_length')), strict=True
  ):
    assert record.levelname == 'WARNING' and named_in(record.getMessage(), *words)


def test_a_corpus_as_beir_gives_it(small):
  plain = small.encode(['Run a coroutine.'])
  titled = small.encode(['Tasks Run a coroutine.'])
  for title, expected in ((None, plain), (float('nan'), plain), ('', plain), ('Tasks', titled)):
    for corpus in (
      [{'title': title, 'text': 'Run a coroutine.'}],
      {'title': [title], 'text': ['Run a coroutine.']},
      pa.table(
        {'title': pa.array([title], pa.string(), from_pandas=True), 'text': ['Run a coroutine.']}
      ),
    ):
      np.testing.assert_allclose(small.encode_corpus(corpus), expected, atol=1e-6)
  np.testing.assert_allclose(small.encode_corpus([{'text': 'Run a coroutine.'}]), plain, atol=1e-6)
  assert small.encode_corpus([]).shape == (0, 128)
  asked = small.encode_queries(['json'], batch_size=2, convert_to_tensor=True)
  np.testing.assert_array_equal(asked, small.encode(['json'], 'query'))
  for bad in (
    [{'title': 5, 'text': 'x'}],
    [{'title': 'x', 'text': None}],
    {'title': [0], 'text': ['x']},
  ):
    with refused('number 0'):
      small.encode_corpus(bad)


def test_bad_arguments(trained, prompt, small, tmp_path):
  fresh = Retriever.load(trained / 'backbone', prompt)
  with refused('none.jsonl'):
    fresh.index(tmp_path / 'none.jsonl')
  with refused('texts'):
    fresh.encode('x')
  with refused('median'):
    Retriever.load(trained / 'backbone', pooling='median')
  with refused('query_max_length', '513', '512'):
    Retriever.load(trained / 'backbone', query_max_length=513)
  with refused('none'):
    Retriever.load(tmp_path / 'none')
  with refused('no_such_package_here'):
    Retriever.load('package:no_such_package_here')
  assert fresh.encode([]).shape == (0, 128)


@pytest.mark.slow
def test_the_docstring_of_retriever(minilm):
  assert minilm.is_dir()  # the package that the example names
  assert doctest.testmod(retriever) == doctest.TestResults(0, 6)


def test_a_search_needs_an_index(small):
  with refused('index'):
    Retriever(small.encoder).search(['json'])


@pytest.mark.slow
def test_equal_texts_go_by_falling_id(small):
  small.index({str(i): 'the same text' for i in range(12)})
  for k in (1, 5, 12):
    (hits,) = small.search(['a text'], k=k)
    assert [hit.id for hit in hits] == sorted(map(str, range(12)), reverse=True)[:k]
