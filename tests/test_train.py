"""The training command, run as a user would run it."""

import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from dprjax import train
from dprjax.base.errors import InputError
from dprjax.exports import exporting
from dprjax.models import artifact, hub
from dprjax.models.adapters.prefix import keys_and_values
from dprjax.retrieval import choosing, folder
from dprjax.retrieval.choosing import BM25, Candidate
from dprjax.text import seen, tokenizing
from dprjax.text.qrels import read_qrels
from dprjax.training import baseline, checkpoint, choice
from dprjax.training import config as configs
from dprjax.training import workdir as workdirs
from tests import beir, devices
from tests.refusals import command_refused, named_in
from tests.workdirs import (
  assert_backbone_moved,
  assert_goes_on,
  assert_same_bits,
  files_of,
  metrics_of,
  steps_of,
  trainable_of,
)

ROOT = pathlib.Path(__file__).parent.parent
# Other recipes differ from these only in data and numbers (tests/test_recipes.py).
EVERY = ('dptdr.py:local', 'dptdr.py:local,lora', 'ft.py:local', 'ft.py:nq,local')
# The others have no dev split: each evaluation compiles the encoder for more lengths.
EVALUATED = ('dptdr.py:local', 'ft.py:local')


@pytest.fixture
def go(command, reuse, tmp_path):
  """``go(config, *flags, workdir='run')`` -> (exit status, standard error)."""

  def run(config='dptdr.py:local', *flags, workdir='run'):
    return command(
      train, f'--config={ROOT}/configs/{config}', f'--workdir={tmp_path / workdir}', *reuse, *flags
    )

  return run


@pytest.fixture
def alone():
  """The test trains on one device."""
  with devices.one():
    yield


# Parameters that train, and others.


def flags_of(config, reuse):
  """``dptdr.py:local`` is the run that the tests share; the others train on its text."""
  if config == EVERY[0]:
    return []
  unmeasured = [] if config in EVALUATED else ['--config.data.dev_split=']
  return [*reuse, '--config.batch_size=8', *unmeasured]


def grouped(configs):
  """Parameters of ``finished``: one worker has the tests of a recipe, and one recipe is quick."""
  return [
    pytest.param(
      config,
      marks=[pytest.mark.xdist_group(config), *[pytest.mark.slow] * (config != EVERY[0])],
    )
    for config in configs
  ]


@pytest.fixture(scope='module', params=grouped(EVERY))
def finished(request, trained, reuse, tmp_path_factory):
  """(recipe, workdir) of a finished training; one of them on eight devices."""
  if request.param == 'dptdr.py:local':
    return request.param, trained
  workdir = tmp_path_factory.mktemp('finished') / 'run'
  with devices.one():
    config = f'--config={ROOT}/configs/{request.param}'
    train.main([config, f'--workdir={workdir}', *flags_of(request.param, reuse)])
  return request.param, workdir


@pytest.fixture
def again(finished, command, reuse, tmp_path):
  """``again(workdir)`` trains on in a copy of the finished run."""
  config, workdir = finished
  shutil.copytree(workdir, tmp_path / 'run')

  def run():
    one = contextlib.nullcontext() if config == 'dptdr.py:local' else devices.one()
    with one:
      return command(
        train,
        f'--config={ROOT}/configs/{config}',
        f'--workdir={tmp_path}/run',
        *flags_of(config, reuse),
      )

  return run


def test_only_what_is_trainable_changes(finished, trained):
  config, run = finished
  step, trainable = trainable_of(run)
  assert step == 12
  tuned = config.startswith('dptdr')
  assert trainable and all(
    name.startswith('prompt/' if tuned else 'backbone/') for name in trainable
  )
  if not tuned:
    assert_backbone_moved(trainable, trained / 'backbone')
  earlier = trainable_of(run, max(step for step in steps_of(run) if step < 12))[1]
  assert any((leaf != earlier[name]).any() for name, leaf in trainable.items())
  # A checkpoint has no backbone: it has what was trained, two Adam moments, and the format's files.
  saved = (run / 'checkpoints' / '12').rglob('*')
  size = sum(path.stat().st_size for path in saved if path.is_file())
  assert size < 3 * sum(leaf.nbytes for leaf in trainable.values()) + 200_000


@pytest.mark.parametrize('finished', grouped(EVALUATED), indirect=True)
def test_every_evaluation_is_compared_with_the_frozen_encoder(finished):
  _, run = finished
  assert [row['step'] for row in metrics_of(run) if 'loss' in row] == [2, 4, 6, 8, 10, 12]
  # The frozen encoder is measured before the first step.
  rows = {row['step']: row for row in metrics_of(run) if 'dev/nDCG@10' in row}
  assert list(rows) == [0, 6, 12]
  kept = json.loads((run / 'baseline.json').read_text())
  assert {f'dev/{name}': value for name, value in kept['means'].items()} == {
    name: value for name, value in rows[0].items() if name != 'step'
  }
  measure = json.loads((run / 'config.json').read_text())['eval']['measure']
  for number in (6, 12):
    difference = rows[number][f'dev/{measure}'] - rows[0][f'dev/{measure}']
    assert rows[number]['dev/gain'] == difference
    assert rows[number]['dev/gain_low'] <= difference <= rows[number]['dev/gain_high']


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(again, trained, tmp_path):
  before = files_of(trained / 'backbone')
  log = assert_goes_on(tmp_path / 'run', again)
  rows = metrics_of(tmp_path / 'run')
  gains = [row['dev/gain'] for row in rows if 'dev/gain' in row and row['step']]
  assert ('Nothing was gained' in log) == bool(gains and max(gains) <= 0)
  assert files_of(trained / 'backbone') == before


@pytest.mark.parametrize('finished', ['dptdr.py:local'], indirect=True)
def test_a_finished_run_is_left_as_it_is(finished, again, tmp_path):
  _, run = finished
  status, err = again()
  assert status == 0 and 'done at step 12' in err and 'compiling' not in err
  assert metrics_of(tmp_path / 'run') == metrics_of(run)
  assert_same_bits(trainable_of(tmp_path / 'run')[1], trainable_of(run)[1])


# Stopping and going on.


@pytest.mark.slow
@pytest.mark.usefixtures('alone')
def test_sigterm_saves_and_the_next_run_goes_on(go, tmp_path):
  log, over = tmp_path / 'run' / 'metrics.jsonl', threading.Event()

  def ask(rows):
    while not over.is_set():
      if log.exists() and len(log.read_text().splitlines()) >= rows:
        os.kill(os.getpid(), signal.SIGTERM)
        return
      time.sleep(0.01)

  saved = []
  for rows in (2, 6):
    over.clear()
    asker = threading.Thread(target=ask, args=(rows,))
    asker.start()
    try:
      # So many steps that it can only end by being asked to.
      status, err = go(
        'dptdr.py:local',
        '--config.steps=1000000',
        '--config.eval.every=1000000',
        '--config.checkpoint.every=1000000',
      )
    finally:
      over.set()
      asker.join()
    assert status == 143 and 'asked to stop (SIGTERM): saved step' in err, err
    saved.append(steps_of(tmp_path / 'run')[-1])
    assert f'saved step {saved[-1]};' in err
    if len(saved) == 2:
      assert f'resuming after step {saved[0]} of 1000000' in err
  assert saved[1] > saved[0] > 0
  steps = [row['step'] for row in metrics_of(tmp_path / 'run')]
  assert steps == list(range(0, saved[1] + 1, 2))


def child(workdir, *flags):
  config = f'--config={ROOT}/configs/dptdr.py:local'
  usual = ('--config.steps=24', '--config.eval.every=10', '--config.prompt.dropout=0.2')
  return subprocess.Popen(
    [sys.executable, '-m', 'dprjax.train', config, f'--workdir={workdir}', *usual, *flags],
    env=devices.environment(PYTHONPATH=str(ROOT)),
    cwd=workdir.parent,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
  )


@pytest.mark.slow
def test_killed_at_any_point_it_ends_with_the_same_bits(tmp_path):
  whole, killed = tmp_path / 'whole', tmp_path / 'killed'
  _, err = (process := child(whole)).communicate()
  assert process.returncode == 0, err
  seed = random.SystemRandom().randrange(2**32)
  print(f'seed {seed}')  # shown where the test fails
  draw = random.Random(seed)
  log = killed / 'metrics.jsonl'

  # While the program starts, or while the cache is built; in the midst of steps, evaluations and
  # saves.
  moment = draw.choice(['time', 'folder', 'rows', 'rows'])
  process = child(killed)
  deadline, begun = draw.uniform(1.0, 8.0), time.monotonic()
  more = draw.randrange(1, 5)
  while process.poll() is None:
    if (
      (moment == 'time' and time.monotonic() - begun > deadline)
      or (moment == 'folder' and (killed / 'token_cache').exists())
      or (moment == 'rows' and log.exists() and len(log.read_text().splitlines()) >= more)
    ):
      break
    time.sleep(0.005)
  time.sleep(draw.uniform(0.0, 0.2))
  process.kill()
  _, err = process.communicate()
  assert process.returncode == -signal.SIGKILL or 'done at step 24' in err, err
  _, err = (process := child(killed)).communicate()
  assert process.returncode == 0 and 'done at step 24' in err, err
  assert_same_bits(trainable_of(killed)[1], trainable_of(whole)[1])
  assert metrics_of(killed) == metrics_of(whole)


@pytest.mark.slow
@pytest.mark.usefixtures('alone')
def test_what_is_not_finite_ends_the_run(go, trained, tmp_path, monkeypatch):
  monkeypatch.setattr('dprjax.training.config.check_ranges', lambda *of: None)
  # The learning rate of the first step is 0, so that there is a good checkpoint; the update of
  # the second step has a norm beyond float32.
  result = go('dptdr.py:local', '--config.optim.learning_rate=1e30', '--config.checkpoint.every=1')
  run = tmp_path / 'run'
  assert steps_of(run) == [1]
  command_refused(result, '2', run / 'checkpoints')
  assert all(np.isfinite(leaf).all() for leaf in trainable_of(run)[1].values())
  queries = {
    json.loads(line)['_id']
    for line in (trained / 'data' / 'queries.jsonl').read_text().splitlines()
  }
  named = set(re.findall(r'[\w.:]+', result[1].splitlines()[-1]))
  assert len(named & queries) >= 2, result[1]


@pytest.mark.slow
@pytest.mark.usefixtures('alone')
def test_early_stopping_is_remembered(go, tmp_path):
  # A learning rate of next to nothing: the first evaluation stays the best.
  flags = [
    '--config.optim.learning_rate=1e-30',
    '--config.eval.every=2',
    '--config.eval.patience=2',
    '--config.steps=100',
  ]
  status, err = go('dptdr.py:local', *flags)
  assert (
    status == 0
    and 'stopped early: no gain in the last 2 evaluations; done at step 6; best dev nDCG@10' in err
    and 'at step 2' in err
  ), err
  assert {2, 6} <= set(steps_of(tmp_path / 'run'))
  status, err = go('dptdr.py:local', *flags)
  assert (
    status == 0 and 'stopped early' in err and 'done at step 6' in err and 'compiling' not in err
  )


@pytest.mark.slow
def test_few_queries_are_held_out_in_turns_also_after_an_interruption(
  go, command, trained, monkeypatch, tmp_path
):
  from dprjax import export

  def begin(workdir):
    flags = [
      '--config.data.folds=2',
      '--config.steps=2',
      '--config.eval.every=1',
      '--config.eval.choose=True',
      f'--config.data.token_cache={tmp_path}/token_cache',
    ]
    with devices.one():
      return go('dptdr.py:local', *flags, workdir=workdir)

  run, save = tmp_path / 'run', checkpoint.Checkpoints.save

  def fail_in_the_second_fold(self, step, *rest):
    if self.folder.parent == run / 'folds' / '2' and step == 2:
      raise InputError('no room')
    save(self, step, *rest)

  monkeypatch.setattr(checkpoint.Checkpoints, 'save', fail_in_the_second_fold)
  command_refused(begin('run'), 'no room')
  assert steps_of(run / 'folds' / '2') == [1] and not (run / 'selection.json').exists()
  monkeypatch.undo()
  status, err = begin('run')
  assert status == 0 and 'resuming after step 1 of 2' in err, err
  plan = json.loads((run / 'selection.json').read_text())
  assert f'one at step {plan["steps"]}' in err
  assert steps_of(run)[-1] == plan['steps'] and plan['schedule'] == 2
  count = len(read_qrels(trained / 'data' / 'qrels' / 'train.tsv'))  # of this Python's docstrings
  assert plan['gains']['']['queries'] == count
  assert not (run / 'folds' / '1' / 'checkpoints').exists()
  for number, best in enumerate(plan['best_steps'], start=1):
    rows = [row for row in metrics_of(run / 'folds' / str(number)) if 'dev/nDCG@10' in row]
    assert [row['step'] for row in rows] == [0, 1, 2]
    # The first of equals.
    assert best == max(rows, key=lambda row: row['dev/nDCG@10'])['step']
  assert begin('whole')[0] == 0
  assert json.loads((tmp_path / 'whole' / 'selection.json').read_text()) == plan
  assert_same_bits(trainable_of(tmp_path / 'whole')[1], trainable_of(run)[1])
  kept = choice.read(run)
  assert kept.choice.verdict in err and kept.choice.queries == count
  scores = baseline.join([baseline.read(run / 'folds' / number) for number in '12'])
  dense, words = scores.fused[''][:, 0], scores.fused[''][:, -1]
  np.testing.assert_allclose(dense, scores.values[''], atol=1e-6)
  measured = kept.choice.estimates[BM25].measured
  assert words.mean() - dense.mean() == pytest.approx(measured, abs=1e-6)
  own, _ = kept.best_of('both')
  status, err = command(export, f'--workdir={run}', f'--out={tmp_path}/p.npz')
  lost = kept.choice.candidate.model != 'both'
  assert status == (2 if lost else 0), err
  # A folder gets what was chosen.
  assert command(export, f'--workdir={run}', f'--out={tmp_path}/mine')[0] == 0
  parts = folder.read(tmp_path / 'mine')
  assert parts.choice['verdict'] == kept.choice.verdict and (parts.prompt is None) == lost
  # The docstrings, and so the choice, differ from Python to Python.
  chosen = Candidate('both', fused=True)
  assert not lost or (str(own) in err and kept.choice.verdict in err)
  # As if the fusion with the prompt had been chosen, with other weights.
  sure = choosing.Estimate(0.1, 0.01, 0.1, 0.01, 0.001)
  made = choosing.Choice(chosen, {**kept.choice.estimates, chosen: sure}, count)
  choice.write(run, choice.Decision(made, {chosen: 0.3}))
  for out in ('p.npz', 'both'):
    assert command(export, f'--workdir={run}', f'--out={tmp_path}/{out}')[0] == 0
  assert folder.read(tmp_path / 'both').fusion.weights['bm25'] == 0.3
  meta = artifact.load_prompt(tmp_path / 'p.npz').meta
  assert meta['expected']['gain'] == 0.1 and meta['expected']['with_bm25']


@pytest.mark.slow
@pytest.mark.usefixtures('alone')
def test_the_average_is_scored_kept_and_resumed(go, tmp_path):
  # So many passages that scores of near parameters differ.
  flags = [
    '--config.ema=0.9',
    '--config.weight_interpolation=50',
    '--config.eval.every=4',
    '--config.eval.corpus_limit=1000',
  ]
  assert go('dptdr.py:local', *flags)[0] == 0
  assert_goes_on(tmp_path / 'run', lambda: go('dptdr.py:local', *flags))
  rows = metrics_of(tmp_path / 'run')
  assert any(row['dev/gain'] for row in rows if row['step'] and 'dev/gain' in row)


@pytest.mark.slow
@pytest.mark.usefixtures('alone')
def test_starts_from_a_text(go, tmp_path):
  options = '--config.optim.learning_rate=1e-30', '--config.steps=1', '--config.prompt.tied=False'
  options += ('--config.data.dev_split=',)
  status, err = go('dptdr.py:local', '--config.prompt.init_text=json string', *options)
  assert status == 0, err
  prompt = trainable_of(tmp_path / 'run')[1]
  query, passage = (prompt[f'prompt/{side}/prefix'] for side in ('query', 'passage'))
  np.testing.assert_array_equal(query, passage)
  # The text is repeated; positions differ.
  config = workdirs.load_workdir(tmp_path / 'run')
  backbone = hub.load_backbone(workdirs.backbone_path(config, tmp_path / 'run'))
  (tokens,) = tokenizing.load_tokenizer(backbone.path).encode_bare(['json string']).values()
  length = query.shape[2]
  assert len(tokens) < length
  np.testing.assert_allclose(
    query,
    keys_and_values(backbone.config, backbone.params, np.resize(tokens, length)),
    atol=1e-5,
  )


@pytest.mark.slow
@pytest.mark.usefixtures('alone')
def test_starts_from_a_prompt(go, trained, tmp_path):
  start = artifact.load_prompt(exporting.export(trained, tmp_path / 'first.npz', force=True))
  start.queries.update(seen.join(start.queries, {'train': seen.hashes(['an earlier query'])}))
  artifact.save_prompt(tmp_path / 'start.npz', start)
  status, err = go(
    'dptdr.py:local',
    f'--config.prompt.init_from={tmp_path}/start.npz',
    '--config.optim.learning_rate=1e-30',
    '--config.steps=1',
    '--config.data.dev_split=',
    '--config.data.hold_out=0.5',
    f'--config.data.token_cache={tmp_path}/tokens',
  )
  assert status == 0 and named_in(err, 'config.prompt.init_from was trained on')
  np.testing.assert_array_equal(
    trainable_of(tmp_path / 'run')[1]['prompt/prefix'],
    artifact.load_prompt(tmp_path / 'start.npz').of_side('query')['prefix'],
  )
  # Its training queries count as its own; that dev queries are among them was told.
  made = artifact.load_prompt(exporting.export(tmp_path / 'run', tmp_path / 'p.npz', force=True))
  assert seen.ids([('1', 'An earlier query')], made.queries) == {'train': ['1']}


# Bad input.


@pytest.mark.parametrize(
  ('config', 'named'),
  [
    ('dptdr.py:msmarco', 'config.data.dir'),
    ('condenser.py', 'config.data.dir'),
    ('nir_retriever.py', 'config.tasks.dialogue.data.dir'),
    ('unm.py', 'dprjax pipeline'),
  ],
)
def test_a_config_alone_says_what_it_needs(config, named, command, tmp_path, monkeypatch):
  if not (ROOT / 'configs' / config.partition(':')[0]).exists():
    pytest.skip('a paper that is not here')
  monkeypatch.chdir(tmp_path)
  command_refused(command(train, f'--config={ROOT}/configs/{config}'), named)
  assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_config_alone_trains_on_docstrings(command, alone, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(configs, 'EMBEDDED', 'email,http,json,logging,asyncio,unittest,xml')
  words = [f'--config={ROOT}/configs/dptdr.py', '--config.backbone.path=scratch:tiny']
  words += ['--config.steps=2', '--config.eval.skip_saturated=False']
  for _ in range(2):  # the same words resume it
    status, err = command(train, *words)
    assert status == 0 and '--workdir=runs/dptdr-beir\n' in err and 'docstrings' in err
  assert (tmp_path / 'runs' / 'dptdr-beir' / 'config.json').exists()


def test_missing_arguments(command, go, tmp_path):
  command_refused(go('ft.py:nq,lcoal'), 'configs/ft.py:nq,lcoal')
  command_refused(
    command(train, f'--config={tmp_path}/none.py', f'--workdir={tmp_path}/run'), 'none.py'
  )
  command_refused(command(train, f'--workdir={tmp_path}/run'), '--config')
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
  'flags, words',
  [
    (['--config.prompt.lenght=3'], ['lenght']),
    (['--config.mesh.data=3'], ['config.mesh', '8']),
    (["--config.trainable=('promt/.*',)"], ['trainable', 'promt']),
    (
      ['--config.data.passage_max_length=510', '--config.prompt.shift_positions=True'],
      ['config.data.passage_max_length', '508'],
    ),
    (['--config.prompt.init_from=none.npz'], ['none.npz']),
  ],
)
def test_options_that_cannot_be(go, tmp_path, flags, words):
  command_refused(go('dptdr.py:local', *flags), *words)
  assert list(tmp_path.iterdir()) == []


def test_a_prompt_of_another_backbone(go, trained, tmp_path):
  prompt = artifact.load_prompt(exporting.export(trained, tmp_path / 'right.npz', force=True))
  artifact.save_prompt(
    tmp_path / 'wrong.npz',
    artifact.Prompt(prompt.meta | {'backbone_sha256': 'a' * 64}, prompt.arrays),
  )
  command_refused(
    go('dptdr.py:local', f'--config.prompt.init_from={tmp_path}/wrong.npz'),
    'wrong.npz',
    'a' * 64,
    prompt.meta['backbone_sha256'],
  )


@pytest.mark.slow
def test_interrupted_from_the_keyboard(reuse, tmp_path, monkeypatch):
  # An interrupted compilation goes on in a thread of XLA, so one that takes its time.
  monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', str(tmp_path / 'compiled'))
  flags = ['--config.steps=100000', '--config.data.dev_split=', *reuse]
  process = child(tmp_path / 'run', *flags)
  next(line for line in process.stderr if line.startswith('step 1: compiling'))
  time.sleep(0.7)
  process.send_signal(signal.SIGINT)
  _, err = process.communicate(timeout=60)
  lines = [line for line in err.splitlines() if line.startswith('dprjax: error')]
  assert process.returncode == 130 and 'Traceback' not in err, err
  assert len(lines) == 1 and lines[0].startswith('dprjax: error: interrupted')


@pytest.mark.slow
def test_nothing_is_trained_where_nothing_is_left_to_gain(command, trained, tmp_path):
  from dprjax import export

  # Queries that are their passages: every encoder finds them.
  texts = {f'{i}': f'passage {i} about {i * i}' for i in range(40)}
  beir.write(tmp_path / 'text', texts, texts, train={id_: [id_] for id_ in texts})
  run = tmp_path / 'run'
  flags = [
    f'--config={ROOT}/configs/dptdr.py:beir,query',
    f'--workdir={run}',
    f'--config.backbone.path={trained}/backbone',
    f'--config.data.dir={tmp_path}/text',
    '--config.steps=1',
    '--config.data.hold_out=0.3',
  ]
  status, err = command(train, *flags)
  assert status == 0
  lines = err.splitlines()
  why = next(line for line in lines if line.startswith('nothing is trained: nDCG@10 is 1.0000 on'))
  assert 'as it is' in why
  assert not list(run.rglob('checkpoints'))
  status, err = command(export, f'--workdir={run}', f'--out={tmp_path}/p.npz', '--force')
  command_refused((status, err), '--config.eval.skip_saturated=False')
  # A folder gets the frozen encoder, as the last lines say.
  status, err = command(export, f'--workdir={run}', f'--out={tmp_path}/mine')
  assert lines[-3] == f'  dprjax export --workdir={run} --out=run' and status == 0
  parts = folder.read(tmp_path / 'mine')
  assert parts.prompt is None and parts.backbone == str(trained / 'backbone')
  status, err = command(train, *flags, '--config.eval.skip_saturated=False')
  assert status == 0 and 'one at step 1' in err and not (run / 'saturated.json').exists()
  assert steps_of(run) == [1]
