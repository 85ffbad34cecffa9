"""The command, and training on its file. mining/test_negatives.py tests mining."""

import json

import numpy as np
import pytest

from tests.commands import mine
from tests.refusals import named_in, refused
from tests.retrieval.test_negatives import World


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
    (['--reranker_prompt=qa.npz'], ('--reranker_prompt=qa.npz', '--reranker=DIR')),
    (['--reranker=ce', '--reranked=run.trec'], ('--reranker', '--reranked')),
    (['--score_positives=true'], '--score_positives=true'),
  ],
)
def test_bad_flags(world, command, flags, message):
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
