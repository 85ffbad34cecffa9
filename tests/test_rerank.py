"""The command that rescores a run, with a small cross-encoder."""

import json
import shutil

import numpy as np
import pytest
import safetensors.numpy

from dprjax import CrossEncoder, rerank
from dprjax.base import files
from dprjax.retrieval.folder import passages_of
from dprjax.text import trec
from tests.refusals import command_refused
from tests.retrieval.test_reranker import NEAR, WORDS, alone, edited

QUERIES = {'q1': 'json string', 'q2': 'http server', 'q3': 'xml'}
CORPUS = {f'd{i}': ('json', ' '.join(WORDS[i : i + 3])) for i in range(6)} | {
  f'e{i}': ('', ' '.join(WORDS[8 + i : 10 + i])) for i in range(4)
}
RUN = {'q1': ['d0', 'd3', 'e1', 'd5', 'd1'], 'q2': ['e2', 'd4'], 'q3': ['e0', 'e1', 'd2']}


@pytest.fixture
def folder(tmp_path):
  (tmp_path / 'queries.jsonl').write_text(
    ''.join(json.dumps({'_id': id_, 'text': text}) + '\n' for id_, text in QUERIES.items())
  )
  (tmp_path / 'corpus.jsonl').write_text(
    ''.join(
      json.dumps({'_id': id_, 'title': title, 'text': text}) + '\n'
      for id_, (title, text) in CORPUS.items()
    )
  )
  write_run(tmp_path, RUN)
  return tmp_path


def write_run(folder, run):
  (folder / 'run.trec').write_text(
    ''.join(
      f'{query} Q0 {doc} {rank} {10.0 - rank} bm25\n'
      for query, docs in run.items()
      for rank, doc in enumerate(docs, start=1)
    )
  )


@pytest.fixture
def go(command, folder, make_cross_encoder, small_cross_encoder, monkeypatch):
  """``go(*flags)``: reranks folder/run.trec into folder/out.trec; flags come last and override."""
  load = CrossEncoder.load

  # The same model is compiled once for all tests.
  def load_once(path, **settings):
    usual = {'max_length': None, 'batch_size': 8, 'dtype': 'float32'}
    same = path == str(make_cross_encoder()) and settings == usual
    return small_cross_encoder if same else load(path, **settings)

  monkeypatch.setattr(CrossEncoder, 'load', load_once)

  def run(*flags):
    return command(
      rerank,
      f'--backbone={make_cross_encoder()}',
      f'--run={folder}/run.trec',
      f'--queries={folder}/queries.jsonl',
      f'--corpus={folder}/corpus.jsonl',
      f'--out={folder}/out.trec',
      '--batch_size=8',
      *flags,
    )

  return run


@pytest.fixture(scope='session')
def expected(make_cross_encoder):
  """``expected(run)``: query -> [(document, score)], best first; single pairs, in float64."""

  def score(run):
    rankings = {}
    for query, docs in run.items():
      scores = alone(
        make_cross_encoder(), [(QUERIES[query], ' '.join(CORPUS[doc]).strip()) for doc in docs]
      )
      rankings[query] = sorted(zip(docs, scores.tolist(), strict=True), key=lambda one: -one[1])
    return rankings

  return score


def check(path, rankings):
  lines = [line.split() for line in path.read_text().splitlines()]
  assert {columns[5] for columns in lines} == {'dprjax-rerank'}
  found = {}
  for query, _, doc, rank, score, _ in lines:
    found.setdefault(query, []).append((doc, float(score)))
    assert int(rank) == len(found[query])
  assert list(found) == list(rankings)
  for query, ranking in found.items():
    docs, scores = zip(*ranking, strict=True)
    expected_docs, expected_scores = zip(*rankings[query], strict=True)
    assert docs == expected_docs
    np.testing.assert_allclose(scores, expected_scores, **NEAR)


COUNTS = ('queries', 'pairs', 'unknown_queries', 'unknown_passages')


def counts(folder):
  report = json.loads((folder / 'out.trec.json').read_text())
  return tuple(report[name] for name in COUNTS)


def test_rescores_and_sorts(go, folder, expected):
  rankings = expected(RUN)
  assert any([doc for doc, _ in rankings[query]] != RUN[query] for query in RUN)
  status, err = go()
  assert status == 0 and '10 passages for 3 queries' in err, err
  check(folder / 'out.trec', rankings)
  assert counts(folder) == (3, 10, 0, 0)
  assert not (folder / 'out.trec.parts').exists()
  # The same command again changes nothing.
  before = (folder / 'out.trec').stat().st_mtime_ns
  status, err = go()
  assert status == 0 and 'out.trec is already complete' in err
  assert (folder / 'out.trec').stat().st_mtime_ns == before
  # Another depth makes another run; deeper passages are dropped.
  status, err = go('--depth=2')
  assert status == 0 and '6 passages for 3 queries' in err
  check(folder / 'out.trec', expected({query: docs[:2] for query, docs in RUN.items()}))


class Killed(BaseException):
  """Stands for a signal."""


@pytest.mark.slow
def test_a_killed_run_continues(go, folder, expected, monkeypatch):
  score, scored = CrossEncoder.score, []

  def counting(self, pairs, progress=None):
    if len(scored) == 2 and not done:
      raise Killed
    scored.append(len(pairs))
    return score(self, pairs, progress)

  done = False
  monkeypatch.setattr(CrossEncoder, 'score', counting)
  assert go('--shard_pairs=3')[0] == 2
  parts = folder / 'out.trec.parts'
  assert scored == [3, 3] and not (folder / 'out.trec').exists()
  assert sorted(path.name for path in parts.iterdir()) == [
    'parts.json',
    'scores-00000.f32',
    'scores-00001.f32',
  ]
  done = True
  # Other settings do not replace scores.
  before = {path: path.read_bytes() for path in parts.iterdir()}
  for flags, what in (
    (['--shard_pairs=3', '--depth=2'], 'depth'),
    (['--shard_pairs=3', f'--queries={folder}/more.jsonl'], 'queries_sha256'),
  ):
    (folder / 'more.jsonl').write_text('{"_id": "q7", "text": "xml"}\n')
    command_refused(go(*flags), what)
    assert {path: path.read_bytes() for path in parts.iterdir()} == before
  # A damaged part is scored again: here that of another shard.
  first, part = parts / 'scores-00000.f32', parts / 'scores-00001.f32'
  shutil.copytree(parts, folder / 'kept')
  part.write_bytes(first.read_bytes())
  status, err = go('--shard_pairs=3')
  assert status == 0 and '3 of 10 pairs' in err and scored[2:] == [3, 3, 1]
  assert 'scores-00001.f32 is damaged: its pairs are scored again' in err
  check(folder / 'out.trec', expected(RUN))
  assert not parts.exists()
  (folder / 'out.trec').unlink()
  (folder / 'kept').rename(parts)
  del scored[2:]
  shutil.copytree(parts, folder / 'kept')
  assert go('--shard_pairs=3')[0] == 0 and scored[2:] == [3, 1]
  check(folder / 'out.trec', expected(RUN))
  # Killed when all was written but the parts were there still, or in part.
  (folder / 'kept').rename(parts)
  (folder / '.out.trec.parts.0123abcd.tmp').mkdir()
  assert 'already complete' in go('--shard_pairs=3')[1]
  assert not parts.exists() and not list(folder.glob('.*'))


@pytest.mark.slow
def test_other_folders_and_reports_beside_the_run(go, folder, expected):
  parts = folder / 'out.trec.parts'
  # No score in it: nothing is lost.
  files.write_json(parts / 'parts.json', {'format': 'dprjax.scores', 'fingerprint': 'other'})
  (folder / 'out.trec').write_text('')
  (folder / 'out.trec.json').write_text('{"settings": null, "queries": "1"}')
  assert go()[0] == 0
  check(folder / 'out.trec', expected(RUN))
  (folder / 'out.trec').unlink()
  # A folder of something else is kept.
  parts.mkdir()
  (parts / 'thesis').write_text('1')
  command_refused(go(), 'out.trec.parts')
  assert (parts / 'thesis').read_text() == '1'


def test_unknown_ids_are_counted_and_named(go, folder, expected):
  write_run(folder, {**RUN, 'q1': ['d0', 'x1', 'd3'], 'q9': ['d0'], 'q2': ['x2']})
  status, err = go()
  assert status == 0, err
  assert '1 of 4 queries not in' in err and ': q9; left out' in err
  assert '2 passages not in' in err and ': x1, x2; left out' in err
  check(folder / 'out.trec', expected({'q1': ['d0', 'd3'], 'q3': RUN['q3']}))
  assert counts(folder) == (2, 5, 1, 2)
  write_run(folder, {'q8': ['d0'], 'q1': ['x1']})
  command_refused(go(), 'run.trec')


def test_the_passages_of_a_retriever(command, go, folder, make_cross_encoder, tmp_path):
  assert go()[0] == 0
  place = passages_of(tmp_path / 'mine')
  place.parent.mkdir(parents=True)
  (tmp_path / 'mine' / 'retriever.json').write_text('{}')  # rerank reads only the passages
  words = [
    f'--backbone={make_cross_encoder()}',
    f'--retriever={tmp_path}/mine',
    f'--run={folder}/run.trec',
    f'--queries={folder}/queries.jsonl',
    f'--out={folder}/again.trec',
    '--batch_size=8',
  ]
  command_refused(command(rerank, *words), 'dprjax index')
  lines = [
    json.dumps({'id': id_, 'text': ' '.join(texts).strip()}) for id_, texts in CORPUS.items()
  ]
  place.write_text('\n'.join(lines))
  assert command(rerank, *words)[0] == 0
  assert (folder / 'again.trec').read_text() == (folder / 'out.trec').read_text()


@pytest.mark.slow
def test_scores_that_are_not_finite(go, folder, make_cross_encoder, tmp_path):
  path = edited(
    make_cross_encoder(), tmp_path / 'nan', **{'classifier.bias': np.array([np.nan], np.float32)}
  )
  command_refused(go(f'--backbone={path}'), 'json string', '10')
  assert not (folder / 'out.trec').exists()
  assert not list((folder / 'out.trec.parts').glob('scores-*'))


@pytest.mark.slow
def test_ties_are_ordered_as_trec_eval_does(go, folder, make_cross_encoder, tmp_path):
  weights = safetensors.numpy.load_file(make_cross_encoder() / 'model.safetensors')[
    'classifier.weight'
  ]
  path = edited(
    make_cross_encoder(), tmp_path / 'flat', **{'classifier.weight': np.zeros_like(weights)}
  )
  assert go(f'--backbone={path}')[0] == 0
  ranking = dict(trec.read_run(folder / 'out.trec'))['q1']
  assert [doc for doc, _ in ranking] == ['e1', 'd5', 'd3', 'd1', 'd0']


@pytest.mark.slow
def test_a_prompt_of_pairs_judges(command, folder, templates):
  from dprjax import PromptReranker

  flags = [
    f'--backbone={templates}/backbone',
    f'--run={folder}/run.trec',
    f'--queries={folder}/queries.jsonl',
    f'--corpus={folder}/corpus.jsonl',
    f'--out={folder}/out.trec',
    '--batch_size=8',
  ]
  status, err = command(rerank, *flags, f'--prompt={templates}/pairs.npz')
  assert status == 0, err
  pairs = [(query, doc) for query, docs in RUN.items() for doc in docs]
  scores = PromptReranker.load(templates / 'backbone', templates / 'pairs.npz', batch_size=8).score(
    [(QUERIES[query], ' '.join(CORPUS[doc]).strip()) for query, doc in pairs]
  )
  expected = dict(zip(pairs, scores.tolist(), strict=True))
  run = dict(trec.read_run(folder / 'out.trec'))
  found = {(query, doc): score for query, ranking in run.items() for doc, score in ranking}
  assert found == pytest.approx(expected, abs=1e-5)
  settings = json.loads((folder / 'out.trec.json').read_text())['settings']
  assert settings['prompt_sha256'] == files.sha256_file(templates / 'pairs.npz')
  assert settings['score'] == 'logit' and settings['text_tokens'] == [5, 7]
  command_refused(command(rerank, *flags, f'--prompt={templates}/qa.npz'), 'template')
