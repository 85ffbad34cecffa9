"""Papers to BEIR folders, from the command line."""

import itertools
import json

import pytest

from dprjax.papers.topic_dpr import papers
from dprjax.text import sources

ROWS = [
  {
    'id': f'p{i}',
    'title': f'title {i}',
    'abstract': f'abstract {i}',
    'categories': [f'c{i % 3}', f'c{i % 2}'],
  }
  for i in range(30)
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  rows = [
    *ROWS,
    {'id': 'x1', 'title': '', 'abstract': 'a', 'categories': ['c0']},
    {'id': 'x2', 'title': 't', 'categories': []},
  ]
  (tmp_path / 'papers.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return tmp_path


def ids(path):
  return [json.loads(line)['_id'] for line in path.read_text().splitlines()]


def test_splits_are_apart_and_grow_at_the_end(folder, capsys):
  papers.main(['--input=papers.jsonl', '--out=out', '--dev=5', '--test=8'])
  log = capsys.readouterr().err
  assert '1 paper without title: skipped (x1)' in log
  assert '1 paper without abstract: skipped (x2)' in log
  assert '1 paper without categories: skipped (x2)' in log
  found = {split: ids(folder / 'out' / split / 'corpus.jsonl') for split in papers.SPLITS}
  assert {split: len(part) for split, part in found.items()} == {'train': 17, 'dev': 5, 'test': 8}
  assert sorted(itertools.chain(*found.values())) == sorted(row['id'] for row in ROWS)
  # With fewer papers to train on, dev and test are the same.
  papers.main(['--input=papers.jsonl', '--out=out', '--dev=5', '--test=8', '--train=4'])
  assert ids(folder / 'out/test/corpus.jsonl') == found['test']
  assert ids(folder / 'out/train/corpus.jsonl') == found['train'][:4]
  for split, own in (('train', True), ('dev', False)):
    data = sources.load_dataset(sources.Source(str(folder / 'out' / split), split=split))
    categories = data.read_categories()
    for query in data.queries:
      expected = [
        id_ for id_, of in categories.items() if set(of) & set(categories[query.id]) and not own
      ]
      assert data.positives(query.id) == (expected or [query.id])


@pytest.mark.parametrize(
  'arguments, message',
  [
    ('--input=papers.jsonl --out=out --test=99', 'papers.jsonl: 30'),
    ('--input=papers.jsonl --out=other', 'contains something other than papers'),
    ('--input=other/mine --out=other', 'holds an input'),
  ],
)
def test_bad_input(folder, command, arguments, message):
  (folder / 'other').mkdir()
  (folder / 'other' / 'mine').write_text('mine')
  before = sorted(folder.rglob('*'))
  status, output = command(papers, *arguments.split())
  assert status == 2
  assert output.splitlines()[-1].startswith('dprjax: error: ') and message in output
  assert sorted(folder.rglob('*')) == before
