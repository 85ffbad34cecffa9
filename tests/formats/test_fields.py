import pytest

from dprjax.formats import fields
from tests.refusals import refused

GOOD = {'n': 3, 't': 'x', 'null': None, 'b': True, 'o': {'n': 1}}


@pytest.mark.parametrize(
  'ask, expected',
  [
    (lambda r: r.whole('n', 0, 9), 3),
    (lambda r: r.choice('t', 'x', 'y'), 'x'),
    (lambda r: r.boolean('b'), True),
    (lambda r: r.optional_text('null'), None),
    (lambda r: r.optional_text('t'), 'x'),
    (lambda r: r.record('o').whole('n', 1, 1), 1),
    (lambda r: r.number('n'), 3.0),
    (lambda r: r.number('null', 0.5), 0.5),
  ],
)
def test_typed_fields(ask, expected):
  assert ask(fields.Record(GOOD, 'a.json')) == expected


@pytest.mark.parametrize(
  'ask, message',
  [
    (lambda r: r.whole('n', 4, 9), ('a.json', '3')),
    (lambda r: r.whole('b', 0, 9), 'b'),
    (lambda r: r.whole('t', 0, 9), ('t', 'x')),
    (lambda r: r.whole('missing', 0, 9), 'missing'),
    (lambda r: r.choice('t', 'y', 'z'), ('t', 'x', 'y', 'z')),
    (lambda r: r.choice('o', 'y'), ('o', 'n', '1}')),
    (lambda r: r.boolean('n'), ('n', '3')),
    (lambda r: r.optional_text('missing'), 'missing'),
    (lambda r: r.optional_text('n'), ('n', '3')),
    (lambda r: r.record('t'), ('t', 'x')),
    (lambda r: r.record('o').whole('n', 2, 3), ('a.json', '1')),
    (lambda r: r.number('b'), 'b'),
    (lambda r: r.number('t'), ('t', 'x')),
    (lambda r: r.number('null'), 'null'),
    (lambda r: fields.Record({'a': 10**400}, 'b').number('a'), 'a'),
    (lambda r: fields.Record({'a': float('inf')}, 'b').number('a'), 'a'),
  ],
)
def test_fields_of_another_type_are_named(ask, message):
  with refused(message):
    ask(fields.Record(GOOD, 'a.json'))


@pytest.mark.parametrize(
  'value, expected',
  [
    (['cs.CL', 'stat.ML', 'cs.CL'], ('cs.CL', 'stat.ML')),
    ('hep-ph  hep-th\n', ('hep-ph', 'hep-th')),
    (['two words'], ('two words',)),
    ([], ()),
    (None, ()),
  ],
)
def test_labels(value, expected):
  assert fields.labels(value, 'a') == expected


@pytest.mark.parametrize('value', [[' a'], [''], [str(i) for i in range(1001)]])
def test_bad_labels(value):
  with refused('a.jsonl', 'line 3'):
    fields.labels(value, 'a.jsonl, line 3')


@pytest.mark.parametrize('content', ['d7\n\nd1\n', '\ufeffd7\nd1', 'd7\r\nd1\r\n'])
def test_lists_of_ids(tmp_path, content):
  path = tmp_path / 'ids.txt'
  path.write_bytes(content.encode())
  assert fields.read_ids(path) == ['d7', 'd1']


@pytest.mark.parametrize(
  'content, message',
  [
    (b'd1\n d2\n', ('ids.txt', 'line 2', 'd2')),
    (b'd1\nd2\t\n', ('ids.txt', 'line 2')),
    (b'd1\na\x00b\n', ('ids.txt', 'line 2')),
    (b'd1\nd2\nd1\n', ('d1', 'line 1', 'line 3')),
    (b'd1\n\xff\n', ('ids.txt', 'line 1')),
    (b'\n \n', 'ids.txt'),
    (b'', 'ids.txt'),
  ],
)
def test_bad_lists_of_ids(tmp_path, content, message):
  path = tmp_path / 'ids.txt'
  path.write_bytes(content)
  with refused(message):
    fields.read_ids(path)
