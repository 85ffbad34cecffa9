import numpy as np
import pytest

from dprjax.text.trec import (
  read_run,
  run_from_dict,
  run_from_rows,
  write_run,
)
from tests.refusals import refused


def as_dict(run):
  return {query_id: ranking for query_id, ranking in run}  # noqa: C416 (a Run has __len__ and __iter__ but is no mapping)


def test_ties_are_ordered_by_id_as_in_trec_eval():
  run = run_from_dict({'q': {'d10': 1.0, 'd9': 1.0, 'd1': 1.0, 'é': 1.0, 'z': 2.0}})
  assert as_dict(run) == {'q': [('z', 2.0), ('é', 1.0), ('d9', 1.0), ('d10', 1.0), ('d1', 1.0)]}


def test_round_trip_is_exact(tmp_path):
  rng = np.random.default_rng(0)
  scores = rng.standard_normal((20, 30)).astype(np.float32)
  run = run_from_rows(
    [f'q{i}' for i in range(20)],
    [f'd{i}' for i in range(100)],
    np.stack([rng.permutation(100)[:30] for _ in range(20)]),
    scores,
  )
  write_run(tmp_path / 'run.trec', run, 'x')
  again = read_run(tmp_path / 'run.trec')
  assert as_dict(again) == as_dict(run)
  assert sorted(score for _, ranking in again for _, score in ranking) == sorted(
    scores.astype(float).ravel()
  )


def test_rescored():
  run = run_from_dict({'q2': {'a': 3.0, 'c': 2.0, 'b': 1.0}, 'q1': {}, 'q0': {'b': 5.0}})
  # In the order of its rows: for each query, best first.
  again = run.rescored(np.array([-1.0, 0.5, 0.5, 7.0]))
  assert as_dict(again) == {
    'q2': [('c', 0.5), ('b', 0.5), ('a', -1.0)],
    'q1': [],
    'q0': [('b', 7.0)],
  }
  assert as_dict(run)['q2'] == [('a', 3.0), ('c', 2.0), ('b', 1.0)]


def test_keep_top_and_same_id():
  run = run_from_dict({'a': {'a': 3.0, 'b': 2.0, 'c': 1.0}, 'z': {'b': 1.0}, 'c': {'c': 1.0}})
  assert run.same_id().tolist() == [True, False, False, False, True]
  assert as_dict(run.keep(~run.same_id())) == {
    'a': [('b', 2.0), ('c', 1.0)],
    'z': [('b', 1.0)],
    'c': [],
  }
  assert as_dict(run.top(1)) == {'a': [('a', 3.0)], 'z': [('b', 1.0)], 'c': [('c', 1.0)]}


@pytest.mark.parametrize(
  'text, message',
  [
    ('q Q0 a 1 1.0 x\nr Q0 b 1 9.0 x\nq Q0 c 2 2.0 x\n', ('run.trec', 'line 3', '1.0', '2.0')),
    ('q Q0 a 1 3.0 x\nr Q0 a 1 3.0 x\nq Q0 b 2 2.0 x\nq Q0 a 3 1.0 x\n', ('run.trec', 'line 4')),
  ],
)
def test_bad_runs(tmp_path, text, message):
  (tmp_path / 'run.trec').write_text(text)
  with refused(message):
    read_run(tmp_path / 'run.trec')


def test_an_unwritable_run_leaves_nothing_behind(tmp_path):
  with refused('q 1'):
    write_run(tmp_path / 'run.trec', run_from_dict({'q 1': {'a': 1.0}}), 'x')
  assert not list(tmp_path.iterdir())


def made_run(queries=60, depth=9, seed=0):
  """Lines of a run by query; scores tie."""
  rng = np.random.default_rng(seed)
  return [
    [
      f'q{query} Q0 d{doc} 0 {score} x\n'
      for doc, score in zip(
        rng.permutation(40)[:depth], np.sort(rng.integers(0, 5, depth))[::-1], strict=True
      )
    ]
    for query in rng.permutation(1000)[:queries].tolist()
  ]


def test_rankings_by_query(tmp_path):
  path = tmp_path / 'run.trec'
  path.write_text(''.join(map(''.join, made_run())))
  run = read_run(path)
  assert {query: list(zip(*one, strict=True)) for query, one in run.rankings().items()} == dict(run)
