"""Folders as tasks of mteb, measured as dprjax.evaluate measures them; where mteb is installed."""

import json
import math
import warnings

import pytest

import dprjax.mteb
from dprjax import Retriever
from tests.commands import evaluate
from tests.refusals import refused

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings('ignore')]


@pytest.fixture(autouse=True)
def mteb(tmp_path, monkeypatch):
  monkeypatch.setenv('MTEB_CACHE', str(tmp_path / 'mteb'))
  monkeypatch.setenv('HF_DATASETS_OFFLINE', '1')
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    return pytest.importorskip('mteb', reason="pip install 'dprjax[mteb]' (it brings PyTorch)")


def test_a_folder_scores_as_a_run_of_it_does(mteb, small, beir, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  prompt = small.write(tmp_path / 'prompts', 'qa', 2, passage=1)
  flags = ['--backbone', str(small.path), '--prompt', str(prompt), '--out=mteb.json']
  seen = ['--training_datasets=', '--adapted_from=sentence-transformers/all-MiniLM-L6-v2']
  evaluate.main([f'--mteb={beir}', *flags, *seen, '--extra=trained=12'])
  found = json.loads((tmp_path / 'mteb.json').read_text())

  retriever = Retriever.load(small.path, prompt)
  retriever.index(beir / 'corpus.jsonl')
  queries = [json.loads(line) for line in (beir / 'queries.jsonl').read_text().splitlines()]
  hits = retriever.search([query['text'] for query in queries], k=3)
  lines = (
    f'{query["_id"]} Q0 {hit.id} {rank} {hit.score:.9f} x\n'
    for query, ranked in zip(queries, hits, strict=True)
    for rank, hit in enumerate(ranked)
  )
  (tmp_path / 'run.trec').write_text(''.join(lines))
  evaluate.main(
    ['--run=run.trec', f'--qrels={beir}/qrels/test.tsv', '--measure=nDCG@10', '--out=run.json']
  )
  expected = json.loads((tmp_path / 'run.json').read_text())['mean']['nDCG@10']
  task = dprjax.mteb.folder_task(beir)
  name = task.metadata.name
  assert name.startswith('toy-')
  assert found['mean'] == pytest.approx({name: expected, 'average': expected}, abs=1e-4)
  assert found['tasks'][name]['main_score'] == 'ndcg_at_10'
  assert found['model']['training_datasets'] == [] and found['extra'] == {'trained': '12'}
  retriever.save(tmp_path / 'mine')
  evaluate.main([f'--mteb={beir}', '--retriever=mine', '--out=mine.json'])
  mine = json.loads((tmp_path / 'mine.json').read_text())
  assert mine['mean'] == found['mean'] and mine['model']['name'] == 'dprjax/mine'
  # Other judgements are another task: mteb does not answer from its cache.
  (beir / 'qrels' / 'test.tsv').write_text('query-id\tcorpus-id\tscore\nq1\td2\t1\n')
  evaluate.main([f'--mteb={beir}', *flags])
  ranks = {hit.id: rank for rank, hit in enumerate(hits[0])}
  again = json.loads((tmp_path / 'mteb.json').read_text())['mean']['average']
  assert again == pytest.approx(1 / math.log2(2 + ranks['d2']), abs=1e-4)


def test_bad_tasks(mteb, small, beir):
  model = dprjax.mteb.load(small.path)
  with refused('NoSuchTask'):
    dprjax.mteb.measure(model, ['NoSuchTask'])
  with refused(dprjax.mteb.folder_task(beir).metadata.name):
    dprjax.mteb.measure(model, [str(beir), str(beir)])
  with refused('qrels/dev.tsv'):
    dprjax.mteb.folder_task(beir, 'dev')
  with refused('English'):
    dprjax.mteb.folder_task(beir, language='English')
