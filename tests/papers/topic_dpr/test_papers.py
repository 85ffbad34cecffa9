"""Papers to BEIR folders, from the command line."""

import itertools
import json

import pytest

from dprjax.papers.topic_dpr import papers
from dprjax.papers.topic_dpr.papers import Paper
from dprjax.text import sources
from tests.refusals import refused

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
    # The passage is only the abstract: its title is the query.
    assert all(passage.text.startswith('abstract ') for passage in data.passages)
    assert all(query.text.startswith('title ') for query in data.queries)
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


ARXIV = [
  {'id': '1', 'title': ' On cats ', 'abstract': 'Cats\n sit.', 'categories': ['cs.CL', 'cs.CL']},
  {'id': 2, 'title': None, 'abstract': 'Dogs.', 'categories': 'hep-th math.AG'},
  {'id': '3', 'title': 'Fish'},
]
PAPERS = [
  Paper('1', 'On cats', 'Cats\n sit.', ('cs.CL',)),
  Paper('2', '', 'Dogs.', ('hep-th', 'math.AG')),
  Paper('3', 'Fish', '', ()),
]


def write(path, rows):
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return path


def test_arxiv(tmp_path):
  assert list(papers.read_papers(write(tmp_path / 'a.jsonl', ARXIV))) == PAPERS
  # The first may be the one that lacks an abstract.
  turned = write(tmp_path / 'b.jsonl', ARXIV[::-1])
  assert list(papers.read_papers(turned)) == PAPERS[::-1]
  array = tmp_path / 'a.json'
  array.write_text(json.dumps(ARXIV))
  assert list(papers.read_papers(array)) == PAPERS


def test_corpora(tmp_path):
  rows = [{'_id': 'a', 'title': 'T', 'text': 'x', 'categories': ['k']}, {'_id': 'b', 'text': ''}]
  read = list(papers.read_papers(write(tmp_path / 'corpus.jsonl', rows)))
  assert read == [Paper('a', 'T', 'T x', ('k',)), Paper('b', '', '', ())]
  (tmp_path / 'corpus.tsv').write_text('a\tT\tx\nb\t\ty\n')
  read = list(papers.read_papers(tmp_path / 'corpus.tsv'))
  assert read == [Paper('a', '', 'T x', ()), Paper('b', '', 'y', ())]


@pytest.mark.parametrize(
  'rows, message',
  [
    ([ARXIV[0], {'id': '7', 'title': 3}], ('line 2', 'title')),
    ([ARXIV[0], ARXIV[0]], ('a.jsonl', 'line 1', 'line 2')),
  ],
)
def test_bad_papers_are_named(tmp_path, rows, message):
  with refused(message):
    list(papers.read_papers(write(tmp_path / 'a.jsonl', rows)))
