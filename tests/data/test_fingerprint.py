"""What is built once: who builds, who waits, what a failure leaves, and what progress says."""

import pytest
from etils import epath

from dprjax.base import files
from dprjax.base.errors import InputError
from dprjax.data import fingerprint


def build(tmp_path, text, settings, fails=False, **options):
  """Whether a folder that holds one file's content in capitals had to be built."""
  source = epath.Path(tmp_path / 'source.txt')
  source.write_text(text)

  def write(aside, stamps):
    aside.mkdir()
    (aside / 'content').write_text(text.upper())
    if fails:
      raise InputError('no')
    files.write_json(aside / 'made.json', {'settings': settings, 'files': stamps})

  return fingerprint.build_once(
    epath.Path(tmp_path / 'made'),
    'made.json',
    settings,
    {'text': source},
    write,
    **{'process_index': 0, 'wait_s': 0} | options,
  )


def test_it_is_built_for_new_settings_and_new_content(tmp_path):
  assert build(tmp_path, 'one', {'format_version': 1})
  assert not build(tmp_path, 'one', {'format_version': 1})  # written anew, with the same bytes
  assert not build(tmp_path, 'one', {'format_version': 1}, process_index=1)
  assert build(tmp_path, 'one', {'format_version': 1, 'length': 2})
  assert build(
    tmp_path, 'two', {'format_version': 1, 'length': 2}
  )  # as long, within the same second
  assert (tmp_path / 'made' / 'content').read_text() == 'TWO'


def test_a_failure_leaves_what_was_there(tmp_path):
  for _ in range(2):
    with pytest.raises(InputError, match='no'):
      build(tmp_path, 'three', {}, fails=True)
  assert [path.name for path in tmp_path.iterdir()] == ['source.txt']
  build(tmp_path, 'one', {})
  with pytest.raises(InputError, match='no'):
    build(tmp_path, 'three', {}, fails=True)
  assert (tmp_path / 'made' / 'content').read_text() == 'ONE'


def test_only_process_0_builds(tmp_path):
  with pytest.raises(InputError, match='process 0 has not built the store within 0 s'):
    build(tmp_path, 'one', {}, process_index=1)
  assert not (tmp_path / 'made').exists()
