import json
import sys

import numpy as np
import pytest
from etils import epath

from dprjax import search
from dprjax.base import outputs
from dprjax.encoding import codes
from dprjax.retrieval import scann
from dprjax.text.trec import read_run
from tests.platforms import needs_scann
from tests.refusals import command_refused, named_in

RNG = np.random.default_rng(0)
PASSAGES, QUERIES = (RNG.standard_normal((count, 16), np.float32) for count in (500, 12))
PASSAGE_IDS = [*(f'd{i}' for i in range(499)), 'q3']
QUERY_IDS = [f'q{i}' for i in range(12)]


@pytest.fixture(scope='module')
def embeddings(tmp_path_factory, write_embeddings):
  """Two good folders, corpus/ and queries/, and bad ones."""
  folder = tmp_path_factory.mktemp('embeddings')
  for name in ('corpus', 'damaged'):
    write_embeddings(folder / name, PASSAGE_IDS, PASSAGES, shard_rows=200)
  for name, changes in (
    ('queries', {}),
    ('prompt', {'prompt_sha256': None}),
  ):
    write_embeddings(folder / name, QUERY_IDS, QUERIES, side='query', **changes)
  write_embeddings(folder / 'dimension', QUERY_IDS, QUERIES[:, :8], side='query')
  for name, changes in (
    ('binary', {'dtype': 'binary'}),
    ('other texts', {'input_sha256': 'j' * 64}),
  ):
    write_embeddings(folder / name, PASSAGE_IDS, PASSAGES, shard_rows=200, **changes)
  write_embeddings(folder / 'short', PASSAGE_IDS, codes.cut(PASSAGES, 8, True), shard_rows=200)
  with (folder / 'damaged' / 'embeddings-00001-of-00003.npy').open('r+b') as file:
    file.seek(-1, 2)
    file.write(b'!')
  return folder


@pytest.fixture
def folder(tmp_path, embeddings, monkeypatch):
  """The working folder, with links to the embeddings."""
  for path in embeddings.iterdir():
    (tmp_path / path.name).symlink_to(path)
  monkeypatch.chdir(tmp_path)
  return tmp_path


def expected(k):
  """Documents by float64 products."""
  scores = QUERIES.astype(float) @ PASSAGES.astype(float).T
  rankings = np.array(PASSAGE_IDS)[np.argsort(-scores, axis=1)[:, :k]].tolist()
  return dict(zip(QUERY_IDS, rankings, strict=True))


def documents(path='run.trec'):
  return {query_id: [doc_id for doc_id, _ in ranking] for query_id, ranking in read_run(path)}


@pytest.mark.parametrize('index', ['exact', 'scann'])
def test_equals_numpy(folder, index):
  flags = ['--corpus=corpus', '--queries=queries', '--out=run.trec', f'--index={index}']
  search.main([*flags, '--k=20'])
  assert documents() == expected(20)
  lines = [line.split() for line in (folder / 'run.trec').read_text().splitlines()]
  assert [line[3] for line in lines[:20]] == [str(rank) for rank in range(1, 21)]
  report = json.loads((folder / 'run.trec.json').read_text())
  facts = {'k': 20, 'queries': 12, 'passages': 500, 'dimension': 16, 'pooling': 'mean'}
  facts |= {'backbone_sha256': 'b' * 64, 'prompt_sha256': 'p' * 64}
  assert report | facts == report
  assert report['queries_per_second'] > 0 and report['seconds']['search'] > 0
  if index == 'scann' and scann.available():
    assert report['index'] == 'scann' and report['kind'] == 'brute_force'
    assert report['recall'] == {'queries': 12, 'target': 0.95, 'recall@10': 1.0, 'recall@20': 1.0}
  else:
    assert report['index'] == 'exact' and 'recall' not in report


@pytest.mark.slow
@pytest.mark.parametrize(
  'stored, index',
  [('binary', 'exact'), pytest.param('short', 'scann', marks=needs_scann)],
)
def test_rescoring_finds_what_smaller_vectors_nearly_do(folder, command, stored, index):
  """A first search in few bytes, and its best in the order of float vectors."""
  flags = [f'--corpus={stored}', '--queries=queries', '--out=run.trec', f'--index={index}']
  flags += ['--k=5', *(['--dimensions=8'] if stored == 'short' else [])]
  assert command(search, *flags)[0] == 0
  alone = documents()
  report = json.loads((folder / 'run.trec.json').read_text())
  assert report.get('stored') == (None if stored == 'short' else stored)
  assert report['dimension'] == (8 if stored == 'short' else 16) and 'rescored' not in report
  again = ['--rescore=corpus', '--rescore_factor=100']
  assert command(search, *flags, *again)[0] == 0
  assert documents() == expected(5)  # all passages were candidates
  report = json.loads((folder / 'run.trec.json').read_text())
  assert report['rescored']['candidates'] == 500

  def shared(found):
    return np.mean([len({*found[q]} & {*best}) / 5 for q, best in expected(5).items()])

  assert command(search, *flags, '--rescore=corpus')[0] == 0
  least = {'binary': 0.1, 'short': 0.05}[stored]
  assert least < shared(alone) <= shared(documents())


def test_k_beyond_the_corpus_and_without_the_querys_own_id(folder):
  flags = ['--corpus=corpus', '--queries=queries', '--out=run.trec', '--drop_same_id=true']
  search.main(flags)
  found = documents()
  assert [len(found[f'q{i}']) for i in range(12)] == [500, 500, 500, 499] + [500] * 8
  search.main([*flags, '--k=499'])
  assert {len(ranking) for ranking in documents().values()} == {499}
  assert 'q3' not in documents()['q3']


def test_without_scann_the_search_is_exact(folder, monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, 'scann', None)
  monkeypatch.setattr(scann, 'available', lambda: False)
  search.main(['--corpus=corpus', '--queries=queries', '--out=run.trec', '--k=20'])
  assert documents() == expected(20)
  assert 'ScaNN is not installed' in capsys.readouterr().err
  assert json.loads((folder / 'run.trec.json').read_text())['index'] == 'exact'


@needs_scann
def test_one_command_writes_an_index_and_any_number_read_it(folder, command):
  flags = ['--corpus=corpus', '--queries=queries', '--index_dir=index', '--k=20']
  with outputs.hold(epath.Path('.index.lock'), 'a test'):
    status, err = command(search, *flags, '--out=a.trec')
    assert status == 2 and named_in(err, '--index_dir=index')
  assert not (folder / 'index').exists() and not (folder / 'a.trec').exists()
  assert command(search, *flags, '--out=a.trec')[0] == 0
  left = folder / '.index.12345678.tmp'
  left.mkdir()
  with outputs.hold(epath.Path('.index.lock'), 'a test'):
    assert command(search, *flags, '--out=b.trec')[0] == 0 and left.exists()
  assert command(search, *flags, '--out=c.trec')[0] == 0 and not left.exists()
  runs = [(folder / f'{name}.trec').read_bytes() for name in 'abc']
  assert runs[0] == runs[1] == runs[2]
  content = bytearray((folder / 'index' / 'dataset.npy').read_bytes())
  content[-1] ^= 1
  (folder / 'index' / 'dataset.npy').write_bytes(content)
  status, err = command(search, *flags, '--out=d.trec')
  assert status == 2 and named_in(err, 'dataset.npy')


@pytest.mark.parametrize(
  'flags, named',
  [
    (['--corpus=nowhere'], ['nowhere']),
    (['--corpus=damaged'], ['damaged/embeddings-00001-of-00003.npy']),
    (['--queries=corpus'], ['--queries']),
    (['--queries=prompt'], ['prompt_sha256']),
    (['--queries=dimension'], ['dimension', '16', '8', '--dimensions=8']),
    (['--rescore=short'], ['--rescore', '--queries', 'dimension']),
    (['--rescore=binary'], ['--rescore', 'binary']),
    (['--rescore=other texts'], ['--corpus=corpus']),
    (['--rescore=corpus', '--out=corpus/run.trec'], ['--out=corpus/run.trec']),
    (['--out=corpus/manifest.json'], ['--corpus=corpus']),
    (['--out=report'], ['report.json']),
    (['--out=busy.trec'], ['--out=busy.trec']),
    (['--index_dir=new', '--out=new/run.trec'], ['--index_dir']),
  ],
)
def test_bad_input(folder, command, flags, named):
  (folder / 'report.json').mkdir()
  (folder / 'report.json' / 'thesis.tex').write_text('years of work')
  before = sorted(folder.rglob('*'))
  with outputs.hold(epath.Path('.busy.trec.lock'), 'a test'):
    result = command(search, '--corpus=corpus', '--queries=queries', '--out=run.trec', *flags)
  command_refused(result, *named)
  assert sorted(folder.rglob('*')) == before


@pytest.mark.slow
@pytest.mark.parametrize('index', ['exact', pytest.param('scann', marks=needs_scann)])
def test_of_several_vectors_of_a_query_the_best_score_counts(
  folder, command, write_embeddings, index
):
  others = -QUERIES[:, ::-1].copy()
  write_embeddings('others', QUERY_IDS, others, side='query')
  status, err = command(
    search,
    *('--corpus=corpus', '--queries=queries', '--queries=others', '--k=20'),
    *(f'--index={index}', '--out=run.trec'),
  )
  assert status == 0, err
  scores = np.maximum(*(q.astype(float) @ PASSAGES.T.astype(float) for q in (QUERIES, others)))
  for number, (query, ranking) in enumerate(read_run('run.trec')):
    assert query == QUERY_IDS[number]
    best = np.argsort(-scores[number])[:20]
    assert [doc for doc, _ in ranking] == [PASSAGE_IDS[row] for row in best]
    np.testing.assert_allclose([score for _, score in ranking], scores[number][best], rtol=1e-5)
  write_embeddings('fewer', QUERY_IDS[:-1], QUERIES[:-1], side='query')
  status, err = command(
    search, *('--corpus=corpus', '--queries=queries', '--queries=fewer', '--out=other.trec')
  )
  assert status == 2 and named_in(err, 'fewer', 'queries'), err
