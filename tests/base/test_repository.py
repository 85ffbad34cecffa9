"""Repositories of a hub on loopback."""

import json

import pytest
from huggingface_hub import constants

from dprjax.base import provenance, repository
from tests import fake_hub
from tests.refusals import refused

COMMIT = 'a' * 40


@pytest.fixture
def hub(tmp_path):
  with fake_hub.serve(tmp_path / 'cache') as running:
    yield running


@pytest.mark.parametrize(
  ('text', 'expected'),
  [
    ('user/na.me-2@v1.0', ('user/na.me-2', 'v1.0')),
    (f'user/name@{COMMIT}', ('user/name', COMMIT)),
    ('roberta-large', ('roberta-large', None)),
    ('a/b/c', None),
    ('user/name@../x', None),
  ],
)
def test_names(text, expected):
  assert repository.parse(text) == (None if expected is None else repository.Reference(*expected))


@pytest.fixture
def folder(tmp_path):
  made = tmp_path / 'made'
  (made / 'sub').mkdir(parents=True)
  (made / 'prompt.npz').write_bytes(b'a prompt')
  (made / 'README.md').write_text('---\ntags: ["x"]\n---\n')
  (made / 'sub' / 'more.json').write_text('{}')
  provenance.write_mark(made, 'dprjax.model', files=provenance.sums(made))
  return made


def test_a_file_of_a_repository_is_checked_and_kept(hub, folder, tmp_path, caplog):
  files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob('*.*')}
  commit = hub.add('me/mine', files)
  caplog.set_level('INFO', 'dprjax')
  found = repository.locate('me/mine', 'prompt.npz', 'prompt')
  assert found.read_bytes() == b'a prompt' and repository.commit_of(found.parent) == commit
  assert f'to stay with it: me/mine@{commit}' in caplog.text
  # No more than is read.
  assert sorted(path.name for path in found.parent.iterdir()) == ['dprjax.json', 'prompt.npz']
  # A later commit does not change a pinned version, which needs no hub either.
  later = hub.add('me/mine', {'prompt.npz': b'another'})
  hub.asked.clear()
  constants.HF_HUB_OFFLINE = True
  assert repository.locate(f'me/mine@{commit}', 'prompt.npz', 'prompt') == found
  assert hub.asked == []
  constants.HF_HUB_OFFLINE = False
  with refused('prompt.npz'):
    repository.locate(f'me/mine@{later}', 'prompt.npz', 'prompt')


@pytest.mark.parametrize(
  ('name', 'message'),
  [
    ('me/none', 'me/none'),
    (f'me/other@{COMMIT}', f'me/other@{COMMIT}'),
  ],
)
def test_repositories_without_it(hub, name, message):
  hub.add('me/other', {'config.json': b'{}'})
  with refused(message):
    repository.locate(name, 'prompt.npz', 'prompt')


def test_paths_come_first(tmp_path, monkeypatch):
  # Without a hub: whatever is here, or looks like a file, is not asked for.
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'me').mkdir()
  (tmp_path / 'me' / 'file').write_text('x')
  for name in ('me/file', 'me/absent.npz', 'absent', 'a/b/c', str(tmp_path / 'no')):
    assert str(repository.locate(name, 'prompt.npz', 'prompt')) == name
  (tmp_path / 'me' / 'folder').mkdir()
  (tmp_path / 'me' / 'folder' / 'prompt.npz').write_text('x')
  (tmp_path / 'me' / 'folder' / 'dprjax.json').write_text(
    json.dumps({'files': {'prompt.npz': 'y'}})
  )
  with refused('prompt.npz', 'dprjax.json'):
    repository.locate('me/folder', 'prompt.npz', 'prompt')
  (tmp_path / 'me' / 'folder' / 'dprjax.json').unlink()
  assert repository.locate('me/folder', 'prompt.npz', 'prompt').read_text() == 'x'
  with refused('ftp://'):
    repository.locate('ftp://host/prompt.npz', 'prompt.npz', 'prompt')
