"""How many updates: from trainings that each hold out a part of the queries."""

import json

import ml_collections
import numpy as np
import pytest

from dprjax.base.errors import InputError
from dprjax.methods import baseline, folds
from dprjax.methods.method import Folds, Scores
from tests.knobs import with_knobs

COUNT = 3
# Of each fold, the values of its queries at the start and after 2, 4 and 6 updates.
VALUES = [
  {0: [0.0, 0.5], 2: [0.5, 0.5], 4: [1.0, 0.5], 6: [0.0, 1.0]},
  {0: [0.5, 0.5], 2: [0.5, 0.0], 4: [0.5, 0.25], 6: [0.25, 0.5]},
  {0: [0.0], 2: [0.25], 4: [0.5], 6: [1.0]},
]
BEST = [4, 0, 6]  # nothing was better in the second


def make_config(**changes):
  knobs = {'steps': 6, 'eval__measure': 'P@1', 'data__folds': COUNT, 'data__hold_out': 0.1}
  return ml_collections.FrozenConfigDict(with_knobs(**(knobs | changes)))


@pytest.fixture
def config():
  return make_config()


class Trainings:
  """Stands for the training of a fold, and keeps what it would."""

  def __init__(self, stop_at=None):
    self.configs, self.stop_at = [], stop_at

  def __call__(self, config, folder, number):
    self.configs.append((number, config))
    if number == self.stop_at:
      return None
    folder.mkdir(parents=True, exist_ok=True)
    for step, values in VALUES[number - 1].items():
      each = np.array(values)
      baseline.write(folder, Scores({'P@1': each.mean()}, {'': each}), step)
    return BEST[number - 1]


def test_the_step_that_is_best_over_all_queries(config, tmp_path):
  train, parts = Trainings(), Folds(COUNT, 100)
  plan = folds.find(config, tmp_path, parts, train)
  assert plan.best_steps == (4, 0, 6) and plan.schedule == 6
  # After 2, 4 and 6 updates the five queries' mean is .35, .55 and .55.
  assert plan.steps == 4 and plan.gain.folds == COUNT and plan.gain.queries == 5
  before = np.mean([n for fold in VALUES for n in fold[0]])
  # The other two folds' queries choose 6, 4 and 4 updates.
  after = np.mean([n for fold, step in zip(VALUES, (6, 4, 4), strict=True) for n in fold[step]])
  assert (plan.gain.baseline, plan.gain.best) == pytest.approx((before, after))
  assert plan.gain.low < after - before < plan.gain.high
  assert 'in cross-validation over 3 folds' in plan.gain.verdict
  assert folds.metrics(plan)['folds/gain'] == pytest.approx(after - before)
  # The next time nothing is trained.
  assert folds.find(config, tmp_path, parts, None) == plan


def test_a_fold_that_stopped_early(config, tmp_path, monkeypatch):
  for step in (4, 6):
    monkeypatch.delitem(VALUES[1], step)
  plan = folds.find(config, tmp_path, Folds(COUNT, 100), Trainings())
  assert plan.steps == 2  # the only number that all have


def test_it_goes_on_where_it_was_asked_to_stop(config, tmp_path):
  parts = Folds(COUNT, 100)
  assert folds.find(config, tmp_path, parts, Trainings(stop_at=2)) is None
  assert not (tmp_path / 'folds.json').exists()
  assert folds.find(config, tmp_path, parts, Trainings()).best_steps == tuple(BEST)


def test_all_folds_have_one_schedule(tmp_path):
  config = make_config(
    steps=0,
    epochs=10.0,
    batch_size=32,
    backbone__path='scratch:tiny',
    prompt__sides='query',
    data__store='kept',
  )
  train = Trainings()
  folds.find(config, tmp_path, Folds(COUNT, 100), train)
  assert [number for number, _ in train.configs] == [1, 2, 3]
  for number, one in train.configs:
    assert one.data.fold == number and one.data.store == f'kept/fold-{number}'
    # 100 queries are 3 updates of 32.
    assert (one.steps, one.eval.every) == (30, 3)
    assert one.backbone.path == str(tmp_path / 'backbone')
    assert one.data.passage_embeddings == str(tmp_path / 'passages')
    assert one.eval.corpus_limit == 0
  for limit in (0, 5000):
    config = make_config(eval__corpus_limit=limit)
    one = folds.config_of(config, tmp_path, Folds(COUNT, 100), 1)
    assert (one.eval.corpus_limit, one.data.passage_embeddings) == (limit, '')


def test_batches_that_a_fold_can_fill():
  config = make_config(batch_size=32, accumulate=2)
  assert folds.fit(config, Folds(COUNT, 64), 8) is config
  assert folds.fit(config, Folds(COUNT, 63), 1).batch_size == 31
  assert folds.fit(config, Folds(COUNT, 63), 8).batch_size == 24
  cached = make_config(batch_size=32, grad_cache=2)
  assert folds.fit(cached, Folds(COUNT, 28), 4).batch_size == 24
  with pytest.raises(
    InputError, match=r'an update of 16 queries, .* more than the 15 that one of 3'
  ):
    folds.fit(cached, Folds(COUNT, 15), 8)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'format': 'other'}, "'format' is 'other'"),
    ({'steps': 0}, "'steps' is 0"),
    ({'schedule': None}, "'schedule' is missing"),
    ({'best_steps': [1, -1]}, "'best_steps' is"),
    ({'gain': 1}, "'gain' is 1"),
    ({'gain': {}}, 'gain is {}'),
  ],
)
def test_a_plan_that_is_something_else(config, tmp_path, change, message):
  parts, path = Folds(COUNT, 100), tmp_path / 'folds.json'
  folds.find(config, tmp_path, parts, Trainings())
  path.write_text(json.dumps(json.loads(path.read_text()) | change))
  with pytest.raises(InputError, match='remove that file') as info:
    folds.find(config, tmp_path, parts, None)
  assert message in str(info.value) and str(path) in str(info.value)
