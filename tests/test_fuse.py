import json

import numpy as np
import pytest

from dprjax.retrieval import fusion
from dprjax.text.qrels import write_qrels
from dprjax.text.trec import read_run
from tests.commands import evaluate, fuse
from tests.refusals import command_refused, named_in

QUERIES = [f'q{number}' for number in range(30)]
RUNS = ['--run=bm25.trec', '--run=dense.trec']
LEARN = ['--method=learned', '--qrels=qrels.tsv']


def write(path, rankings, tag):
  path.write_text(
    ''.join(
      f'{query} Q0 {id_} {rank} {score} {tag}\n'
      for query, scores in rankings.items()
      for rank, (id_, score) in enumerate(sorted(scores.items(), key=lambda one: -one[1]), 1)
    )
  )


@pytest.fixture(scope='module')
def made(tmp_path_factory):
  """Two runs, in other orders of queries, of which the second is better; and judgements."""
  folder, rng = tmp_path_factory.mktemp('runs'), np.random.default_rng(0)
  relevant = {query: {f'd{rng.integers(40)}': 1} for query in QUERIES}

  def run(signal, order):
    return {
      query: {
        f'd{doc}': float(np.float32(rng.normal() + signal * (f'd{doc}' in relevant[query])))
        for doc in rng.permutation(40)[:30]
      }
      for query in order
    }

  write(folder / 'bm25.trec', run(1.5, QUERIES), 'dprjax-bm25')
  write(folder / 'dense.trec', run(3, QUERIES[::-1]), 'dprjax-exact')
  (folder / 'bm25.trec.json').write_text(
    json.dumps({'index': 'bm25s', 'settings': {'k1': 1.2, 'b': 0.5, 'language': 'none'}})
  )
  write_qrels(folder / 'qrels.tsv', relevant)
  write_qrels(folder / 'half.tsv', {query: relevant[query] for query in QUERIES[:15]})
  return folder


@pytest.fixture
def folder(tmp_path, made, monkeypatch):
  for path in made.iterdir():
    (tmp_path / path.name).write_bytes(path.read_bytes())
  monkeypatch.chdir(tmp_path)
  return tmp_path


def rankings(path):
  return dict(read_run(path))


def report(path='run.trec'):
  return json.loads(open(f'{path}.json').read())


@pytest.fixture
def refused(command):
  """``refused(words, *names)``: `dprjax fuse` ends in one line with these names."""
  return lambda words, *names: command_refused(command(fuse, *words, '--out=run.trec'), *names)


def test_weights_are_of_the_runs_in_turn(folder):
  fuse.main([*RUNS, '--method=zscore', '--weights=0,1', '--out=run.trec'])
  assert {query: [id_ for id_, _ in one] for query, one in rankings('run.trec').items()} == {
    query: [id_ for id_, _ in one] for query, one in rankings('dense.trec').items()
  }


def test_weights_are_learnt_kept_and_used_again_by_name(folder, capsys):
  fuse.main([*RUNS, '--method=learned', '--qrels=half.tsv', '--out=run.trec'])
  out = capsys.readouterr()
  how = fusion.read('run.trec.fusion.json')
  named_in(out.err, 'bm25', 'dense', f'{how.weights["dense"]:.2f}', 'nDCG@10', '15 queries')
  assert how.weights['dense'] > 0.5 and sum(how.weights.values()) == pytest.approx(1)
  assert how.bm25 == {'k1': 1.2, 'b': 0.5, 'language': 'none'}
  learnt = report()['learnt']
  assert learnt['gain']['over'] == 'dense'
  assert learnt['cross_validated'] - learnt['alone']['dense'] == pytest.approx(
    learnt['gain']['mean']
  )
  for name in ('bm25', 'dense'):
    evaluate.main([f'--run={name}.trec', '--qrels=half.tsv', '--measure=nDCG@10', '--out=m.json'])
    measured = json.loads((folder / 'm.json').read_text())['mean']['nDCG@10']
    assert learnt['alone'][name] == pytest.approx(measured)
  fuse.main([*RUNS[::-1], '--weights=run.trec.fusion.json', '--out=again.trec'])
  assert rankings('again.trec') == rankings('run.trec')


def test_a_query_that_one_run_lacks(folder, capsys):
  text = (folder / 'bm25.trec').read_text().splitlines(keepends=True)
  (folder / 'bm25.trec').write_text(''.join(line for line in text if not line.startswith('q3 ')))
  fuse.main([*RUNS, '--out=run.trec'])
  named_in(capsys.readouterr().err, 'bm25', '1 of 30 queries', 'q3')
  found = rankings('run.trec')['q3']
  assert [id_ for id_, _ in found] == [id_ for id_, _ in rankings('dense.trec')['q3']]


def test_runs_of_different_queries_are_refused_and_of_different_documents_told(
  folder, refused, capsys
):
  text = (folder / 'dense.trec').read_text()
  (folder / 'others.trec').write_text(text.replace('q', 'p'))
  refused(['--run=bm25.trec', '--run=others.trec'], 'bm25.trec')
  (folder / 'others.trec').write_text(text.replace(' d', ' e'))
  fuse.main(['--run=bm25.trec', '--run=others.trec', '--out=run.trec'])
  named_in(capsys.readouterr().err, 'run.trec', '--corpus')


@pytest.mark.parametrize(
  'words, named',
  [
    (RUNS[:1], ['bm25.trec']),
    ([*RUNS, '--weights=1'], ['--weights=1', '2 runs']),
    ([*RUNS, *LEARN, '--weights=1,1'], ['--weights', '--method=learned']),
    ([*RUNS, '--weights=w.json', '--method=rrf', '--depth=3'], ['--depth', '--weights=FILE']),
    ([*RUNS, *LEARN, '--weights_out=bm25.trec'], ['--weights_out', 'bm25.trec']),
    (['--run=a=bm25.trec', '--run=a=dense.trec'], ['--run=bm25.trec', 'a']),
    ([*RUNS, '--method=learned', '--qrels=one.tsv'], ['--qrels', '1 judged query']),
  ],
)
def test_what_does_not_go_together_is_refused(folder, refused, words, named):
  write_qrels(folder / 'one.tsv', {'q1': {'d1': 1}, 'q2': {'d1': 0}})
  fusion.write(folder / 'w.json', fusion.Fusion(weights={'bm25': 1.0, 'dense': 1.0}))
  refused(words, *named)
  assert not (folder / 'run.trec').exists() and (folder / 'bm25.trec').read_text().startswith('q0')


def test_runs_with_the_same_tag_are_called_by_their_paths(folder):
  (folder / 'other.trec').write_bytes((folder / 'dense.trec').read_bytes())
  fuse.main(['--run=dense.trec', '--run=other.trec', '--run=b=bm25.trec', '--out=run.trec'])
  assert [*report()['weights']] == ['dense.trec', 'other.trec', 'b']
