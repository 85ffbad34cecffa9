"""The command, and training on its file. mining/test_negatives.py tests mining."""

import json
import pathlib

import numpy as np
import pytest

from dprjax import bm25, load_prompt, train
from dprjax.text import docstrings
from dprjax.training import exporting
from tests.commands import mine
from tests.refusals import named_in, refused
from tests.retrieval.test_negatives import World, trec_lines

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture
def world(tmp_path):
  return World(tmp_path)


def arguments(world, **changes):
  flags = {'queries': 'queries.jsonl', 'corpus': 'corpus.jsonl', 'qrels': 'train.tsv'}
  flags |= {'out': 'out.jsonl'} | changes
  return [f'--{name}={world.folder / value}' for name, value in flags.items()]


def test_the_command_writes_the_file_and_its_report(world, command, capsys):
  folder = world.folder
  status, errors = command(
    mine,
    *arguments(world, reranked='reranked.trec'),
    f'--run={folder}/bm25.trec',
    f'--run=dpt={folder}/dense.trec',
    '--sample=5',
    '--depth=20',
    '--threshold=0.2',
  )
  assert status == 0, errors
  report = json.loads((folder / 'out.jsonl.json').read_text())
  assert report['retrievers'] == {'bm25': f'{folder}/bm25.trec', 'dpt': f'{folder}/dense.trec'}
  options = {'sample': 5, 'depth': 20, 'threshold': 0.2}
  assert report['queries'] == 20 and options.items() <= report['settings'].items()
  world.mine('expected.jsonl', reranked='reranked.trec', **options)
  expected = (folder / 'expected.jsonl').read_text().replace('"dense"', '"dpt"')
  assert (folder / 'out.jsonl').read_text() == expected
  assert f'{report["counts"]["negatives in the file"]:,} negatives in the file' in errors


def test_names_of_retrievers(world):
  a, b = world.folder / 'bm25.trec', world.folder / 'dense.trec'
  assert mine.name_retrievers([('', str(a)), ('new', str(b))]) == {'bm25': str(a), 'new': str(b)}
  # Two with the same tag are named after their files.
  (world.folder / 'other.trec').write_text(a.read_text())
  assert mine.name_retrievers([('', str(a)), ('', str(world.folder / 'other.trec'))]) == {
    'bm25': str(a),
    'other': str(world.folder / 'other.trec'),
  }
  with refused('x', a, b, '--run=NAME'):
    mine.name_retrievers([('x', str(a)), ('x', str(b))])


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (['--run=lost.trec'], 'lost.trec'),
    (['--threshold=1.5'], '--threshold'),
    (['--run=a\udce9b=run.trec'], 'run.trec'),
    (['--reranked=lost.trec'], 'lost.trec'),
    (['--reranker_prompt=qa.npz'], ('--reranker_prompt=qa.npz', '--reranker=DIR')),
    (['--reranker=ce', '--reranked=run.trec'], ('--reranker', '--reranked')),
    (['--score_positives=true'], '--score_positives=true'),
  ],
)
def test_bad_flags(world, command, flags, message):
  flags = [flag.replace('{folder}', str(world.folder)) for flag in flags]
  status, errors = command(mine, *arguments(world), f'--run={world.folder}/bm25.trec', *flags)
  assert status == 2 and named_in(errors, message) and errors.count('dprjax: error: ') == 1
  assert not (world.folder / 'out.jsonl').exists() and not list(world.folder.glob('.*'))


@pytest.mark.slow
def test_a_prompt_of_pairs_scores(world, command, templates, tmp_path):
  from dprjax import PromptReranker
  from dprjax.models import artifact

  prompt = artifact.load_prompt(templates / 'pairs.npz')
  path = tmp_path / 'probability.npz'
  artifact.save_prompt(path, artifact.Prompt(prompt.meta | {'score': 'probability'}, prompt.arrays))
  source = [f'--reranker={templates}/backbone', f'--reranker_prompt={path}', '--batch_size=8']
  flags = [f'--run={world.folder}/bm25.trec', '--depth=2', '--sample=2', '--texts=false']
  status, errors = command(mine, *arguments(world), *flags, *source, '--threshold=0.5')
  assert status == 0, errors
  # Differences of logits, whatever the scores in the file.
  reranker = PromptReranker.load(templates / 'backbone', templates / 'pairs.npz', batch_size=8)
  records = [json.loads(line) for line in (world.folder / 'out.jsonl').read_text().splitlines()]
  found = [(record, one) for record in records for one in record['negative_passages']]
  pairs = [(record['query'], world.corpus[one['docid']]) for record, one in found]
  scores = [one['reranker_score'] for _, one in found]
  np.testing.assert_allclose(scores, reranker.score(pairs), rtol=0, atol=1e-4)
  report = json.loads((world.folder / 'out.jsonl.json').read_text())
  assert report['reranker_prompt'] == str(path)


@pytest.mark.slow
def test_training_on_a_mined_file(tmp_path, command):
  """BM25's negatives of docstrings, denoised by made-up scores: metrics have their shares."""
  data = tmp_path / 'data'
  docstrings.build(str(data), packages=['email', 'json', 'logging', 'unittest', 'http'])
  names = {'corpus': 'corpus.jsonl', 'queries': 'queries.jsonl', 'qrels': 'qrels/train.tsv'}
  texts = [f'--{role}={data}/{name}' for role, name in names.items()]
  run = tmp_path / 'bm25.trec'
  assert command(bm25, *texts, '--k=50', f'--out={run}')[0] == 0
  rankings = {}
  for number, line in enumerate(run.read_text().splitlines()):
    query, _, doc, *_ = line.split()
    rankings.setdefault(query, []).append((-5 if number % 3 else 5, doc))
  for ranking in rankings.values():
    ranking.sort(reverse=True)
  reranked = tmp_path / 'reranked.trec'
  reranked.write_text('\n'.join(trec_lines(rankings, 'ce')))
  files = [f'--run={run}', f'--reranked={reranked}', f'--out={tmp_path}/mined.jsonl']
  flags = ['--sample=10', '--texts=false', '--score_positives=true']
  status, errors = command(mine, *texts, *files, *flags)
  assert status == 0, errors
  shares = {'denoised': 0.5, 'undenoised': 0.25, 'random': 0.25}
  train.main(
    [
      f'--config={ROOT}/configs/dptdr.py:local',
      f'--workdir={tmp_path}/run',
      '--config.data.format=beir',
      f'--config.data.dir={data}',
      f'--config.data.mined_negatives={tmp_path}/mined.jsonl',
      '--config.negatives=4',
      *(f'--config.mix.{source}={share}' for source, share in shares.items()),
      '--config.steps=4',
      '--config.distillation.loss=margin_mse',
      '--config.distillation.weight=0.5',
      '--config.matryoshka=(32, 16)',
    ]
  )
  prompt = exporting.export(tmp_path / 'run', tmp_path / 'prompt.npz', force=True)
  assert load_prompt(prompt).meta['matryoshka'] == [32, 16]
  lines = (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()
  rows = [row for row in map(json.loads, lines) if 'loss' in row]
  assert len(rows) == 2
  for row in rows:
    mean = (row['info_nce'] + row['distillation']) / 2
    assert row['distillation'] > 0 and row['loss'] == pytest.approx(mean, rel=1e-4)
    found = {name: row.get(f'negatives/{name}', 0.0) for name in (*shares, 'random_for_denoised')}
    assert sum(found.values()) == pytest.approx(1)
    # A denoised negative that is missing is replaced by a random one.
    found['denoised'] += found['random_for_denoised']
    for source, share in shares.items():
      # 64 negatives draw their sources; 4 standard deviations.
      assert abs(found[source] - share) < 4 * (share * (1 - share) / 64) ** 0.5
    assert found['denoised'] > found['undenoised'] > 0 and found['random'] > 0
    assert 0 <= row['negatives/queries_short_of_a_source'] < 0.5
