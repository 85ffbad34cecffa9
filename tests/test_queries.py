"""Queries for passages, from the command line, and a real server on this machine."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

import generation
from dprjax import queries
from dprjax.base.counts import ReadReport
from dprjax.generation import endpoint, making, prompts
from dprjax.generation.prompts import Request
from dprjax.text import sources
from dprjax.text.qrels import read_qrels
from dprjax.text.texts import PassageRecord
from tests.refusals import command_refused, refused

ROOT = pathlib.Path(__file__).parent.parent
ASKED = '--corpus=corpus.jsonl --out=made --endpoint=http://127.0.0.1:1/v1 --model=m'
THINGS = ('anchor', 'oven', 'glacier', 'violin', 'turbine', 'orchid', 'ledger', 'comet', 'saddle')
ROWS = [
  {
    '_id': f'p{n}',
    'title': f'The {thing} explained',
    'text': f'Every {thing} has a history of its own. Why is the {thing} used at number {n}? '
    f'The {thing} needs care, oil and patience, and whoever owns one keeps it in a dry place. '
    f'Nobody sells a {thing} without regret, as reports from the {thing} market say.',
  }
  for n, thing in enumerate(THINGS)
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(endpoint, '_FIRST_PAUSE_S', 0.01)
  (tmp_path / 'corpus.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in ROWS))
  return tmp_path


class Handler(generation.Handler):
  """Fails for the first requests as ``server.failures`` say, and remembers all."""

  def do_POST(self):
    server = self.server
    with server.lock:
      server.asked.append((self.path, dict(self.headers)))
      failure = server.failures.pop(0) if server.failures else None
    if failure is None:
      super().do_POST()
      return
    self.rfile.read(int(self.headers['Content-Length']))
    status, body, headers = failure
    if status == 0:  # the connection ends
      self.close_connection = True
      return
    self.reply(status, body, headers)


def answer(prompt, most):
  """Three queries about the passage in a prompt, one of them unusable."""
  thing = next(thing for thing in THINGS if f'The {thing} explained' in prompt)
  return f'1. upkeep of {thing}s\n2. {thing} <b>now</b>\n- "{thing} trade"', 'stop', 9, 7


@pytest.fixture
def server():
  made = generation.serve(answer, handler=Handler)
  made.lock, made.asked, made.failures = threading.Lock(), [], []
  made.url = f'http://127.0.0.1:{made.server_port}/v1'
  yield made
  made.shutdown()
  made.server_close()


def contents(folder):
  return {
    path.relative_to(folder).as_posix(): path.read_bytes()
    for path in sorted(folder.rglob('*'))
    if path.is_file()
  }


def lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_sample_is_the_same_of_a_seed_and_leaves_out_short_passages():
  rows = [PassageRecord(row['_id'], row['title'], row['text']) for row in ROWS]
  report = ReadReport()
  [short, first, other] = (
    making.sample_passages([PassageRecord('short', '', 'two words'), *rows], 4, seed, report)
    for seed in (0, 0, 1)
  )
  assert short == first != other and len(other) == 4
  everything = making.sample_passages(rows[::-1], 99, 0, ReadReport())
  assert everything[:4] == first and sorted(everything) == sorted(rows)
  assert report.counts['passages below 8 words: not asked about'] == 3


def test_a_server_is_asked_and_busy_ones_again(folder, command, server, monkeypatch):
  monkeypatch.setenv('MY_KEY', 'very-secret')
  server.failures += [
    (429, {'error': 'slow down'}, (('Retry-After', '0.02'),)),
    (503, {'error': 'busy'}, ()),
    (0, None, ()),
  ]
  flags = (f'--endpoint={server.url}', '--model=m', '--key_env=MY_KEY', '--concurrency=3')
  status, log = command(queries, '--corpus=corpus.jsonl', '--out=made', *flags)
  assert status == 0, log
  assert len(server.asked) == len(ROWS) + 3
  assert {path for path, _ in server.asked} == {'/v1/chat/completions'}
  assert {headers['Authorization'] for _, headers in server.asked} == {'Bearer very-secret'}
  texts = {row['text'] for row in lines(folder / 'made/queries.jsonl')}
  assert texts == {text for t in THINGS for text in (f'upkeep of {t}s', f'{t} trade')}
  report = json.loads((folder / 'made/report.json').read_text())
  assert report['counts']['queries left out: markup'] == len(ROWS)
  # Passages are as they were, and each answer has its prompt.
  assert [row['text'] for row in lines(folder / 'made/corpus.jsonl')] == [r['text'] for r in ROWS]
  kept = lines(folder / 'made.answers.jsonl')
  assert len(kept) == len(ROWS)
  assert all(ROWS[int(one['id'][1:])]['text'] in one['prompt'] for one in kept)
  assert kept[0]['tokens'] == [9, 7] and kept[0]['model'] == 'm'
  for path in folder.rglob('*'):
    assert path.is_dir() or b'very-secret' not in path.read_bytes()
  assert 'very-secret' not in log

  # Answers of another model are asked for; the same are not.
  before, asked = contents(folder / 'made'), len(server.asked)
  assert command(queries, '--corpus=corpus.jsonl', '--out=made', *flags)[0] == 0
  assert len(server.asked) == asked and contents(folder / 'made') == before


@pytest.mark.slow
def test_a_refusal_ends_at_once_without_the_key_and_keeps_the_answers(
  folder, command, server, monkeypatch
):
  monkeypatch.setenv('OPENAI_API_KEY', 'very-secret')
  flags = (f'--endpoint={server.url}', '--model=m', '--concurrency=1')
  server.failures += [None, None, (401, {'error': 'the key very-secret is wrong'}, ())]
  result = command(queries, '--corpus=corpus.jsonl', '--out=made', *flags)
  command_refused(result, '--endpoint', '401', '--model')
  assert 'very-secret' not in result[1]
  assert len(lines(folder / 'made.answers.jsonl')) == 2 and not (folder / 'made').exists()
  # A kill in the middle of a line loses that line only.
  path = folder / 'made.answers.jsonl'
  path.write_bytes(path.read_bytes()[:-20])
  asked = len(server.asked)
  status, log = command(queries, '--corpus=corpus.jsonl', '--out=made', *flags)
  assert status == 0, log
  assert len(server.asked) == asked + len(ROWS) - 1 and len(lines(path)) == len(ROWS)


def test_an_answer_without_choices(server):
  server.failures += [(200, {'choices': []}, ())]
  with refused('--endpoint', 'choices'):
    list(endpoint.ask(endpoint.Server(server.url, 'm', {}), [Request('p0', 'x', 'k')], 1))


def test_a_server_that_stays_busy_is_given_up(server):
  server.failures += [(500, {}, ())] * 3
  busy, waited = endpoint.Server(server.url, 'm', {}, retries=2), []
  with refused('--endpoint', '500', '3'):
    list(endpoint.ask(busy, [Request('p0', 'x', 'k')], 1, waited.append))
  assert len(waited) == 2 and 0.5 <= waited[0] <= 1.5 and 1 <= waited[1] <= 3


def test_answers_are_kept_by_all_that_decides_them():
  asked = ('p', 'm', {'a': 1}), ('q', 'm', {'a': 1}), ('p', 'n', {'a': 1}), ('p', 'm', {'a': 2})
  assert len({prompts.key_of(*one) for one in asked}) == 4


def test_no_redirect_takes_the_key_along(folder, server):
  other = generation.serve(answer, handler=Handler)
  other.lock, other.asked, other.failures = threading.Lock(), [], []
  where = f'http://127.0.0.1:{other.server_port}/v1/chat/completions'
  server.failures += [(302, {}, (('Location', where),))]
  ask = endpoint.ask(
    endpoint.Server(server.url, 'm', {}, 'very-secret'), [Request('p0', 'x', 'k')], 1
  )
  with refused('--endpoint', '302'):
    list(ask)
  assert other.asked == []
  other.shutdown()
  other.server_close()


def test_a_template_and_examples_of_the_task(folder, command, server):
  flags = ('--corpus=corpus.jsonl', '--out=made', f'--endpoint={server.url}', '--model=m')
  (folder / 'template.txt').write_text(
    '{examples}Ask about {title}: The {title} explained {passage}{count}{other}'
  )
  (folder / 'examples.jsonl').write_text('{"passage": "an old {passage}", "query": ["q1", "q2"]}\n')
  status, log = command(queries, *flags, '--template=template.txt', '--examples=examples.jsonl')
  assert status == 0 and '9 prompts' in log, log
  prompt = next(row['prompt'] for row in lines(folder / 'made.answers.jsonl') if row['id'] == 'p0')
  assert prompt.startswith('\nPassage: an old {passage}\nQueries:\nq1\nq2\n')
  assert prompt.endswith(f'explained {ROWS[0]["text"]}3{{other}}')


def test_the_round_trip(folder, command, server):
  command(queries, '--corpus=corpus.jsonl', '--out=made', f'--endpoint={server.url}', '--model=m')
  found = lines(folder / 'made/queries.jsonl')
  rows = [
    (row['_id'], row['_id'].partition('?')[0] if n % 2 else 'p99') for n, row in enumerate(found)
  ]
  (folder / 'run.trec').write_text(''.join(f'{q} Q0 {d} 1 1.0 x\n' for q, d in rows))
  flags = ('--run=run.trec', '--qrels=made/qrels/train.tsv', '--within=1')
  status, log = command(queries, *flags, '--out=made/qrels/found.tsv')
  assert status == 0, log
  kept = read_qrels(folder / 'made/qrels/found.tsv')
  assert list(kept) == [row['_id'] for n, row in enumerate(found) if n % 2]
  assert len(sources.load_dataset(sources.Source('made', 'beir', 'found')).queries) == len(kept)
  (folder / 'run.trec').write_text('q Q0 d 1 1.0 x\n')
  command_refused(command(queries, *flags, '--out=none.tsv'), '--run', 'made/qrels/train.tsv')
  assert not (folder / 'none.tsv').exists()


@pytest.mark.parametrize(
  'arguments, names',
  [
    ('--out=made', '--corpus'),
    ('--corpus=corpus.jsonl --out=made --model=m', '--endpoint'),
    (f'{ASKED} --template=corpus.jsonl', '--template'),
    ('--corpus=corpus.jsonl --out=made --endpoint=http://u:p@h/v1 --model=m', '--key_env'),
    ('--corpus=corpus.jsonl --out=made --endpoint=http://h.example/v1 --model=m', 'https'),
    ('--run=corpus.jsonl --out=made', '--qrels'),
  ],
)
def test_bad_input(folder, command, monkeypatch, arguments, names):
  monkeypatch.setenv('OPENAI_API_KEY', 'very-secret')
  before = sorted(folder.rglob('*'))
  command_refused(command(queries, *arguments.split()), names)
  assert sorted(folder.rglob('*')) == before


@pytest.mark.slow
def test_after_a_kill_the_same_command_asks_the_rest_and_writes_the_same_bytes(
  folder, command, server
):
  flags = ['--corpus=corpus.jsonl', f'--endpoint={server.url}', '--model=m', '--concurrency=1']
  assert command(queries, '--out=whole', *flags)[0] == 0
  calm = server.answer
  gate = threading.Semaphore(4)

  def slow(prompt, most):
    gate.acquire()
    return calm(prompt, most)

  server.answer = slow
  child = subprocess.Popen(
    [sys.executable, '-m', 'dprjax.queries', '--out=killed', *flags],
    cwd=folder,
    env=os.environ | {'PYTHONPATH': str(ROOT)},
    stderr=subprocess.DEVNULL,
  )
  kept = folder / 'killed.answers.jsonl'
  deadline = time.monotonic() + 120
  while not (kept.exists() and len(kept.read_bytes().splitlines()) == 4):
    assert child.poll() is None and time.monotonic() < deadline
    time.sleep(0.05)
  child.send_signal(signal.SIGKILL)
  child.wait()
  server.answer = calm
  for _ in range(20):
    gate.release()
  asked = len(server.asked)
  status, log = command(queries, '--out=killed', *flags)
  assert status == 0, log
  assert len(server.asked) == asked + len(ROWS) - 4
  assert contents(folder / 'killed') == contents(folder / 'whole')
  assert not [path for path in folder.iterdir() if path.name.startswith('.')]
  assert {one['id'] for one in lines(kept)} == {row['_id'] for row in ROWS}
