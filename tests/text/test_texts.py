"""Corpora and queries in columns, as their writers write them."""

import csv
import gzip

import pytest

from dprjax.text import texts
from dprjax.text.texts import PassageRecord
from tests.refusals import refused

DPR = 'id\ttext\ttitle\n'


def entries(path):
  return [(entry.number, entry.record) for entry in texts.read_entries(path, 'passage')]


@pytest.mark.parametrize(('name', 'ending'), [('psgs.tsv', '\n'), ('psgs.tsv.gz', '\r\n')])
def test_what_the_csv_module_writes_is_read_as_it_was(tmp_path, ending, name):
  rows = [
    ('1', 'two\nlines', 'Aaron'),
    ('2', 'a paragraph\n\nand "another"', '"Weird Al"'),
    ('3', '"', 'a\ttab'),
    ('4', 'x' * 300_000, ''),
    ('5', 'plain', '5" pipe'),
    ('6', 'def f():\n\treturn 1\t# one', ''),
  ]
  with (gzip.open if name.endswith('.gz') else open)(
    tmp_path / name, 'wt', encoding='utf-8', newline=''
  ) as file:
    writer = csv.writer(file, delimiter='\t', lineterminator=ending)
    writer.writerows([('id', 'text', 'title'), *rows])
  assert entries(tmp_path / name) == [
    (line, PassageRecord(id_, title, text))
    for line, (id_, text, title) in zip((2, 4, 7, 8, 9, 10), rows, strict=True)
  ]


@pytest.mark.parametrize(
  ('text', 'expected'),
  [
    ('id\ttext\n1\t"all:\n\tmake\n\ttest"\n', PassageRecord('1', '', 'all:\n\tmake\n\ttest')),
    ('"id"\t"title"\t"text"\n"1"\t"T"\t"so ""it"" is"\n', PassageRecord('1', 'T', 'so "it" is')),
    ('\ufeff"Id"\t"Text"\n1\t"a\nb"\n', PassageRecord('1', '', 'a\nb')),
    ('id\ttitle\ttext\n1\tT\t"no quotes of CSV\n', PassageRecord('1', 'T', '"no quotes of CSV')),
    ('1\t"Hello," she said\n', PassageRecord('1', '', '"Hello," she said')),
    ('1\thttps://a.org\tT\ttext\n', PassageRecord('1', 'T', 'text')),
    (f'{DPR}1\ta carriage\rreturn\tT\n', PassageRecord('1', 'T', 'a carriage\rreturn')),
  ],
)
def test_headers_and_quotes(tmp_path, text, expected):
  (tmp_path / 'c.tsv').write_text(text)
  assert [entry for _, entry in entries(tmp_path / 'c.tsv')] == [expected]


@pytest.mark.parametrize(
  ('text', 'line'),
  [
    (f'{DPR}1\tok\tA\n2\t"open\tB\n3\tplain\tC\n', 3),
    (f'{DPR}1\t"open\tA\n2\tswallowed\tB\n3\tclosed"\tC\n', 2),
    (f'{DPR}1\t"two\nlines"\tA\n2\t"open\tB\n', 4),
    (f'{DPR}1\tone\tA\n2\ttwo\n', 3),
    ('0\tplain\n1\tfirst\tsecond\n', 2),
    ('"1"\t"the text"\t"T"\n', 1),
  ],
)
def test_a_bad_row_is_named_by_its_first_line(tmp_path, text, line):
  (tmp_path / 'c.tsv').write_text(text)
  with refused('c.tsv', f'line {line}'):
    entries(tmp_path / 'c.tsv')


def test_queries(tmp_path):
  path = tmp_path / 'queries.tsv'
  for text, expected in (
    ('q1\t"who" is it\n', '"who" is it'),
    ('"id"\t"text"\nq1\t"""who""\nis it"\n', '"who"\nis it'),
    ('qid\tquery\nq1\twho\n', 'who'),
  ):
    path.write_text(text)
    assert list(texts.read_texts(path, 'query')) == [('q1', expected)]
  for text, line in (('q1\twho\tis it\n', 1), ('q1\twho\nq2\tis\tit\n', 2), ('"q1"\twho\n', 1)):
    path.write_text(text)
    with refused('queries.tsv', f'line {line}'):
      list(texts.read_texts(path, 'query'))


def test_a_missing_value_is_empty_and_one_of_another_kind_is_refused(tmp_path):
  path = tmp_path / 'c.jsonl'
  path.write_text('{"_id": "a", "title": null, "text": "x"}\n{"_id": "b", "text": null}\n')
  assert entries(path) == [(1, PassageRecord('a', '', 'x')), (2, PassageRecord('b', '', ''))]
  # Nor has every row the names of the first.
  path.write_text('{"_id": "a", "text": "x"}\n{"_id": "b", "title": "T", "text": "y"}\n')
  assert entries(path) == [(1, PassageRecord('a', '', 'x')), (2, PassageRecord('b', 'T', 'y'))]
  for record in ('"title": 5, "text": "x"', '"title": "x"', '"text": 5', '"text": NaN'):
    path.write_text(f'{{"_id": "a", {record}}}\n')
    with refused('c.jsonl', 'line 1'):
      entries(path)
