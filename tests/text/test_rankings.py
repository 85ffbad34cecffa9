import functools
import gzip
import os

import numpy as np
import pytest

from dprjax.text import runs, trec
from dprjax.text.rankings import Rankings
from tests.refusals import refused


def lines_of(queries, documents):
  rng = np.random.default_rng(0)
  for query in range(queries):
    scores = np.sort(rng.integers(0, 9, documents))[::-1]  # with ties
    for rank, (doc, score) in enumerate(zip(rng.permutation(documents), scores, strict=True)):
      yield f'q{query} Q0 d{doc} {rank} {score} tag\n'


WAYS = {
  'plain': lambda text: text.encode(),
  'mark': lambda text: b'\xef\xbb\xbf' + text.encode(),
  'blank lines': lambda text: b'\n' + text.replace('\nq1 ', '\n\n \nq1 ', 1).encode(),
  'no last newline': lambda text: text.rstrip('\n').encode(),
}


@pytest.mark.parametrize('way', WAYS)
def test_each_query_is_read_as_read_run_does(tmp_path, monkeypatch, way):
  path = tmp_path / 'run.trec'
  path.write_bytes(WAYS[way](''.join(lines_of(5, 7))))
  expected = dict(trec.read_run(path))
  read = functools.partial(runs.read_blocks, block_bytes=64)
  monkeypatch.setattr(runs, 'read_blocks', read)
  with Rankings(path) as found:
    assert list(found) == [*expected] and len(found) == 5 and 'q9' not in found
    for query in reversed(list(found)):
      ranking = found[query]
      assert list(zip(*ranking, strict=True)) == expected[query]
      assert list(zip(*ranking.top(2), strict=True)) == expected[query][:2]


def test_compressed(tmp_path):
  path = tmp_path / 'run.gz'
  path.write_bytes(gzip.compress(''.join(lines_of(3, 4)).encode()))
  with Rankings(path) as found:
    assert [found[query].ids for query in ('q2', 'q0')] == [
      [id_ for id_, _ in dict(trec.read_run(path))[query]] for query in ('q2', 'q0')
    ]


def test_lines_of_a_query_stand_together(tmp_path):
  path = tmp_path / 'run.trec'
  path.write_text('q1 Q0 a 1 2 t\nq2 Q0 a 1 2 t\nq1 Q0 b 2 1 t\n')
  with refused('run.trec', 'line 3', 'q1', 'sort -s -k1,1'):
    Rankings(path)


@pytest.mark.parametrize(
  'lines, named',
  [
    ('q2 Q0 a 1 1 t\nq2 Q0 b 2 3 t', ('line 3', 'q2')),
    ('q2 Q0 a 1 1 t\n\nq2 Q0 a 2 1 t', ('line 4', 'document a', 'q2')),
  ],
)
def test_a_query_that_is_not_sorted_or_has_a_document_twice(tmp_path, lines, named):
  path = tmp_path / 'run.trec'
  path.write_text(f'q1 Q0 a 1 1 t\n{lines}\n')
  with Rankings(path) as found, refused('run.trec', *named):
    found['q2']


def test_a_pipe_is_refused(tmp_path):
  os.mkfifo(tmp_path / 'pipe')
  with refused(str(tmp_path / 'pipe')):
    Rankings(tmp_path / 'pipe')
