"""Which of several experiments is chosen."""

import json

import numpy as np
import pytest

from dprjax.base.errors import InputError
from dprjax.methods import alternatives, baseline
from dprjax.methods.method import Scores
from dprjax.runtime import config as configs
from dprjax.runtime import workdir as workdirs
from tests.knobs import with_knobs

CHANGES = {'first': {}, 'second': {'batch_size': 8, 'data': {'hold_out': 0.3}}, 'third': {}}
SCORES = {'first': 0.5, 'second': 0.75, 'third': 0.75}


def make_config(changes=CHANGES, **more):
  config = with_knobs(data__hold_out=0.1, data__dir='d', backbone__path='b', **more)
  config.alternatives = changes
  configs.check(config)
  return config


class Trainings:
  """Stands for trainings, and keeps what they would be."""

  def __init__(self, stop_at=None, gains=True, chance=(), folded=()):
    self.made, self.stop_at, self.gains, self.chance = [], stop_at, gains, chance
    self.folded, self.rivals = folded, {}

  def __call__(self, config, folder, whole, rival):
    self.made.append((folder.name, config, whole))
    self.rivals[folder.name] = rival and rival.name
    score = SCORES[folder.name]
    better = score > 0.5 and folder.name not in self.chance
    gain = baseline.Gain('nDCG@10', 0.5, score, score - 0.5, None, None, 0, better)
    scores = None if folder.name in self.folded else Scores({'nDCG@10': score}, {})
    return alternatives.Trained(folder.name != self.stop_at, gain if self.gains else None, scores)


@pytest.fixture
def lines():
  return []


def test_the_best_on_held_out_queries(tmp_path, lines):
  config, train = make_config(data__store='store'), Trainings()
  assert alternatives.choose(config, tmp_path, train, lines.append) == 'second'
  assert [name for name, *_ in train.made] == ['first', 'second', 'third']
  for name, one, whole in train.made:
    changed = name == 'second'
    assert (one.batch_size, one.data.hold_out) == ((8, 0.3) if changed else (64, 0.1))
    assert not one.alternatives and one.data.store == f'store/{name}' and not whole
  assert lines[-1].startswith(
    'chosen: second, by nDCG@10 on held-out queries: first 0.5000 (+0.0000), second 0.7500'
  )
  found = json.loads((tmp_path / 'alternatives.json').read_text())
  assert {name: gain['best'] for name, gain in found['gains'].items()} == SCORES
  # The next time nothing is trained.
  assert alternatives.choose(config, tmp_path, None, lines.append) == 'second'


def test_a_gain_before_a_higher_score_that_may_be_chance(tmp_path, lines, monkeypatch):
  monkeypatch.setitem(SCORES, 'first', 0.6)
  train = Trainings(chance=('second', 'third'))
  assert alternatives.choose(make_config(), tmp_path / 'one', train, lines.append) == 'first'
  train = Trainings(chance=SCORES)  # none is a gain
  assert alternatives.choose(make_config(), tmp_path / 'none', train, lines.append) == 'second'


def test_each_races_with_the_best_before_it(tmp_path, lines, monkeypatch):
  train = Trainings()
  alternatives.choose(make_config(), tmp_path / 'one', train, lines.append)
  assert train.rivals == {'first': None, 'second': 'first', 'third': 'second'}
  monkeypatch.setitem(SCORES, 'third', 0.9)
  train = Trainings(folded=('first', 'second'))  # the folds' queries are others'
  assert alternatives.choose(make_config(), tmp_path / 'two', train, lines.append) == 'third'
  assert train.rivals == dict.fromkeys(SCORES)


def test_prompts_for_queries_are_first():
  changes = {'a': {}, 'b': {'prompt': {'sides': 'query'}}, 'c': {}}
  assert list(alternatives.resolve(make_config(changes))) == ['b', 'a', 'c']


def test_one_is_beaten_by_a_lead_that_is_not_chance():
  rng = np.random.default_rng(0)
  behind = rng.uniform(0, 0.5, 40)

  def scores(values):
    return Scores({'nDCG@10': float(np.mean(values))}, {'': values})

  def beats(lead, step, found=behind):
    rival = alternatives.Rival('first', scores(behind + lead))
    return rival.beats('nDCG@10', scores(found), step, 12)

  noise = rng.normal(0, 0.2, 40)
  assert beats(0.1 + 0.1 * noise, 4) and beats(0.1, 12)
  assert not beats(0.1, 3)  # too early
  assert not beats(noise - noise.mean() + 0.01, 6)  # by chance
  assert not beats(-0.1, 6)
  assert not beats(0.1, 6, behind[:-1])  # of other queries


def test_it_goes_on_where_it_was_asked_to_stop(tmp_path, lines):
  config = make_config()
  assert alternatives.choose(config, tmp_path, Trainings('second'), lines.append) is None
  configs.claim_workdir(config, tmp_path)
  with pytest.raises(InputError, match=r'no alternative is chosen yet; .*/alternatives/first or '):
    workdirs.trained(tmp_path)
  assert alternatives.choose(config, tmp_path, Trainings(), lines.append) == 'second'
  assert workdirs.trained(tmp_path) == tmp_path / 'alternatives' / 'second'


def test_without_alternatives_it_is_the_config(tmp_path):
  config = make_config({})
  assert alternatives.resolve(config) == {'': config}
  configs.claim_workdir(config, tmp_path)
  assert workdirs.trained(tmp_path) == tmp_path


@pytest.mark.parametrize('text', ['{', '[]', '{"format": "x"}', '{"chosen": "fourth"}'])
def test_a_damaged_record(tmp_path, lines, text):
  (tmp_path / 'alternatives.json').write_text(text)
  with pytest.raises(InputError, match=r'remove that file, and they are compared again'):
    alternatives.choose(make_config(), tmp_path, None, lines.append)


def test_a_method_that_measures_nothing(tmp_path, lines):
  with pytest.raises(InputError, match='dpr measures nothing that first could win'):
    alternatives.choose(make_config(), tmp_path, Trainings(gains=False), lines.append)


@pytest.mark.parametrize(
  'changes, more, message',
  [
    ({'first': {}}, {}, 'first is the only one'),
    (CHANGES, {'data__hold_out': 0.0}, r'there are none; set config.data.hold_out=0.2'),
  ],
)
def test_what_cannot_be_compared(changes, more, message):
  config = make_config(changes)
  for name, value in more.items():
    section, _, knob = name.partition('__')
    config[section][knob] = value
  with pytest.raises(InputError, match=message):
    alternatives.resolve(config)


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'a': {'batch': 3}}, r'config.alternatives.a.batch: there is no such option'),
    ({'a': {'batch_size': 0}}, r'config.alternatives.a.batch_size: expected a whole number'),
    ({'a b': {}}, r"config.alternatives: expected a name .* not 'a b'"),
    ({'a': 3}, r"config.alternatives: expected a name .* not 'a': 3"),
    ({'a': {'alternatives': {'b': {'batch_size': 4}}}}, 'there is no such option'),
    (3, 'config.alternatives: expected knobs by name, not 3'),
  ],
  ids=str,
)
def test_alternatives_that_cannot_be(changes, message):
  config = with_knobs(data__dir='d', backbone__path='b')
  with config.ignore_type():
    config.alternatives = changes
  with pytest.raises(InputError, match=message):
    configs.check(config)
