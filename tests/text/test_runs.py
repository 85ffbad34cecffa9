import gzip

import numpy as np
import pytest

from dprjax.base.hashes import keys_of
from dprjax.text import runs, trec
from tests.refusals import refused


def columns(path, **options):
  blocks = [
    (runs.keys(block.query_ids), runs.keys(block.doc_ids), block.ranks, block.scores)
    for block in runs.read_blocks(path, **options)
  ]
  return [np.concatenate(column).tolist() for column in zip(*blocks, strict=True)]


def write(path, text):
  path.write_text(text)
  return path


TEXT = 'q1 Q0 d1 1 2.5 x\nq1 Q0 d2 2 -1e-3 x\nq22 Q0 a-very-long-document-id 1 7 x\n'


def expected():
  return [
    keys_of(['q1', 'q1', 'q22']).tolist(),
    keys_of(['d1', 'd2', 'a-very-long-document-id']).tolist(),
    [1, 2, 1],
    [2.5, -0.001, 7.0],
  ]


@pytest.mark.parametrize(
  'text',
  [
    TEXT[:-1],
    TEXT.replace('\n', '\r\n'),
    TEXT.replace(' Q0 ', '  Q0\t').replace(' x\n', ' x \n'),
    '\n\n' + TEXT + ' \n',
    TEXT.replace(' 1 ', ' +1 '),
  ],
)
def test_reads_what_trec_eval_reads(tmp_path, text):
  assert columns(write(tmp_path / 'run.trec', text)) == expected()


@pytest.mark.parametrize('block', [1, 20])
def test_blocks_of_any_size(tmp_path, block):
  assert columns(write(tmp_path / 'run.trec', TEXT), block_bytes=block) == expected()
  assert [b.lines.tolist() for b in runs.read_blocks(tmp_path / 'run.trec', block_bytes=1)] == [
    [1],
    [2],
    [3],
  ]


def test_scores_are_read_exactly(tmp_path):
  scores = np.random.default_rng(0).standard_normal(5000).astype(np.float32).astype(float).tolist()
  scores += [0.1, 1e-300, 123456789.12345679]
  lines = [f'q Q0 d{i} {i} {score!r} t\n' for i, score in enumerate(scores)]
  assert columns(write(tmp_path / 'run.trec', ''.join(lines)))[3] == scores


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('q Q0 a 1 2.0 x\nq Q0 b 2 1.0\nq Q0 c 3 1.0 x\n', ('run.trec', 'line 2', '5')),
    ('\nq Q0 a 1 2.0 x\nq Q0 b 2 nan x\n', ('line 3', 'nan')),
    ('q Q0 a 1 high x\n', ('line 1', 'high')),
    ('q Q0 a 99999999999 1.0 x\n', ('line 1', '99999999999')),
    ('', 'run.trec'),
  ],
)
def test_bad_runs(tmp_path, text, message):
  path = write(tmp_path / 'run.trec', text)
  with refused(message):
    list(runs.read_blocks(path))


@pytest.mark.parametrize('block', [1, 1000])
def test_a_byte_order_mark_is_no_part_of_the_first_id(tmp_path, block):
  path = tmp_path / 'run.trec'
  path.write_bytes(b'\xef\xbb\xbf' + TEXT.encode())
  assert columns(path, block_bytes=block) == expected()
  assert trec.read_run(path).query_ids == ['q1', 'q22']


@pytest.mark.parametrize(
  ('line', 'message'),
  [
    (b'q3 Q0 \xff 1 1.0 x', 'UTF-8'),
    (b'q3 Q0 a\0b 1 1.0 x', r'a\x00b'),
    ('q3\xa0 Q0 a 1 1.0 x'.encode(), r'q3\xa0'),
    (b'q3 Q0 a 1 1.0 x\rq3 Q0 b 2 0.5 x', '12 columns'),
  ],
)
def test_runs_that_are_no_utf8_or_have_bad_ids(tmp_path, line, message):
  path = tmp_path / 'run.trec'
  path.write_bytes(TEXT.encode() + line + b'\nq4 Q0 a 1 1.0 x\n')
  with refused('run.trec', 'line 4', message):
    list(runs.read_blocks(path))


def test_compressed(tmp_path):
  (tmp_path / 'run.trec.gz').write_bytes(gzip.compress(TEXT.encode()))
  assert columns(tmp_path / 'run.trec.gz') == expected()
  assert runs.read_tag(tmp_path / 'run.trec.gz') == 'x'
