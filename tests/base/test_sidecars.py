import os

import pytest

from dprjax.base import files, sidecars
from tests.refusals import refused


def test_sidecars_name_what_a_folder_holds_and_notice_damage(tmp_path):
  folder = tmp_path / 'index'

  def read(format='my.index', fingerprint='abc'):
    return sidecars.read_sidecar(folder, 'about.json', format, 'index', fingerprint)

  assert read() is None
  folder.mkdir()
  assert read() is None
  (folder / 'part').mkdir()
  (folder / 'part' / 'a').write_text('a')
  with refused('index'):
    read()
  sidecars.write_sidecar(folder, 'about.json', 'my.index', 'abc', count=3)
  assert read()['count'] == 3 and read(fingerprint='other') is None
  with refused('index'):
    read(format='your.index')
  sidecar = (folder / 'about.json').read_text()
  (folder / 'about.json').write_text(sidecar.replace('"count": 3', '"count": 4'))
  with refused('about.json'):
    read()
  (folder / 'about.json').write_text(sidecar)
  (folder / 'part' / 'a').write_text('b')
  with refused('part/a'):
    read()
  (folder / 'part' / 'a').unlink()
  with refused('part/a'):
    read()


@pytest.mark.parametrize(
  'name', ['../secret', '/dev/zero', 'part/../../secret', 'a\0b', 'pipe', 'part']
)
def test_a_sidecar_cannot_have_another_file_read(tmp_path, name):
  (tmp_path / 'secret').write_text('s')
  folder = tmp_path / 'index'
  (folder / 'part').mkdir(parents=True)
  os.mkfifo(folder / 'pipe')
  files.write_json(
    folder / 'about.json', {'format': 'my.index', 'fingerprint': 'abc', 'sha256': {name: 'a'}}
  )
  with refused('index'):
    sidecars.read_sidecar(folder, 'about.json', 'my.index', 'index', 'abc')


@pytest.mark.parametrize('fingerprint', ['abc', 'other'])
def test_what_somebody_added_to_a_folder_of_ours_is_not_replaced(tmp_path, fingerprint):
  folder = tmp_path / 'index'
  folder.mkdir()
  (folder / '.hidden').write_text('mine')
  with refused('index'):
    sidecars.read_sidecar(folder, 'about.json', 'my.index', 'index', fingerprint)
  (folder / '.hidden').unlink()
  sidecars.write_sidecar(folder, 'about.json', 'my.index', 'abc')
  (folder / 'notes.txt').write_text('mine')
  with refused('notes.txt'):
    sidecars.read_sidecar(folder, 'about.json', 'my.index', 'index', fingerprint, complete=True)
