import pytest

from dprjax.text.qrels import read_qrels, write_qrels
from tests.refusals import refused


@pytest.mark.parametrize(
  'text',
  [
    'query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\td 2\t0\nq2\td1\t-1\n',
    'q1\t0\td1\t2\nq1\t0\td 2\t0\nq2\t0\td1\t-1\n',
    '\ufeffq1\t0\td1\t2\r\nq1\t0\td 2\t0\r\n\r\nq2\t0\td1\t-1',
    '\ufeffquery\tdocument\tGrade\nq1\td1\t2.0\nq1\td 2\t0.\nq2\td1\t-1.00\n',
    '"query-id"\t"corpus-id"\t"score"\n"q1"\t"d1"\t"2"\n"q1"\t"d 2"\t0\nq2\td1\t-1\n',
  ],
)
def test_columns_and_header(tmp_path, text):
  (tmp_path / 'q.tsv').write_text(text)
  assert read_qrels(tmp_path / 'q.tsv') == {'q1': {'d1': 2, 'd 2': 0}, 'q2': {'d1': -1}}


def test_trec_qrels_with_spaces_and_a_repetition(tmp_path):
  (tmp_path / 'q.txt').write_text('1 0 LA-1 1\n1  0  LA-2  0\n1 0 LA-1 1\n')
  assert read_qrels(tmp_path / 'q.txt') == {'1': {'LA-1': 1, 'LA-2': 0}}


@pytest.mark.parametrize(
  'text, message',
  [
    ('q 0 d 1\nq 0 d\n', ('q.tsv', 'line 2', '3')),
    ('q\td\t1\nq\t"d\t1\n', ('q.tsv', 'line 2')),
    ('q 0 d yes\n', ('line 1', 'yes')),
    ('query-id\tcorpus-id\tscore\nq\td\t0.5\n', ('q.tsv', 'line 2', '0.5')),
    ('q 0 d 1\nq 0 d 0\n', ('q.tsv', 'line 2')),
    ('query\tdocument\tworth\nq\td\t1\n', ('line 1', 'worth')),
    ('q\td\t٣\n', ('q.tsv', 'line 1', '٣')),
    ('q\ta\0\t1\n', ('q.tsv', 'line 1')),
    ('q\td\t1\nq\t d\t1\n', ('line 2', 'd')),
  ],
)
def test_bad_qrels(tmp_path, text, message):
  (tmp_path / 'q.tsv').write_text(text)
  with refused(message):
    read_qrels(tmp_path / 'q.tsv')


def test_written_and_read_again(tmp_path):
  qrels = {'q1': {'d1': 2, 'd 2': 0}, 'q2': {'d1': -1}, '"q"': {'"d': 1, '5" d': 1}}
  write_qrels(tmp_path / 'q.tsv', qrels)
  assert (tmp_path / 'q.tsv').read_text().startswith('query-id\tcorpus-id\tscore\nq1\td1\t2\n')
  assert read_qrels(tmp_path / 'q.tsv') == qrels
