import pytest

from dprjax.text import records
from tests.refusals import refused


@pytest.mark.parametrize(
  ('name', 'text', 'expected'),
  [
    ('a.csv', 'x,y\n"one\n\n""two""",three\n', [(2, ['one\n\n"two"', 'three'])]),
    ('a.csv', '"y","x"\r\n"b","a"\r\n', [(2, ['a', 'b'])]),
    ('a.csv', f'{"a" * 200_000},b\n', [(1, ['a' * 200_000, 'b'])]),
    ('a.tsv', '"open\tb\n\nc\t"d"\n', [(1, ['"open', 'b']), (3, ['c', '"d"'])]),
    ('a.tsv', '"x"\t"y"\n"a ""b"""\t"c\nd"\n', [(2, ['a "b"', 'c\nd'])]),
    ('a.jsonl', '{"y": 1, "x": null}\n', [(1, [None, 1])]),
  ],
)
def test_rows(tmp_path, name, text, expected):
  (tmp_path / name).write_text(text)
  assert list(records.read_columns(tmp_path / name, ('x', 'y'), 'table')) == expected


@pytest.mark.parametrize(
  ('name', 'text', 'line'),
  [
    ('a.csv', 'a,b\nc,"d\n\ne,f\n', 2),
    ('a.csv', 'a,b\nc,d,e\n', 2),
    ('a.tsv', 'x\tz\ty\na\tb\tc\nd\te\n', 3),
    ('a.tsv', '"x"\t"y"\na\t"b\nc\td"\n', 2),
  ],
)
def test_bad_rows(tmp_path, name, text, line):
  (tmp_path / name).write_text(text)
  with refused(name, f'line {line}'):
    list(records.read_columns(tmp_path / name, ('x', 'y'), 'table'))
