"""Folders that are built once: who builds, who waits, and the state after a failure."""

import numpy as np
import pytest
from etils import epath

from dprjax.base import outputs
from dprjax.base.counts import ReadReport
from dprjax.text import fingerprint
from tests.refusals import refused


def build(tmp_path, text, settings, process=0):
  """Builds a folder with the content of a file in capitals; returns whether it had to."""
  source = epath.Path(tmp_path / 'source.txt')
  source.write_text(text)

  def write(aside):
    aside.mkdir()
    (aside / 'content').write_text(text.upper())
    return fingerprint.Built({'sizes': np.array([len(text)])}, ReadReport(), {'pad_id': 7})

  folder = epath.Path(tmp_path / 'made')
  return fingerprint.build_once(folder, 'made', settings, {'text': source}, write, process)


@pytest.mark.parametrize(
  ('harm', 'words'),
  [
    (lambda made: (made / 'content').write_text('ONe'), ('made', 'content')),
    (lambda made: (made / 'content').unlink(), ('made', 'content')),
    (lambda made: (made / 'lengths.npz').write_text('x'), 'lengths.npz'),
    (lambda made: _edit(made, '"pad_id": 7', '"pad_id": 8'), 'made.json'),
    (lambda made: (made / 'made.json').write_text('[' * 9999 + ']' * 9999), 'made.json'),
  ],
)
def test_what_was_damaged_since_is_not_used(tmp_path, harm, words):
  assert build(tmp_path, 'one', {}) and not build(tmp_path, 'one', {})
  harm(tmp_path / 'made')
  with refused(words):
    build(tmp_path, 'one', {})


def _edit(made, old, new):
  text = (made / 'made.json').read_text()
  assert old in text
  (made / 'made.json').write_text(text.replace(old, new))


def test_what_somebody_put_into_it_is_not_removed(tmp_path):
  build(tmp_path, 'one', {})
  (tmp_path / 'made' / 'notes').write_text('mine')
  with refused('made'):
    build(tmp_path, 'two', {})
  assert (tmp_path / 'made' / 'notes').read_text() == 'mine'


def test_a_folder_of_something_else_is_kept(tmp_path):
  (tmp_path / 'made').mkdir()
  (tmp_path / 'made' / 'thesis.tex').write_text('years of work')
  with refused('made'):
    build(tmp_path, 'one', {})
  assert (tmp_path / 'made' / 'thesis.tex').exists()


def test_two_commands_that_build_at_once(tmp_path):
  with outputs.hold(epath.Path(tmp_path / '.made.lock'), 'it'), refused('made'):
    build(tmp_path, 'one', {})
  (tmp_path / '.made.0123abcd.tmp').mkdir()  # of one that was killed
  assert build(tmp_path, 'one', {})
  assert sorted(path.name for path in tmp_path.iterdir()) == ['made', 'source.txt']


def test_only_process_0_builds(tmp_path, monkeypatch):
  monkeypatch.setattr(fingerprint, '_WAIT_S', 0.0)
  with refused('made', '0'):
    build(tmp_path, 'one', {}, process=1)
  assert not (tmp_path / 'made').exists()
  # Others wait for it.
  monkeypatch.setattr(fingerprint, '_WAIT_S', 60.0)
  monkeypatch.setattr(fingerprint.time, 'sleep', lambda _: build(tmp_path, 'one', {}))
  assert not build(tmp_path, 'one', {}, process=1) and (tmp_path / 'made' / 'content').exists()
