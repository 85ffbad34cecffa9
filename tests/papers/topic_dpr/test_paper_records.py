"""Papers: their records in files, and the BEIR folder made of them."""

import json

import pytest

from dprjax.papers.topic_dpr import paper_records
from dprjax.papers.topic_dpr.paper_records import Paper
from dprjax.text import sources
from tests.refusals import refused

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
  assert list(paper_records.read_papers(write(tmp_path / 'a.jsonl', ARXIV))) == PAPERS
  # The first may be the one that lacks an abstract.
  turned = write(tmp_path / 'b.jsonl', ARXIV[::-1])
  assert list(paper_records.read_papers(turned)) == PAPERS[::-1]
  array = tmp_path / 'a.json'
  array.write_text(json.dumps(ARXIV))
  assert list(paper_records.read_papers(array)) == PAPERS


def test_corpora(tmp_path):
  rows = [{'_id': 'a', 'title': 'T', 'text': 'x', 'categories': ['k']}, {'_id': 'b', 'text': ''}]
  read = list(paper_records.read_papers(write(tmp_path / 'corpus.jsonl', rows)))
  assert read == [Paper('a', 'T', 'T x', ('k',)), Paper('b', '', '', ())]
  (tmp_path / 'corpus.tsv').write_text('a\tT\tx\nb\t\ty\n')
  read = list(paper_records.read_papers(tmp_path / 'corpus.tsv'))
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
    list(paper_records.read_papers(write(tmp_path / 'a.jsonl', rows)))


FOUR = [
  Paper('a', 'on a', 'text a', ('x', 'y')),
  Paper('b', 'on b', 'text b', ('y',)),
  Paper('c', 'on c', 'text c', ('z',)),
  Paper('d', 'on d', 'text d', ('z', 'x')),
]


def test_related():
  assert {query: list(found) for query, found in paper_records.related(FOUR).items()} == {
    'a': ['a', 'b', 'd'],
    'b': ['a', 'b'],
    'c': ['c', 'd'],
    'd': ['a', 'c', 'd'],
  }


@pytest.mark.parametrize('own', [True, False])
def test_the_beir_folder(tmp_path, own):
  paper_records.write_beir(tmp_path / 'beir', FOUR, 'dev', own)
  rows = [json.loads(line) for line in (tmp_path / 'beir/corpus.jsonl').read_text().splitlines()]
  assert rows[0] == {'_id': 'a', 'title': '', 'text': 'text a', 'categories': ['x', 'y']}
  data = sources.load_dataset(sources.Source(str(tmp_path / 'beir'), split='dev'))
  # The passage is only the abstract: its title is the query.
  assert [passage.text for passage in data.passages] == [f'text {p.id}' for p in FOUR]
  assert [tuple(query) for query in data.queries] == [(p.id, p.title) for p in FOUR]
  assert data.positives('c') == (['c'] if own else ['c', 'd'])
  assert data.read_categories() == {paper.id: paper.categories for paper in FOUR}
