"""Unified negative mining: its options, and all of it at a tiny scale."""

import contextlib
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from etils import epath

from dprjax.base import outputs
from dprjax.base.errors import InputError
from dprjax.papers.unm import pipeline
from dprjax.training import config as configs
from tests import devices
from tests.refusals import named_in, refused

ROOT = pathlib.Path(__file__).parents[3]
LOCAL = f'--config={ROOT}/configs/unm.py:local'


def command_line(workdir, *flags):
  packages = '--config.data.dir=docstrings:email,json,logging,http'
  command = [sys.executable, '-m', 'dprjax.papers.unm.pipeline', LOCAL]
  return [*command, f'--workdir={workdir}', packages, *flags]


def run_here(command):
  """A stage in this process: (python, -m, its module, its flags); returns its status."""
  try:
    importlib.import_module(command[2]).main(list(command[3:]))
  except SystemExit as end:
    return end.code or 0
  return 0


@pytest.mark.slow
def test_the_whole_pipeline_killed_midway(tmp_path, monkeypatch, capsys, command, one_device):
  work = tmp_path / 'work'
  few = ['--config.retriever.steps=2', '--config.reranker.steps=2', '--config.undenoised=False']

  # The stages before the first training, in this process, which has imported all.
  def until_training(command):
    return 2 if command[2] == 'dprjax.train' else run_here(command)

  with monkeypatch.context() as patch:
    patch.setattr(pipeline, 'run_command', until_training)
    assert command(pipeline, *command_line(work, *few)[3:])[0] == 2
  # A kill that nothing can catch, while the first retriever trains.
  child = subprocess.Popen(
    command_line(work, *few),
    cwd=ROOT,
    env=devices.environment(),
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
    start_new_session=True,
  )
  deadline = time.monotonic() + 300
  while not (work / 'first' / 'metrics.jsonl').exists():
    assert child.poll() is None and time.monotonic() < deadline
    time.sleep(0.1)
  # Only it dies: its stage lives, here stopped, and nobody else may begin in the folder.
  os.killpg(child.pid, signal.SIGSTOP)
  child.kill()
  child.wait()
  status, err = command(pipeline, *command_line(work, *few)[3:])
  assert status == 2 and 'another command is writing it now' in err
  os.killpg(child.pid, signal.SIGKILL)
  while True:
    with contextlib.suppress(InputError), outputs.hold(epath.Path(work / '.lock'), 'work'):
      break
    assert time.monotonic() < deadline

  # The stages go on in this process.
  monkeypatch.setattr(pipeline, 'run_command', run_here)
  pipeline.main(command_line(work, *few)[3:])
  whole = capsys.readouterr().out
  assert 'Mine: mined-bm25: done before' in whole and 'Train: first: done before' not in whole
  last = whole.splitlines()[-1]
  assert f'{work}/report.md' in last and f'{work}/models/denoised.npz' in last
  lines = [line for line in whole.splitlines() if line.startswith('[')]
  assert [line.split(']')[0] for line in lines] == [f'[{n + 1}' for n in range(len(lines))]
  table = (work / 'report.md').read_text()
  for name in ('BM25', 'frozen backbone', '+ BM25 negatives', '+ denoised negatives'):
    assert f'| {name} |' in table
  mined = [
    json.loads(line) for line in (work / 'mined-denoised' / 'train.jsonl').read_text().splitlines()
  ]
  retrievers = {one['retriever'] for query in mined for one in query['negative_passages']}
  assert retrievers == {'bm25', 'retriever'}
  scored = [one for query in mined for one in query['negative_passages'] if 'reranker_score' in one]
  # The threshold of 0.9 as a logit; the pool is a sample of passages that score below it.
  assert {one['reranker_score'] < 2.1972 for one in scored if 'denoised' in one['sources']} == {
    True
  }


@pytest.mark.parametrize(('recipe', 'more'), [('beir', ''), ('local', ',ft')])
def test_every_recipe_holds_two_experiments_of_train(recipe, more):
  config = configs.parse([f'--config={ROOT}/configs/unm.py:{recipe}{more}'])
  assert bool(config.retriever.prompt.length) == (more == '') and tuple(
    config.retriever.trainable
  ) == (('backbone/.*',) if more else ('prompt/.*',))
  for part, method in (('retriever', 'dpr'), ('reranker', 'cross_encoder')):
    path, experiment = config[f'{part}_recipe'], config[part]
    parsed = configs.parse(
      [f'--config={path}', *pipeline.differences(path, experiment, pipeline._OURS)]
    )
    ours = set(parsed.to_dict()) - {'seed', 'mix', 'data', 'backbone'}
    assert parsed.method == method and parsed.negatives >= 1
    assert {name: parsed.to_dict()[name] for name in ours} == {
      name: experiment.to_dict()[name] for name in ours
    }


@pytest.mark.parametrize(
  ('flags', 'words'),
  [
    (['--config.data.dir=none'], 'none'),
    (['--config.retriever.optim.clip=-1.0'], 'config.retriever.optim.clip'),
  ],
)
def test_bad_options(tmp_path, flags, words):
  with refused(words):
    pipeline.Pipeline(configs.parse([LOCAL, *flags]), pipeline.epath.Path(tmp_path / 'work')).run()
  assert list(tmp_path.iterdir()) == []


def test_a_path_without_a_reranker_is_refused_at_once(tmp_path, make_cross_encoder):
  for path, words in (
    (tmp_path / 'none', 'none'),
    ('runs/none', 'runs/none'),
    (tmp_path, 'config.json'),
  ):
    with refused(words):
      pipeline.Pipeline(
        configs.parse([LOCAL, f'--config.reranker_path={path}']),
        pipeline.epath.Path(tmp_path / 'work'),
      )
  assert not (tmp_path / 'work').exists()
  pipeline.check(configs.parse([LOCAL, f'--config.reranker_path={make_cross_encoder()}']))


@pytest.mark.parametrize(
  ('workdir', 'message'),
  [
    ('text/run', '--config.data.dir'),
    ('model', 'dprjax.pipeline'),
    ('training', 'dprjax.pipeline'),
    ('text/corpus.jsonl', 'corpus.jsonl'),
  ],
)
def test_a_pipeline_harms_nothing(command, tmp_path, workdir, message):
  for name, file, text in (
    ('text', 'corpus.jsonl', '{}'),
    ('model', 'config.json', '{"model_type": "bert"}'),
    ('training', 'dprjax.json', '{"format": "dprjax.training"}'),
  ):
    (tmp_path / name).mkdir()
    (tmp_path / name / file).write_text(text)
  before = {path: path.is_file() and path.read_text() for path in tmp_path.rglob('*')}
  flags = [LOCAL, f'--workdir={tmp_path}/{workdir}', f'--config.data.dir={tmp_path}/text']
  status, err = command(pipeline, *flags)
  assert status == 2 and named_in(err.splitlines()[-1], message), err
  assert {path: path.is_file() and path.read_text() for path in tmp_path.rglob('*')} == before


@pytest.mark.slow
def test_interrupted_in_a_stage_it_says_so_once(tmp_path):
  for everyone in (True, False):
    child = subprocess.Popen(
      command_line(tmp_path / 'work'),
      cwd=ROOT,
      env=devices.environment(),
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      start_new_session=True,
    )
    for line in child.stdout:
      if line.startswith('$ '):
        break
    time.sleep(0.5)
    (os.killpg if everyone else os.kill)(child.pid, signal.SIGINT)
    _, err = child.communicate(timeout=300)
    assert child.returncode == 130 and 'Traceback' not in err, err
    assert err.count('dprjax: error: interrupted') == err.count('dprjax: error') == 1


def test_what_the_pipeline_sets_itself_is_refused(command, tmp_path):
  status, err = command(pipeline, LOCAL, f'--workdir={tmp_path}/work', '--config.retriever.seed=1')
  assert status == 2 and named_in(err.splitlines()[-1], 'config.retriever.seed')
  assert not (tmp_path / 'work').exists()


def test_differences_are_the_flags_that_differ_from_the_recipe():
  own = ('optim.learning_rate=0.5', "trainable=('prompt/.*', 'head/.*')")
  config = configs.parse([LOCAL, *(f'--config.retriever.{one}' for one in own)])
  found = pipeline.differences(config.retriever_recipe, config.retriever, pipeline._OURS)
  assert found == ['--config.negatives=1', *(f'--config.{one}' for one in own)]
  parsed = configs.parse([f'--config={config.retriever_recipe}', *found])
  assert parsed.optim.learning_rate == 0.5 and tuple(parsed.trainable) == ('prompt/.*', 'head/.*')
