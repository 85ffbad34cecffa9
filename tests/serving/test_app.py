"""The HTTP interface, asked over a socket by the clients that people use."""

import base64
import concurrent.futures
import functools
import hashlib
import http.client
import json
import random
import re
import shutil
import socket
import time

import jax
import numpy as np
import pytest

pytest.importorskip('starlette', reason="pip install 'dprjax[serve]'")
pytest.importorskip('prometheus_client', reason="pip install 'dprjax[serve]'")

from dprjax import encode
from dprjax.serving import admission, service
from dprjax.serving.app import THIS_MACHINE, App
from dprjax.serving.engine import Engine
from dprjax.serving.indexes import ServedIndex
from dprjax.serving.keys import Keys
from dprjax.serving.options import Limits, ServerOptions
from tests.fuzz import mutations
from tests.refusals import refused
from tests.serving.conftest import running

httpx = pytest.importorskip('httpx', reason="pip install 'dprjax[dev]'")
openai = pytest.importorskip('openai', reason="pip install 'dprjax[dev]'")

pytestmark = [pytest.mark.xdist_group('serving'), pytest.mark.slow]
JSON = {'content-type': 'application/json'}
PASSAGES = {'d1': 'json decodes a string', 'd2': 'an http server sends', 'd3': 'parse the xml tree'}


@pytest.fixture(scope='module')
def corpus(folder):
  file = folder.parent / 'corpus.jsonl'
  file.write_text(''.join(json.dumps({'_id': i, 'text': t}) + '\n' for i, t in PASSAGES.items()))
  return file


@pytest.fixture(scope='module')
def index(small, folder, corpus):
  out = folder.parent / 'embeddings'
  encode.main(
    [
      *(f'--backbone={small.path}', f'--prompt={folder / "qa.npz"}', f'--input={corpus}'),
      *('--side=passage', f'--out={out}', '--batch_size=8'),
    ]
  )
  return ServedIndex('qa', out)


@pytest.fixture(scope='module')
def client(small, engine, index):
  app = App(
    engine,
    [index],
    limits=Limits(bytes=10_000, prompt_bytes=100_000, inputs=8, tokens=90, seconds=20),
  )
  with running(app) as address, httpx.Client(base_url=address, timeout=60) as client:
    yield client


@pytest.fixture(scope='module')
def plain(engine):
  """A client of a server with the limits of the command, for names of this machine; and its app."""
  app = App(engine, hosts=(*THIS_MACHINE, '*.example.org'))
  with running(app) as address, httpx.Client(base_url=address, timeout=60) as client:
    yield client, app


@pytest.fixture(scope='module')
def compiled():
  """The programs compiled since."""
  events = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: events.append(event) if 'compile' in event else None
  )
  return events


@pytest.fixture
def ask(client, compiled):
  """``ask(path, **body)``: the answer to a POST, for which nothing is compiled."""

  def post(path, **body):
    before = len(compiled)
    answer = client.post(path, json=body)
    assert len(compiled) == before
    return answer

  return post


def test_openais_client(client, alone):
  texts = ['json', 'an http server']
  with openai.OpenAI(base_url=f'{client.base_url}/v1', api_key='none') as ai:
    listed = [model.id for model in ai.models.list()]
    assert listed == ['model', 'asks', 'chat:query', 'chat:passage', 'qa']
    assert ai.models.retrieve('qa').owned_by == 'dprjax'
    for model, name, side in (
      ('qa:query', 'qa', 'query'),
      ('chat:query', 'chat', 'query'),
      ('chat:passage', 'chat', 'passage'),
      ('model', 'model', 'passage'),
    ):
      for form in ({'encoding_format': 'float'}, {'encoding_format': 'base64'}):
        answer = ai.embeddings.create(model=model, input=texts, **form)
        vectors = [one.embedding for one in answer.data]
        if form.get('encoding_format') == 'base64':
          vectors = [np.frombuffer(base64.b64decode(one), '<f4') for one in vectors]
        np.testing.assert_allclose(vectors, alone(name, side, *texts), rtol=0, atol=1e-5)
        assert answer.model == model and answer.usage.total_tokens > 4
    assert (
      len(ai.embeddings.create(model='qa', input='json', dimensions=16).data[0].embedding) == 16
    )
    for model in ('nonesuch', 'qa:question', 'QA'):
      with pytest.raises(openai.NotFoundError, match='no such model'):
        ai.embeddings.create(model=model, input=texts)
    for model, size, gives in (('qa', 17, '16'), ('model', 64, '16')):
      with pytest.raises(openai.BadRequestError, match=f'{gives} dimensions'):
        ai.embeddings.create(model=model, input=texts, dimensions=size)
    # The first numbers are scaled to unit length, as whole vectors are.
    short = ai.embeddings.create(model='asks:query', input=texts, dimensions=8)
    expected = alone('asks', 'query', *texts)[:, :8]
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    vectors = np.array([entry.embedding for entry in short.data])
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-5)


def test_truncation_and_what_made_a_vector(ask, small, folder):
  answer = ask('/v1/embeddings', model='qa:query', input='json')
  assert answer.headers['x-dprjax-truncated'] == '0'
  assert answer.headers['x-dprjax-prompt-sha256'] == sha256(folder / 'qa.npz')
  assert answer.headers['x-dprjax-backbone-sha256'] == small.meta['backbone_sha256']
  long = ask('/v1/embeddings', model='qa', input=['json', 'http ' * 30])
  assert long.json()['truncated'] == [1] and long.headers['x-dprjax-truncated'] == '1'
  assert ask('/v1/embeddings', model='model', input='x').headers['x-dprjax-prompt-sha256'] == ''


def sha256(path):
  return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
  ('status', 'path', 'body', 'param'),
  [
    (400, 'embeddings', {'model': 'qa'}, 'input'),
    # As OpenAIEmbeddings of LangChain sends texts by default: ids of tiktoken.
    (400, 'embeddings', {'model': 'qa', 'input': [[34, 12], [7, 8, 9]]}, 'input'),
    (413, 'embeddings', {'model': 'qa', 'input': ['a'] * 9}, None),
    (413, 'embeddings', {'model': 'qa', 'input': 'a' * 10_000}, None),
  ],
)
def test_an_error_names_the_field(ask, status, path, body, param):
  answer = ask(f'/v1/{path}', **body)
  error = answer.json()['error']
  assert (answer.status_code, error['type']) == (status, 'invalid_request_error')
  assert param in (error['param'], None)


@pytest.mark.parametrize(
  ('path', 'body', 'field'),
  [
    ('/v1/embeddings', {'model': 'qa', 'input': 'json'}, 'normalize'),
    ('/v1/search', {'model': 'qa', 'query': 'json'}, 'top_k'),
  ],
)
def test_no_field_is_ignored(ask, path, body, field):
  answer = ask(path, **body, **{field: 3})
  assert answer.status_code == 400 and answer.json()['error']['param'] == field, answer.text


def test_null_is_as_absent(ask):
  path, body = '/v1/embeddings', {'model': 'qa', 'input': 'json'}
  nothing = dict.fromkeys(('encoding_format', 'user', 'input_type'))
  expected, answer = ask(path, **body), ask(path, **body, **nothing)
  assert expected.status_code == answer.status_code == 200 and answer.json() == expected.json()


def test_bodies_that_are_no_json(client):
  post = functools.partial(client.post, '/v1/embeddings', headers=JSON)
  surrogate = b'{"model": "qa", "input": "a \\ud800 b"}'
  for body in (b'', b'{', b'[' * 9000, b'\xff', b'null', surrogate, b'{"input": "\xed\xa0\x80"}'):
    assert post(content=body).status_code == 400, body
  chunks = post(content=(b'x' * 1000 for _ in range(20)))
  assert chunks.status_code == 413
  assert client.get('/v1/embeddings').status_code == 405
  assert client.get('/nonesuch').status_code == 404


def test_no_body_is_a_fault_of_the_server(client, tmp_path):
  path, seen = tmp_path / 'body.json', set()
  bodies = {
    'embeddings': {'model': 'qa:query', 'input': ['json', 'xml'], 'input_type': 'query'},
    'search': {'model': 'qa', 'query': ['json'], 'k': 2, 'index': 'qa'},
  }
  for route, body in bodies.items():
    for seed in range(150):
      rng = random.Random(seed)
      path.write_text(json.dumps(body))
      done = mutations.mutate_json(rng, path)
      answer = client.post(f'/v1/{route}', content=path.read_bytes(), headers=JSON)
      assert answer.status_code < 500 and answer.json(), (done, answer.text)
      seen.add((route, answer.status_code))
  assert seen >= {(route, status) for route in bodies for status in (200, 400)}


def test_odd_names(client, ask, small, folder):
  name = 'fragen über größe'
  file = folder / f'{name}.npz'
  shutil.copy(folder / 'qa.npz', file)
  try:
    expected = ask('/v1/embeddings', model='qa:query', input='json').json()['data']
    assert ask('/v1/embeddings', model=f'{name}:query', input='json').json()['data'] == expected
    assert client.get(f'/v1/models/{name}').json()['id'] == name
    assert client.get(f'/v1/prompts/{name}').json()['name'] == name
    assert client.delete(f'/v1/prompts/{name}').status_code == 204
  finally:
    file.unlink(missing_ok=True)
  # A backbone has the name of its repository.
  options = ServerOptions(rows=(1,), lengths=(16,), slots=4, prompt_length=4)
  engine = Engine(small.path, folder, name='an-org/model-1', options=options)
  with running(App(engine)) as at, openai.OpenAI(base_url=f'{at}/v1', api_key='none') as ai:
    assert ai.models.retrieve('an-org/model-1').id == 'an-org/model-1'
    assert len(ai.embeddings.create(model='an-org/model-1:query', input='x').data) == 1
  engine.close()
  with refused('--name'):
    Engine(small.path, folder, name='../x', options=options)


def test_prompts_come_and_go_while_it_runs(client, ask, small, folder, tmp_path, alone):
  content = small.write(tmp_path, 'new', 4, task='toys').read_bytes()
  query = {'model': 'new:query', 'input': 'json'}
  assert ask('/v1/embeddings', **query).status_code == 404
  put = client.put('/v1/prompts/new', content=content)
  assert put.status_code == 201
  card = put.json()
  assert card == client.get('/v1/prompts/new').json()
  assert card['sha256'] == sha256(tmp_path / 'new.npz') and card['task'] == 'toys'
  assert card['lengths'] == {'query': 4, 'passage': 4} and card['refused'] == ''
  first = ask('/v1/embeddings', **query).json()['data'][0]['embedding']
  assert client.put('/v1/prompts/new', content=(folder / 'qa.npz').read_bytes()).status_code == 200
  second = ask('/v1/embeddings', **query).json()['data'][0]['embedding']
  np.testing.assert_allclose(second, alone('qa', 'query', 'json')[0], rtol=0, atol=1e-5)
  assert np.abs(np.subtract(first, second)).max() > 0.01
  listed = client.get('/v1/prompts').json()
  assert [one['name'] for one in listed['prompts']] == ['asks', 'chat', 'new', 'qa']
  assert listed['indexes'] == {'qa': 3}
  assert client.delete('/v1/prompts/new').status_code == 204
  assert ask('/v1/embeddings', **query).status_code == 404
  for method in (client.get, client.delete):
    assert method('/v1/prompts/new').status_code == 404
  other = small.write(tmp_path, 'other', 2, backbone_sha256='a' * 64).read_bytes()
  for name, body, status, says in (
    ('new', other, 422, 'made for backbone small'),
    ('new', b'x', 422, 'not an npz file'),
    ('new', b'', 422, 'empty'),
    ('new', content * 50, 413, 'larger than 100,000 bytes'),
    ('model', content, 409, 'backbone'),
    ('a:b', content, 400, '1 to 64 letters'),
  ):
    answer = client.put(f'/v1/prompts/{name}', content=body)
    assert answer.status_code == status and says in answer.json()['error']['message']
    assert str(folder) not in answer.text
  for name in ('..%2Fcorpus', 'x%00', '.hidden'):
    assert client.put(f'/v1/prompts/{name}', content=content).status_code in (400, 404, 405)
  assert sorted(path.name for path in folder.iterdir()) == ['asks.npz', 'chat.npz', 'qa.npz']
  assert sorted(path.name for path in folder.parent.iterdir()) == [
    'corpus.jsonl',
    'embeddings',
    'prompts',
  ]


def test_search(ask, alone):
  queries = ['json string', 'a tree']
  answer = ask('/v1/search', model='qa', query=queries, k=2).json()
  scores = alone('qa', 'query', *queries) @ alone('qa', 'passage', *PASSAGES.values()).T
  for hits, own in zip(answer['results'], scores, strict=True):
    order = np.argsort(-own)[:2]
    assert [hit['id'] for hit in hits] == [list(PASSAGES)[i] for i in order]
    np.testing.assert_allclose([hit['score'] for hit in hits], own[order], atol=1e-5)
  assert answer['index'] == 'qa'
  # Its meta names the index: a prompt for queries only.
  asked = ask('/v1/search', model='asks', query='json', k=3)
  assert asked.status_code == 200 and len(asked.json()['results'][0]) == 3
  for status, body, says in (
    (422, {'model': 'chat'}, 'do not belong together: prompt_sha256'),
    (422, {'model': 'model'}, 'do not belong together: prompt_sha256'),
    (404, {'model': 'qa', 'index': 'x'}, 'no such index'),
    (413, {'model': 'qa', 'k': 101}, 'k is 101; 100 at most'),
  ):
    refused = ask('/v1/search', query='json', **body)
    assert refused.status_code == status and says in refused.json()['error']['message']


def test_query_or_passage_by_field(ask, alone):
  texts = ['json', 'an http server']

  def vectors(**body):
    answer = ask('/v1/embeddings', model='chat', **({'input': texts} | body))
    assert answer.status_code == 200, answer.text
    return [one['embedding'] for one in answer.json()['data']]

  sides = {side: alone('chat', side, *texts) for side in ('query', 'passage')}
  for word, side in (('query', 'query'), ('document', 'passage'), ('passage', 'passage')):
    np.testing.assert_allclose(vectors(input_type=word), sides[side], rtol=0, atol=1e-5)
  for status, param, body in (
    (400, 'input_type', {'model': 'chat:query', 'input_type': 'passage'}),
    (400, 'input_type', {'input_type': 'image'}),
    (400, 'model', {}),
    (413, 'truncate', {'model': 'qa', 'input': ['json', 'http ' * 30], 'truncate': False}),
  ):
    answer = ask('/v1/embeddings', **({'model': 'chat', 'input': 'json'} | body))
    assert (answer.status_code, answer.json()['error']['param']) == (status, param), answer.text


def test_ids_of_requests(client):
  for path in ('/v1/models', '/livez', '/nonesuch'):
    made = client.get(path).headers.get_list('x-request-id')
    assert len(made) == 1 and re.fullmatch('[0-9a-f]{32}', made[0])
    given = client.get(path, headers={'x-request-id': 'trace-1.2/3:4_5'}).headers['x-request-id']
    assert given == 'trace-1.2/3:4_5'
  for odd in ('a b', 'x' * 129, ''):
    answer = client.get('/livez', headers={'x-request-id': odd})
    assert re.fullmatch('[0-9a-f]{32}', answer.headers['x-request-id'])


def test_health_and_metrics(client, ask):
  ask('/v1/embeddings', model='qa:query', input='json')
  assert client.get('/livez').text == 'ok\n'
  assert client.get('/readyz').text == 'ready\n'
  text = client.get('/metrics').text
  for line in (
    'dprjax_requests_total{model="qa",route="POST /v1/embeddings",status="200"}',
    'dprjax_stage_seconds_count{stage="queue"}',
    'dprjax_queued_texts 0.0',
    'dprjax_prompts_resident{place="device"}',
  ):
    assert line in text


def test_unusual_requests(client):
  body = json.dumps({'model': 'qa', 'input': 'json'}).encode()
  path, port = '/v1/embeddings', client.base_url.port

  def ask(headers, content):
    head = f'POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n'
    with socket.create_connection(('127.0.0.1', port)) as one:
      one.settimeout(60)
      one.sendall(head.encode() + headers + b'\r\n\r\n' + content)
      answer = http.client.HTTPResponse(one)
      answer.begin()
      return answer.status, answer.read(), one.recv(1) == b'' if answer.will_close else False

  length = b'Content-Length: %d' % len(body)
  chunks = b'%x\r\n%s\r\n0\r\n\r\n' % (len(body), body)
  both = length + b'\r\nTransfer-Encoding: chunked'
  status, _, closed = ask(both, chunks)
  assert status == 200 and closed
  status, _, closed = ask(length, body)
  assert status == 200 and not closed
  for wanted, headers, content in (
    (413, b'Content-Length: 999999999999999999', b''),
    (415, length + b'\r\nContent-Encoding: gzip', body),
  ):
    status, said, _ = ask(headers, content)
    assert status == wanted and json.loads(said)['error']['message'], said


def test_a_body_of_too_many_values_is_refused_before_it_is_decoded(plain, monkeypatch):
  monkeypatch.setattr(service, 'AGAIN_S', 3.0)
  monkeypatch.setattr(admission, 'AGAIN_S', 60.0)
  client, app = plain
  post = functools.partial(client.post, '/v1/embeddings', headers=JSON)
  texts = json.dumps({'model': 'qa', 'input': [', "[{\\' * 20_000] * 2}).encode()
  assert post(content=texts).status_code == 200
  many = b'{"model": "qa", "input": [%s]}' % b', '.join([b'[1]'] * 200_000)
  refused = post(content=many)
  assert refused.status_code == 413 and 'values' in refused.json()['error']['message']
  # Who comes back at once waits for the next refusal, and holds no memory.
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    again = pool.submit(post, content=many)
    time.sleep(1.5)  # the body arrives in milliseconds
    assert not again.done() and app.admission._held == 0
    assert again.result().status_code == 429


def test_work_that_cannot_end_in_time_is_refused_at_once(plain, engine, monkeypatch):
  client, _ = plain
  monkeypatch.setattr(engine.batcher, 'costs', dict.fromkeys(engine.options.lengths, 40.0))
  body = {'model': 'qa', 'input': ['json', 'xml']}
  found = client.post('/v1/embeddings', json=body)
  assert found.status_code == 413 and found.json()['error']['param'] == 'input'
  assert client.post('/v1/embeddings', json=body | {'input': 'json'}).status_code == 200


def test_a_client_that_leaves_and_one_that_waits_too_long(small, folder):
  # Alone, a text waits for a minute.
  options = ServerOptions(rows=(1, 2), lengths=(48,), slots=4, deadline=60)
  engine = Engine(small.path, folder, options=options)
  app = App(engine, limits=Limits(seconds=1))
  body = {'model': 'qa', 'input': 'json'}
  with running(app) as address, httpx.Client(base_url=address, timeout=60) as client:
    with socket.create_connection(('127.0.0.1', int(address.rpartition(':')[2]))) as one:
      content = json.dumps(body).encode()
      one.sendall(
        b'POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n'
        b'Content-Length: %d\r\n\r\n%s' % (len(content), content)
      )
      wait_for(client, 'dprjax_queued_texts 1.0')
    wait_for(client, 'status="499"')
    late = client.post('/v1/embeddings', json=body)
    assert late.status_code == 504
    wait_for(client, 'dprjax_queued_texts 0.0')
    both = client.post('/v1/embeddings', json=body | {'input': ['a', 'b']})
    assert both.status_code == 200
    assert 'dprjax_dropped_texts_total 2.0' in client.get('/metrics').text
    # One that began before the end is answered, and told to close its connection.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      begun = pool.submit(client.post, '/v1/embeddings', json=body)
      wait_for(client, 'dprjax_queued_texts 1.0')
      app.drain()
      assert client.post('/v1/embeddings', json=body).status_code == 200
    assert begun.result().status_code == 200 and begun.result().headers['connection'] == 'close'
    assert client.get('/readyz').status_code == 503
  app.engine.close()


def wait_for(client, line):
  for _ in range(200):
    if line in client.get('/metrics').text:
      return
    time.sleep(0.05)
  raise AssertionError(f'no {line}')


def test_keys(engine, tmp_path, folder):
  file = tmp_path / 'keys'
  digest = {key: hashlib.sha256(key.encode()).hexdigest() for key in ('reader', 'boss')}
  file.write_text(
    f'[a-team]\nsha256 = "{digest["reader"]}"\n'
    f'[boss]\nsha256 = "{digest["boss"]}"\nscopes = ["admin"]\n'
  )
  content = (folder / 'qa.npz').read_bytes()
  with running(App(engine, allowed=Keys(file))) as address, httpx.Client() as client:

    def status(method, path, key=None, scheme='Bearer', **more):
      headers = {} if key is None else {'authorization': f'{scheme} {key}'}
      return client.request(method, address + path, headers=headers, **more).status_code

    ask = {'json': {'model': 'qa', 'input': 'json'}}
    for path in ('/v1/models', '/v1/prompts', '/v1/prompts/qa', '/metrics'):
      found = [status('GET', path, key) for key in (None, 'x', 'reader', 'boss')]
      assert found == [401, 401, 200, 200]
    assert status('POST', '/v1/embeddings', 'reader', **ask) == 200
    assert status('POST', '/v1/embeddings', 'reader', 'Basic', **ask) == 401
    assert status('POST', '/v1/embeddings', digest['boss'], **ask) == 401
    assert status('PUT', '/v1/prompts/mine', 'reader', content=content) == 403
    assert status('DELETE', '/v1/prompts/qa', 'reader') == 403
    assert status('PUT', '/v1/prompts/mine', 'boss', content=content) == 201
    assert status('DELETE', '/v1/prompts/mine', 'boss') == 204
    for path in ('/livez', '/readyz', '/'):
      assert status('GET', path) == 200


def test_what_a_key_may_use(engine, index, tmp_path, folder, caplog, monkeypatch):
  file = tmp_path / 'keys.toml'
  digest = {key: hashlib.sha256(key.encode()).hexdigest() for key in ('reader', 'team', 'finder')}
  file.write_text(
    f'[reader]\nsha256 = "{digest["reader"]}"\nprompts = ["qa"]\n'
    f'[team]\nsha256 = "{digest["team"]}"\nscopes = ["read", "write"]\nprompts = ["team-*"]\n'
    f'[finder]\nsha256 = "{digest["finder"]}"\nprompts = ["qa"]\nindexes = ["qa"]\n'
  )
  content, other = ((folder / f'{name}.npz').read_bytes() for name in ('qa', 'asks'))
  caplog.set_level('INFO', 'dprjax')
  app = App(engine, [index], allowed=Keys(file))
  with running(app) as address, httpx.Client() as client:

    def call(method, path, key):
      body = content if method == 'PUT' else None
      headers = {'authorization': f'Bearer {key}'}
      return client.request(method, address + path, headers=headers, content=body)

    def embed(key, model):
      headers = {'authorization': f'Bearer {key}'}
      body = {'model': model, 'input': 'json'}
      return client.post(f'{address}/v1/embeddings', json=body, headers=headers)

    assert [one['id'] for one in call('GET', '/v1/models', 'reader').json()['data']] == ['qa']
    assert [one['name'] for one in call('GET', '/v1/prompts', 'team').json()['prompts']] == []
    assert call('GET', '/v1/prompts/chat', 'reader').status_code == 404
    assert call('GET', '/metrics', 'reader').status_code == 403
    # Who names prompts alone sees no index, though the prompt has one.
    body = {'model': 'qa', 'query': 'json', 'k': 1}
    for key, status in (('finder', 200), ('reader', 404)):
      headers = {'authorization': f'Bearer {key}'}
      assert client.post(f'{address}/v1/search', json=body, headers=headers).status_code == status
    # A name that the key does not see is as one that is not there.
    assert [embed('reader', model).status_code for model in ('qa', 'chat', 'model', 'none')] == [
      *(200, 404, 404, 404)
    ]
    # Changes: of its own names.
    path = '/v1/prompts/team-a'
    assert call('PUT', '/v1/prompts/qa', 'team').status_code == 403
    assert call('PUT', path, 'reader').status_code == 403
    put = call('PUT', path, 'team')
    assert put.status_code == 201
    content = other
    assert call('PUT', path, 'team').status_code == 200
    assert call('DELETE', path, 'team').status_code == 204
    embed('team', 'team-a')
    # Its texts wait in its own turn.
    submit, turns = engine.batcher.submit, []
    monkeypatch.setattr(
      engine.batcher, 'submit', lambda *args: turns.append(args[1].name) or submit(*args)
    )
    assert embed('reader', 'qa').status_code == embed('finder', 'qa').status_code == 200
  assert turns == ['reader', 'finder']
  lines = [line for line in caplog.messages if line.startswith('audit: ')]
  assert [' '.join(line.split()[2:6]) for line in lines] == [
    *('team-a added by team', 'team-a replaced by team', 'team-a removed by team')
  ]
  assert put.json()['sha256'] in lines[0] and put.json()['sha256'] in lines[1]
  metrics = engine.metrics.text().decode()
  assert 'dprjax_key_requests_total{status="404",tenant="reader"}' in metrics
  assert 'dprjax_key_tokens_total{tenant="reader"}' in metrics


def test_pages_of_other_sites_and_texts_that_are_no_json(plain, folder):
  client, _ = plain

  def status(method, path='/v1/embeddings', **headers):
    content = b'{"model": "qa", "input": "json"}' if method == 'POST' else None
    return client.request(method, path, content=content, headers=headers).status_code

  for host in ('a.example.org', 'LOCALHOST:8000', '[::1]:80'):
    assert status('POST', **JSON, host=host) == 200
  for host in ('evil.org', '127.0.0.1.evil.org', '['):
    assert status('POST', **JSON, host=host) == 400
  assert status('DELETE', '/v1/prompts/qa', host='evil.org') == 400
  assert (folder / 'qa.npz').exists()
  assert status('GET', '/livez', host='10.0.0.7') == 200  # as a balancer asks
  # Before it sends JSON, a browser asks whether this page may.
  asking = {'origin': 'http://evil.org', 'access-control-request-method': 'POST'}
  assert status('OPTIONS', **asking) == 405
  assert status('POST', **{'content-type': 'application/vnd.x+json; charset=utf-8'}) == 200
  for form in ('text/plain', ''):
    assert status('POST', **{'content-type': form}) == 415


def test_a_fault_is_logged_by_its_lines_without_the_text(client, engine, monkeypatch, caplog):
  def fail(name, side, texts):
    raise ZeroDivisionError(texts[0])

  monkeypatch.setattr(engine, 'estimate', fail)
  answer = client.post('/v1/embeddings', json={'model': 'qa', 'input': 'a secret'})
  assert answer.status_code == 500 and answer.json()['error']['type'] == 'server_error'
  [line] = [line for line in caplog.messages if 'a fault of dprjax' in line]
  assert 'ZeroDivisionError' in line and 'app.py:' in line and 'secret' not in line + answer.text


def test_the_page_loads_nothing_from_elsewhere(client):
  page = client.get('/')
  assert page.headers['content-type'] == 'text/html; charset=utf-8'
  assert "default-src 'none'" in page.headers['content-security-policy']
  assert not re.findall(r'(?:src|href)="(?!data:,)[^"]*//', page.text)
  # Nor outside of the path that a proxy has for this server.
  assert not re.search(r'(href|src)="/|call\(\'/', page.text)
