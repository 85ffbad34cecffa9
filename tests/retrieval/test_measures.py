import math

import ir_measures
import numpy as np
import pytest

from dprjax.base.errors import InputError
from dprjax.formats.qrels import read_qrels
from dprjax.formats.trec import read_run, run_from_dict
from dprjax.retrieval.measures import DEFAULT_MEASURES, measure, parse_measures

QRELS = {'q1': {'a': 2, 'b': 1, 'x': 0}, 'q2': {'c': 1}, 'q3': {'d': 0}}
# q1: b, x, a at ranks 1, 2, 3; q2 is missing; q3 has nothing relevant; q4 is not judged.
RUN = run_from_dict({'q4': {'a': 1.0}, 'q1': {'b': 3.0, 'x': 2.0, 'a': 1.0}, 'q3': {'d': 1.0}})


def test_values_known_by_hand():
  found = measure(RUN, QRELS, ['nDCG@10', 'RR@10', 'AP', 'R@1', 'Success@1', 'P(rel=2)@10'])
  # (1 + 2 / log2(4)) / (2 + 1 / log2(3))
  ndcg = 2 / (2 + 1 / math.log2(3))
  q1 = {
    'nDCG@10': ndcg,
    'RR@10': 1.0,
    'AP': (1 + 2 / 3) / 2,
    'R@1': 0.5,
    'Success@1': 1.0,
    'P(rel=2)@10': 0.1,
  }
  for name, value in q1.items():
    assert found['per_query'][name] == {'q1': pytest.approx(value), 'q2': 0.0, 'q3': 0.0}
    assert found['mean'][name] == pytest.approx(value / 3)
  assert list(found['mean']) == list(q1)
  assert found['counts'] == {
    'queries': 3,
    'missing': 1,
    'without_relevant': 1,
    'unjudged_queries': 1,
    'relevant': 3,
    'retrieved': 4,
  }


def test_equals_ir_measures_in_many_pieces():
  """1,300 queries: three pieces, one of them without a single query in the run."""
  rng = np.random.default_rng(0)
  qrels = {
    f'q{i}': {f'd{j}': int(rng.integers(0, 3)) for j in rng.choice(50, 5, replace=False)}
    for i in range(1300)
  }
  ranked = {
    f'q{i}': {
      f'd{j}': float(s)
      for j, s in zip(rng.permutation(50)[:30], rng.integers(0, 40, 30), strict=True)
    }
    for i in range(1300)
    if not 500 <= i < 1000
  }
  found = measure(run_from_dict(ranked), qrels)
  whole = ir_measures.calc(list(parse_measures(DEFAULT_MEASURES).values()), qrels, ranked)
  assert found['mean'] == {
    str(name): pytest.approx(value, abs=1e-12) for name, value in whole.aggregated.items()
  }
  for metric in whole.per_query:
    assert found['per_query'][str(metric.measure)][metric.query_id] == metric.value
  assert found['counts']['missing'] == 500


def test_equals_ir_measures_on_published_bm25_runs(data_dir):
  """TREC DL 2020 with graded judgements; ir_measures reads the files itself."""
  run_file = data_dir / 'msmarco-dl/runs/bm25.dl20.top100.trec'
  qrels_file = data_dir / 'msmarco-dl/qrels/dl20.tsv'
  found = measure(
    read_run(run_file), read_qrels(qrels_file), ['nDCG@10', 'RR(rel=2)@10', 'AP(rel=2)']
  )
  qrels = [
    ir_measures.Qrel(query, doc, int(score))
    for query, doc, score in (line.split('\t') for line in qrels_file.read_text().splitlines()[1:])
  ]
  expected = ir_measures.calc_aggregate(
    [ir_measures.nDCG @ 10, ir_measures.RR(rel=2) @ 10, ir_measures.AP(rel=2)],
    qrels,
    ir_measures.read_trec_run(str(run_file)),
  )
  assert found['mean'] == {
    str(name): pytest.approx(value, abs=1e-12) for name, value in expected.items()
  }


def test_queries_whose_documents_are_dropped_count_as_missing():
  run = run_from_dict({'q1': {'q1': 1.0}, 'q2': {'c': 1.0}})
  found = measure(run.keep(~run.same_id()), {'q1': {'a': 1}, 'q2': {'c': 1}}, ['RR@10'])
  assert found['mean'] == {'RR@10': 0.5} and found['counts']['missing'] == 1


@pytest.mark.parametrize(
  'name', ['nDCG@ten', 'Recall', 'nDCG(color=3)@10', 'DCG@10', 'R@0', 'AP@10@20', 'P(rel)@10', '']
)
def test_unknown_measures(name):
  with pytest.raises(InputError, match='measure'):
    parse_measures([name])


def average_precision(ranked, relevant, k):
  """As InformationRetrievalEvaluator of sentence-transformers has it."""
  correct, total = 0, 0.0
  for rank, document in enumerate(ranked[:k]):
    if document in relevant:
      correct += 1
      total += correct / (rank + 1)
  return total / min(k, len(relevant)) if relevant else 0.0


def test_nap_is_average_precision_over_what_can_be_found():
  rng = np.random.default_rng(1)
  qrels = {
    f'q{i}': {f'd{j}': int(rng.integers(-1, 3)) for j in rng.permutation(120)[: i % 100 + 1]}
    for i in range(150)
  }
  ranked = {f'q{i}': [f'd{j}' for j in rng.permutation(120)[:60]] for i in range(140)}
  run = run_from_dict(
    {q: {d: 100.0 - rank for rank, d in enumerate(found)} for q, found in ranked.items()}
  )
  names = ['nAP@10', 'AP@10', 'nAP(rel=2)@50', 'nAP@1']
  found = measure(run, qrels, names)
  assert list(found['mean']) == names
  for name, grade, k in (('nAP@10', 1, 10), ('nAP(rel=2)@50', 2, 50), ('nAP@1', 1, 1)):
    expected = {
      query: average_precision(
        ranked.get(query, []), {d for d, judged in grades.items() if judged >= grade}, k
      )
      for query, grades in qrels.items()
    }
    assert found['per_query'][name] == pytest.approx(expected, abs=1e-12)
    assert found['mean'][name] == pytest.approx(np.mean(list(expected.values())), abs=1e-12)
  assert found['per_query']['AP@10'] != found['per_query']['nAP@10']


@pytest.mark.parametrize('relevant', [3, 7, 90])
def test_nap_reaches_exactly_1(relevant):
  qrels = {'q': {f'd{i}': 1 for i in range(relevant)}}
  run = run_from_dict({'q': {f'd{i}': -float(i) for i in range(relevant)}})
  assert measure(run, qrels, ['nAP@10'])['mean'] == {'nAP@10': 1.0}


@pytest.mark.parametrize('name', ['nAP', 'nAP(rel=2)', 'nAP@0', 'nAP(cutoff=10)'])
def test_nap_needs_a_cutoff(name):
  with pytest.raises(InputError, match='measure'):
    parse_measures([name])


def test_other_names_for_the_same():
  assert list(parse_measures(['MRR@10', 'RR@10', 'NDCG@10'])) == ['RR@10', 'nDCG@10']


def test_no_common_query():
  with pytest.raises(
    InputError,
    match=r'none of the 3 judged queries is in the run \(judged: q1, q2, q3; in the run: other\)',
  ):
    measure(run_from_dict({'other': {'a': 1.0}}), QRELS)


@pytest.mark.parametrize(
  'name',
  [
    *('nDCG@99999999999999999999', 'AP(rel=99999999999)', 'R@' + '9' * 5000, 'P(rel=[])@5', ''),
    *(
      'AP(rel=' + '(' * 5000 + ')',
      'nDCG(cutoff=nan)',
      "AP(rel='a')",
      'AP(__import__=1)',
      'P@' * 300,
    ),
  ],
)
def test_measures_with_odd_numbers(name):
  with pytest.raises(
    InputError, match=r'the measure .* cannot be computed|unknown measure'
  ) as found:
    parse_measures([name])
  assert len(str(found.value)) < 400


def test_a_provider_that_fails():
  run, qrels = run_from_dict({'q': {'a': 1.0}}), {'q': {'a': 1}}
  with pytest.raises(InputError, match='the measures Accuracy cannot be computed of these'):
    measure(run, qrels, ['Accuracy'])
