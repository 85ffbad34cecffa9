"""Batches by the OpenAI client, and the time that they leave to others."""

import contextlib
import hashlib
import io
import json
import time

import numpy as np
import pytest

pytest.importorskip('starlette', reason="pip install 'dprjax[serve]'")
pytest.importorskip('prometheus_client', reason="pip install 'dprjax[serve]'")
pytest.importorskip('python_multipart', reason="pip install 'dprjax[serve]'")

from dprjax.inference.text_encoder import Encoder
from dprjax.serving.admission import Admission
from dprjax.serving.app import App, Limits
from dprjax.serving.backfill import Backfill
from dprjax.serving.backlog import Backlog
from dprjax.serving.engine import Engine, ServerOptions
from dprjax.serving.keys import ANYONE, Keys
from tests.serving.test_app import running

httpx = pytest.importorskip('httpx', reason="pip install 'dprjax[dev]'")
openai = pytest.importorskip('openai', reason="pip install 'dprjax[dev]'")

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group('serving')]
OPTIONS = ServerOptions(rows=(1, 4), lengths=(16, 48), slots=6, deadline=0.001, prompt_length=4)
LIMITS = Limits(bytes=20_000, inputs=300, seconds=20)
SIDES = ('query', 'passage')
BAD = 1e38  # overflows


@pytest.fixture(scope='module')
def engine(small, tmp_path_factory):
  folder = tmp_path_factory.mktemp('served') / 'prompts'
  small.write(folder, 'qa', 2, passage=3)
  small.write(folder, 'loud', 2, scale=BAD)
  engine = Engine.load(small.path, folder, options=OPTIONS)
  yield engine
  engine.close()


@pytest.fixture
def backlog(tmp_path):
  return Backlog(tmp_path / 'later', most_bytes=50_000, most_tenant_bytes=4 * 10**6, days=1)


@contextlib.contextmanager
def working(app):
  """The address of a server whose engine outlives it."""
  with running(app) as address:
    yield address
  app._backfill.close()


def lines(*bodies):
  return b''.join(
    json.dumps(
      {'custom_id': f'r{n}', 'method': 'POST', 'url': '/v1/embeddings', 'body': body}
    ).encode()
    + b'\n'
    for n, body in enumerate(bodies)
  )


def wait(client, batch):
  for _ in range(600):
    card = client.batches.retrieve(batch.id)
    if card.status in ('completed', 'failed', 'cancelled'):
      return card
    time.sleep(0.05)
  raise AssertionError(card)


def test_openais_client(small, engine, backlog):
  app = App(engine, limits=LIMITS, backlog=backlog)
  texts = [f'text {n}' for n in range(20)]
  bodies = [{'model': f'qa:{side}', 'input': text} for text in texts for side in SIDES]
  bodies += [
    {'model': 'qa', 'input': texts, 'encoding_format': 'base64'},
    {'model': 'none', 'input': 'a'},
    {'model': 'qa'},
    {'model': 'qa', 'input': ['a'] * 301},
    {'model': 'loud', 'input': 'a'},
    {'model': 'qa', 'input': [[1, 2]]},
  ]
  with working(app) as address, openai.OpenAI(base_url=f'{address}/v1', api_key='x') as client:
    file = client.files.create(file=('in.jsonl', lines(*bodies)), purpose='batch')
    assert client.files.retrieve(file.id) == file and file.filename == 'in.jsonl'
    assert client.files.content(file.id).read() == lines(*bodies)
    made = client.batches.create(
      input_file_id=file.id, endpoint='/v1/embeddings', completion_window='24h', metadata={'a': 'b'}
    )
    card = wait(client, made)
    assert card.status == 'completed' and card.metadata == {'a': 'b'}
    counts = card.request_counts
    assert (counts.total, counts.completed, counts.failed) == (46, 41, 5)
    found = [json.loads(line) for line in client.files.content(card.output_file_id).iter_lines()]
    assert [one['custom_id'] for one in found] == [f'r{n}' for n in range(41)]
    tokens = sum(one['response']['body']['usage']['total_tokens'] for one in found)
    assert card.usage.total_tokens >= tokens > 0
    encoder = Encoder.load(small.path, engine.library.folder / 'qa.npz', batch_size=8)
    for number, side in enumerate(SIDES):
      vectors = [one['response']['body']['data'][0]['embedding'] for one in found[number:40:2]]
      np.testing.assert_allclose(vectors, encoder.encode(texts, side), rtol=0, atol=1e-5)
    assert len(found[40]['response']['body']['data']) == 20
    failed = [json.loads(line) for line in client.files.content(card.error_file_id).iter_lines()]
    statuses = {one['custom_id']: one['response']['status_code'] for one in failed}
    assert statuses == {'r41': 404, 'r42': 400, 'r43': 413, 'r44': 422, 'r45': 422}
    assert all(one['response']['body']['error']['message'] for one in failed)
    # A list goes on where a part of it ended.
    assert {one.id for one in client.files.list(limit=2)} == {
      *(file.id, card.output_file_id, card.error_file_id)
    }
    assert [one.id for one in client.batches.list(limit=1)] == [made.id]
    client.files.delete(file.id)
    with pytest.raises(openai.NotFoundError):
      client.files.retrieve(file.id)
    assert 'dprjax_backfilled_requests_total{how="failed"} 5.0' in engine.metrics.text().decode()


def test_files_that_are_refused(engine, backlog):
  app = App(engine, limits=LIMITS, backlog=backlog)
  good = lines({'model': 'qa', 'input': 'a'})
  with working(app) as address, openai.OpenAI(base_url=f'{address}/v1', api_key='x') as client:

    def problem(content):
      file = client.files.create(file=('in.jsonl', content), purpose='batch')
      made = client.batches.create(
        input_file_id=file.id, endpoint='/v1/embeddings', completion_window='24h'
      )
      card = wait(client, made)
      assert card.status == 'failed' and card.output_file_id is None
      return [(one.code, one.line) for one in card.errors.data]

    assert problem(b'\n\n') == [('empty_file', None)]
    assert problem(good + good) == [('duplicate_custom_id', 2)]
    assert problem(good + b'{"custom_id": "b"}\n') == [('invalid_json_line', 2)]
    assert problem(good + b'{') == [('invalid_json_line', 2)]
    assert problem(good.replace(b'/v1/embeddings', b'/v1/rerank')) == [('invalid_json_line', 1)]
    assert problem(good + b' ' * 20_001) == [('line_too_large', 2)]
    assert len(problem(b'[' * 9999 + b'\n' + b'\xff\n' * 99)) == 20
    for purpose, content, status in (('fine-tune', good, 400), ('batch', b'x' * 50_001, 413)):
      with pytest.raises(openai.APIStatusError) as error:
        client.files.create(file=('in.jsonl', content), purpose=purpose)
      assert error.value.status_code == status
    with pytest.raises(openai.NotFoundError):
      client.batches.create(
        input_file_id='file-1', endpoint='/v1/embeddings', completion_window='24h'
      )
    with httpx.Client(base_url=f'{address}/v1') as http:
      form = {'content-type': 'multipart/form-data; boundary=x'}
      for headers, body, status in (
        ({}, b'', 415),
        ({'content-type': 'multipart/form-data'}, b'', 400),
        (form, b'', 400),
        (form, b'nonsense', 400),
        (form, b'--x\r\n' + b'a: ' + b'b' * 40_000, 400),
        (form, b'x' * 500_000, 413),
      ):
        answer = http.post('/files', content=body, headers=headers)
        assert answer.status_code == status, (headers, body[:20], answer.text)
      for query in ('limit=0', 'limit=x', 'limit=101'):
        assert http.get(f'/batches?{query}').status_code == 400
    # A list goes on only after one of its entries.
    for entries in (client.files, client.batches):
      with pytest.raises(openai.BadRequestError, match='file-gone') as error:
        entries.list(after='file-gone')
      assert error.value.param == 'after'


def test_a_server_that_is_killed_goes_on_and_answers_once(engine, backlog):
  bodies = [{'model': 'qa', 'input': [f'{n} {m}' for m in range(100)]} for n in range(12)]
  file = backlog.add_file('', 'a', 'batch', io.BytesIO(lines(*bodies))).id
  id = backlog.add_batch('', file, '/v1/embeddings', '24h', None).id

  def worker():
    admission = Admission(lambda: 0.0, requests=9, wait=1, seconds=1, bytes=1)
    return Backfill(backlog, engine, LIMITS, admission, lambda tenant: ANYONE)

  class KilledError(BaseException):
    pass

  write, kills = backlog.write, iter([0, 0, 1, 0, 1, 0])

  def kill(record):
    if next(kills, 0):
      raise KilledError  # after the answers are written, before they count
    write(record)

  backlog.write = kill
  one, deaths = worker(), 0
  for _ in range(100):
    try:
      if not one.step():
        break
    except KilledError:
      deaths += 1
      one = worker()
  card = backlog.batch('', id)
  assert deaths == 2 and card.status == 'completed' and card.request_counts.completed == 12
  content = backlog.content('', card.output_file_id).read_bytes().splitlines()
  assert [json.loads(line)['custom_id'] for line in content] == [f'r{n}' for n in range(12)]


def test_tenants_and_the_end_of_a_batch(engine, backlog, tmp_path):
  file = tmp_path / 'keys.toml'
  digest = {key: hashlib.sha256(key.encode()).hexdigest() for key in ('one', 'two')}
  file.write_text(
    f'[one]\nsha256 = "{digest["one"]}"\nprompts = ["qa"]\n'
    f'[two]\nsha256 = "{digest["two"]}"\ntokens_per_minute = 700\n'
  )
  app = App(engine, limits=LIMITS, backlog=backlog, allowed=Keys.load(file))
  with working(app) as address:
    one, two = (openai.OpenAI(base_url=f'{address}/v1', api_key=key) for key in ('one', 'two'))
    with one, two:
      bodies = [{'model': name, 'input': 'a b c'} for name in ('qa', 'model', 'loud')]
      made = submit(one, lines(*bodies))
      for call in (two.batches.retrieve, two.batches.cancel):
        with pytest.raises(openai.NotFoundError):
          call(made.id)
      card = wait(one, made)
      assert (card.request_counts.completed, card.request_counts.failed) == (1, 2)
      for id in (card.input_file_id, card.output_file_id, card.error_file_id):
        assert one.files.content(id).read()
        with pytest.raises(openai.NotFoundError):
          two.files.content(id)
      assert [*two.files.list()] == [*two.batches.list()] == []
      # The second step is over the tokens of a minute; the batch waits, and is cancelled.
      many = [{'model': 'qa', 'input': ['a b c d e f'] * 150} for _ in range(6)]
      late = submit(two, lines(*many))
      until(lambda: two.batches.retrieve(late.id).request_counts.completed == 2)
      time.sleep(0.5)
      assert two.batches.retrieve(late.id).status == 'in_progress'
      assert two.batches.cancel(late.id).status == 'cancelling'
      assert two.batches.retrieve(late.id).status == 'cancelling'


def submit(client, content):
  file = client.files.create(file=('in.jsonl', content), purpose='batch')
  return client.batches.create(
    input_file_id=file.id, endpoint='/v1/embeddings', completion_window='24h'
  )


def until(done):
  for _ in range(600):
    if done():
      return
    time.sleep(0.05)
  raise AssertionError


def test_others_come_first(engine, backlog):
  app = App(engine, limits=LIMITS, backlog=backlog)
  bodies = [{'model': 'qa', 'input': ['a b c d e'] * 250} for _ in range(8)]
  body = {'model': 'qa', 'input': 'a question'}
  with working(app) as address, openai.OpenAI(base_url=f'{address}/v1', api_key='x') as client:
    made = submit(client, lines(*bodies))
    seconds = []
    with httpx.Client(base_url=address) as http:
      while client.batches.retrieve(made.id).status not in ('completed', 'failed'):
        began = time.monotonic()
        assert http.post('/v1/embeddings', json=body).status_code == 200
        seconds.append(time.monotonic() - began)
    assert wait(client, made).request_counts.completed == 8
  # Whoever asks waits for a batch of the device, not for 2,000 texts.
  assert len(seconds) > 5 and sorted(seconds)[len(seconds) // 2] < 0.5
