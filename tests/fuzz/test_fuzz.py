"""Hundreds of harmed and killed calls.

`python -m tests.fuzz.fuzzing --cases=1000 --seed=N` tries others.
"""

import functools
import random
import signal

import pytest

from tests.fuzz import fuzzing, scenes
from tests.fuzz.server import Server

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group('fuzz')]  # one warm process

FAST = ('evaluate', 'fuse', 'mine', 'report', 'search', 'papers', 'topics')
SLOW = ('bm25', 'encode', 'rerank', 'retriever', 'export')
MODELS = ('encode', 'rerank', 'retriever', 'export', 'convert')


@pytest.fixture(scope='module')
def server():
  with Server() as running:
    yield running


@pytest.fixture(scope='module')
def texts(tmp_path_factory):
  """A folder and its scenes without a model, whose files every case would copy and hash."""
  template = tmp_path_factory.mktemp('fuzz') / 'texts'
  found = scenes.build(template)
  return template, found | scenes.more(found)


@pytest.fixture(scope='module')
def models(tmp_path_factory, trained, prompt, make_cross_encoder):
  """A folder and its scenes with a model."""
  template = tmp_path_factory.mktemp('fuzz') / 'models'
  scenes.build(template)
  return template, scenes.add_models(template, trained, prompt, make_cross_encoder())


@pytest.fixture(scope='module')
def built(request):
  """``built(name)``: the scene of that name and its folder."""

  def find(name):
    template, found = request.getfixturevalue('models' if name in MODELS else 'texts')
    return found[name], template

  return find


@pytest.fixture(scope='module')
def sound(server, built):
  """``sound(name)``: the output of the unharmed scene, and the seconds that it takes."""

  @functools.cache
  def run(name):
    scene, template = built(name)
    return fuzzing.sound_output(server, template, scene, template.parent / 'case')

  return run


def fuzz(server, template, scene, sound, seed, count):
  """Fails with all that is wrong with the cases; returns how many of them succeeded."""
  folder = template.parent / 'case'
  verdicts = [
    fuzzing.run(server, template, case, sound, folder) for case in fuzzing.cases(scene, seed, count)
  ]
  wrong = [str(verdict) for verdict in verdicts if verdict.faults]
  assert not wrong, '\n'.join(wrong)
  return sum(verdict.reply.status == 0 for verdict in verdicts)


@pytest.mark.parametrize('name', [*FAST, *SLOW])
def test_many_harmed_inputs(server, built, sound, name):
  count = 15 if name in FAST else 5
  scene, template = built(name)
  assert fuzz(server, template, scene, sound(name)[0], 1, count) < count


KILLED = (
  *('evaluate', 'fuse', 'mine', 'search', 'bm25', 'kept_bm25', 'encode', 'rerank', 'export'),
  *('convert', 'scann', 'index'),
)


@pytest.mark.parametrize('name', KILLED)
def test_killed_at_random_the_same_command_writes_what_an_undisturbed_one_does(
  server, built, sound, name
):
  (scene, template), rng = built(name), random.Random(name)
  folder = template.parent / 'case'
  expected, first = sound(name)
  # The shorter of two: after more than a call takes, nothing is left to kill.
  whole = min(first, fuzzing.sound_output(server, template, scene, folder)[1])
  kills = [
    # A command that goes on is sooner done.
    (number, rng.uniform(0, 0.6 * whole))
    for number in (signal.SIGKILL, signal.SIGINT)
  ]
  rng.shuffle(kills)
  replies, output, wrong = fuzzing.killed(server, template, scene, kills, folder)
  for reply, (number, _) in zip(replies, kills, strict=False):
    # Done before the signal came; ended by it; or by the command that noticed it.
    assert reply.status in (0, -number, 128 + number), reply
    assert 'Traceback' not in reply.err, reply
  assert all(reply.status == 0 for reply in replies[len(kills) :]), replies[-1]
  assert any(reply.status for reply in replies), 'no run was killed'
  assert output == expected and not wrong, wrong
