import json

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
