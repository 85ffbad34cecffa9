import contextlib
import os
import threading

import pytest

from dprjax.base import files, reading
from tests.refusals import refused


def test_atomic_files_appear_whole_or_not_at_all(tmp_path):
  path = tmp_path / 'made' / 'a.txt'
  with files.atomic_write(path) as file:
    file.write('old')
  with contextlib.suppress(KeyError), files.atomic_write(path) as file:
    file.write('new')
    raise KeyError
  assert path.read_text() == 'old' and list(path.parent.iterdir()) == [path]
  with refused('made'), files.atomic_write(path.parent):
    pass


def test_links_are_followed_and_devices_written_to(tmp_path):
  target, link, pipe = tmp_path / 'target', tmp_path / 'link', tmp_path / 'pipe'
  target.write_text('old')
  link.symlink_to(target)
  os.mkfifo(pipe)
  for path in (link, '/dev/null'):
    with files.atomic_write(path) as file:
      file.write('new')
  assert link.is_symlink() and target.read_text() == 'new' and files.is_special('/dev/null')
  read = []
  thread = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
  thread.start()
  with files.atomic_write(pipe, 'wb') as file:
    file.write(b'new')
  thread.join()
  assert read == [b'new'] and files.is_special(pipe)
  assert {path.name for path in tmp_path.iterdir()} == {'target', 'link', 'pipe'}


def test_a_folder_is_replaced_or_put_back(tmp_path):
  final = tmp_path / 'model'
  for content in ('old', 'new'):
    with files.atomic_path(final) as aside:
      aside.mkdir()
      (aside / 'a').write_text(content)
  assert (final / 'a').read_text() == 'new' and list(tmp_path.iterdir()) == [final]
  # As after a kill between the two renames, then after them.
  final.rename(tmp_path / '.model.01234567.old')
  files.recover(files.resolved(final))
  assert (final / 'a').read_text() == 'new'
  (tmp_path / '.model.01234567.old').mkdir()
  files.recover(files.resolved(final))
  assert list(tmp_path.iterdir()) == [final]


@pytest.mark.parametrize('scheme', ['file', 'HTTP'])
def test_addresses_are_neither_read_nor_written(scheme):
  path = f'{scheme}://host/corpus.jsonl'
  for use in (lambda: files.existing(path, 'text'), lambda: files.resolved(path)):
    with refused('corpus.jsonl', '//'):
      use()


def test_an_open_file_is_written_to_where_it_is(tmp_path):
  with (tmp_path / 'log').open('w') as log:
    log.write('before\n')
    log.flush()
    for name in (f'/dev/fd/{log.fileno()}', f'/proc/self/fd/{log.fileno()}'):
      assert files.is_stream(name)
      with files.atomic_write(name) as file:
        file.write('here\n')
    log.write('after\n')
  assert (tmp_path / 'log').read_text() == 'before\nhere\nhere\nafter\n'
  assert not files.is_stream(tmp_path / 'log') and files.is_stream('/dev/null')
  with pytest.raises(OSError, match='Bad file descriptor'), files.atomic_write('/dev/fd/98765'):
    pass


@pytest.mark.parametrize('name', ['a\0b', 'a' * 300])
def test_names_that_no_file_has(name):
  for read in (files.existing, files.regular_file):
    with refused('text'):
      read(name, 'text')


def test_json_is_what_json_has(tmp_path):
  with pytest.raises(ValueError, match='JSON'):
    files.write_json(tmp_path / 'a.json', {'a': float('nan')})
  assert not list(tmp_path.iterdir())
  # A path that is no UTF-8 does not lose a report.
  files.write_json(tmp_path / 'a.json', {'path': 'caf\udce9.trec'})
  assert reading.read_json_object(tmp_path / 'a.json') == {'path': 'caf?.trec'}
