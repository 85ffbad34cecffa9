import math

import ir_measures
import numpy as np
import pytest

from dprjax.retrieval.measures import check_name, measure, parse_measures
from dprjax.text.qrels import read_qrels
from dprjax.text.trec import read_run, run_from_dict
from tests.refusals import refused

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


def by_rule(scores):
  """As trec_eval ranks: by falling score, as a float of 32 bits, then by falling id."""
  return sorted(scores, key=lambda doc: (np.float32(scores[doc]), doc.encode()), reverse=True)


def tied_runs(queries):
  """Few scores, some of them apart by less than float32 shows; grades from -1 to 3."""
  rng = np.random.default_rng(0)
  docs = [f'd{j}' for j in range(45)] + ['é', 'Z', 'z#1', '\U0001f600', '\uffee']
  qrels = {
    f'q{i}': {docs[j]: int(rng.integers(-1, 4)) for j in rng.choice(50, 12, replace=False)}
    for i in range(queries)
  }
  ranked = {
    f'q{i}': {
      docs[j]: int(rng.integers(-4, 4)) / 3 + int(rng.integers(0, 3)) * 1e-10
      for j in rng.permutation(50)[:30]
    }
    for i in range(queries)
    if not 500 <= i < 1000
  }
  return ranked, qrels


@pytest.mark.slow
def test_equals_pytrec_eval_in_many_pieces():
  """1,300 queries: three pieces, one of them without a single query in the run."""
  ranked, qrels = tied_runs(1300)
  names = [
    *(
      'P@5',
      'P(rel=3)@7',
      'P(judged_only=True)@5',
      'RR',
      'RR(rel=2)',
      'Rprec',
      'AP',
      'AP(rel=2)@9',
    ),
    *('nDCG', 'nDCG@10', 'nDCG(judged_only=True)@4', 'nDCG(gains={1:9})@10', 'R@5', 'R(rel=2)@10'),
    *('Bpref', 'Bpref(rel=2)', 'infAP', 'infAP(rel=3)', 'SetAP', 'SetP', 'SetP(relative=True)'),
    *('SetR(rel=2)', 'SetF', 'SetF(beta=0.5)', 'Success@1', 'IPrec(recall=0.3)'),
    *('NumRet(rel=2)', 'NumRel'),
  ]
  found = measure(run_from_dict(ranked), qrels, names)
  kinds = parse_measures(names)
  whole = ir_measures.pytrec_eval.calc(list(kinds.values()), qrels, ranked)
  assert found['mean'] == {
    str(kind): pytest.approx(value, abs=1e-12) for kind, value in whole.aggregated.items()
  }
  for metric in whole.per_query:
    value = found['per_query'][str(metric.measure)][metric.query_id]
    assert value == pytest.approx(metric.value, abs=1e-12)
  assert found['counts']['missing'] == 500


def test_measures_of_other_providers_break_ties_in_the_same_way():
  ranked, qrels = tied_runs(40)
  found = measure(
    run_from_dict(ranked),
    qrels,
    ['RR@3', 'RR(rel=2)@10', 'Judged@7', 'Accuracy@9', 'ERR@5', 'nDCG(dcg="exp-log2")@5', 'Compat'],
  )['per_query']
  for query, scores in ranked.items():
    judged = qrels[query]
    order = by_rule(scores)
    for name, least, cut in (('RR@3', 1, 3), ('RR(rel=2)@10', 2, 10)):
      hits = [rank for rank, doc in enumerate(order[:cut], 1) if judged.get(doc, 0) >= least]
      assert found[name][query] == (1 / hits[0] if hits else 0)
    assert found['Judged@7'][query] == pytest.approx(sum(doc in judged for doc in order[:7]) / 7)
    relevant = [judged.get(doc, 0) > 0 for doc in order[:9]]
    above = [relevant[:place].count(False) for place, hit in enumerate(relevant) if hit]
    misses = relevant.count(False)
    accuracy = 1 - sum(above) / (misses * len(above)) if above else 0
    assert found['Accuracy@9'][query] == pytest.approx(accuracy)
    stop, err, gain = 1.0, 0.0, 0.0
    for rank, doc in enumerate(order[:5], 1):
      worth = 2 ** max(judged.get(doc, 0), 0) - 1
      err, stop = err + stop * worth / 16 / rank, stop * (1 - worth / 16)
      gain += worth / math.log2(rank + 1)
    best = sorted((2 ** max(grade, 0) - 1 for grade in judged.values()), reverse=True)[:5]
    ideal = sum(worth / math.log2(rank + 1) for rank, worth in enumerate(best, 1))
    assert found['ERR@5'][query] == pytest.approx(err, abs=6e-6)  # of five decimals
    assert found["nDCG(dcg='exp-log2')@5"][query] == pytest.approx(gain / ideal, abs=6e-6)
  # The ideal ranking of Compat keeps the order of the run among equal scores.
  assert measure(run_from_dict({'q': {'a': 1.0, 'b': 1.0}}), {'q': {'a': 1, 'b': 1}}, ['Compat'])[
    'mean'
  ] == {'Compat': pytest.approx(1.0)}


@pytest.mark.parametrize('lowest', [-2, -(2**31)])
@pytest.mark.parametrize('first', [True, False])
def test_a_query_that_is_judged_below_0_scores_0(lowest, first):
  junk = {'q2': {'a': lowest, 'b': lowest}}
  qrels = {'q1': {'a': 1}} | junk if not first else junk | {'q1': {'a': 1}}
  run = run_from_dict({'q1': {'a': 1.0}, 'q2': {'a': 2.0, 'b': 1.0}})
  names = ['nDCG', 'Bpref', 'infAP', 'Rprec', 'P@1', 'RR@10', 'IPrec@0.1', 'ERR@5', 'SetF']
  given = [name.replace('@0.1', '(recall=0.1)') for name in names]
  found = measure(run, qrels, given)['per_query']
  for name in names:
    assert found[name]['q1'] > 0 and found[name]['q2'] == 0, name


def test_grades_of_any_size():
  qrels = {'q': {'a': 999_999_999, 'b': 3, 'c': -7}}
  run = run_from_dict({'q': {'b': 2.0, 'c': 1.5, 'a': 1.0}})
  found = measure(run, qrels, ['nDCG', 'AP(rel=1000)', 'Bpref(rel=1000000)', 'P(rel=4)@3'])['mean']
  top = 999_999_999
  assert found['nDCG'] == pytest.approx((3 + top / 2) / (top + 3 / math.log2(3)))
  assert found['AP(rel=1000)'] == found['P(rel=4)@3'] == pytest.approx(1 / 3)
  assert found['Bpref(rel=1000000)'] == 0  # b, judged below it, is ranked first
  with refused('ERR@5', '999999999'):
    measure(run, qrels, ['ERR@5'])


def test_ids_that_a_provider_would_change():
  """gdeval takes the id of a query from the last hyphen on, and columns between spaces."""
  qrels = {'set-1': {'a b': 2}, 'other-1': {'#x': 1}, 'no query': {'c': 1}, 'no_query': {'d': 0}}
  run = run_from_dict(
    {'set-1': {'a b': 1.0}, 'other-1': {'y': 2.0, '#x': 1.0}, 'no query': {'c': 1.0}}
  )
  found = measure(run, qrels, ['ERR@5', 'RR'])['per_query']
  assert found['RR'] == {'set-1': 1, 'other-1': 0.5, 'no query': 1, 'no_query': 0}
  assert found['ERR@5'] == {'set-1': 3 / 16, 'other-1': 0.03125, 'no query': 0.0625, 'no_query': 0}


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
  'name',
  [
    *('nDCG@ten', 'Recall', 'nDCG(color=3)@10', 'R@0', '', 'nAP@0', 'ndcg_cut_10_5'),
    *('AP(__import__=1)', 'R@' + '9' * 5000, 'AP(rel=' + '(' * 5000 + ')', 'P(2)@5'),
  ],
)
def test_unknown_measures(name):
  with refused('measure') as found:
    parse_measures([name])
  assert len(str(found.value)) < 400


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


@pytest.mark.parametrize(
  ('names', 'here'),
  [
    ('MRR@10 RR@10 mrr@10 mrr_at_10', 'RR@10'),
    ('NDCG@10 ndcg@10 ndcg_cut_10 ndcg_cut.10 ndcg_at_10', 'nDCG@10'),
    ('map ap MAP', 'AP'),
    ('map_cut_100 map@100 MAP@100', 'AP@100'),
    ('recall_10 recall@10 recall.10 r@10 Recall@10', 'R@10'),
    ('P_10 P.10 p@10 precision@10', 'P@10'),
    ('success_1 hit_rate@1 success@1', 'Success@1'),
    ('iprec_at_recall_0.10 iprec@0.1', 'IPrec@0.1'),
    *(('recip_rank', 'RR'), ('num_rel_ret', 'NumRet(rel=1)'), ('set_recall', 'SetR')),
  ],
)
def test_other_names_for_the_same(names, here):
  assert list(parse_measures(names.split())) == [here]


def test_a_config_has_the_name_of_the_metrics():
  check_name('RR@10', 'config.eval.measure')
  with refused('config.eval.measure', 'mrr@10', 'RR@10'):
    check_name('mrr@10', 'config.eval.measure')


def test_no_common_query():
  with refused('q1', 'q2', 'q3'):
    measure(run_from_dict({'other': {'a': 1.0}}), QRELS)


def test_all_that_is_found_counts_beside_measures_of_judged_documents():
  run = run_from_dict({'q': {'a': 3.0, 'b': 2.0, 'c': 1.0}})
  found = measure(run, {'q': {'a': 1}}, ['P(judged_only=True)@5', 'NumRet', 'NumRet(rel=1)'])
  assert found['mean']['NumRet'] == 3 and found['mean']['NumRet(rel=1)'] == 1


def test_a_provider_that_fails():
  run, qrels = run_from_dict({'q': {'a': 1.0}}), {'q': {'a': 1}}
  with refused('Accuracy'):
    measure(run, qrels, ['Accuracy'])
