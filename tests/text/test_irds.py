"""Data sets of ir_datasets as BEIR folders: from a stand-in with its interface, and, where it is
installed, from ir_datasets itself.
"""

import json
import sys
import types
from typing import NamedTuple

import pytest

from dprjax.base import errors
from dprjax.text import irds, sources
from tests.refusals import refused


class Doc(NamedTuple):
  doc_id: str
  text: str

  def default_text(self):
    return self.text


class Titled(NamedTuple):
  doc_id: str
  title: str
  text: str
  url: str = ''

  def default_text(self):
    return f'{self.title} {self.text} {self.url}'


class Image(NamedTuple):
  doc_id: str


class Query(NamedTuple):
  query_id: str
  title: str
  narrative: str = 'long'

  def default_text(self):
    return self.title


class Qrel(NamedTuple):
  query_id: str
  doc_id: str
  relevance: int


class Parts:
  """A data set of ir_datasets has some of docs, queries and qrels."""

  def __init__(self, docs=None, queries=None, qrels=None):
    self.parts = {'docs': docs, 'queries': queries, 'qrels': qrels}

  def __getattr__(self, name):
    if name.startswith('has_'):
      return lambda: self.parts[name.removeprefix('has_')] is not None
    return lambda: iter(self.parts[name.removesuffix('_iter')])


DOCS = [
  Doc('d1', 'json "decodes"'),
  Titled('d2', 'a title', 'its text', 'http://x'),
  Doc('d3', 'é'),
]
TRAIN = Parts(
  DOCS, [Query('q1', 'json'), Query('q2', 'http')], [Qrel('q1', 'd1', 1), Qrel('q2', 'd2', 1)]
)
TEST = Parts(DOCS, [Query('q3', 'xml')], [Qrel('q3', 'd3', 1), Qrel('q3', 'd3', 2)])
REGISTRY = {
  'toy': Parts(DOCS),
  'toy/train': TRAIN,
  'toy/test': TEST,
  'whole': TRAIN,
  'odd/no-docs': Parts(None, TRAIN.parts['queries'], TRAIN.parts['qrels']),
  'odd/no-qrels': Parts(DOCS, TRAIN.parts['queries'], []),
  'odd/twice': Parts([*DOCS, DOCS[0]], TRAIN.parts['queries'], TRAIN.parts['qrels']),
  'odd/id': Parts([Doc(' d1', 'x')], TRAIN.parts['queries'], TRAIN.parts['qrels']),
  'odd/textless': Parts([Image('d1')], TRAIN.parts['queries'], TRAIN.parts['qrels']),
  'odd/grades': Parts(DOCS, TRAIN.parts['queries'], [Query('q1', 'd1')]),
  'odd/other-text': Parts(DOCS, [Query('q1', 'a'), Query('q1', 'b')], TRAIN.parts['qrels']),
}


class Unreadable(Parts):
  def docs_iter(self):
    raise OSError('no route to host')


REGISTRY['odd/unreadable'] = Unreadable(DOCS, TRAIN.parts['queries'], TRAIN.parts['qrels'])


@pytest.fixture
def stand_in(monkeypatch):
  module = types.ModuleType('ir_datasets')
  module.registry, module.load = REGISTRY, REGISTRY.__getitem__
  monkeypatch.setitem(sys.modules, 'ir_datasets', module)


def lines(path):
  return [json.loads(line) for line in path.read_text(encoding='utf-8').splitlines()]


def test_a_data_set_as_a_beir_folder(stand_in, tmp_path):
  folder = irds.folder_of('irds:toy', tmp_path / 'data', ['train', 'test'])
  assert lines(folder / 'corpus.jsonl') == [
    {'_id': 'd1', 'text': 'json "decodes"'},
    {'_id': 'd2', 'title': 'a title', 'text': 'its text'},
    {'_id': 'd3', 'text': 'é'},
  ]
  assert [query['text'] for query in lines(folder / 'queries.jsonl')] == ['json', 'http', 'xml']
  train, test = (
    sources.load_dataset(sources.Source(str(folder), split=split)) for split in ('train', 'test')
  )
  assert train.format == 'beir' and train.qrels == {'q1': {'d1': 1}, 'q2': {'d2': 1}}
  assert test.qrels == {'q3': {'d3': 2}}  # the higher of two grades
  # It is written once.
  (folder / 'corpus.jsonl').write_text('')
  assert irds.folder_of('irds:toy', folder, ['train', 'test']) == folder
  assert (folder / 'corpus.jsonl').read_text() == ''
  for name, splits in (('irds:whole', ['train', 'test']), ('irds:toy', ['train'])):
    with refused(name):
      irds.folder_of(name, folder, splits)


@pytest.mark.parametrize(
  ('id_', 'split'), [('whole', 'train'), ('toy/train', 'train'), ('toy/test', 'test')]
)
def test_an_id_that_is_a_split_itself(stand_in, tmp_path, id_, split):
  irds.write(id_, [split], tmp_path / 'data')
  assert sources.load_dataset(sources.Source(str(tmp_path / 'data'), split=split)).queries


@pytest.mark.parametrize(
  ('id_', 'split', 'message'),
  [
    ('tyo', 'train', 'tyo'),
    ('toy', 'dev', 'dev'),
    ('whole', 'dev', 'dev'),
    ('toy/train', 'test', 'test'),  # never the training queries instead
    ('odd/no-docs', 'train', 'odd/no-docs'),
    ('odd/no-qrels', 'train', ('odd/no-qrels', 'train')),
    ('odd/twice', 'train', ('d1', 'line 1', 'line 4')),
    ('odd/id', 'train', 'd1'),
    ('odd/textless', 'train', 'irds:odd/textless'),
    ('odd/grades', 'train', 'odd/grades'),
    ('odd/other-text', 'train', 'q1'),
    ('odd/unreadable', 'train', 'ir_datasets'),
  ],
)
def test_what_cannot_be_used(stand_in, tmp_path, id_, split, message):
  with refused(message):
    irds.write(id_, [split], tmp_path / 'data')
  assert list(tmp_path.iterdir()) == []


def test_without_ir_datasets(monkeypatch, tmp_path):
  monkeypatch.setitem(sys.modules, 'ir_datasets', None)
  with pytest.raises(ModuleNotFoundError) as missing:
    irds.write('toy', ['train'], tmp_path / 'data')
  assert 'dprjax[irds]' in errors.explain(missing.value)[1]


@pytest.mark.filterwarnings('ignore')
def test_ir_datasets_itself(tmp_path, monkeypatch):
  monkeypatch.setenv('IR_DATASETS_HOME', str(tmp_path / 'home'))
  ir_datasets = pytest.importorskip('ir_datasets', reason="pip install 'dprjax[irds]'")
  (tmp_path / 'docs.tsv').write_text('d1\tjson decodes\nd2\tan http server\n')
  (tmp_path / 'queries.tsv').write_text('q1\tjson\nq2\thttp\n')
  (tmp_path / 'qrels').write_text('q1 0 d1 1\nq2 0 d2 2\n')
  made = ir_datasets.create_dataset(
    docs_tsv=str(tmp_path / 'docs.tsv'),
    queries_tsv=str(tmp_path / 'queries.tsv'),
    qrels_trec=str(tmp_path / 'qrels'),
  )
  ir_datasets.registry.register('dprjax-toy/train', made)
  irds.write('dprjax-toy', ['train'], tmp_path / 'data')
  data = sources.load_dataset(sources.Source(str(tmp_path / 'data')))
  assert data.qrels == {'q1': {'d1': 1}, 'q2': {'d2': 2}}
  assert [passage.text for passage in data.passages] == ['json decodes', 'an http server']
  with refused('beir/scifcat', 'beir/scifact'):
    irds.write('beir/scifcat', ['train'], tmp_path / 'other')
