"""Lines of the log."""

import contextvars
import hashlib
import json
import logging

import pytest

pytest.importorskip('starlette', reason="pip install 'dprjax[serve]'")
pytest.importorskip('prometheus_client', reason="pip install 'dprjax[serve]'")

from dprjax.serving import server as tracing
from dprjax.serving.app import App
from dprjax.serving.keys import Keys
from tests.serving.conftest import running

httpx = pytest.importorskip('httpx', reason="pip install 'dprjax[dev]'")

pytestmark = pytest.mark.xdist_group('serving')
BODY = {'model': 'qa:query', 'input': 'a text that is secret'}


def line_of(formatter, message, fields=None):
  record = logging.LogRecord('dprjax', logging.INFO, '', 0, message, (), None)
  if fields is not None:
    record.request = fields
  return formatter.format(record)


def test_lines_of_the_log():
  text, lines = tracing.TextLines(), tracing.JsonLines()
  assert line_of(text, 'ready') == 'ready'
  context = contextvars.copy_context()
  context.run(tracing.current.set, 'r1')
  assert context.run(line_of, text, 'ready') == 'ready (request r1)'
  message = 'two\nlines "quoted" http://user:pw@host'
  found = context.run(line_of, lines, message, {'status': 200})
  assert '\n' not in found
  found = json.loads(found)
  assert found.pop('time').endswith('+00:00') and 'pw' not in found['message']
  assert found == {
    'level': 'info',
    'message': found['message'],
    'request_id': 'r1',
    'status': 200,
  }
  assert 'request_id' not in json.loads(line_of(lines, 'ready'))


@pytest.mark.slow
def test_a_request_has_a_line_without_text_and_key(engine, tmp_path, caplog):
  file = tmp_path / 'keys'
  digest = hashlib.sha256(b'secret').hexdigest()
  file.write_text(f'[team]\nsha256 = "{digest}"\n')
  caplog.set_level(logging.INFO, 'dprjax')
  app = App(engine, allowed=Keys(file), log_requests=True)
  with running(app) as address, httpx.Client(base_url=address) as client:
    key = {'authorization': 'Bearer secret', 'x-request-id': 'one'}
    assert client.post('/v1/embeddings', json=BODY, headers=key).status_code == 200
    assert (
      client.post('/v1/embeddings', json=BODY | {'model': 'no'}, headers=key).status_code == 404
    )
    assert client.get('/livez').status_code == 200
    assert client.post('/v1/embeddings', json=BODY).status_code == 401
  found = [record.request for record in caplog.records if hasattr(record, 'request')]
  assert [(one['status'], one['tenant'], one['model']) for one in found] == [
    *((200, 'team', 'qa'), (404, 'team', ''), (401, '', ''))
  ]
  assert all(one['route'] == 'POST /v1/embeddings' and one['seconds'] > 0 for one in found)
  said = [tracing.JsonLines().format(record) for record in caplog.records]
  assert not any('secret' in line or 'Bearer' in line for line in said)
