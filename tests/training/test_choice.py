"""The candidate that the held-out queries of a training choose."""

import importlib
import shlex
import types

import numpy as np
import pytest
from etils import epath

from dprjax.base import flags
from dprjax.retrieval import fusion
from dprjax.retrieval.choosing import BM25, FROZEN, Candidate
from dprjax.training import baseline, choice, train
from dprjax.training import config as configs
from dprjax.training.method import Scores

QUERIES = 60
WEIGHTS = fusion.candidates(2)[:, 0]  # of BM25


def rankings(dense, words=0.2, both=0.0):
  """Scores of queries by vectors, and fused: linear in the weight, and more by ``both`` between."""
  rng = np.random.default_rng(0)
  noise = rng.normal(0, 0.02, (QUERIES, 1))
  means = dense * (1 - WEIGHTS) + words * WEIGHTS + both * 4 * WEIGHTS * (1 - WEIGHTS)
  fused = means + noise
  return Scores({fusion.MEASURE: dense}, {'': fused[:, 0]}, {}, {'': fused})


def training(folder, before, after):
  """A workdir with these evaluations, by step."""
  folder.mkdir(parents=True)
  for step, scores in {0: before, **after}.items():
    baseline.write(folder, scores, step)
  return epath.Path(folder)


def test_each_model_alone_and_fused_is_a_candidate(tmp_path):
  before = rankings(0.5)
  run = training(tmp_path / 'run', before, {2: rankings(0.55), 4: rankings(0.7)})
  kept = choice.decide({'query': [run]})
  fused = kept.weights.keys()  # where BM25 has a weight
  assert fused <= {Candidate(name, fused=True) for name in ('frozen', 'query')}
  assert kept.choice.estimates.keys() == {BM25, Candidate('query'), *fused}
  assert kept.choice.candidate == Candidate('query')
  assert kept.choice.estimates[Candidate('query')].measured == pytest.approx(0.2)
  assert kept.choice.estimates[BM25].measured == pytest.approx(-0.3)
  assert kept.best_model(['query']) == 'query'


@pytest.mark.parametrize('model', ['query', 'frozen'])
def test_the_commands_after_a_choice_can_be_typed(model, tmp_path):
  run = training(tmp_path / 'run', rankings(0.5, both=0.2), {2: rankings(0.5, both=0.3)})
  kept = choice.decide({'query': [run]})
  chosen = kept.choice._replace(candidate=Candidate(model, fused=True))
  choice.write(run, kept._replace(choice=chosen))
  (tmp_path / 'corpus.jsonl').touch()
  config = configs.default()
  config.backbone.path, config.data.dir, config.eval.choose = 'package:x', str(tmp_path), True
  config.prompt.sides, config.prompt.length = 'query', 8
  setup = types.SimpleNamespace(config=config, workdir=run)
  said = train.last_words(setup, types.SimpleNamespace(whole=True), True, 'done at step 2')
  assert said.startswith(f'Chosen of {len(chosen.estimates) + 1}: {model} with BM25')
  lines = [shlex.split(line) for line in said.splitlines() if line.startswith('  dprjax ')]
  read = [
    flags.parse(importlib.import_module(f'dprjax.{name}').Flags, words)[0]
    for _, name, *words in lines
  ]
  export, index, search = read
  assert export.workdir == str(run) and export.out == index.retriever == search.retriever == 'run'
  assert index.input == str(tmp_path / 'corpus.jsonl') and search.queries == ('QUERIES',)


def test_the_fusion_that_was_chosen(tmp_path):
  run = training(tmp_path / 'run', rankings(0.5, both=0.2), {2: rankings(0.5, both=0.3)})
  kept = choice.decide({'query': [run]})
  assert kept.choice.candidate == Candidate('query', fused=True)
  choice.write(run, kept)
  how = choice.read(run).fusion
  assert how.weights[fusion.BM25] == pytest.approx(kept.weights[kept.choice.candidate])
  assert how.method == 'zscore' and how.bm25 == {'k1': 1.5, 'b': 0.75, 'language': 'english'}
  again = choice.read(run)
  assert again.choice.verdict == kept.choice.verdict and again.weights == kept.weights
  worse = training(tmp_path / 'worse', rankings(0.5), {2: rankings(0.3)})
  choice.write(run, choice.decide({'query': [worse]}))
  assert choice.read(run).choice.candidate == FROZEN and choice.read(run).fusion is None


def test_folds_are_scored_after_the_updates_of_the_others(tmp_path):
  folders = [
    training(tmp_path / str(n), rankings(0.5), {2: rankings(0.5 + gain), 4: rankings(0.6)})
    for n, gain in enumerate([0.4, 0.0, 0.0])
  ]
  kept = choice.decide({'both': folders})
  # Only the first fold is best after 2 updates, where the others choose 4; for the others, 2.
  assert kept.choice.queries == 3 * QUERIES
  assert kept.choice.estimates[Candidate('both')].measured == pytest.approx(0.1 / 3)


def test_the_step_of_a_part_is_chosen_elsewhere():
  values = np.array([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.9, 0.9]])
  assert choice.best_elsewhere(values, np.array([0, 0, 1, 1])).tolist() == [1, 1, 0, 0]
  assert choice.best_elsewhere(values[:, :1], np.array([0])).tolist() == [0]


def test_one_held_out_query_learns_no_weights(tmp_path):
  one = rankings(0.5)
  one = one._replace(values={'': one.values[''][:1]}, fused={'': one.fused[''][:1]})
  run = training(tmp_path / 'run', one, {2: one})
  kept = choice.decide({'query': [run]})
  assert not kept.weights and kept.choice.queries == 1
