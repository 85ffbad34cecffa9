import os

from etils import epath

from dprjax.base import stamps


def test_files_are_known_by_size_time_and_content(tmp_path):
  path = epath.Path(tmp_path) / 'a'
  path.write_text('one')
  before = stamps.of({'text': path})
  assert stamps.changes(before, {'text': path}) == []
  os.utime(path)  # touched
  assert stamps.changes(before, {'text': path}) == []
  path.write_text('two')
  assert stamps.changes(before, {'text': path, 'more': path}) == ['text', 'more']
