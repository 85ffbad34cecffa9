import pytest

from dprjax.text import fields
from tests.refusals import refused


@pytest.mark.parametrize('content', ['d7\n\nd1\n', '\ufeffd7\nd1', 'd7\r\nd1\r\n'])
def test_lists_of_ids(tmp_path, content):
  path = tmp_path / 'ids.txt'
  path.write_bytes(content.encode())
  assert fields.read_ids(path) == ['d7', 'd1']


@pytest.mark.parametrize(
  'content, message',
  [
    (b'd1\n d2\n', ('ids.txt', 'line 2', 'd2')),
    (b'd1\nd2\nd1\n', ('d1', 'line 1', 'line 3')),
  ],
)
def test_bad_lists_of_ids(tmp_path, content, message):
  path = tmp_path / 'ids.txt'
  path.write_bytes(content)
  with refused(message):
    fields.read_ids(path)
