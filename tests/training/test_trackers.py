"""Each tracker writes to a folder, without a network."""

import contextlib
import importlib.util
import json
import logging
import os
import sqlite3
import subprocess
import sys

import pytest

from dprjax.training import config as configs
from dprjax.training import log, trackers
from tests.refusals import refused


def installed(name):
  return pytest.mark.skipif(
    importlib.util.find_spec(name) is None,
    reason=f"{name} is not here: pip install 'dprjax[track]'",
  )


def track(workdir, to, resume=-1, steps=(1, 2)):
  config = configs.default()
  config.log.to, config.log.project = to, 'tests'
  written = log.MetricLog(workdir, resume, config)
  for step in steps:
    written.write(step, {'loss': 1 / step, 'dev/nDCG@10': step / 10})
  written.close()


def test_nothing_is_imported_that_is_not_named(tmp_path):
  code = f"""
import sys
from dprjax.training import config as configs, log
config = configs.default()
config.log.to = ''
log.MetricLog({str(tmp_path)!r}, -1, config).close()
print(sorted({{'tensorboardX', 'wandb', 'mlflow', 'trackio'}} & set(sys.modules)))
"""
  found = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
  assert found.stdout == '[]\n'
  assert [one.name for one in tmp_path.iterdir()] == ['metrics.jsonl']


def test_an_unknown_tracker():
  with refused('config.log.to', 'comet', 'wandb'):
    trackers.check('tensorboard,comet')


def test_a_tracker_that_breaks_does_not_end_a_training(tmp_path, monkeypatch, caplog):
  def board(*_, **__):
    raise RuntimeError('the server is gone')

  monkeypatch.setattr('tensorboardX.SummaryWriter.add_scalar', board)
  with caplog.at_level(logging.WARNING, 'dprjax'):
    track(tmp_path, 'tensorboard')
  assert [record.getMessage() for record in caplog.records] == [
    'tensorboard failed and gets no more numbers: the server is gone'
  ]
  assert len((tmp_path / 'metrics.jsonl').read_text().splitlines()) == 2


@pytest.mark.slow
@installed('mlflow')
def test_mlflow(tmp_path, monkeypatch):
  import mlflow

  monkeypatch.setenv('MLFLOW_TRACKING_URI', (tmp_path / 'mlruns').as_uri())
  monkeypatch.setenv('MLFLOW_ALLOW_FILE_STORE', 'true')
  run = tmp_path / 'run'
  run.mkdir()
  track(run, 'mlflow')
  track(run, 'mlflow', 2, [3])  # resumed
  client = mlflow.MlflowClient()
  experiment = client.get_experiment_by_name('tests')
  [found] = client.search_runs([experiment.experiment_id])
  assert found.info.run_name == 'run' and found.info.status == 'FINISHED'
  assert found.data.params['prompt.kind'] == 'prefix'
  history = client.get_metric_history(found.info.run_id, 'dev/nDCG_at_10')
  assert [(one.step, one.value) for one in history] == [(1, 0.1), (2, 0.2), (3, 0.3)]
  (tmp_path / 'retriever').mkdir()
  for name in ('retriever/README.md', 'prompt.npz'):
    (tmp_path / name).write_text('made')
  for name in ('retriever', 'prompt.npz'):
    trackers.send(run, tmp_path / name)
  sent = {one.path for one in client.list_artifacts(found.info.run_id)}
  assert sent == {'README.md', 'prompt.npz'}


def test_an_export_outlives_a_tracker_that_is_gone(tmp_path, monkeypatch, caplog):
  monkeypatch.setitem(sys.modules, 'mlflow', None)
  (tmp_path / trackers.FILE).write_text('{"mlflow": "run"}')
  trackers.send(tmp_path, tmp_path / 'prompt.npz')
  assert 'prompt.npz' in caplog.text


PROGRAM = """
import pathlib, sys
from tests.training.test_trackers import track
track(pathlib.Path(sys.argv[1]), sys.argv[2])
track(pathlib.Path(sys.argv[1]), sys.argv[2], 2, [3])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
  'name', [pytest.param(one, marks=installed(one)) for one in ('trackio', 'wandb')]
)
def test_in_a_process(tmp_path, name):
  """Steps 1 and 2 and, resumed, 3: these packages start threads and change the process."""
  run = tmp_path / 'run'
  run.mkdir()
  environment = os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)}
  environment |= {'TRACKIO_DIR': str(tmp_path), 'WANDB_MODE': 'offline', 'WANDB_SILENT': 'true'}
  subprocess.run([sys.executable, '-c', PROGRAM, str(run), name], check=True, env=environment)
  if name == 'trackio':
    [path] = tmp_path.glob('tests*.db')
    with contextlib.closing(sqlite3.connect(path)) as database:
      rows = database.execute('select run_name, step, metrics from metrics order by step')
      found = [
        (run_name, step, json.loads(values)['dev/nDCG@10']) for run_name, step, values in rows
      ]
    assert len({run_name for run_name, *_ in found}) == 1
    assert [one[1:] for one in found] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    return
  parts = sorted((run / 'wandb').glob('offline-run-*'))
  files = [next(part.glob('*.wandb')) for part in parts]
  # Both parts have one id; a sync joins them.
  assert len({path.name for path in files}) == 1
  content = b''.join(path.read_bytes() for path in files)
  assert b'dev/nDCG@10' in content and b'prompt.kind' in content
