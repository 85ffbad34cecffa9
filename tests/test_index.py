"""dprjax.index and dprjax.search --uri, on a real milvus-lite: in this process, and as a server."""

import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from etils import epath

from dprjax import Retriever, engines, index, search
from dprjax.base import outputs
from dprjax.base.errors import InputError
from dprjax.encoding import codes
from dprjax.encoding.embeddings import load_embeddings
from dprjax.engines import storing
from dprjax.retrieval import exact
from dprjax.text.trec import read_run
from tests.engines import test_collection
from tests.refusals import command_refused, named_in

RNG = np.random.default_rng(0)
PASSAGES, QUERIES = (RNG.standard_normal((count, 8), np.float32) for count in (50, 4))
IDS = [*(f'd{row}' for row in range(49)), 'q3']


@pytest.fixture
def folder(tmp_path, monkeypatch, write_embeddings):
  _require_milvus()
  monkeypatch.chdir(tmp_path)
  write_embeddings('corpus', IDS, PASSAGES)
  write_embeddings('queries', [f'q{i}' for i in range(4)], QUERIES, side='query')
  return tmp_path


def _require_milvus():
  for package in ('pymilvus', 'milvus_lite'):
    pytest.importorskip(package, reason="pip install 'dprjax[milvus]'")


def documents(path='run.trec'):
  return {query: [doc for doc, _ in ranking] for query, ranking in read_run(path)}


def expected(queries, vectors, ids, k):
  return [[ids[row] for row in rows] for rows in exact.search(queries, vectors, k).rows]


@pytest.mark.slow
def test_an_engine_takes_a_retriever(folder, trained, prompt, command):
  """Its vectors and texts; the engine finds what the retriever finds without BM25."""
  texts = {id_: f'Words{row % 7} and cats{row % 3} {"json " * row}' for row, id_ in enumerate(IDS)}
  queries = {'q0': 'words3', 'q2': 'Cats1 jsons', 'q3': 'cats2 words5'}
  lines = [json.dumps({'_id': id_, 'text': text}) for id_, text in queries.items()]
  (folder / 'queries.jsonl').write_text('\n'.join(lines))
  found = Retriever.load(trained / 'backbone', prompt)
  found.index(texts)
  found.save('mine')
  assert command(index, '--uri=milvus:index.db', '--upsert=mine')[0] == 0
  asked = ['--uri=milvus:index.db', '--retriever=mine', '--queries=queries.jsonl', '--k=9']
  for dropped in (False, True):
    words = [f'--drop_same_id={str(dropped).lower()}', '--out=run.trec']
    status, said = command(search, *asked, *words)
    assert status == 0, said
    expected = found.search(queries, k=9, drop_same_id=dropped)
    assert documents() == {
      query.id: [hit.id for hit in hits]
      for query, hits in zip(expected.queries, expected, strict=True)
    }
  assert 'q3' not in documents()['q3']


def test_fill_search_change(folder, command, write_embeddings):
  def searched(*flags):
    assert command(search, '--uri=milvus:index.db', '--out=run.trec', *flags)[0] == 0
    return list(documents().values())

  status, said = command(index, '--uri=milvus:index.db', '--upsert=corpus')
  assert status == 0 and 'milvus-lite has no SCANN' in said
  assert re.search(
    r'^milvus:index\.db, collection .passages.: 50 passages written in (\d+s|less than a second) '
    r'\(\d[\d,.]* a second\); it has 50, index FLAT',
    said,
    re.MULTILINE,
  )
  assert searched('--queries=queries', '--k=10') == expected(QUERIES, PASSAGES, IDS, 10)
  report = json.loads((folder / 'run.trec.json').read_text())
  facts = {'index': 'milvus', 'kind': 'FLAT', 'uri': 'milvus:index.db', 'collection': 'passages'}
  facts |= {'k': 10, 'queries': 4, 'passages': 50, 'settings': {}, 'prompt_sha256': 'p' * 64}
  assert report | facts == report
  assert report['server'].startswith('milvus_lite') and report['queries_per_second'] > 0
  found = searched('--queries=queries', '--k=49', '--drop_same_id=true')
  assert (
    [len(ranking) for ranking in found] == [49] * 4 and 'q3' not in found[3] and 'q3' in found[0]
  )

  write_embeddings('changed', ['d1', 'new'], -PASSAGES[:2])
  pathlib.Path('gone.txt').write_text('d0\nd2\nnever\n')
  assert 'it has 51' in command(index, '--uri=milvus:index.db', '--upsert=changed')[1]
  status, said = command(index, '--uri=milvus:index.db', '--delete=gone.txt')
  assert (
    status == 0
    and '1 id that was missing: never' in said
    and '2 passages deleted; it has 49' in said
  )
  kept = [row for row in range(50) if row not in (0, 1, 2)]
  assert searched('--queries=queries', '--k=10') == expected(
    QUERIES,
    np.concatenate([PASSAGES[kept], -PASSAGES[:2]]),
    [*(IDS[row] for row in kept), 'd1', 'new'],
    10,
  )
  assert command(index, '--uri=milvus:index.db', '--drop') == (
    0,
    "milvus:index.db, collection 'passages': removed\n",
  )


@pytest.mark.slow
def test_codes_are_stored_as_their_values(folder, command, write_embeddings):
  write_embeddings('int8', IDS, PASSAGES, dtype='int8')
  write_embeddings('short', IDS, codes.cut(PASSAGES, 4, True))

  def found(name, *flags):
    assert (
      command(index, *(to := ('--uri=milvus:i.db', f'--collection={name}')), f'--upsert={name}')[0]
      == 0
    )
    asked = ('--queries=queries', '--k=10', '--out=run.trec')
    assert command(search, *to, *asked, *flags)[0] == 0
    return list(documents().values())

  values = load_embeddings('int8').vectors()
  assert found('int8') == expected(QUERIES, values, IDS, 10)
  short = [codes.cut(vectors, 4, True) for vectors in (QUERIES, PASSAGES)]
  assert found('short', '--dimensions=4') == expected(*short, IDS, 10)
  refusal = command(
    search, '--uri=milvus:i.db', '--collection=short', '--queries=queries', '--out=x'
  )
  command_refused(refusal, '--dimensions')


@pytest.mark.parametrize(
  'module, flags, named',
  [
    (index, ['--upsert=queries'], '--upsert'),
    (index, ['--upsert=other'], 'prompt_sha256'),
    (index, ['--upsert=corpus', '--index_type=HNSW'], ('HNSW', 'FLAT')),
    (index, ['--delete=ids.txt', '--collection=missing'], 'missing'),
    (index, ['--drop', '--uri=milvus:typo.db'], 'typo.db'),
    (search, ['--queries=other'], '--queries'),
    (search, ['--queries=strange'], 'prompt_sha256'),
    (search, ['--queries=queries', '--where=year'], '--where'),
    # Before the queries are read.
    (search, ['--queries=nowhere', '--where=year'], '--where'),
  ],
)
def test_bad_input(filled, monkeypatch, command, module, flags, named):
  monkeypatch.chdir(filled)
  common = ['--out=run.trec'] if module is search else []
  command_refused(command(module, *common, '--uri=milvus:index.db', *flags), named)
  assert not list(filled.glob('run*')) and not (filled / 'typo.db').exists()


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (['--uri=milvus:corpus.db'], ('--uri=corpus.db', '--upsert=corpus')),
    (['--uri=milvus:photos.db'], 'photos.db'),
    (['--uri=milvus:pipe.db'], '--uri=pipe.db'),
    (['--uri=milvus:busy.db'], 'busy.db'),
    (['--uri=milvus:new.db', '--collection=../x'], '--collection'),
    (['--uri=milvus:new.db', '--upsert=nowhere'], 'nowhere'),
  ],
)
def test_an_index_takes_nothing_that_is_not_one(folder, command, flags, message):
  (folder / 'corpus.db').symlink_to('corpus')
  (folder / 'photos.db').mkdir()
  (folder / 'photos.db' / 'holiday.jpg').write_text('x')
  os.mkfifo(folder / 'pipe.db')
  (folder / 'ids.txt').write_text('d1\n')
  before = sorted(folder.rglob('*'))
  with outputs.hold(epath.Path('.busy.db.lock'), 'a test'):
    status, err = command(index, '--upsert=corpus', *flags)
  assert status == 2 and err.count('\n') == 1 and named_in(err, message)
  asked = (search, '--queries=queries', '--out=run.trec')
  for module, *words in ((index, '--drop'), (index, '--delete=ids.txt'), asked):
    command_refused(command(module, '--uri=milvus:photos.db', *words))
  assert sorted(folder.rglob('*')) == before


@pytest.mark.parametrize(
  'flags',
  [
    ['--uri=milvus:http://me:hunter2@127.0.0.1:1'],
    ['--uri=me:hunter2@127.0.0.1:1'],
    ['--uri=qdrant:http://127.0.0.1:1?token=hunter2'],
    ['--uri=qdrant:http://127.0.0.1:1', '--token=hunter2'],
  ],
)
def test_no_secret_is_printed(folder, command, monkeypatch, flags):
  monkeypatch.setenv('DPRJAX_TRACEBACK', '1')
  asked = (search, '--queries=queries', '--out=run.trec')
  for module, *more in ((index, '--upsert=corpus'), asked):
    status, err = command(module, *flags, *more)
    assert status == 2 and 'hunter2' not in err


@pytest.fixture(scope='module')
def filled(tmp_path_factory, write_embeddings):
  """A folder with an index of the passages, and embeddings that do not fit it."""
  _require_milvus()
  folder = tmp_path_factory.mktemp('filled')
  write_embeddings(folder / 'corpus', IDS, PASSAGES)
  write_embeddings(folder / 'queries', [f'q{i}' for i in range(4)], QUERIES, side='query')
  write_embeddings(folder / 'other', IDS, PASSAGES, prompt_sha256=None)
  write_embeddings(folder / 'strange', ['q0'], QUERIES[:1], side='query', prompt_sha256=None)
  (folder / 'ids.txt').write_text('d1\nnobody\n')
  server = engines.connect(f'milvus:{folder}/index.db', new=True)
  storing.upsert(server, 'passages', load_embeddings(folder / 'corpus'))
  return folder


@pytest.mark.slow
def test_an_index_file_that_a_killed_command_wrote_half_is_made_again(folder, command, monkeypatch):
  """In another folder than the one that this process has open: milvus-lite keeps it loaded."""
  assert command(index, '--uri=milvus:index.db', '--upsert=corpus')[0] == 0
  flags = ['--queries=queries', '--k=10']
  assert command(search, '--uri=milvus:index.db', '--out=run.trec', *flags)[0] == 0
  shutil.copytree('index.db', 'killed.db')
  [file] = pathlib.Path('killed.db').glob('collections/*/partitions/*/indexes/*.idx')
  os.truncate(file, 100)
  status, said = command(search, '--uri=milvus:killed.db', '--out=again.trec', *flags)
  assert status == 0 and 'rebuilding the index of collection passages' in said
  assert pathlib.Path('again.trec').read_bytes() == pathlib.Path('run.trec').read_bytes()


@pytest.mark.slow
def test_a_server_over_the_network(folder, command):
  """milvus-lite as a server, over http."""
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    port = free.getsockname()[1]
  uri = f'milvus:http://127.0.0.1:{port}'
  where = ('--data-dir', 'data', '--host', '127.0.0.1', '--port', str(port))
  server = subprocess.Popen([sys.executable, '-m', 'milvus_lite', 'server', *where])
  try:
    for _ in range(120):
      try:
        socket.create_connection(('127.0.0.1', port), 1).close()
        break
      except OSError:
        time.sleep(0.5)
    to = (f'--uri={uri}', '--collection=mine')
    assert command(index, *to, '--upsert=corpus', '--index_type=HNSW')[0] == 0
    asked = ('--queries=queries', '--out=run.trec', '--k=10', '--search_param=ef=100')
    status, _ = command(search, *to, *asked)
    assert status == 0 and list(documents().values()) == expected(QUERIES, PASSAGES, IDS, 10)
    report = json.loads(pathlib.Path('run.trec.json').read_text())
    assert report['uri'] == uri and report['kind'] == 'HNSW' and report['settings'] == {'ef': 100}
  finally:
    server.kill()
    server.wait()


# tests/engines tests engines; these are the commands.


def write_texts(path, ids=IDS, year=2000):
  lines = [
    {'_id': id_, 'title': f'On {row}', 'text': f'word{row} cats', 'year': year + row % 5}
    for row, id_ in enumerate(ids)
  ]
  path.write_text(''.join(f'{json.dumps(line)}\n' for line in lines))


@pytest.mark.slow
def test_an_upsert_goes_on(tmp_path, monkeypatch, command, write_embeddings):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(storing, '_BLOCK', 10)
  write_embeddings('corpus', IDS, PASSAGES)
  write_embeddings('queries', ['q0'], QUERIES[:1], side='query')
  write_texts(tmp_path / 'corpus.jsonl')
  with test_collection.served('qdrant', tmp_path) as address:
    words = (f'--uri={address}', '--upsert=corpus', '--texts=corpus.jsonl')
    rows = []

    def upsert(self, ids, *args, **how):
      if len(rows) == 30:
        raise InputError('the engine is gone')
      rows.extend(ids)
      usual(self, ids, *args, **how)

    usual = engines.Collection.upsert
    kind_of = type(engines.connect(address, new=True))
    monkeypatch.setattr(kind_of, 'request_rows', 10)
    with monkeypatch.context() as gone:
      gone.setattr(engines.Collection, 'upsert', upsert)
      assert command(index, *words)[0] == 2
    assert rows == IDS[:30]
    status, said = command(search, words[0], '--queries=queries', '--out=run.trec')
    assert status == 0 and 'partly loaded' in said
    assert json.loads((tmp_path / 'run.trec.json').read_text())['partly_loaded'] is True
    status, said = command(index, *words)
    assert status == 0 and 'continues after 30 passages' in said and 'it has 50' in said, said
    status, said = command(search, words[0], '--queries=queries', '--out=run.trec', '--k=9')
    assert status == 0 and 'partly loaded' not in said
    assert list(documents().values()) == expected(QUERIES[:1], PASSAGES, IDS, 9)
    newer = ('--queries=queries', '--out=run.trec', '--k=9', '--where=year>=2003')
    assert command(search, words[0], *newer)[0] == 0
    kept = [row for row in range(50) if row % 5 >= 3]
    new = [IDS[row] for row in kept]
    assert list(documents().values()) == expected(QUERIES[:1], PASSAGES[kept], new, 9)
