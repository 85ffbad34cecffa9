"""Milvus, on a real milvus-lite in this process; tests/test_index.py has one in another process."""

import sys
import traceback

import numpy as np
import pytest

from dprjax import milvus
from dprjax.base import errors
from dprjax.base.errors import InputError
from dprjax.milvus import collection as module
from dprjax.retrieval import exact
from tests.refusals import refused

SPACE = {
  'dimension': 16,
  'backbone_sha256': 'b' * 64,
  'config_sha256': 'c' * 64,
  'tokenizer_sha256': 't' * 64,
  'prompt_sha256': None,
  'shift_positions': False,
  'pooling': 'mean',
  'normalize': True,
}
RNG = np.random.default_rng(0)
# In clusters, as embeddings are, so that approximate indexes work.
VECTORS = RNG.standard_normal((20, 16), np.float32)[
  RNG.integers(0, 20, 300)
] + 0.3 * RNG.standard_normal((300, 16), np.float32)
QUERIES = VECTORS[::30] + 0.3 * RNG.standard_normal((10, 16), np.float32)
IDS = [f'd{row}' for row in range(300)]


@pytest.fixture(scope='module')
def server(tmp_path_factory):
  for package in ('pymilvus', 'milvus_lite'):
    pytest.importorskip(package, reason="pip install 'dprjax[milvus]'")
  return milvus.Server(str(tmp_path_factory.mktemp('milvus') / 'index.db'), new=True)


@pytest.fixture
def collection(server):
  made = server.create('passages', SPACE, rows=len(IDS))
  made.upsert(IDS, VECTORS)
  yield made
  server.drop('passages')


def rankings(found):
  return [[found.ids[row] for row in rows if row >= 0] for rows in found.rows]


def test_equals_exact_search(collection, monkeypatch):
  monkeypatch.setattr(
    module, '_ANSWER_ROWS', 80
  )  # three queries a request: 20 passages, and one to see a tie
  told = []
  found = collection.search(QUERIES, 20, progress=told.append)
  expected = exact.search(QUERIES, VECTORS, 20)
  assert rankings(found) == [[IDS[row] for row in rows] for rows in expected.rows]
  np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-5)
  assert told == [3, 6, 9, 10]
  assert collection.index_type == 'FLAT' and len(collection) == 300
  for ranking in rankings(collection.search(QUERIES, 1000)):  # more than there are
    assert sorted(ranking) == sorted(IDS)


def test_ties_at_the_cut(server):
  """Of forty passages with one vector, the greatest ids, however many are asked for."""
  made = server.create('ties', SPACE, rows=60)
  vectors = np.concatenate([np.tile(VECTORS[:1], (40, 1)), VECTORS[100:120]])
  made.upsert(IDS[:60], vectors)
  equal = sorted(IDS[:40], reverse=True)
  for k in (1, 5, 39, 60):
    told = []
    (ranking,) = rankings(made.search(4 * VECTORS[:1], k, progress=told.append))
    assert ranking[:40] == equal[:k] and len(ranking) == k and told == [1]
  server.drop('ties')


def test_upsert_replaces_and_delete_deletes(collection, server, monkeypatch):
  monkeypatch.setattr(module, '_REQUEST_ROWS', 2)
  monkeypatch.setattr(module, '_IDS', 2)
  told = []
  collection.upsert(['d1', 'd7', 'new'], 9 * QUERIES[:3], progress=told.append)
  assert told == [2, 3] and len(collection) == 301
  np.testing.assert_array_equal(
    collection.vectors(['new', 'd1', 'd0']), np.stack([9 * QUERIES[2], 9 * QUERIES[0], VECTORS[0]])
  )
  first = [ranking[0] for ranking in rankings(collection.search(QUERIES[:3], 5))]
  assert first == ['d1', 'd7', 'new']
  collection.flush()
  assert collection.delete(['d1', 'never', 'new', 'd1x']) == ['never', 'd1x']
  kept = [row for row, id_ in enumerate(IDS) if id_ != 'd1']
  vectors = VECTORS.copy()
  vectors[7] = 9 * QUERIES[1]
  expected = exact.search(QUERIES, vectors[kept], 20).rows
  # A second connection sees what the first one wrote.
  again = milvus.Server(server.uri).open('passages')
  assert rankings(again.search(QUERIES, 20)) == [
    [IDS[kept[row]] for row in rows] for rows in expected
  ]
  assert len(again) == 299 and again.space == SPACE
  with refused('passages', 'd1'):
    again.vectors(['d0', 'd1'])


def test_like_a_stored_document(collection):
  ids = ['d5', 'd250', 'd5']
  rows = [5, 250, 5]
  nearest = exact.search(VECTORS[rows], VECTORS, 11).rows
  expected = [
    [IDS[other] for other in ranking if other != row][:10]
    for row, ranking in zip(rows, nearest, strict=True)
  ]
  assert rankings(collection.like(ids, 10)) == expected
  # A short vector's inner product with itself may be smaller than that with others.
  collection.upsert(['short'], VECTORS[:1] * 0.01)
  (ranking,) = rankings(collection.like(['short'], 10))
  assert len(ranking) == 10 and 'short' not in ranking
  assert len(rankings(collection.like(['d5'], 1000))[0]) == 300


def test_ids_are_strings_of_any_kind(server):
  strange = ['a"b', "c'd", 'e\\f', 'ü', '{x}', "'] or id != ['"]
  made = server.create('strange', SPACE)
  made.upsert([*strange, 'kept'], VECTORS[:7])
  np.testing.assert_array_equal(made.vectors(strange), VECTORS[:6])
  assert made.delete(strange) == [] and rankings(made.search(QUERIES[:1], 10)) == [['kept']]
  server.drop('strange')
  assert 'strange' not in server


@pytest.mark.slow
@pytest.mark.parametrize('index_type', ['HNSW', 'IVF_FLAT', 'AUTOINDEX'])
def test_approximate_indexes(server, index_type):
  made = server.create('approximate', SPACE, index_type=index_type, rows=len(IDS))
  made.upsert(IDS, VECTORS)
  made.flush()
  truth = [[IDS[row] for row in rows] for rows in exact.search(QUERIES, VECTORS, 50).rows]
  found = rankings(
    made.search(QUERIES, 50, settings={'nprobe': 40} if index_type == 'IVF_FLAT' else None)
  )
  assert made.index_type == index_type
  shared = [len(set(some) & set(best)) for some, best in zip(found, truth, strict=True)]
  assert np.mean(shared) / 50 > 0.95
  server.drop('approximate')


@pytest.mark.parametrize(
  ('index_type', 'settings'),
  [
    ('SCANN', {'nprobe': 40, 'reorder_k': 400}),
    ('HNSW', {'ef': 200}),
    ('IVF_SQ8', {'nprobe': 40}),
    ('FLAT', {}),
  ],
)
def test_default_search_settings(server, index_type, settings):
  collection = milvus.Collection(server, '', {}, index_type, lists=400)
  assert collection.settings(100) == settings


@pytest.mark.parametrize(
  'ask, message',
  [
    (lambda c: c.search(QUERIES[:, :8], 5), ('index.db', 'passages', '16')),
    (lambda c: c.upsert(['x'], VECTORS[:1, :8]), ('index.db', 'passages', '16')),
    (lambda c: c.upsert(['x'], np.full((1, 16), np.nan, np.float32)), '0'),
    (lambda c: c.upsert(['ü' * 600], VECTORS[:1]), '1024'),
    (lambda c: c.search(QUERIES, 20_000), ('16,384', '20,000')),
    (lambda c: c.search(QUERIES[:0], 5), ('0', 'index.db', 'passages')),
    (
      lambda c: c.check_space(SPACE | {'backbone_sha256': 'c' * 64}, '--queries'),
      'backbone_sha256',
    ),
    (
      lambda c: c.check_space(SPACE | {'tokenizer_sha256': 'u' * 64}, '--queries'),
      'tokenizer_sha256',
    ),
    (lambda c: c.check_space(SPACE | {'prompt_sha256': 'p' * 64}, '--queries'), 'prompt_sha256'),
    (lambda c: c.server.open('pasages'), 'pasages'),
    (lambda c: c.server.create('passages', SPACE), ('index.db', 'passages')),
    (lambda c: c.server.create('scann', SPACE, index_type='SCANN'), ('SCANN', 'FLAT')),
  ],
)
def test_bad_input(collection, ask, message):
  with refused(message):
    ask(collection)
  assert len(collection) == 300


def test_a_collection_of_another_program(server):
  server.client.create_collection('theirs', dimension=16)
  with refused('theirs'):
    server.open('theirs')
  server.drop('theirs')


@pytest.mark.parametrize(
  'uri, message',
  [
    ('index', ('--uri', '.db', 'http://host:port')),
    ('nowhere.db', 'nowhere.db'),
    ('http://127.0.0.1:1', 'http://127.0.0.1:1'),
  ],
)
def test_no_server(server, tmp_path, monkeypatch, uri, message):
  monkeypatch.chdir(tmp_path)
  with refused(message):
    milvus.Server(uri)
  assert list(tmp_path.iterdir()) == []


ADDRESSES = [
  ('http://me:hunter2@127.0.0.1:1', ''),
  ('http://me:hun/ter2@127.0.0.1:1', ''),
  ('http://me:hunter2@@127.0.0.1:1', ''),
  ('http://me:hunter2?x@127.0.0.1:1', ''),
  ('http://hunter2@127.0.0.1:1', ''),
  ('http://127.0.0.1:1?token=hunter2', ''),
  ('http://127.0.0.1:1/db?a=1&password=hunter2#x', ''),
  ('http://127.0.0.1:1#hunter2', ''),
  ('http://127.0.0.1:1', 'me:hunter2'),
  ('http://127.0.0.1:1', 'hunter2'),
  ('milvus://me:hunter2@127.0.0.1:1', ''),
  ('me:hunter2@127.0.0.1:1', ''),
  ('me:hunter2@127.0.0.1/index.db', ''),
]


@pytest.mark.parametrize(('uri', 'token'), ADDRESSES)
def test_no_secret_in_errors(server, uri, token):
  with pytest.raises(InputError) as info:
    milvus.Server(uri, token, timeout=0.2)
  line = errors.error_line(str(info.value))
  assert 'hunter' not in line and 'ter2' not in line
  shown = errors.mask(''.join(traceback.format_exception(info.value)))
  assert 'hunter2' not in shown.replace(f'{uri!r}', '')


def test_no_secret_in_what_a_server_answers(server):
  other = milvus.Server(server.uri, 'me:hunter2')
  with (
    refused('ValueError'),
    other.errors('x'),
  ):
    raise ValueError('me:hunter2 is wrong')


@pytest.mark.parametrize('package', ['pymilvus', 'milvus_lite'])
def test_without_the_extra(monkeypatch, tmp_path, package):
  monkeypatch.setitem(sys.modules, package, None)
  with refused('dprjax[milvus]'):
    milvus.Server(str(tmp_path / 'index.db'), new=True)
