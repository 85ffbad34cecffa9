import json

import pytest

import dprjax
from dprjax.base import tables
from dprjax.retrieval import fusion
from dprjax.retrieval.retriever import Hit, Results
from dprjax.text.texts import Query
from tests.commands import evaluate, fuse
from tests.refusals import refused

RUN = {'a': {'x': 0.9, 'y': 0.5}, 'b': {'y': 0.9, 'z': 0.2}}
WORSE = {'a': {'y': 0.9, 'x': 0.5}, 'b': {'z': 0.9, 'y': 0.2}}
RELEVANT = {'a': 'x', 'b': {'y': 1}}


def rows(table):
  return list(table) if isinstance(table, tables.Records) else table.to_dict('records')


@pytest.fixture(params=[True, False], ids=['pandas', 'records'])
def either(request, monkeypatch):
  """With pandas, and as if it were not installed."""
  if request.param:
    pytest.importorskip('pandas')
  else:
    monkeypatch.setattr(tables.importlib.util, 'find_spec', lambda _: None)


def test_a_run(either):
  table = dprjax.evaluate(RUN, RELEVANT, ['RR@10', 'P@2'])
  assert [(row['measure'], row['mean']) for row in rows(table)] == [('RR@10', 1.0), ('P@2', 0.5)]
  assert list(table.columns) == ['system', 'measure', 'mean', 'low', 'high']


def test_a_list_of_judgements_follows_the_queries_of_a_search():
  hits = [[Hit('1', 0.9, 'y'), Hit('0', 0.5, 'x')], [Hit('2', 0.9, 'z')]]
  results = Results(hits, [Query('0', 'who'), Query('1', 'where')])
  for relevant, mean in (([[1], [2]], 1.0), ([0, 2], 0.75), ([('0', '1')], 1.0)):
    (row,) = rows(dprjax.evaluate(results, relevant, ['RR@10']))
    assert row['mean'] == mean
  with refused('relevant'):
    dprjax.evaluate(results, [1])


def test_systems():
  found = rows(dprjax.evaluate({'good': RUN, 'bad': WORSE}, RELEVANT, ['RR@10']))
  assert [(row['system'], row['mean']) for row in found] == [('good', 1.0), ('bad', 0.5)]
  assert found[1]['difference'] == found[1]['difference_high'] == -0.5


def test_single_queries():
  found = rows(dprjax.evaluate(WORSE, {'a': 'x', 'c': 'x'}, ['RR@10'], per_query=True))
  assert {row['query_id']: row['RR@10'] for row in found} == {'a': 0.5, 'c': 0.0}


def test_as_the_command(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  fused = dprjax.fuse({'one': RUN, 'other': WORSE}, k=1, rrf_k=5)
  assert [(row['query_id'], row['rank']) for row in rows(fused)] == [('a', 1), ('b', 1)]
  for name, run in (('one', RUN), ('other', WORSE)):
    lines = [
      f'{query} Q0 {id_} 1 {score} x\n'
      for query, each in run.items()
      for id_, score in each.items()
    ]
    (tmp_path / f'{name}.trec').write_text(''.join(lines))
  fuse.main(['--run=one=one.trec', '--run=other=other.trec', '--k=1', '--rrf_k=5', '--out=f.trec'])
  written = [line.split() for line in (tmp_path / 'f.trec').read_text().splitlines()]
  assert [(row['passage_id'], row['score']) for row in rows(fused)] == [
    (words[2], float(words[4])) for words in written
  ]
  (tmp_path / 'g.tsv').write_text('a\tx\t1\nb\ty\t1\n')
  evaluate.main(['--run=f.trec', '--qrels=g.tsv', '--measure=P@1', '--out=m.json'])
  mean = json.loads((tmp_path / 'm.json').read_text())['mean']['P@1']
  assert rows(dprjax.evaluate(fused, tmp_path / 'g.tsv', ['P@1']))[0]['mean'] == mean


def test_learnt_weights(tmp_path):
  path = tmp_path / 'fusion.json'
  fused = dprjax.fuse({'one': RUN, 'other': WORSE}, 'learned', relevant=RELEVANT, weights_out=path)
  again = dprjax.fuse({'one': RUN, 'other': WORSE}, weights=path)
  assert rows(again) == rows(fused)
  by_hand = dprjax.fuse({'one': RUN, 'other': WORSE}, weights={'one': 1, 'other': 0})
  assert [row['passage_id'] for row in rows(by_hand)] == ['x', 'y', 'y', 'z']


def test_mined(tmp_path):
  queries, corpus = {'a': 'how', 'b': 'why'}, {'x': 'X', 'y': 'Y', 'z': 'Z'}
  found = rows(
    dprjax.mine(queries, corpus, RELEVANT, {'bm25': RUN}, progress=False, out=tmp_path / 't.jsonl')
  )
  assert [(row['query_id'], row['passage_id'], row['text']) for row in found] == [
    ('a', 'y', 'Y'),
    ('b', 'z', 'Z'),
  ]
  assert found[0]['retriever'] == 'bm25' and found[0]['rank'] == 2
  assert (tmp_path / 't.jsonl.json').exists()


def test_a_run_in_a_file_is_kept_and_its_bm25_is_known(tmp_path):
  run, out = tmp_path / 'bm25.trec', tmp_path / 'fusion.json'
  run.write_text('a Q0 x 1 2.0 t\nb Q0 y 1 1.0 t\n')
  settings = {'k1': 1.2, 'b': 0.5, 'language': 'none'}
  report = {'index': 'bm25s', 'settings': settings}
  (tmp_path / 'bm25.trec.json').write_text(json.dumps(report))
  runs = {'bm25': run, 'dense': RUN}
  with refused('weights_out', 'bm25.trec'):
    dprjax.fuse(runs, weights_out=run)
  assert run.read_text().startswith('a Q0 x')
  dprjax.fuse(runs, weights_out=out)
  assert fusion.read(out).bm25 == settings
