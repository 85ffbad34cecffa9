import bz2
import contextlib
import gzip
import lzma
import os
import threading

import pytest

from dprjax.base import files
from dprjax.base.errors import InputError


def test_atomic_files_appear_whole_or_not_at_all(tmp_path):
  path = tmp_path / 'made' / 'a.txt'
  with files.atomic_write(path) as file:
    file.write('old')
  with contextlib.suppress(KeyError), files.atomic_write(path) as file:
    file.write('new')
    raise KeyError
  assert path.read_text() == 'old' and list(path.parent.iterdir()) == [path]
  with pytest.raises(InputError, match='made is a folder; give the name of a file'):
    files.output_file(path.parent)


@pytest.mark.parametrize(
  ('ending', 'pack'),
  [('', bytes), ('.gz', gzip.compress), ('.xz', lzma.compress), ('.bz2', bz2.compress)],
)
def test_lines_are_numbered_and_decompressed(tmp_path, ending, pack):
  path = tmp_path / f'a.txt{ending}'
  path.write_bytes(pack('one\r\n \n\ntwö\n'.encode()))
  assert list(files.read_lines(path)) == [(1, 'one'), (4, 'twö')]
  assert files.plain_name(path) == 'a.txt'
  with files.open_bytes(path) as (file, fraction):
    file.read()
    assert fraction() == 1


def test_a_pipe_is_read_whole(tmp_path):
  path = tmp_path / 'pipe'
  os.mkfifo(path)
  text = '0123456789\n' * 20_000
  for read in (
    lambda: ''.join(f'{line}\n' for _, line in files.read_lines(files.existing(path, 'text'))),
    lambda: _read_bytes(path),
  ):
    thread = threading.Thread(target=path.write_text, args=(text,))
    thread.start()
    assert read() == text
    thread.join()


def _read_bytes(path):
  with files.open_bytes(path) as (file, fraction):
    text = file.read().decode()
    assert fraction() == 0
    return text


@pytest.mark.parametrize(
  ('text', 'records'),
  [
    ('{"a": 1}\n\n{"a": 2}', [(1, {'a': 1}), (3, {'a': 2})]),
    (' [\n{"a": 1}, {"a": "' + 'x' * 99 + '"}]', [(1, {'a': 1}), (2, {'a': 'x' * 99})]),
    ('[]', []),
  ],
)
def test_records_are_lines_or_entries_of_an_array(tmp_path, monkeypatch, text, records):
  monkeypatch.setattr(files, '_CHUNK', 8)
  path = tmp_path / 'a.json'
  path.write_text(text)
  assert [(number, values) for number, _, values in files.read_records(path)] == records


@pytest.mark.parametrize(
  ('read', 'name', 'content', 'message'),
  [
    (files.read_lines, 'lost', None, 'file not found: .*lost'),
    (files.read_lines, 'a', b'', 'file is empty: .*a'),
    (files.read_lines, '.', None, 'file: .* is a folder; give the name of a file'),
    (files.read_lines, 'a', 'ö'.encode('latin-1'), 'a, line 1 or after it: not UTF-8 text'),
    (files.read_records, 'a', 'ö'.encode('latin-1'), 'a: not UTF-8 text'),
    (files.read_lines, 'a.xz', lzma.compress(b'a' * 99)[:-9], 'a.xz: broken or cut-off compressed'),
    (files.read_jsonl, 'a', b'{}\n[]', 'a, line 2: expected a JSON object, found list'),
    (files.read_jsonl, 'a', b'{}\n{', r'a, line 2: not JSON \(.* at column 2\)'),
    (files.read_records, 'a', b'[{}, 5]', 'a, entry 2: expected a JSON object, found int'),
    (files.read_records, 'a', b'[{}, {', 'a, entry 2: not JSON, or cut off'),
  ],
)
def test_errors_name_file_and_line(tmp_path, read, name, content, message):
  if content is not None:
    (tmp_path / name).write_bytes(content)
  with pytest.raises(InputError, match=message):
    list(read(tmp_path / name))


def test_sidecars(tmp_path):
  read = lambda: files.read_sidecar(tmp_path / 'index', 'about.json', 'index', 'abc')  # noqa: E731
  assert read() is None
  files.write_json(tmp_path / 'index' / 'about.json', {'fingerprint': 'abc'})
  assert read() == {'fingerprint': 'abc'}
  files.write_json(tmp_path / 'index' / 'about.json', {'fingerprint': 'other'})
  assert read() is None
  (tmp_path / 'index' / 'about.json').rename(tmp_path / 'index' / 'thesis.tex')
  with pytest.raises(InputError, match='index holds something else than a index; choose another'):
    read()
