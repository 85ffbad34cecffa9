"""The command: its flags, its end, and several processes that share a folder of prompts."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest

pytest.importorskip('starlette', reason="pip install 'dprjax[serve]'")
pytest.importorskip('prometheus_client', reason="pip install 'dprjax[serve]'")

from dprjax import Retriever, serve
from dprjax.base import flags
from dprjax.encoding.text_encoder import Encoder
from dprjax.retrieval import fusion
from dprjax.serving.library import Library  # noqa: F401 (its packages are there)
from tests.refusals import command_refused, named_in
from tests.serving.conftest import running, small  # noqa: F401 (a fixture)

pytestmark = pytest.mark.xdist_group('serving')
SMALL = ('--rows=1,4', '--lengths=16', '--slots=5', '--prompt_length=4')


def test_flags_that_are_refused(command, make_cross_encoder, tmp_path):
  required = (f'--backbone={make_cross_encoder()}', f'--prompts={tmp_path / "prompts"}')
  with socket.create_server(('127.0.0.1', 0)) as taken:
    port = taken.getsockname()[1]
    for flags, says in (
      (('--host=0.0.0.0',), ('--host=0.0.0.0', '--keys')),
      ((f'--keys={tmp_path / "none"}',), 'none'),
      (('--retriever=x', '--retrievers=y'), ('--retriever', '--retrievers')),
      (('--slots=2', '--rows=4'), '--slots=2'),
      ((f'--port={port}', *SMALL), f'--port={port}'),
    ):
      status, err = command(serve, *required, *flags)
      assert status == 2 and named_in(err.splitlines()[-1], says), err


@pytest.mark.slow
def test_many_retrievers_share_a_backbone(small, tmp_path):  # noqa: F811
  small.write(tmp_path, 'qa', 2)
  how = fusion.Fusion(weights={'bm25': 0.5, 'dense': 0.5}, method='zscore')
  passages = {'a': 'json', 'b': 'an http message', 'c': 'xml'}
  found = {
    'qa': Retriever.load(small.path, tmp_path / 'qa.npz', hybrid=how),
    'bare': Retriever.load(small.path),
  }
  for name, one in found.items():
    one.index(passages)
    one.save(tmp_path / 'all' / name)
  given, _ = flags.parse(serve.Flags, [f'--retrievers={tmp_path}/all', '--name=small', *SMALL])
  app = serve._make_app(serve._whole(given))

  def ask(path, method, **body):
    asked = urllib.request.Request(
      f'{address}{path}',
      json.dumps(body).encode() if method == 'POST' else b'x',
      {'content-type': 'application/json'},
      method=method,
    )
    with urllib.request.urlopen(asked) as answer:
      return json.load(answer)

  try:
    app.start()
    with running(app) as address:
      for name, one in found.items():
        model = {'model': 'small', 'index': 'bare'} if name == 'bare' else {'model': name}
        (hits,) = ask('/v1/search', 'POST', query=['http message'], k=3, **model)['results']
        assert [hit['id'] for hit in hits] == [hit.id for hit in one.search(['http message'])[0]]
      assert all(hit['text'] == passages[hit['id']] for hit in hits)
      for method in ('PUT', 'DELETE'):
        with pytest.raises(urllib.error.HTTPError) as refusal:
          ask('/v1/prompts/qa', method)
        assert refusal.value.code == 409
  finally:
    app.engine.close()
  assert (tmp_path / 'all' / 'qa' / 'prompt.npz').exists()


def test_what_is_served_must_be_named(command, tmp_path):
  for given, named in (((), '--backbone'), ((f'--backbone={tmp_path}',), '--prompts')):
    command_refused(command(serve, *given), named)


class Server:
  """The process of a server."""

  def __init__(self, backbone, prompts, log, *flags):
    self.log = log.open('w+')
    self.process = subprocess.Popen(
      [
        *(sys.executable, '-m', 'dprjax.serve', '--port=0', f'--backbone={backbone}'),
        *(f'--prompts={prompts}', *SMALL, *flags),
      ],
      stderr=self.log,
      env=os.environ | {'XLA_FLAGS': '', 'PYTHONWARNINGS': ''},
    )
    self.address = ''

  def said(self):
    self.log.seek(0)
    return self.log.read()

  def wait(self):
    for _ in range(1200):
      assert self.process.poll() is None, self.said()
      if not self.address and 'listening on ' in self.said():
        self.address = self.said().partition('listening on ')[2].split()[0]
      if self.address and self.ask('GET', '/readyz')[0] == 200:
        return
      time.sleep(0.1)
    raise AssertionError(self.said())

  def ask(self, method, path, body=None, key=''):
    """Status and content."""
    if isinstance(body, dict):
      body = json.dumps(body).encode()
    headers = {'content-type': 'application/json', 'authorization': f'Bearer {key}'}
    request = urllib.request.Request(self.address + path, body, headers, method=method)
    try:
      with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.status, answer.read()
    except urllib.error.HTTPError as error:
      return error.code, error.read()

  def vector(self, model, text='json'):
    status, content = self.ask('POST', '/v1/embeddings', {'model': model, 'input': text})
    assert status == 200, content
    return json.loads(content)['data'][0]['embedding']


@pytest.fixture
def start(small, tmp_path):  # noqa: F811
  """``start(*flags)``: the process of a server; all share a folder of prompts."""
  with contextlib.ExitStack() as stack:

    def run(*flags):
      log = tmp_path / f'log-{len(list(tmp_path.glob("log-*")))}'
      server = Server(small.path, tmp_path / 'prompts', log, *flags)
      stack.callback(server.log.close)
      stack.callback(server.process.wait)
      stack.callback(server.process.kill)
      return server

    yield run


@pytest.mark.slow
def test_servers_share_a_folder_survive_a_kill_and_drain(start, small, tmp_path):  # noqa: F811
  one, two = start('--lame_duck=0'), start('--deadline=1000', '--lame_duck=0')
  one.wait()
  two.wait()
  contents = {
    name: small.write(tmp_path / 'made', name, 2).read_bytes() for name in ('a', 'b', 'c')
  }
  expected = {
    name: Encoder.load(small.path, tmp_path / 'made' / f'{name}.npz').encode(['json'])[0]
    for name in contents
  }
  # The other serves prompts of one at once: added, replaced, removed.
  for name in contents:
    assert one.ask('PUT', '/v1/prompts/x', contents[name])[0] in (200, 201)
    for server in (one, two):
      np.testing.assert_allclose(server.vector('x'), expected[name], rtol=0, atol=1e-5)
  assert two.ask('DELETE', '/v1/prompts/x')[0] == 204
  assert one.ask('POST', '/v1/embeddings', {'model': 'x', 'input': 'json'})[0] == 404
  # Killed between and during uploads: accepted prompts are there, whole.
  done = []

  def upload():
    # An answer that the kill cut short is an HTTPException, and counts as none.
    with contextlib.suppress(OSError, http.client.HTTPException):
      for number in range(10_000):
        name = list(contents)[number % 3]
        one.ask('PUT', f'/v1/prompts/p{number}', contents[name])
        done.append((f'p{number}', name))

  thread = threading.Thread(target=upload)
  thread.start()
  while len(done) < 20:
    time.sleep(0.01)
  one.process.send_signal(signal.SIGKILL)
  thread.join()
  again = start()
  again.wait()
  for name, like in done:
    np.testing.assert_allclose(again.vector(name), expected[like], rtol=0, atol=1e-5)
  assert 'not served' not in again.said()
  # Asked to end while a request waits for its batch, it answers first.
  answers = []
  thread = threading.Thread(target=lambda: answers.append(two.vector('p0')))
  thread.start()
  while b'dprjax_queued_texts 1.0' not in two.ask('GET', '/metrics')[1]:
    time.sleep(0.01)
  two.process.send_signal(signal.SIGTERM)
  thread.join()
  np.testing.assert_allclose(answers[0], expected['a'], rtol=0, atol=1e-5)
  assert two.process.wait(60) == 0
  again.process.send_signal(signal.SIGINT)
  assert again.process.wait(60) == 130


@pytest.mark.slow
def test_a_server_that_compiles_ends_at_once(start, tmp_path, monkeypatch):
  monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', str(tmp_path / 'none'))
  server = start('--rows=1,2,3,4', '--lengths=16,24,32,40,48')
  while 'listening on ' not in server.said():
    assert server.process.poll() is None, server.said()
    time.sleep(0.05)
  server.address = server.said().partition('listening on ')[2].split()[0]
  assert server.ask('GET', '/livez')[0] == 200
  server.process.send_signal(signal.SIGTERM)
  assert server.process.wait(15) == 0
