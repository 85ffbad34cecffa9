import csv
import json

import pytest

from dprjax.retrieval.evaluation import (
  answer_recall,
  has_answer,
  questions_of,
  read_answers,
  read_passages,
)
from dprjax.text.trec import run_from_dict
from tests.refusals import refused


@pytest.mark.parametrize(
  'answers, text, expected',
  [
    (['Paris'], 'It is in PARIS, France', True),
    (['Pari'], 'It is in Paris', False),
    (['New York'], 'the new   york\ntimes', True),
    (['New York'], 'new, york', False),
    (['caf\u00e9'], 'a cafe\u0301 there', True),
    (['cafe'], 'a caf\u00e9 there', False),
    (['a b a c'], 'a b a b a c', True),
    ([''], 'anything', True),
    ([], 'anything', False),
  ],
)
def test_strings_as_dpr_matches_them(answers, text, expected):
  assert has_answer(answers, text) is expected


TEXTS = {'a': 'Nothing here', 'b': 'The capital is Paris', 'c': 'Lyon'}
RUN = run_from_dict(
  {
    '1': {'a': 3.0, 'b': 2.0, 'c': 1.0},
    '2': {'a': 2.0, 'x': 1.0},
    '9': {'a': 1.0},
    '4': {'c': 1.0},
  }
)
ANSWERS = {'1': ['Paris', 'Lyon'], '2': ['Paris'], '3': ['Paris'], '4': ['lyon', '']}


def test_recall_known_by_hand():
  rankings = questions_of(RUN, ANSWERS, 2)
  assert rankings == {'1': ['a', 'b'], '2': ['a', 'x'], '4': ['c']}
  found = answer_recall(rankings, ANSWERS, TEXTS, (1, 2))
  assert found['per_query'] == {
    'Answer@1': {'1': 0, '2': 0, '3': 0, '4': 1},
    'Answer@2': {'1': 1, '2': 0, '3': 0, '4': 1},
  }
  assert found['mean'] == {'Answer@1': 0.25, 'Answer@2': 0.5}
  assert found['counts'] == {
    'questions': 4,
    'questions_missing': 1,
    'passages_without_text': 1,
    'broken_answers': 1,
  }


def test_no_common_question():
  with refused('questions', '1'):
    answer_recall(questions_of(RUN, ANSWERS, 2), {'77': ['x']}, TEXTS)


def test_formats_of_answers(tmp_path):
  rows = [['who\nis it?', '[\'Ann "A" B\', "O\'Neil"]'], ['where?', "['here']"]]
  with (tmp_path / 'nq.qas.csv').open('w', newline='') as file:
    csv.writer(file, delimiter='\t').writerows(rows)
  assert read_answers(tmp_path / 'nq.qas.csv') == {'1': ['Ann "A" B', "O'Neil"], '3': ['here']}
  entries = [{'question': 'who?', 'answers': ['Ann'], 'positive_ctxs': []}]
  entries.append({'id': 7, 'answers': ['Bob']})
  (tmp_path / 'dev.json').write_text(json.dumps(entries))
  assert read_answers(tmp_path / 'dev.json') == {'1': ['Ann'], '7': ['Bob']}
  (tmp_path / 'a.jsonl').write_text(
    '{"_id": "q1", "answers": ["x", "y"]}\n\n{"query_id": 2, "answers": ["z"]}\n'
  )
  assert read_answers(tmp_path / 'a.jsonl') == {'q1': ['x', 'y'], '2': ['z']}


@pytest.mark.parametrize(
  'name, text, message',
  [
    (
      'a.jsonl',
      '{"id": 1, "answers": ["x"]}\n' * 2,
      ('a.jsonl', 'line 1', 'line 2'),
    ),
    ('a.jsonl', '{"answers": "x"}\n', ('line 1', 'answers')),
    ('a.json', '[{"answers": ["x"]}, 5]', 'entry 2'),
    ('a.csv', "q\t['x']\nq\n", ('a.csv', 'line 2', 'line 1')),
    ('a.csv', "q\t['x']\nq\t\"['x']\n", ('a.csv', 'line 2')),
  ],
)
def test_bad_answers(tmp_path, name, text, message):
  (tmp_path / name).write_text(text)
  with refused(message):
    read_answers(tmp_path / name)


def test_passages_without_their_titles(tmp_path):
  (tmp_path / 'c.jsonl').write_text(
    '{"_id": "a", "title": "T", "text": "x y"}\n{"_id": "b", "title": "T", "text": "z"}\n'
  )
  assert read_passages(tmp_path / 'c.jsonl', {'a'}) == {'a': 'x y'}
  (tmp_path / 'psgs.tsv').write_text('id\ttext\ttitle\n1\t"He said ""so"" there"\tT\n2\tplain\tT\n')
  expected = {'1': 'He said "so" there', '2': 'plain'}
  assert read_passages(tmp_path / 'psgs.tsv', {'1', '2', '3'}) == expected
  (tmp_path / 'lines.tsv').write_text('id\ttext\ttitle\n1\t"He said\nso"\tT\n2\tplain\tT\n')
  assert read_passages(tmp_path / 'lines.tsv', {'1', '2'}) == {'1': 'He said\nso', '2': 'plain'}
  (tmp_path / 'collection.tsv').write_text('0\t"quoted" text\n1\t"Wings"\n')
  expected = {'0': 'quoted" text', '1': 'Wings'}  # as DPR
  assert read_passages(tmp_path / 'collection.tsv', {'0', '1'}) == expected
  (tmp_path / 'bad.tsv').write_text('0\tx\n1\n')
  with refused('bad.tsv', 'line 2', 'line 1'):
    read_passages(tmp_path / 'bad.tsv', set())
  (tmp_path / 'twice.tsv').write_text('0\tx\n1\ty\n1\tz\n')
  assert read_passages(tmp_path / 'twice.tsv', {'0'}) == {'0': 'x'}
  with refused('twice.tsv', 'line 2', 'line 3'):
    read_passages(tmp_path / 'twice.tsv', {'1'})


@pytest.mark.parametrize(
  'answers',
  ['[' * 5000, "['a'] * 10**9", '__import__("os")'],
)
def test_answers_that_are_no_list_are_not_run(tmp_path, answers):
  (tmp_path / 'a.tsv').write_text(f"who\t['me']\nwho\t{answers}\n")
  with refused('a.tsv', 'line 2', 'TAB'):
    read_answers(tmp_path / 'a.tsv')
