"""The score to beat: measured once, kept, and compared by a paired bootstrap."""

import json

import numpy as np
import pytest
from etils import epath

from dprjax.retrieval import comparison
from dprjax.training import baseline
from dprjax.training.baseline import Gain
from dprjax.training.method import Scores

BEFORE = {'a': np.array([0.0, 0.5, 1.0, 0.25]), 'b': np.array([0.5, 0.5])}


def scores_of(values):
  return Scores({'mean': float(np.mean([each.mean() for each in values.values()]))}, values)


def test_the_interval_is_that_of_the_paired_bootstrap():
  rng = np.random.default_rng(0)
  after = {name: values + rng.normal(0.1, 0.1, values.shape) for name, values in BEFORE.items()}
  gain = baseline.compare('mean', scores_of(BEFORE), scores_of(after))
  expected = comparison.difference([after[name] - BEFORE[name] for name in BEFORE])
  assert (gain.difference, gain.low, gain.high) == pytest.approx(expected)
  assert gain.queries == 6 and gain.better and gain.low < gain.difference < gain.high
  assert gain.best - gain.baseline == gain.difference


def test_a_gain_that_may_be_chance_and_one_without_an_interval():
  before, now = scores_of({'': np.zeros(4)}), scores_of({'': np.array([0.5, 0.0, 0.5, 0.0])})
  gain = baseline.compare('mean', before, now)
  assert not gain.better and gain.low == 0 < gain.difference
  assert gain.verdict.startswith('No clear gain on the dev split')
  assert baseline.compare('mean', Scores({'mean': 0.0}, {}), now).better  # no values of queries
  bare = baseline.compare('mean', Scores({'mean': 0.25}), now)
  assert bare == Gain('mean', 0.25, 0.25, 0.0, None, None, 0, False) and bare.shown == '+0.0000'
  assert baseline.metrics(now, bare) == {'dev/mean': 0.25, 'dev/gain': 0.0}
  assert baseline.metrics(now, gain).keys() == {
    'dev/mean',
    'dev/gain',
    'dev/gain_low',
    'dev/gain_high',
  }


@pytest.mark.parametrize(
  ('now', 'new', 'expected', 'words'),
  [
    ([1, 1, 0, 0], [False, False, True, True], (0.0, 2), 'the gain is on answers seen in training'),
    (
      [1, 1, 0.5, 0],
      [False, False, True, True],
      (0.25, 2),
      '+0.2500 on the 2 queries with new answers',
    ),
    ([1, 1, 0, 0], [False] * 4, (None, 0), 'new answers are untested'),
    ([1, 1, 0, 0], None, (None, None), ''),
  ],
)
def test_a_gain_tells_new_answers_apart(tmp_path, now, new, expected, words):
  before, after = (scores_of({'': np.array(values, np.float64)}) for values in ([0] * 4, now))
  after = after._replace(new={} if new is None else {'': np.array(new)})
  folder = epath.Path(tmp_path)
  baseline.write(folder, after, 3)
  gain = baseline.compare('mean', before, baseline.read(folder, 3))
  assert (gain.new, gain.new_queries) == expected
  assert words in gain.verdict and (bool(words) or 'answers' not in gain.verdict)
  assert Gain.read(json.loads(json.dumps(gain._asdict())), 'x') == gain
  assert ('dev/gain_new' in baseline.metrics(after, gain)) == (expected[0] is not None)


def short_of_one(queries, wrong, by=0.5):
  values = np.ones(queries)
  values[:wrong] -= by
  return scores_of({'': values})


@pytest.mark.parametrize(
  'queries, wrong, expected',
  [
    (200, 8, True),
    (40, 5, False),
  ],
)
def test_nothing_is_left_to_gain_where_no_gain_could_be_shown(queries, wrong, expected):
  why = baseline.saturated('mean', short_of_one(queries, wrong))
  assert bool(why) == expected
  if why:
    assert f'mean is {1 - wrong / queries / 2:.4f} on the {queries:,} dev queries' in why
    assert '--config.eval.skip_saturated=False' in why
