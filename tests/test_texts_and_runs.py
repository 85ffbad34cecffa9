"""What the commands that read texts, judgements and runs promise of every input and output: bm25,
mine, rerank, evaluate and report.
"""

import json
import os
import threading

import pytest

from dprjax import CrossEncoder, bm25, report, rerank
from tests.commands import evaluate, mine
from tests.refusals import command_refused

TEXTS = {'d1': 'json string', 'd2': 'http server', 'd3': 'xml tree string', 'd4': 'server objects'}
QUERIES = {'q1': 'json string objects', 'q2': 'server', 'q3': 'tree'}
RANKED = {'q1': ['d1', 'd3', 'd4'], 'q2': ['d4', 'd2'], 'q3': ['d3', 'd1']}


def jsonl(key, texts):
  return ''.join(json.dumps({'_id': id_, key: text}) + '\n' for id_, text in texts.items())


# As logits, all of them pass for negatives.
RUN = ''.join(
  f'{query} Q0 {doc} {rank} {-2.5 - rank} tag\n'
  for query, docs in RANKED.items()
  for rank, doc in enumerate(docs, start=1)
)
METRICS = json.dumps({'mean': {'AP': 0.5}, 'per_query': {'AP': {'q1': 0.25, 'q2': 0.75}}})
FILES = {
  'corpus.jsonl': jsonl('text', TEXTS),
  'queries.jsonl': jsonl('text', QUERIES),
  'qrels.tsv': 'query-id\tcorpus-id\tscore\nq1\td1\t1\nq2\td2\t1\nq3\td3\t2\n',
  'run.trec': RUN,
  'answers.jsonl': '{"_id": "q1", "answers": ["tree"]}\n{"_id": "q2", "answers": ["http"]}\n',
  'metrics.json': METRICS,
}
CORPUS, RANKING, JUDGED = {'corpus': 'corpus.jsonl'}, {'run': 'run.trec'}, {'qrels': 'qrels.tsv'}
TEXTS_OF = CORPUS | {'queries': 'queries.jsonl'}
COMMANDS = {
  'bm25': (bm25, TEXTS_OF | JUDGED, 'out.trec'),
  'mine': (mine, TEXTS_OF | JUDGED | RANKING | {'reranked': 'run.trec'}, 'out.jsonl'),
  'rerank': (rerank, TEXTS_OF | RANKING, 'out.trec'),
  'evaluate': (evaluate, RANKING | JUDGED | {'answers': 'answers.jsonl'} | CORPUS, 'out.json'),
  'report': (report, {'metrics': 'metrics.json'}, 'out.md'),
}
INPUTS = [(name, flag) for name, (_, inputs, _) in COMMANDS.items() for flag in inputs]
# A file that is read twice, or hashed, cannot be a pipe.
NO_PIPES = {
  *(('bm25', 'corpus'), ('mine', 'run')),
  *(('rerank', flag) for flag in ('corpus', 'queries', 'run')),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
  for name, text in FILES.items():
    (tmp_path / name).write_text(text)
  monkeypatch.chdir(tmp_path)
  return tmp_path


@pytest.fixture
def go(folder, command, request, monkeypatch):
  """``go(name, **flags)`` -> status and error lines of a command."""

  def run(name, *more, **flags):
    module, inputs, out = COMMANDS[name]
    if name == 'rerank':
      small = request.getfixturevalue('small_cross_encoder')
      monkeypatch.setattr(CrossEncoder, 'load', lambda *_, **__: small)
      flags.setdefault('backbone', 'a-hub-id')
    given = inputs | {'out': out} | flags
    if name == 'report' and 'metrics' in given:
      given['metrics'] = f'a={given["metrics"]}'
    return command(module, *(f'--{flag}={value}' for flag, value in given.items()), *more)

  return run


def content(folder):
  """Every file below a folder with its bytes, links and pipes by their kind."""
  found = {}
  for path in folder.rglob('*'):
    name = str(path.relative_to(folder))
    if path.is_symlink():
      found[name] = ('link', os.readlink(path))
    elif path.is_file():
      found[name] = path.read_bytes()
    else:
      found[name] = 'pipe' if path.is_fifo() else 'folder'
  return found


@pytest.mark.parametrize(('name', 'flag'), INPUTS)
def test_an_output_that_is_an_input_is_refused(go, folder, name, flag):
  path = COMMANDS[name][1][flag]
  (folder / 'soft').symlink_to(path)
  os.link(path, folder / 'hard')  # tests/base/test_outputs.py has other ways
  before = content(folder)
  for out in (path, 'soft', 'hard'):
    command_refused(go(name, out=out), '--out', out)
    assert content(folder) == before
  # The same where the input itself is given by a link.
  command_refused(go(name, **{flag: 'soft', 'out': path}), '--out', path)
  assert content(folder) == before


@pytest.mark.parametrize(('name', 'flag'), INPUTS)
def test_a_pipe_is_read_once_or_refused(go, folder, name, flag):
  path = COMMANDS[name][1][flag]
  assert go(name)[0] == 0
  out = folder / COMMANDS[name][2]
  whole = out.read_bytes()
  out.unlink()
  pipe = folder / f'pipe-{path}'  # its name decides the format
  os.mkfifo(pipe)
  thread = threading.Thread(target=pipe.write_bytes, args=((folder / path).read_bytes(),))
  thread.start()
  answer = go(name, **{flag: pipe.name})
  if (name, flag) in NO_PIPES:
    command_refused(answer, pipe.name)
    pipe.read_bytes()  # so that the thread ends
    assert not out.exists()
  else:
    assert answer[0] == 0, answer[1]
    # Metrics name their files.
    assert out.read_bytes().replace(pipe.name.encode(), path.encode()) == whole
  thread.join()


def test_a_pipe_cannot_be_two_inputs(go, folder):
  os.mkfifo(folder / 'pipe')
  command_refused(go('evaluate', run='pipe', qrels='pipe'), 'pipe')


def sound(text):
  """With a byte-order mark, carriage returns and blank lines, and no newline at the end."""
  return b'\xef\xbb\xbf' + text.replace(b'\n', b'\r\n \r\n').rstrip()


@pytest.mark.slow
@pytest.mark.parametrize(('name', 'flag'), INPUTS)
def test_files_of_other_editors_are_read_alike(go, folder, name, flag):
  assert go(name)[0] == 0
  whole = (folder / COMMANDS[name][2]).read_bytes()
  (folder / f'other-{COMMANDS[name][1][flag]}').write_bytes(
    sound((folder / COMMANDS[name][1][flag]).read_bytes())
  )
  status, errors = go(name, **{flag: f'other-{COMMANDS[name][1][flag]}'})
  assert status == 0, errors
  found = (folder / COMMANDS[name][2]).read_bytes()
  assert found.replace(b'other-', b'') == whole  # a report names its file


@pytest.mark.parametrize(
  ('name', 'flag'), [(name, flag) for name, flag in INPUTS if flag not in ('metrics', 'qrels')]
)
def test_ids_that_cannot_be_used_are_named_by_file_and_line(go, folder, name, flag):
  bad = 'x\x01y'  # tests/text has others
  path = folder / f'bad-{COMMANDS[name][1][flag]}'
  if flag in ('run', 'reranked'):
    lines = [*RUN.splitlines()[:-1], f'q3 Q0 {bad} 9 -9.5 tag']
    path.write_text('\n'.join(lines) + '\n', newline='')
  else:
    texts = list(FILES[COMMANDS[name][1][flag]].splitlines())
    record = json.loads(texts[-1]) | {'_id': bad}
    path.write_text('\n'.join([*texts[:-1], json.dumps(record)]) + '\n')
  number = path.read_bytes().count(b'\n')
  before = content(folder)
  command_refused(go(name, **{flag: path.name}), path.name, f'line {number}')
  assert content(folder) == before


@pytest.mark.parametrize('name', [name for name in COMMANDS if name != 'rerank'])
def test_a_full_disk_is_named(go, folder, name):
  before = content(folder)
  command_refused(go(name, out='/dev/full'), '/dev/full')
  assert content(folder) == before


def test_a_run_with_results_beside_it_is_a_file(go):
  command_refused(go('rerank', out='/dev/null'), '--out', '/dev/null')
  assert not os.path.lexists('/dev/null.parts')


def test_a_kept_index_is_apart(go, folder):
  (folder / 'inner').mkdir()
  assert go('bm25', '--index_dir=index')[0] == 0
  # By a link, the folder that it leads to is the index.
  (folder / 'link').symlink_to('inner')
  assert go('bm25', '--index_dir=link')[0] == 0
  assert (folder / 'link').is_symlink() and (folder / 'inner' / 'ids.txt').exists()
  before = content(folder)
  # A corpus that lies in the index folder would be lost with it.
  (folder / 'index' / 'corpus.jsonl').write_text(FILES['corpus.jsonl'])
  result = go('bm25', '--index_dir=index', corpus='index/corpus.jsonl')
  command_refused(result, '--index_dir=index', '--corpus=index/corpus.jsonl')
  (folder / 'index' / 'corpus.jsonl').unlink()
  command_refused(go('bm25', '--index_dir=index', out='index/out.trec'), '--index_dir', '--out')
  assert content(folder) == before


@pytest.mark.slow
@pytest.mark.parametrize('name', ['bm25', 'mine', 'evaluate'])
def test_all_commands_read_the_same_judgements(go, folder, name):
  grade, header = '+1.0', 'q\td\tGrade\n'
  assert go(name)[0] == 0
  whole = (folder / COMMANDS[name][2]).read_bytes()
  judged = f'q1\td1\t{grade}\nq2\td2\t{grade}\nq3\td3\t2.0\n'
  (folder / 'qrels.tsv').write_text(header + judged)
  assert go(name)[0] == 0
  assert (folder / COMMANDS[name][2]).read_bytes() == whole
  (folder / 'qrels.tsv').write_text(f'{header}{judged}q3\td1\t0.5\n')
  command_refused(go(name), 'qrels.tsv', 'line 5', '0.5')
