import itertools
import json
import math

import numpy as np
import pytest

from dprjax.base.ranking import Ranking, ranked
from dprjax.retrieval import fusion, measures
from dprjax.text.trec import run_from_dict
from tests.refusals import refused

RNG = np.random.default_rng(0)


def ranking(scores):
  return ranked([*scores], np.array([*scores.values()], np.float64))


def fused(runs, k=None, weights=None, **options):
  """Document -> score of rankings given as dicts, best first."""
  names = [f'run{number}' for number in range(len(runs))]
  weights = weights or [1.0] * len(runs)
  how = fusion.Fusion(weights=dict(zip(names, weights, strict=True)), **options)
  found = how.fuse(dict(zip(names, map(ranking, runs), strict=True)), k)
  return dict(zip(found.ids, found.scores.tolist(), strict=True))


def random_runs(count, documents=30, found=20, ties=False):
  for _ in range(count):
    ids = RNG.permutation(documents)[:found]
    scores = RNG.integers(0, 5, found) if ties else RNG.gumbel(size=found)
    yield {f'd{id_}': float(np.float32(score)) for id_, score in zip(ids, scores, strict=True)}


def values(run, method, rrf_k):
  """By document, in plain numpy."""
  ordered = sorted(run, key=lambda id_: (run[id_], id_), reverse=True)
  scores = np.array([run[id_] for id_ in ordered])
  low, mean, deviation = scores.min(), np.mean(scores), np.std(scores)
  found = {
    'rrf': [1 / (rrf_k + rank) for rank in range(1, len(scores) + 1)],
    # z-scores, a missing document with the lowest: a constant of the query less.
    'zscore': (scores - mean) / deviation - (low - mean) / deviation,
  }[method]
  return dict(zip(ordered, found, strict=True))


@pytest.mark.parametrize('method', fusion.METHODS)
def test_weighted_sums_agree_with_plain_numpy(method):
  runs, weights = list(random_runs(3)), [0.5, 2.0, 1.0]
  parts = [values(run, method, 7) for run in runs]
  expected = {
    id_: sum(weight * part.get(id_, 0) for weight, part in zip(weights, parts, strict=True))
    for id_ in set().union(*runs)
  }
  found = fused(runs, weights=weights, method=method, rrf_k=7)
  assert found == pytest.approx(expected)
  assert [*found] == sorted(expected, key=lambda id_: (np.float32(expected[id_]), id_))[::-1]
  assert fused(runs, 4, weights, method=method, rrf_k=7) == dict([*found.items()][:4])


def test_pyserini_reciprocal_ranks():
  """Two runs of three documents by its rules: ranks from 1, k = 60."""
  runs = [{'a': 9.0, 'b': 5.0, 'c': 1.0}, {'b': 0.8, 'd': 0.7, 'a': 0.3}]
  assert fused(runs) == pytest.approx(
    {'b': 1 / 62 + 1 / 61, 'a': 1 / 61 + 1 / 63, 'd': 1 / 62, 'c': 1 / 63}
  )


@pytest.mark.parametrize('method', fusion.METHODS)
@pytest.mark.parametrize('ties', [False, True])
def test_the_order_of_runs_changes_nothing(method, ties):
  runs, weights = list(random_runs(4, ties=ties)), [0.1, 0.2, 0.3, 0.7]
  expected = [*fused(runs, weights=weights, method=method).items()]
  for order in itertools.permutations(range(4)):
    found = fused([runs[i] for i in order], weights=[weights[i] for i in order], method=method)
    assert [*found.items()] == expected


@pytest.mark.parametrize('method', fusion.METHODS)
def test_equal_scores_have_the_order_of_every_ranking(method):
  equal = dict.fromkeys(['d10', 'd9', 'd1'], 3.0)
  assert [*fused([equal, equal], method=method)] == ['d9', 'd10', 'd1']


@pytest.mark.parametrize('method, value', [('zscore', 1), ('rrf', 1 / 61)])
def test_a_constant_run_has_a_value_above_a_missing_document(method, value):
  assert fused([{'a': 7.0}, {'b': 2.0, 'c': 1.0}], method=method)['a'] == pytest.approx(value)


def test_a_run_of_weight_0_and_one_without_the_query_bring_no_documents():
  how = fusion.Fusion(weights={'one': 1, 'none': 0, 'gone': 2})
  found = how.fuse({'one': ranking({'a': 1.0}), 'none': ranking({'b': 1.0})})
  assert found.ids == ['a'] and found.scores.tolist() == [1 / 61]


def test_scores_at_the_ends_of_float32_are_finite():
  large = float(np.finfo(np.float32).max)
  for method in fusion.METHODS:
    found = fused([{'a': large, 'b': 0.0, 'c': -large}, {'a': 1e-45, 'b': 0.0}], method=method)
    assert [*found] == ['a', 'b', 'c'] and np.isfinite([*found.values()]).all()


@pytest.mark.parametrize('weights', [[0, 0], [-1, 2], [math.nan, 1]])
def test_weights_are_not_negative_and_not_all_0(weights):
  with refused('weights'):
    fusion.Fusion(weights=dict(zip('ab', weights, strict=True)))


@pytest.mark.parametrize('ties', [False, True])
def test_scores_of_candidates_are_those_that_evaluate_gives(ties):
  runs = dict(zip('ab', map(ranking, random_runs(2, ties=ties)), strict=True))
  grades = {'d1': 2, 'd2': 1, 'd3': 0, 'd4': -1, 'gone': 1, 'd5': 3}
  how = fusion.Fusion(weights={'a': 1, 'b': 1}, method='zscore')
  weights = fusion.candidates(2)
  found = fusion.ndcg(*how.table(runs), grades, weights)
  for row, value in zip(weights, found, strict=True):
    # A weight of 0 keeps the documents here, at the end.
    ids, table = how.table(runs)
    run = run_from_dict({'q': dict(zip(ids, (table @ row).tolist(), strict=True))})
    expected = measures.measure(run, {'q': grades}, ['nDCG@10'])['mean']['nDCG@10']
    assert value == pytest.approx(expected)


def curve(weights, best, queries, noise=0.0):
  """Scores of candidates for two runs that are best at a weight of the first run."""
  shape = 0.6 - 0.1 * (weights[:, 0] - best) ** 2
  return shape + noise * RNG.standard_normal((queries, len(weights)))


def test_weights_agree_with_plain_numpy():
  weights = fusion.candidates(3)
  scores = 0.6 - ((weights - [0.2, 0.5, 0.3]) ** 2).sum(axis=1)
  scores = scores + 0.2 * RNG.standard_normal((40, len(weights)))
  best = scores[:, np.argmax(scores.mean(axis=0))]
  likely = []
  for column in scores.T:
    behind = best - column
    error = np.sqrt((40 * np.var(behind) + 0.1) / 40 / 40)
    likely.append(np.exp(-((behind.mean() / error) ** 2) / 2))
  mean = np.average(weights, axis=0, weights=likely)
  nearest = weights[np.argmin(np.linalg.norm(weights - mean, axis=1))]
  np.testing.assert_array_equal(fusion.learn(weights, scores).weights, nearest)


def test_cross_validation_leaves_each_query_out():
  weights = fusion.candidates(2)
  scores = curve(weights, 0.2, 6, noise=0.3)
  learnt = fusion.learn(weights, scores)
  for query in range(6):
    others = fusion.learn(weights, np.delete(scores, query, axis=0)).weights
    row = np.flatnonzero((weights == others).all(axis=1))[0]
    assert learnt.held_out[query] == scores[query, row]
  np.testing.assert_array_equal(learnt.alone[:, 0], scores[:, weights[:, 0] == 1][:, 0])
  np.testing.assert_array_equal(learnt.equal, scores[:, weights[:, 0] == 0.5][:, 0])


def test_a_file_keeps_all(tmp_path):
  path = tmp_path / 'fusion.json'
  how = fusion.Fusion(
    weights={'bm25': 0.25, 'dense': 0.75},
    method='zscore',
    rrf_k=9,
    depth=50,
    bm25={'k1': 1.2, 'b': 0.5, 'language': 'none'},
  )
  fusion.write(path, how, learnt={'queries': 2})
  found = fusion.read(path)
  assert (found.weights, found.method, found.rrf_k, found.depth) == (how.weights, 'zscore', 9, 50)
  assert found.bm25 == how.bm25
  plain = fusion.Fusion(weights={'a': 1})
  fusion.write(path, plain)
  assert fusion.read(path) == plain


@pytest.mark.parametrize(
  'changes, named',
  [
    ({'weights': {}}, 'weights'),
    ({'weights': {'a': -1.0}}, 'weights'),
    ({'bm25': {'k1': 1}}, 'bm25'),
  ],
)
def test_a_file_of_something_else_is_refused(tmp_path, changes, named):
  path = tmp_path / 'fusion.json'
  fusion.write(path, fusion.Fusion(weights={'a': 1.0}))
  path.write_text(json.dumps(json.loads(path.read_text()) | changes))
  with refused('fusion.json', named):
    fusion.read(path)


def test_rankings_without_documents():
  how = fusion.Fusion(weights={'a': 1, 'b': 1})
  empty = Ranking([], np.empty(0))
  assert how.fuse({}).ids == how.fuse({'a': empty}).ids == []
  assert how.fuse({'a': empty, 'b': ranking({'d': 1.0})}).ids == ['d']
