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
  refused = pytest.raises(InputError, match='made is a folder; give the name of a file')
  with refused, files.atomic_write(path.parent):
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


@pytest.mark.parametrize('exchange', [True, False])
def test_a_folder_is_replaced_without_a_moment_without_one(tmp_path, monkeypatch, exchange):
  final = tmp_path / 'model'
  if not exchange:  # a file system that cannot
    monkeypatch.setattr(files, '_renameat2', lambda: None)
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
    ('\ufeff{"a": 1}', [(1, {'a': 1})]),
    ('\ufeff[{"a": 1} , {}]', [(1, {'a': 1}), (2, {})]),
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
    (files.read_records, 'a', b'[{} {}]', 'a: no comma after entry 1'),
    (files.read_records, 'a', b'[{}]\n[{}]\n', r"a: '\[\{\}\]' after the end of the list"),
    (files.read_records, 'a', b'[{},]', 'a, entry 2: not JSON, or cut off'),
    (files.read_records, 'a', b'[,{}]', 'a, entry 1: not JSON, or cut off'),
    *(
      (read, 'a', opening + text + closing, f'a.*(1|): .*{message}')
      for read, opening, closing in (
        (files.read_json, b'{"a": ', b'}'),
        (files.read_jsonl, b'{"a": ', b'}'),
        (files.read_records, b'[{"a": ', b'}]'),
      )
      for text, message in (
        (b'NaN', 'NaN is not JSON'),
        (b'-Infinity', '-Infinity is not JSON'),
        (b'9' * 5000, 'Exceeds the limit .* for integer string conversion'),
        (b'[' * 2000 + b']' * 2000, 'JSON nested deeper than 64'),
        (b'[' * 70 + b']' * 70, 'JSON nested deeper than 64'),
        (b'{"b":' * 70 + b'1' + b'}' * 70, 'JSON nested deeper than 64'),
        (b'"\\ud83d"', 'half of a surrogate pair'),
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
    (b'{"a": 1e999}', r'a, line 1: the number 1e999 is too large'),
    (b'{"a": ' + b'9' * 60 + b'.5e300}', r'a, line 1: the number 9{40} is too large'),
  ],
)
@pytest.mark.parametrize('start', [b'', b'\xef\xbb\xbf'])
def test_lines_that_no_text_has(tmp_path, monkeypatch, content, message, start):
  monkeypatch.setattr(files, '_MAX_ENTRY', 100)
  (tmp_path / 'a').write_bytes(start + content)
  with pytest.raises(InputError, match=message):
    list((files.read_jsonl if b'{' in content else files.read_lines)(tmp_path / 'a'))


def test_a_newline_alone_ends_a_line(tmp_path):
  (tmp_path / 'a').write_bytes(b'one\rtwo\r\nth\xe2\x80\xa8ree\x0c\n')
  assert list(files.read_lines(tmp_path / 'a')) == [(1, 'one\rtwo'), (2, 'th\u2028ree\x0c')]


def test_json_is_not_read_without_end(tmp_path, monkeypatch):
  monkeypatch.setattr(files, '_MAX_JSON', 100)
  (tmp_path / 'a').write_text('[' + '1, ' * 100 + '1]')
  with pytest.raises(InputError, match=r'file .*a: longer than 100 characters'):
    files.read_json(tmp_path / 'a')


@pytest.mark.parametrize('name', ['a\0b', 'a' * 300, 'b/' + 'a' * 300 + '/c'])
def test_names_that_no_file_has(name):
  for read in (files.existing, files.existing_file, files.regular_file):
    with pytest.raises(InputError, match='text not found'):
      read(name, 'text')


@pytest.mark.parametrize('scheme', ['http', 'https', 'ftp', 'file', 'HTTP', 'a+b'])
def test_addresses_are_neither_read_nor_written(scheme):
  path = f'{scheme}://host/corpus.jsonl'
  for use in (lambda: files.existing(path, 'text'), lambda: files.resolved(path)):
    with pytest.raises(InputError, match=r'corpus\.jsonl: .*:// is neither read nor written'):
      use()


def test_links_in_a_circle(tmp_path):
  (tmp_path / 'a').symlink_to('b')
  (tmp_path / 'b').symlink_to('a')
  with pytest.raises(InputError, match='a is a link that leads in a circle'):
    files.resolved(tmp_path / 'a')
  with pytest.raises(InputError, match='text not found'):
    files.existing(tmp_path / 'a', 'text')


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


def test_a_path_that_is_no_utf8_is_written_to_json(tmp_path):
  files.write_json(tmp_path / 'a.json', {'path': 'caf\udce9.trec'})
  assert files.read_json(tmp_path / 'a.json') == {'path': 'caf?.trec'}


def test_whole_surrogate_pairs_and_wide_lists_are_sound():
  text = '{"a": "\\ud83d\\ude00", "b": [' + ', '.join(['[]'] * 100) + ']}'
  assert files.parse_json(text, 'a')['a'] == '\U0001f600'


def test_pipes_are_refused_where_one_reading_is_not_enough():
  with pytest.raises(InputError, match='text: /dev/null is a pipe or a device'):
    files.regular_file('/dev/null', 'text')


def test_sidecars_name_what_a_folder_holds_and_notice_damage(tmp_path):
  folder = tmp_path / 'index'

  def read(format='my.index', fingerprint='abc'):
    return files.read_sidecar(folder, 'about.json', format, 'index', fingerprint)

  assert read() is None
  folder.mkdir()
  assert read() is None
  (folder / 'part').mkdir()
  (folder / 'part' / 'a').write_text('a')
  with pytest.raises(InputError, match='index holds something else than a index; choose another'):
    read()
  files.write_sidecar(folder, 'about.json', 'my.index', 'abc', count=3)
  assert read()['count'] == 3 and read(fingerprint='other') is None
  with pytest.raises(InputError, match='holds something else'):
    read(format='your.index')
  sidecar = (folder / 'about.json').read_text()
  (folder / 'about.json').write_text(sidecar.replace('"count": 3', '"count": 4'))
  with pytest.raises(InputError, match=r'about.json was changed or is damaged .*; remove .*index'):
    read()
  (folder / 'about.json').write_text(sidecar)
  (folder / 'part' / 'a').write_text('b')
  with pytest.raises(InputError, match=r'part/a was changed or is damaged .*; remove .*index'):
    read()
  (folder / 'part' / 'a').unlink()
  with pytest.raises(InputError, match='part/a is missing'):
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
  with pytest.raises(InputError, match=r'not the name of a file in it|was changed or is damaged'):
    files.read_sidecar(folder, 'about.json', 'my.index', 'index', 'abc')


@pytest.mark.parametrize('fingerprint', ['abc', 'other'])
def test_what_somebody_added_to_a_folder_of_ours_is_not_replaced(tmp_path, fingerprint):
  folder = tmp_path / 'index'
  folder.mkdir()
  (folder / '.hidden').write_text('mine')
  with pytest.raises(InputError, match='holds something else'):
    files.read_sidecar(folder, 'about.json', 'my.index', 'index', fingerprint)
  (folder / '.hidden').unlink()
  files.write_sidecar(folder, 'about.json', 'my.index', 'abc')
  (folder / 'notes.txt').write_text('mine')
  with pytest.raises(InputError, match=r'also holds notes\.txt, which is not of dprjax'):
    files.read_sidecar(folder, 'about.json', 'my.index', 'index', fingerprint, complete=True)


def test_nothing_is_written_that_json_does_not_have(tmp_path):
  with pytest.raises(ValueError, match='JSON'):
    files.write_json(tmp_path / 'a.json', {'a': float('nan')})
  assert not list(tmp_path.iterdir())
