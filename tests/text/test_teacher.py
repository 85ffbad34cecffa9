"""Teacher scores in batches: of runs and of mined files."""

import json

import numpy as np
import pytest

from dprjax.text import sources, teacher, token_cache, vocabularies
from tests.refusals import refused

PASSAGES = {f'd{i}': f'oak {"elm " * i}' for i in range(5)}


@pytest.fixture(scope='module')
def tokens(tmp_path_factory):
  """A cache of three queries and five passages."""
  folder = tmp_path_factory.mktemp('teacher')
  (folder / 'qrels').mkdir()
  (folder / 'corpus.jsonl').write_text(
    ''.join(json.dumps({'_id': id_, 'text': text}) + '\n' for id_, text in PASSAGES.items())
  )
  (folder / 'queries.jsonl').write_text(
    ''.join(json.dumps({'_id': f'q{i}', 'text': f'oak {i}'}) + '\n' for i in range(3))
  )
  (folder / 'qrels' / 'train.tsv').write_text(
    'query-id\tcorpus-id\tscore\n' + ''.join(f'q{i}\td{i}\t1\n' for i in range(3))
  )
  tokenizer = vocabularies.train_wordpiece([*PASSAGES.values()] * 4, 60, folder / 'tokenizer')
  lengths = {'query_max_length': 8, 'passage_max_length': 8}
  return token_cache.build_cache(
    sources.Source(str(folder)), tokenizer, folder / 'token_cache', **lengths
  )


RUN = 'q0 Q0 d0 1 5.5 t\nq0 Q0 d3 2 -2 t\nx Q0 d1 1 9 t\nq1 Q0 d1 1 1 t\nq1 Q0 y 2 0 t\n'
MINED = [
  {
    'query_id': 'q0',
    'positive_passages': [{'docid': 'd0', 'reranker_score': 5.5}],
    'negative_passages': [{'docid': 'd3', 'reranker_score': -2, 'score': 8}, {'docid': 'd4'}],
  },
  {'query_id': 'q1', 'positive_passages': [{'docid': 'd1', 'reranker_score': 1}]},
]


@pytest.mark.parametrize(
  ('name', 'content'),
  [('run.trec', RUN), ('mined.jsonl', ''.join(json.dumps(line) + '\n' for line in MINED))],
)
def test_scores_by_rows(tokens, tmp_path, name, content):
  path = tmp_path / name
  path.write_text(content)
  queries = np.array([2, 0, 1], np.int32)
  passages = np.array([[2, 0, 1], [0, 3, 4], [1, 3, 0]], np.int32)
  assert tokens.query_ids(queries) == ['q2', 'q0', 'q1'] and tokens.passage_ids([3]) == ['d3']
  found = teacher.Teacher(path, tokens).scores(queries, passages)
  nan = np.nan
  np.testing.assert_array_equal(found, [[nan] * 3, [5.5, -2, nan], [1, nan, nan]])
  assert found.dtype == np.float32


@pytest.mark.parametrize(
  ('name', 'content', 'message'),
  [
    ('run.trec', 'q0 Q0 d0 1 1 t\nq1 Q0 d1 1 1 t\n', ('run.trec', 'token_cache')),
    (
      'mined.jsonl',
      '{"query_id": "q0", "negative_passages": [{"docid": "d0", "reranker_score": "5"}]}\n',
      ('line 1', 'reranker_score'),
    ),
  ],
)
def test_files_without_scores(tokens, tmp_path, name, content, message):
  (tmp_path / name).write_text(content)
  with refused(message):
    teacher.Teacher(tmp_path / name, tokens)
