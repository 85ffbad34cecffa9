"""Metrics of a training; each tracker writes to a folder, without a network."""

import importlib.util
import json
import logging
import os
import subprocess
import sys

import pytest

from dprjax.training import config as configs
from dprjax.training import log
from tests.refusals import refused


def test_a_resumed_log_reads_like_one_that_never_stopped(tmp_path):
  config = configs.default()
  config.log.to = 'tensorboard'
  first = log.MetricLog(tmp_path, 0, config)
  for step in (1, 2, 3):
    first.write(step, {'loss': step / 2})
  first.close()
  with (tmp_path / 'metrics.jsonl').open('a') as file:
    file.write('{"step": 4, "lo')  # where a kill cut it off
  second = log.MetricLog(tmp_path, 2, config)
  second.write(3, {'loss': 1.5})
  second.close()
  rows = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
  assert rows == [{'step': 1, 'loss': 0.5}, {'step': 2, 'loss': 1.0}, {'step': 3, 'loss': 1.5}]
  assert list((tmp_path / 'tensorboard').iterdir())


def test_only_the_first_process_writes(tmp_path):
  silent = log.MetricLog(tmp_path, 0, configs.default(), active=False)
  silent.write(1, {'loss': 1.0})
  silent.close()
  assert not list(tmp_path.iterdir())


def test_a_damaged_line_is_named(tmp_path):
  text = '{"step": 1}\n{"step": "2"}\n{"step": 3}\n'
  (tmp_path / 'metrics.jsonl').write_text(text)
  with refused('metrics.jsonl', 'line 2'):
    log.MetricLog(tmp_path, 5, configs.default())
  assert (tmp_path / 'metrics.jsonl').read_text() == text


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
print(sorted({{'tensorboardX', 'wandb'}} & set(sys.modules)))
"""
  found = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
  assert found.stdout == '[]\n'
  assert [one.name for one in tmp_path.iterdir()] == ['metrics.jsonl']


def test_an_unknown_tracker():
  with refused('config.log.to', 'comet', 'wandb'):
    log.check('tensorboard,comet')


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


PROGRAM = """
import pathlib, sys
from tests.training.test_log import track
track(pathlib.Path(sys.argv[1]), sys.argv[2])
track(pathlib.Path(sys.argv[1]), sys.argv[2], 2, [3])
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec('wandb') is None, reason="pip install 'dprjax[track]'")
def test_wandb(tmp_path):
  """Steps 1 and 2 and, resumed, 3, in a process: W&B starts threads and changes the process."""
  run = tmp_path / 'run'
  run.mkdir()
  environment = os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)}
  environment |= {'WANDB_MODE': 'offline', 'WANDB_SILENT': 'true'}
  subprocess.run([sys.executable, '-c', PROGRAM, str(run), 'wandb'], check=True, env=environment)
  parts = sorted((run / 'wandb').glob('offline-run-*'))
  files = [next(part.glob('*.wandb')) for part in parts]
  # Both parts have one id; a sync joins them.
  assert len({path.name for path in files}) == 1
  content = b''.join(path.read_bytes() for path in files)
  assert b'dev/nDCG@10' in content and b'prompt.kind' in content
