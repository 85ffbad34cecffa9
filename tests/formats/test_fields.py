import pytest

from dprjax.base.errors import InputError
from dprjax.formats import fields

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
    (lambda r: r.whole('n', 4, 9), "a.json: 'n' is 3; expected a whole number from 4 to 9"),
    (lambda r: r.whole('b', 0, 9), "'b' is True"),
    (lambda r: r.whole('t', 0, 9), "'t' is 'x'"),
    (lambda r: r.whole('missing', 0, 9), "'missing' is missing"),
    (lambda r: r.choice('t', 'y', 'z'), "'t' is 'x'; expected 'y' or 'z'"),
    (lambda r: r.choice('o', 'y'), "'o' is {'n': 1}"),
    (lambda r: r.boolean('n'), "'n' is 3; expected true or false"),
    (lambda r: r.optional_text('missing'), "'missing' is missing; expected text"),
    (lambda r: r.optional_text('n'), "'n' is 3; expected text"),
    (lambda r: r.record('t'), "'t' is 'x'; expected an object"),
    (lambda r: r.record('o').whole('n', 2, 3), "a.json, 'o': 'n' is 1"),
    (lambda r: r.number('b'), "'b' is True; expected a finite number"),
    (lambda r: r.number('t'), "'t' is 'x'; expected a finite number"),
    (lambda r: r.number('null'), "'null' is missing; expected a finite number"),
    (lambda r: fields.Record({'a': 10**400}, 'b').number('a'), "'a' is 1000"),
    (lambda r: fields.Record({'a': float('inf')}, 'b').number('a'), "'a' is inf"),
  ],
)
def test_fields_of_another_type_are_named(ask, message):
  with pytest.raises(InputError, match=message):
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
  with pytest.raises(InputError, match=r'a\.jsonl, line 3'):
    fields.labels(value, 'a.jsonl, line 3')


@pytest.mark.parametrize('content', ['d7\n\nd1\n', '\ufeffd7\nd1', 'd7\r\nd1\r\n'])
def test_lists_of_ids(tmp_path, content):
  path = tmp_path / 'ids.txt'
  path.write_bytes(content.encode())
  assert fields.read_ids(path) == ['d7', 'd1']


@pytest.mark.parametrize(
  'content, message',
  [
    (b'd1\n d2\n', "ids.txt, line 2: the id ' d2' is empty, has white space around it"),
    (b'd1\nd2\t\n', 'line 2'),
    (b'd1\na\x00b\n', 'line 2'),
    (b'd1\nd2\nd1\n', "id 'd1' is on line 1 and again on line 3; ids must be unique"),
    (b'd1\n\xff\n', 'not UTF-8'),
    (b'\n \n', 'holds no ids'),
    (b'', 'ids is empty'),
  ],
)
def test_bad_lists_of_ids(tmp_path, content, message):
  path = tmp_path / 'ids.txt'
  path.write_bytes(content)
  with pytest.raises(InputError, match=message):
    fields.read_ids(path)
