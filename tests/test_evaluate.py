import json
import math

import pytest

from dprjax import report
from dprjax.text import seen
from tests.commands import evaluate
from tests.refusals import command_refused

QRELS = 'query-id\tcorpus-id\tscore\nq1\ta\t2\nq1\tb\t1\nq2\tc\t1\nq3\td\t1\n'
RUN = """q1 Q0 b 1 3.0 x
q1 Q0 z 2 2.0 x
q1 Q0 a 3 1.0 x
q2 Q0 q2 1 2.0 x
q2 Q0 c 2 1.0 x
q9 Q0 a 1 1.0 x
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'run.trec').write_text(RUN)
  (tmp_path / 'qrels.tsv').write_text(QRELS)
  (tmp_path / 'corpus.jsonl').write_text(
    ''.join(
      f'{{"_id": "{id_}", "title": "Lyon", "text": "text of {id_}"}}\n'
      for id_ in ('a', 'b', 'c', 'z', 'q2')
    )
  )
  (tmp_path / 'answers.jsonl').write_text(
    '{"_id": "q1", "answers": ["of z"]}\n{"_id": "q2", "answers": ["lyon", "C"]}\n'
  )
  for name, text in (('one', QRELS), ('two', 'query-id\tcorpus-id\tscore\nq2\tc\t1\n')):
    (tmp_path / 'beir' / name / 'qrels').mkdir(parents=True)
    (tmp_path / 'beir' / name / 'qrels' / 'test.tsv').write_text(text)
  return tmp_path


def run(arguments):
  evaluate.main([*arguments.split(), '--out=metrics.json'])
  with open('metrics.json') as file:
    return json.load(file)


def test_several_runs_on_one_file_of_judgements(folder, capsys):
  (folder / 'other.trec').write_text('q1 Q0 a 1 3.0 x\nq2 Q0 c 1 1.0 x\nq3 Q0 d 1 1.0 x\n')
  evaluate.main(['--run=a=run.trec', '--run=b=other.trec', '--qrels=qrels.tsv', '--measure', 'RR'])
  shown = [line.split() for line in capsys.readouterr().out.splitlines() if '000' in line]
  assert shown == [['a', '0.5000', '3'], ['b', '1.0000', '3']]  # and no average


def test_known_by_hand(folder, capsys):
  found = run(
    '--run=run.trec --qrels=qrels.tsv --measure nDCG@10 RR@10 --measure=AP --extra=trained=12'
  )
  ndcg, second = 2 / (2 + 1 / math.log2(3)), 1 / math.log2(3)
  assert found['per_query']['nDCG@10'] == pytest.approx({'q1': ndcg, 'q2': second, 'q3': 0})
  assert found['mean'] == pytest.approx(
    {'nDCG@10': (ndcg + second) / 3, 'RR@10': 0.5, 'AP': (5 / 6 + 1 / 2) / 3}
  )
  assert found['counts'] == {
    'queries': 3,
    'missing': 1,
    'without_relevant': 0,
    'unjudged_queries': 1,
    'relevant': 4,
    'retrieved': 5,
    'queries_with_own_id': 1,
  }
  assert found['settings'] == {'drop_same_id': False} and found['extra'] == {'trained': '12'}
  assert found['command'] == (
    'python -m dprjax.evaluate --run=run.trec --qrels=qrels.tsv --measure nDCG@10 RR@10 AP'
  )
  assert '0.5000' in capsys.readouterr().out


def test_lines_in_any_order_give_the_same(folder):
  flags = '--qrels=qrels.tsv --answers=answers.jsonl --corpus=corpus.jsonl'
  expected = run(f'--run=run.trec {flags}')
  lines = RUN.splitlines(keepends=True)
  (folder / 'run.trec').write_text(''.join(lines[place] for place in (3, 0, 5, 1, 4, 2)))
  assert run(f'--run=run.trec {flags}') == expected
  found = run(f'--run=run.trec {flags} --measure=RR@10 --drop_same_id=true')
  assert found['counts']['queries_with_own_id'] == 1
  assert found['per_query']['RR@10'] == {'q1': 1, 'q2': 1, 'q3': 0}


def test_a_hint_only_where_queries_seem_to_be_passages(folder, capsys):
  """An id that a query has by chance is seldom that of the passage ranked first."""
  (folder / 'q.tsv').write_text('1\t9\t1\n2\t9\t1\n')
  for first, second, told in (('1', '2', 1), ('8', '8', 0), ('8', '2', 0)):
    (folder / 'o.trec').write_text(
      f'1 Q0 {first} 1 3.0 x\n1 Q0 {"9" if first == "1" else "1"} 2 2.0 x\n'
      f'2 Q0 {second} 1 3.0 x\n2 Q0 {"9" if second == "2" else "2"} 2 2.0 x\n'
    )
    found = run('--run=o.trec --qrels=q.tsv --measure=RR@10')
    assert found['counts']['queries_with_own_id'] == 2
    assert capsys.readouterr().err.count('--drop_same_id') == told


def test_judgements_of_the_query_itself_are_left_out_with_it(folder):
  (folder / 'own.trec').write_text('q1 Q0 q1 1 3.0 x\nq1 Q0 a 2 2.0 x\n')
  (folder / 'own.tsv').write_text('q1\tq1\t1\nq1\ta\t1\n')
  counted = run('--run=own.trec --qrels=own.tsv --measure nAP@10 R@10')
  assert counted['mean'] == {'nAP@10': 1.0, 'R@10': 1.0}
  dropped = run('--run=own.trec --qrels=own.tsv --measure nAP@10 R@10 --drop_same_id=true')
  # Otherwise half of the relevant passages could not be found.
  assert dropped['mean'] == {'nAP@10': 1.0, 'R@10': 1.0}
  assert dropped['counts']['relevant'] == 1


def test_answers(folder):
  found = run('--run=run.trec --answers=answers.jsonl --corpus=corpus.jsonl --answer_k 1 2 3')
  # "of z" is in q1's second passage; Lyon is only in titles; C, in any case, in q2's second text.
  assert found['per_query'] == {
    'Answer@1': {'q1': 0, 'q2': 0},
    'Answer@2': {'q1': 1, 'q2': 1},
    'Answer@3': {'q1': 1, 'q2': 1},
  }
  assert found['mean'] == {'Answer@1': 0, 'Answer@2': 1, 'Answer@3': 1}
  (folder / 'more.jsonl').write_text(
    '{"_id": "q1", "answers": ["nothing"]}\n{"_id": "q2", "answers": ["q2"]}\n'
  )
  both = run(
    '--run=run.trec --answers=more.jsonl --corpus=corpus.jsonl --qrels=qrels.tsv --measure=RR@10 '
    '--answer_k=1'
  )
  assert both['mean'] == {'RR@10': 0.5, 'Answer@1': 0.5}
  counts = {'questions': 2, 'queries': 3, 'unknown_documents': 1}
  assert {name: both['counts'][name] for name in counts} == counts
  assert both['settings'] == {'drop_same_id': False}


JUDGED = '--run=run.trec --qrels=qrels.tsv'
BAD = [
  (f'{JUDGED} --run=run.trec', '--run=NAME=FILE'),
  (f'{JUDGED} --retriever=r --backbone=b', ('--backbone', '--retriever')),
  (f'{JUDGED} --measure=DCG@7', 'DCG@7'),
  ('--run=run.trec --answers=answers.jsonl', ('--answers', '--corpus')),
  ('--run=a=run.trec --run=b=run.trec --qrels=qrels.tsv', '--out'),
]


@pytest.mark.parametrize('arguments, message', BAD)
def test_bad_input(folder, command, arguments, message):
  before = sorted(folder.rglob('*'))
  command_refused(command(evaluate, '--out=metrics.json', *arguments.split()), message)
  assert sorted(folder.rglob('*')) == before


def test_queries_that_the_model_has_seen(folder, capsys):
  (folder / 'queries.jsonl').write_text(
    ''.join(f'{{"_id": "q{n}", "text": "text {n}"}}\n' for n in range(1, 5))
  )
  (folder / 'model').mkdir()
  known = {
    'train': seen.hashes(['Text 1', 'text 3', 'text 4']),
    'dev': seen.hashes(['text 2']),
  }
  seen.write(folder / 'model' / seen.FILE, known)
  found = run('--run=run.trec --qrels=qrels.tsv --queries=queries.jsonl --backbone=model')
  assert found['counts']['queries_seen_in_train'] == 2
  assert found['counts']['queries_seen_in_dev'] == 1
  err = capsys.readouterr().err
  assert 'run.trec: the model was trained on 2 of these 3 queries' in err
  assert 'run.trec: the model was chosen by 1 of these 3 queries' in err
  report.main(['--metrics=prompt=metrics.json', '--out=report.md'])
  assert 'prompt was trained on 2 of them.' in (folder / 'report.md').read_text()


@pytest.mark.parametrize(
  ('judgements', 'told'),
  [
    ('q 0 a 1', ()),
    ('q 0 e\u0301 1', ('no document',)),
  ],
)
def test_ids_that_match_nothing_are_told(folder, capsys, judgements, told):
  (folder / 'o.trec').write_text('q Q0 a 1 3.0 x\nq Q0 \u00e9 2 2.0 x\n')
  (folder / 'o.tsv').write_text(judgements)
  run('--run=o.trec --qrels=o.tsv --measure=RR@10')
  lines = [line for line in capsys.readouterr().err.splitlines() if 'o.tsv' in line]
  assert len(lines) == bool(told) and all(word in lines[0] for word in told)
