import os

import pytest
from etils import epath

from dprjax.base import files, provenance
from tests.refusals import refused


@pytest.fixture
def folder(tmp_path):
  made = epath.Path(tmp_path) / 'index'
  (made / 'part').mkdir(parents=True)
  (made / 'part' / 'a').write_text('a')
  provenance.write(made, 'about.json', fingerprint='abc', count=3)
  return made


def kept(folder, fingerprint='abc'):
  return provenance.kept(folder, 'about.json', fingerprint)


def test_a_folder_is_used_again_for_the_same_inputs(folder, tmp_path):
  assert kept(folder)['count'] == 3 and kept(folder, 'other') is None
  assert kept(epath.Path(tmp_path) / 'nowhere') is None


@pytest.mark.parametrize(
  ('harm', 'name', 'always'),
  [
    (lambda f: (f / 'part/a').write_text('b'), 'part/a', False),
    (lambda f: (f / 'notes.txt').write_text('mine'), 'notes.txt', True),
    (lambda f: edit(f, '"count": 3', '"count": 4'), 'about.json', True),
    (lambda f: (f / 'about.json').write_text('{'), 'about.json', True),
  ],
)
def test_damage_and_what_somebody_added_are_named(folder, harm, name, always):
  harm(folder)
  with refused(name):
    kept(folder)
  if always:  # not replaced either
    with refused(name):
      kept(folder, 'other')
  else:
    assert kept(folder, 'other') is None


def edit(folder, old, new):
  text = (folder / 'about.json').read_text()
  assert old in text
  (folder / 'about.json').write_text(text.replace(old, new))


@pytest.mark.parametrize('name', ['../secret', 'part/../../secret', 'a\0b'])
def test_a_record_cannot_have_another_file_read(folder, tmp_path, name):
  (tmp_path / 'secret').write_text('s')
  record = {'fingerprint': 'abc', 'sha256': provenance.sums(folder / 'part') | {name: 'a'}}
  record['sha256'] = {f'part/{inside}': sha for inside, sha in record['sha256'].items()}
  files.write_json(folder / 'about.json', record | {'own_sha256': provenance.digest(record)})
  with refused(folder):
    kept(folder)


def test_files_are_known_by_size_time_and_content(tmp_path):
  path = epath.Path(tmp_path) / 'a'
  path.write_text('one')
  before = provenance.stamp({'text': path})
  assert provenance.changes(before, {'text': path}) == []
  os.utime(path)  # touched
  assert provenance.changes(before, {'text': path}) == []
  path.write_text('two')
  assert provenance.changes(before, {'text': path, 'more': path}) == ['text', 'more']
