import multiprocessing
import os
import signal

import pytest

from dprjax.base import outputs
from tests.refusals import refused


@pytest.fixture
def inputs(tmp_path):
  (tmp_path / 'folder' / 'inner').mkdir(parents=True)
  (tmp_path / 'folder' / 'inner' / 'a').write_text('a')
  (tmp_path / 'corpus').write_text('corpus')
  (tmp_path / 'run.json').write_text('queries')
  os.link(tmp_path / 'corpus', tmp_path / 'hard')
  os.link(tmp_path / 'folder' / 'inner' / 'a', tmp_path / 'hard_inner')
  (tmp_path / 'soft').symlink_to('corpus')
  (tmp_path / 'folder_link').symlink_to('folder')
  return {
    '--corpus': tmp_path / 'corpus',
    '--queries': [str(tmp_path / 'run.json')],
    '--backbone': str(tmp_path / 'folder'),
    '--prompt': None,
    '--model': 'some/hub-id',
  }


def content(folder):
  return {
    str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
    for path in folder.rglob('*')
  }


@pytest.mark.parametrize(
  ('out', 'message'),
  [
    ('corpus', '--corpus'),
    ('hard', '--corpus'),
    ('soft', '--corpus'),
    ('run', ('run.json', '--queries')),
    ('folder', '--out'),
    ('folder_link/new', '--backbone'),
    ('http://host/a', 'http://'),
  ],
)
def test_a_file_that_would_harm_an_input_is_refused(tmp_path, inputs, monkeypatch, out, message):
  monkeypatch.chdir(tmp_path)
  before = content(tmp_path)
  with refused(message), outputs.claim(out, inputs):
    pass
  assert content(tmp_path) == before


@pytest.mark.parametrize(
  ('out', 'message'),
  [
    ('folder', '--backbone'),
    ('.', '--corpus'),
    ('theirs', ('--out', 'theirs')),
  ],
)
def test_a_folder_that_would_harm_an_input_is_refused(tmp_path, inputs, out, message):
  (tmp_path / 'theirs').mkdir()
  (tmp_path / 'theirs' / 'thesis.tex').write_text('')
  before = content(tmp_path)
  claim = outputs.claim_folder(tmp_path / out, inputs, what='a model', ours=lambda folder: False)
  with refused(message), claim:
    pass
  assert content(tmp_path) == before


def test_leftovers_of_killed_commands_are_removed_and_others_are_not(tmp_path):
  left = ('.run.0123abcd.tmp', '.run.json.0123abcd.tmp')
  others = ('.run.trec.0123abcd.tmp', '.runs.0123abcd.tmp', 'run.0123abcd.tmp')
  for name in (*left, *others):
    (tmp_path / name).write_text('')
  with outputs.claim(tmp_path / 'run', {}):
    assert {path.name for path in tmp_path.iterdir()} == {*others, '.run.lock'}
  assert {path.name for path in tmp_path.iterdir()} == set(others)


def _hold(path, grows, held):
  claim = (
    outputs.claim_folder(path, {}, what='a run', ours=lambda folder: True, grows=True)
    if grows
    else outputs.claim(path, {})
  )
  with claim:
    held.set()
    signal.pause()


@pytest.mark.parametrize('grows', [False, True])
def test_two_commands_do_not_write_one_output_and_a_killed_one_does_not_block_it(tmp_path, grows):
  spawn = multiprocessing.get_context('spawn')
  held, path = spawn.Event(), tmp_path / 'out'
  process = spawn.Process(target=_hold, args=(path, grows, held))
  process.start()
  assert held.wait(60)

  def claim():
    if grows:
      return outputs.claim_folder(path, {}, what='a run', ours=lambda folder: True, grows=True)
    return outputs.claim(path, {})

  with refused('--out'), claim():
    pass
  process.kill()
  process.join()
  with claim():
    pass
  # The killed command had made its folder.
  assert [path.name for path in tmp_path.rglob('*')] == ['out'] * grows


def test_remote_outputs_are_compared_by_name():
  inputs = {'--corpus': 'gs://bucket/data/corpus.jsonl', '--backbone': 'gs://bucket/model/'}
  for out in ('gs://bucket/data', 'gs://bucket/model', 'gs://bucket/model/prompt.npz'):
    with refused('--out'):
      outputs.check_apart(out, inputs)
  outputs.check_apart('gs://bucket/models', inputs)


@pytest.mark.parametrize(
  ('one', 'other', 'apart'),
  [
    ('a', 'b', True),
    ('a', './x/../a', False),
    ('a', 'a/b', False),
    ('a', 'link', False),
    ('/dev/null', '/dev/null', True),
  ],
)
def test_outputs_of_one_command_do_not_overwrite_each_other(
  tmp_path, monkeypatch, one, other, apart
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'link').symlink_to('a')
  claim = outputs.claim(one, {}, endings=('',), also={'--figure': other}, lock=False)
  if apart:
    with claim:
      return
  with refused('--figure='), claim:
    pass


def test_an_input_that_is_missing_is_no_output_either(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with refused('--out=new', '--run=./new'):
    outputs.check_apart('new', {'--run': './new', '--corpus': 'a\0b'})
  outputs.check_apart('org/model/prompt.npz', {'--backbone': 'org/model'})  # a hub id


def test_a_report_is_an_output_too(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with refused('--index_dir=a.json'), outputs.claim('a', {}, also={'--index_dir': 'a.json'}):
    pass
  also = {'--figure': 'b', '--tsne': './b'}
  with refused('--figure=b'), outputs.claim(None, {}, also=also):
    pass


def test_a_device_has_no_report_beside_it():
  with outputs.claim('/dev/null', {'--run': '/dev/null'}):
    outputs.write_report('/dev/null', {'a': 1})
  assert not os.path.lexists('/dev/null.json')
