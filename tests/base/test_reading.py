import bz2
import gzip
import lzma
from typing import Any

import msgspec
import pytest

from dprjax.base import reading
from tests.refusals import refused


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


@pytest.mark.parametrize(
  ('text', 'records'),
  [
    ('{"a": 1}\n\n{"a": 2}', [(1, {'a': 1}), (3, {'a': 2})]),
    (' [\n{"a": 1}, {"a": "' + 'x' * 99 + '"}]', [(1, {'a': 1}), (2, {'a': 'x' * 99})]),
    ('[]', []),
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
    (reading.read_lines, 'lost', None, 'lost'),
    (reading.read_lines, 'a', b'', 'a'),
    (reading.read_lines, 'a', 'ö'.encode('latin-1'), ('a', 'line 1')),
    (read_records, 'a', 'ö'.encode('latin-1'), 'a'),
    (
      reading.read_lines,
      'a.xz',
      lzma.compress(b'a' * 99)[:-9],
      'a.xz',
    ),
    (read_jsonl, 'a', b'{}\n{', 'line 2'),
    (read_records, 'a', b'[{}, {', 'entry 2'),
    (read_records, 'a', b'[{}]\n[{}]\n', ('a', '[{}]')),
    (read_records, 'a', b'[,{}]', 'entry 1'),
    *(
      (read, 'a', opening + text + closing, ('a', message))
      for read, opening, closing in (
        (reading.read_json_object, b'{"a": ', b'}'),
        (read_jsonl, b'{"a": ', b'}'),
        (read_records, b'[{"a": ', b'}]'),
      )
      for text, message in (
        (b'NaN', 'a'),
        (b'9' * 5000, 'out of range'),
        (b'[' * 20_000 + b']' * 20_000, 'recursion'),
        (b'"\\ud83d"', 'a'),
      )
    ),
  ],
)
def test_errors_name_file_and_line(tmp_path, read, name, content, message):
  if content is not None:
    (tmp_path / name).write_bytes(content)
  with refused(message):
    list(read(tmp_path / name))


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    (b'one\ntwo\0\n', ('a', 'line 2')),
    (b'one\n' + b'x' * 200, ('a', 'line 2', '100')),
    (b'{"a": 1e999}', 'line 1'),
  ],
)
def test_lines_that_no_text_has(tmp_path, monkeypatch, content, message):
  monkeypatch.setattr(reading, 'MAX_ENTRY', 100)
  (tmp_path / 'a').write_bytes(content)
  with refused(message):
    list((read_jsonl if b'{' in content else reading.read_lines)(tmp_path / 'a'))


@pytest.mark.parametrize(
  ('content', 'lines'),
  [
    (b'one\rtwo\r\nth\xe2\x80\xa8ree\x0c\n', [(1, 'one\rtwo'), (2, 'th\u2028ree\x0c')]),
    (b'one\r\rthree\r', [(1, 'one'), (3, 'three')]),  # no newline: of an old Mac
  ],
)
def test_what_ends_a_line(tmp_path, content, lines):
  (tmp_path / 'a').write_bytes(content)
  assert list(reading.read_lines(tmp_path / 'a')) == lines


def test_a_value_of_another_type_is_named_by_file_and_key(tmp_path):
  class Inner(msgspec.Struct):
    size: int

  class Outer(msgspec.Struct):
    inner: list[Inner]

  (tmp_path / 'a.json').write_text('{"inner": [{"size": 1}], "more": null}')
  assert reading.read(tmp_path / 'a.json', 'file', Outer).inner == [Inner(1)]
  (tmp_path / 'b.json').write_text('{"inner": [{"size": "1"}]}')
  with refused('b.json', '$.inner[0].size'):
    reading.read(tmp_path / 'b.json', 'file', Outer)
