import bz2
import gzip
import lzma
import os
import threading
from typing import Any

import msgspec
import pytest

from dprjax.base import files, reading
from dprjax.base.errors import InputError


def read_jsonl(path):
  return reading.read_jsonl(path, 'file', dict[str, Any])


def read_records(path):
  return reading.read_records(path, 'file', dict[str, Any])


@pytest.mark.parametrize(
  ('ending', 'pack'),
  [('', bytes), ('.gz', gzip.compress), ('.xz', lzma.compress), ('.bz2', bz2.compress)],
)
def test_lines_are_numbered_and_decompressed(tmp_path, ending, pack):
  path = tmp_path / f'a.txt{ending}'
  path.write_bytes(pack('one\r\n \n\ntwö\n'.encode()))
  assert list(reading.read_lines(path)) == [(1, 'one'), (4, 'twö')]
  assert reading.plain_name(path) == 'a.txt'
  with reading.open_bytes(path) as (file, fraction):
    file.read()
    assert fraction() == 1


def test_a_pipe_is_read_whole(tmp_path):
  path = tmp_path / 'pipe'
  os.mkfifo(path)
  text = '0123456789\n' * 20_000
  for read in (
    lambda: ''.join(f'{line}\n' for _, line in reading.read_lines(files.existing(path, 'text'))),
    lambda: _read_bytes(path),
  ):
    thread = threading.Thread(target=path.write_text, args=(text,))
    thread.start()
    assert read() == text
    thread.join()


def _read_bytes(path):
  with reading.open_bytes(path) as (file, fraction):
    text = file.read().decode()
    assert fraction() == 0
    return text


@pytest.mark.parametrize(
  ('text', 'records'),
  [
    ('{"a": 1}\n\n{"a": 2}', [(1, {'a': 1}), (3, {'a': 2})]),
    (' [\n{"a": 1}, {"a": "' + 'x' * 99 + '"}]', [(1, {'a': 1}), (2, {'a': 'x' * 99})]),
    ('[]', []),
    ('\ufeff{"a": 1}', [(1, {'a': 1})]),
    ('\ufeff[{"a": 1} , {}]', [(1, {'a': 1}), (2, {})]),
  ],
)
def test_records_are_lines_or_entries_of_an_array(tmp_path, monkeypatch, text, records):
  monkeypatch.setattr(reading, '_CHUNK', 8)
  path = tmp_path / 'a.json'
  path.write_text(text)
  assert [(number, values) for number, _, values in read_records(path)] == records


@pytest.mark.parametrize(
  ('read', 'name', 'content', 'message'),
  [
    (reading.read_lines, 'lost', None, 'file not found: .*lost'),
    (reading.read_lines, 'a', b'', 'file is empty: .*a'),
    (reading.read_lines, '.', None, 'file: .* is a folder; give the name of a file'),
    (reading.read_lines, 'a', 'ö'.encode('latin-1'), 'a, line 1 or after it: not UTF-8 text'),
    (read_records, 'a', 'ö'.encode('latin-1'), 'a: not UTF-8 text'),
    (
      reading.read_lines,
      'a.xz',
      lzma.compress(b'a' * 99)[:-9],
      'a.xz: broken or cut-off compressed',
    ),
    (read_jsonl, 'a', b'{}\n[]', 'a, line 2: Expected `object`, got `array`'),
    (read_jsonl, 'a', b'{}\n{', 'a, line 2: .*truncated'),
    (read_records, 'a', b'[{}, 5]', 'a, entry 2: Expected `object`, got `int`'),
    (read_records, 'a', b'[{}, {', 'a, entry 2: not JSON, or cut off'),
    (read_records, 'a', b'[{} {}]', 'a: no comma after entry 1'),
    (read_records, 'a', b'[{}]\n[{}]\n', r"a: '\[\{\}\]' after the end of the list"),
    (read_records, 'a', b'[{},]', 'a, entry 2: not JSON, or cut off'),
    (read_records, 'a', b'[,{}]', 'a, entry 1: not JSON, or cut off'),
    *(
      (read, 'a', opening + text + closing, f'a.*(1|): .*{message}')
      for read, opening, closing in (
        (reading.read_json_object, b'{"a": ', b'}'),
        (read_jsonl, b'{"a": ', b'}'),
        (read_records, b'[{"a": ', b'}]'),
      )
      for text, message in (
        (b'NaN', 'malformed'),
        (b'-Infinity', ''),
        (b'9' * 5000, 'out of range'),
        (b'[' * 20_000 + b']' * 20_000, 'recursion'),
        (b'"\\ud83d"', 'surrogate pair'),
      )
    ),
  ],
)
def test_errors_name_file_and_line(tmp_path, read, name, content, message):
  if content is not None:
    (tmp_path / name).write_bytes(content)
  with pytest.raises(InputError, match=message):
    list(read(tmp_path / name))


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    (b'one\ntwo\0\n', r'a, line 2: a null byte in the text; the file is damaged'),
    (b'one\n' + b'x' * 200, r'a, line 2: longer than 100 characters; is this a text file'),
    (b'one\n' + b'x' * 200 + b'\nthree\n', r'a, line 2: longer than 100 characters'),
    (b'{"a": 1e999}', r'a, line 1: Number out of range'),
    (b'{"a": ' + b'9' * 60 + b'.5e300}', r'a, line 1: Number out of range'),
  ],
)
@pytest.mark.parametrize('start', [b'', b'\xef\xbb\xbf'])
def test_lines_that_no_text_has(tmp_path, monkeypatch, content, message, start):
  monkeypatch.setattr(reading, 'MAX_ENTRY', 100)
  (tmp_path / 'a').write_bytes(start + content)
  with pytest.raises(InputError, match=message):
    list((read_jsonl if b'{' in content else reading.read_lines)(tmp_path / 'a'))


def test_a_newline_alone_ends_a_line(tmp_path):
  (tmp_path / 'a').write_bytes(b'one\rtwo\r\nth\xe2\x80\xa8ree\x0c\n')
  assert list(reading.read_lines(tmp_path / 'a')) == [(1, 'one\rtwo'), (2, 'th\u2028ree\x0c')]


def test_json_is_not_read_without_end(tmp_path, monkeypatch):
  monkeypatch.setattr(reading, '_MAX_JSON', 100)
  (tmp_path / 'a').write_text('[' + '1, ' * 100 + '1]')
  with pytest.raises(InputError, match=r'file .*a: longer than 100 characters'):
    reading.read_json_object(tmp_path / 'a')


def test_whole_surrogate_pairs_and_wide_lists_are_sound():
  text = '{"a": "\\ud83d\\ude00", "b": [' + ', '.join(['[]'] * 100) + ']}'
  assert reading.parse_object(text, 'a')['a'] == '\U0001f600'


def test_a_value_of_another_type_is_named_by_file_and_key(tmp_path):
  class Inner(msgspec.Struct):
    size: int

  class Outer(msgspec.Struct):
    inner: list[Inner]

  (tmp_path / 'a.json').write_text('{"inner": [{"size": 1}], "more": null}')
  assert reading.read(tmp_path / 'a.json', 'file', Outer).inner == [Inner(1)]
  (tmp_path / 'b.json').write_text('{"inner": [{"size": "1"}]}')
  with pytest.raises(InputError, match=r'b\.json.*`\$\.inner\[0\]\.size`'):
    reading.read(tmp_path / 'b.json', 'file', Outer)
