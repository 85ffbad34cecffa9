"""Which alternative is chosen, and how many updates."""

import json

import ml_collections
import numpy as np
import pytest
from etils import epath

from dprjax.training import baseline, selection
from dprjax.training import config as configs
from dprjax.training import workdir as workdirs
from dprjax.training.method import Folds, Scores
from dprjax.training.selection import Result, Trial
from tests.options import with_options
from tests.refusals import refused

COUNT = 3
# The values of the queries of each fold at the start and after 2, 4 and 6 updates.
VALUES = [
  {0: [0.0, 0.5], 2: [0.5, 0.5], 4: [1.0, 0.5], 6: [0.0, 1.0]},
  {0: [0.5, 0.5], 2: [0.5, 0.0], 4: [0.5, 0.25], 6: [0.25, 0.5]},
  {0: [0.0], 2: [0.25], 4: [0.5], 6: [1.0]},
]
BEST = [4, 0, 6]  # nothing was better in the second
PARTS = Folds(COUNT, 100)
CHANGES = {'first': {}, 'second': {'batch_size': 8, 'data': {'hold_out': 0.3}}, 'third': {}}
SCORES = {'first': 0.5, 'second': 0.75, 'third': 0.75}


def folded(**changes):
  settings = {'steps': 6, 'eval__measure': 'P@1', 'data__folds': COUNT, 'data__hold_out': 0.1}
  return ml_collections.FrozenConfigDict(with_options(**(settings | changes)))


class FoldTrainings:
  """Stands for the trainings of folds, and keeps their settings."""

  def __init__(self, stop_at=None):
    self.configs, self.stop_at = [], stop_at

  def __call__(self, part):
    number = int(part.workdir.name)
    self.configs.append((number, part.config))
    assert not part.whole and part.workdir.parent.name == 'folds'
    if number == self.stop_at:
      return Result(0, None, None, done=False)
    part.workdir.mkdir(parents=True, exist_ok=True)
    for step, values in VALUES[number - 1].items():
      each = np.array(values)
      baseline.write(part.workdir, Scores({'P@1': each.mean()}, {'': each}), step)
    best = BEST[number - 1]
    gain = baseline.Gain('P@1', 0.5, 0.5, 0.1 if best else -0.1, None, None, 0, bool(best))
    return Result(6, 0.5, best or 2, gain=gain)


@pytest.fixture
def lines():
  return []


def steps(config, folder, train, parts=PARTS):
  return selection.choose_steps(config, epath.Path(folder), parts, train, print)


def test_the_step_that_is_best_over_all_queries(tmp_path):
  choice = steps(folded(), tmp_path, FoldTrainings())
  assert choice.best_steps == (4, 0, 6) and choice.schedule == 6
  # After 2, 4 and 6 updates the mean of the five queries is .35, .55 and .55.
  assert choice.steps == 4 and choice.gain.folds == COUNT and choice.gain.queries == 5
  before = np.mean([n for fold in VALUES for n in fold[0]])
  # The queries of the other two folds choose 6, 4 and 4 updates.
  after = np.mean([n for fold, step in zip(VALUES, (6, 4, 4), strict=True) for n in fold[step]])
  assert (choice.gain.baseline, choice.gain.best) == pytest.approx((before, after))
  assert choice.gain.low < after - before < choice.gain.high
  assert 'in cross-validation over 3 folds' in choice.gain.verdict
  assert choice.metrics()['folds/gain'] == pytest.approx(after - before)
  # The next time nothing is trained.
  assert steps(folded(), tmp_path, None) == choice


def test_folds_go_on_where_they_were_asked_to_stop(tmp_path):
  assert steps(folded(), tmp_path, FoldTrainings(stop_at=2)) is None
  assert not (tmp_path / 'selection.json').exists()
  assert steps(folded(), tmp_path, FoldTrainings()).best_steps == tuple(BEST)


def with_alternatives(changes=CHANGES, **more):
  config = with_options(data__hold_out=0.1, data__dir='d', backbone__path='b', **more)
  config.alternatives = changes
  return config


class Trainings:
  """Stands for trainings, and keeps their settings."""

  def __init__(self, stop_at=None):
    self.made, self.stop_at = [], stop_at

  def __call__(self, part: Trial):
    name = part.workdir.name
    if part.whole:
      return Result(12, SCORES[name], 12)
    self.made.append((name, part.config))
    score = SCORES[name]
    gain = baseline.Gain('nDCG@10', 0.5, score, score - 0.5, None, None, 0, score > 0.5)
    part.workdir.mkdir(parents=True, exist_ok=True)
    baseline.write(part.workdir, Scores({'nDCG@10': score}, {}), 12)
    return Result(12, score, 12, name != self.stop_at, gain)


def choose(config, folder, train, lines):
  result = selection.choose_alternative(configs.resolve(config), folder, train, lines.append)
  path = folder / 'selection.json'
  return json.loads(path.read_text())['chosen'] if path.exists() else result


def test_the_best_on_held_out_queries(tmp_path, lines):
  config, train = with_alternatives(data__token_cache='token_cache'), Trainings()
  assert choose(config, tmp_path, train, lines) == 'second'
  assert [name for name, *_ in train.made] == ['first', 'second', 'third']
  for name, one in train.made:
    changed = name == 'second'
    assert (one.batch_size, one.data.hold_out) == ((8, 0.3) if changed else (64, 0.1))
    assert not one.alternatives and one.data.token_cache == f'token_cache/{name}'
  assert lines[-1].startswith(
    'chosen: second, by nDCG@10 on held-out queries: first 0.5000 (+0.0000), second 0.7500'
  )
  found = json.loads((tmp_path / 'selection.json').read_text())
  assert {name: gain['best'] for name, gain in found['gains'].items()} == SCORES
  # The next time only the best one goes on.
  train = Trainings()
  assert choose(config, tmp_path, train, lines) == 'second' and not train.made


def test_alternatives_without_an_evaluation_cannot_be_compared(tmp_path, lines):
  with refused('config.alternatives', 'dpr'):
    choose(with_alternatives(), tmp_path, lambda part: Result(12, None, None), lines)


def test_one_is_beaten_by_a_lead_that_is_not_chance():
  rng = np.random.default_rng(0)
  behind = rng.uniform(0, 0.5, 40)

  def scores(values):
    return Scores({'nDCG@10': float(np.mean(values))}, {'': values})

  def beats(lead, step, found=behind):
    rival = selection.Rival('first', scores(behind + lead))
    return rival.beats('nDCG@10', scores(found), step, 12)

  noise = rng.normal(0, 0.2, 40)
  assert beats(0.1 + 0.1 * noise, 3) and beats(0.1, 12)
  assert not beats(0.1, 2)  # too early
  assert not beats(noise - noise.mean() + 0.01, 6)  # by chance
  assert not beats(-0.1, 6)
  assert not beats(0.1, 6, behind[:-1])  # of other queries


def test_alternatives_go_on_where_one_was_asked_to_stop(tmp_path, lines):
  config = with_alternatives()
  assert not choose(config, tmp_path, Trainings('second'), lines).done
  workdirs.claim_workdir(config, tmp_path)
  with refused('/alternatives/first'):
    workdirs.trained(tmp_path)
  assert choose(config, tmp_path, Trainings(), lines) == 'second'
  assert workdirs.trained(tmp_path) == tmp_path / 'alternatives' / 'second'


def test_batches_that_a_fold_can_fill():
  config = folded(batch_size=64)
  assert selection.fit(config, Folds(COUNT, 64), 8) == {}
  assert selection.fit(config, Folds(COUNT, 63), 1) == {'batch_size': 63}
  assert selection.fit(config, Folds(COUNT, 63), 8) == {'batch_size': 56}
  cached = folded(batch_size=32, grad_cache=2)
  assert selection.fit(cached, Folds(COUNT, 28), 4) == {'batch_size': 24}
  with refused('config.batch_size'):
    selection.fit(cached, Folds(COUNT, 15), 8)


def test_all_folds_have_one_schedule(tmp_path):
  config = folded(
    steps=0,
    epochs=10.0,
    batch_size=32,
    backbone__path='scratch:tiny',
    prompt__sides='query',
    data__token_cache='kept',
  )
  train = FoldTrainings()
  steps(config, tmp_path, train)
  assert [number for number, _ in train.configs] == [1, 2, 3]
  for number, one in train.configs:
    assert one.data.fold == number and one.data.token_cache == f'kept/fold-{number}'
    # 100 queries are 3 updates of 32.
    assert (one.steps, one.eval.every) == (30, 3)
    assert one.backbone.path == str(tmp_path / 'backbone')
    assert one.data.passage_embeddings == str(tmp_path / 'passages')
    assert one.eval.corpus_limit == 0
  for limit in (0, 5000):
    one = selection.fold_of(folded(eval__corpus_limit=limit), tmp_path, PARTS, 1)
    assert (one.eval.corpus_limit, one.data.passage_embeddings) == (limit, '')
