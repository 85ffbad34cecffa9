"""Hundreds of harmed and killed calls.

`python -m tests.fuzz.fuzzing --cases=1000 --seed=N` tries others.
"""

import random
import shutil
import signal

import pytest

from tests.fuzz import fuzzing, scenes
from tests.fuzz.server import Server

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group('fuzz')]  # one warm process

FAST = ('evaluate', 'fuse', 'mine', 'report', 'search', 'papers', 'topics')
SLOW = ('bm25', 'encode', 'rerank', 'export')


@pytest.fixture(scope='module')
def server():
  with Server() as running:
    yield running


@pytest.fixture(scope='module')
def template(tmp_path_factory):
  return tmp_path_factory.mktemp('fuzz') / 'template'


@pytest.fixture(scope='module')
def texts(template):
  """The scenes without a model."""
  return scenes.build(template)


@pytest.fixture(scope='module')
def built(template, texts, trained, prompt, make_cross_encoder):
  """All scenes."""
  found = texts | scenes.add_models(template, trained, prompt, make_cross_encoder())
  return found | scenes.more(found)


def fuzz(server, template, scene, seed, count):
  """Fails with all that is wrong with the cases; returns how many of them succeeded."""
  folder = template.parent / 'case'
  sound = fuzzing.sound_output(server, template, scene, folder)
  verdicts = [
    fuzzing.run(server, template, case, sound, folder) for case in fuzzing.cases(scene, seed, count)
  ]
  wrong = [str(verdict) for verdict in verdicts if verdict.faults]
  assert not wrong, '\n'.join(wrong)
  return sum(verdict.reply.status == 0 for verdict in verdicts)


@pytest.mark.parametrize('name', [*FAST, *SLOW])
def test_many_harmed_inputs(server, template, built, name):
  count = 30 if name in FAST else 10
  assert 0 < fuzz(server, template, built[name], 1, count) < count


KILLED = {
  'evaluate': 3,
  'fuse': 3,
  'mine': 6,
  'search': 6,
  'bm25': 3,
  'kept_bm25': 3,
  'encode': 3,
  'rerank': 3,
  'export': 3,
  'convert': 3,
  'scann': 3,
  'index': 3,
  'train': 3,
}


@pytest.mark.parametrize('name', KILLED)
def test_killed_at_random_the_same_command_writes_what_an_undisturbed_one_does(
  server, template, built, name
):
  scene, folder, rng = built[name], template.parent / 'case', random.Random(name)
  sound = fuzzing.sound_output(server, template, scene, folder)
  whole = server_seconds(server, template, scene, folder)
  kills = [
    # A command that goes on is sooner done.
    (number, rng.uniform(0, 0.6 * whole))
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
    for _ in range(-(-KILLED[name] // 3))
  ]
  rng.shuffle(kills)
  replies, output, wrong = fuzzing.killed(server, template, scene, kills, folder)
  for reply, (number, _) in zip(replies, kills, strict=False):
    # Done before the signal came; ended by it; or by the command that noticed it.
    assert reply.status in (0, -number, 128 + number), reply
    assert 'Traceback' not in reply.err, reply
  assert all(reply.status == 0 for reply in replies[len(kills) :]), replies[-1]
  assert any(reply.status for reply in replies), 'no run was killed'
  assert output == sound and not wrong, wrong


def server_seconds(server, template, scene, folder):
  """How long the scene takes."""
  scenes.copy(template, folder)
  try:
    return server.run(folder, list(scene.argv)).seconds
  finally:
    shutil.rmtree(folder)
