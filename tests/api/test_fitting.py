import itertools
import re
import shutil

import pytest

import dprjax
from dprjax.api import fitting
from dprjax.models import artifact
from dprjax.retrieval import bm25_index
from dprjax.retrieval.choosing import BM25, FROZEN, Candidate, Choice, Estimate
from dprjax.training import choice
from tests import devices
from tests.refusals import refused

PROMPT, FUSED = Candidate('query'), Candidate('query', fused=True)
FROZEN_FUSED = Candidate('frozen', fused=True)
OPTIONS = {
  'steps': 2,
  'batch_size': 8,
  'log_every': 1,
  'prompt': {'length': 2},
  'data.folds': 0,
  'data.hold_out': 0.5,
  'data.query_max_length': 16,
  'data.passage_max_length': 16,
}


@pytest.fixture(scope='module')
def fitted(trained, texts, tmp_path_factory):
  """A prompt for the tiny backbone, and the arguments that it was made with."""
  arguments = (trained / 'backbone', *texts)
  workdir = tmp_path_factory.mktemp('fit') / 'run'
  with devices.one():
    found = dprjax.fit(*arguments, options=OPTIONS, workdir=workdir, progress=False)
    yield found, arguments


@pytest.mark.slow
def test_a_prompt(fitted, tmp_path, capsys):
  found, arguments = fitted
  assert found.gain.measure == 'nDCG@10' and found.gain.queries > 0
  assert found.gain.low <= found.gain.difference <= found.gain.high
  assert found.prompt.meta['sides'] == 'query' and len(found.prompt.arrays) == 1
  curves = found.curves
  assert list(curves['step']) == [0, 1, 2] and list(curves['dev/nDCG@10'].notna()) == [1, 0, 1]
  page = found._repr_html_()
  assert 'data:image/png' in page and str(found.workdir) in page and found.gain.verdict in page
  saved = found.save(tmp_path / 'mine.npz', force=True)
  assert artifact.load_prompt(saved).meta['backbone_sha256']
  retriever = found.retriever(force=True)
  retriever.index(arguments[2])
  results = retriever.search(arguments[1], k=3)
  assert len(results) == 40 and list(results.table()['rank'][:3]) == [1, 2, 3]
  assert '<table' in results._repr_html_()
  capsys.readouterr()
  # The same call finds its result; a fresh process reads it from the workdir.
  again = dprjax.fit(*arguments, options=OPTIONS, workdir=found.workdir)
  assert again.gain == found.gain == fitting.Fitted(found.workdir).gain
  assert str(found.workdir) in capsys.readouterr().err


@pytest.mark.slow
def test_where_nothing_can_be_gained(trained, texts, tmp_path):
  queries, corpus, relevant = texts
  corpus = dict(itertools.islice(corpus.items(), 60))  # R@100 is 1
  options = OPTIONS | {'eval.measure': 'R@100', 'eval.choose': False}
  workdir = tmp_path / 'run'
  found = dprjax.fit(
    trained / 'backbone', queries, corpus, relevant, options=options, workdir=workdir
  )
  assert not len(found.curves) and 'Nothing was trained' in found._repr_html_()


@pytest.fixture
def choosing_now(fitted, tmp_path):
  """A function: a copy of the workdir in which this candidate was chosen."""

  def chosen(candidate):
    folder = tmp_path / str(candidate)
    shutil.copytree(fitted[0].workdir, folder)
    gains = dict.fromkeys((PROMPT, FUSED, FROZEN_FUSED, BM25), -0.1)
    if candidate != FROZEN:
      gains[candidate] = 0.1
    estimates = {name: Estimate(gain, 0.01, gain, 0.01, 0.01) for name, gain in gains.items()}
    kept = choice.Decision(Choice(candidate, estimates, 20), {FUSED: 0.5, FROZEN_FUSED: 0.5})
    choice.write(folder / 'training', kept)
    return fitting.Fitted(folder)

  return chosen


@pytest.mark.slow
def test_a_prompt_that_lost_is_not_saved(choosing_now, tmp_path):
  worse, out = choosing_now(BM25), tmp_path / 'lost.npz'
  assert f'Chosen: {BM25}' in worse.verdict
  with refused('force=True'):
    worse.save(out)
  assert not out.exists()
  worse.save(out, force=True)
  assert out.exists()


@pytest.mark.slow
def test_the_report_has_each_candidate_and_the_chosen_one_first(choosing_now):
  candidate = PROMPT
  names = re.findall('<tr><td>(.*?)</td>', choosing_now(candidate)._repr_html_())
  assert names[0] == str(candidate)
  assert set(names) == set(map(str, (FROZEN, PROMPT, FUSED, FROZEN_FUSED, BM25)))


@pytest.mark.slow
def test_bm25_alone_is_searched_in_a_folder(choosing_now, fitted, tmp_path):
  alone, (_, queries, corpus, _) = choosing_now(BM25), fitted[1]
  alone.save(tmp_path / 'words')
  index = bm25_index.build(list(corpus), list(corpus.values()))
  expected = [one.ids[:3] for one in index.rankings(list(queries.values()), 100)]
  for found in (alone.retriever(), dprjax.Retriever.load(tmp_path / 'words')):
    found.index(corpus)
    assert [[hit.id for hit in hits] for hits in found.search(queries, k=3)] == expected


@pytest.mark.slow
def test_the_retriever_is_what_was_chosen(choosing_now, fitted):
  _, (backbone, queries, corpus, _) = fitted

  def found(retriever):
    retriever.index(corpus)
    return retriever.search(queries, k=5).table()['score'].tolist()

  alone, fused, frozen = map(choosing_now, (PROMPT, FUSED, FROZEN_FUSED))
  prompt = found(alone.retriever())
  bare = found(dprjax.Retriever.load(backbone))
  assert found(fused.retriever(hybrid=None)) == prompt != found(fused.retriever())
  assert found(frozen.retriever(force=True)) == prompt != bare
  assert found(frozen.retriever(hybrid=None)) == bare
  assert found(frozen.retriever()) not in (bare, prompt)
  assert found(choosing_now(FROZEN).retriever()) == bare


@pytest.mark.parametrize(
  ('change', 'named'),
  [
    ({'options': {'epoch': 1}}, "options['epochs']"),
    ({'relevant': {'q0': 'nowhere'}}, 'nowhere'),
  ],
)
def test_what_cannot_be_used_leaves_nothing(change, named, texts, tmp_path):
  queries, corpus, relevant = texts
  given = {'queries': queries, 'corpus': corpus, 'relevant': relevant} | change
  with refused(named):
    dprjax.fit('nowhere', workdir=tmp_path / 'runs' / 'one', **given)
  assert list(tmp_path.iterdir()) == []
