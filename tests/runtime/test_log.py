import json

import pytest

from dprjax.runtime import log


@pytest.mark.parametrize(
  ('seconds', 'text'), [(0.4, '0s'), (75, '1m15s'), (3600, '1h00m'), (90061, '25h01m')]
)
def test_duration(seconds, text):
  assert log.duration(seconds) == text


@pytest.mark.parametrize(
  ('args', 'text'),
  [((118_000,), '118k'), ((22.7e6,), '22.7M'), ((118_000, 'B'), '118 kB'), ((12,), '12')],
)
def test_size(args, text):
  assert log.size(*args) == text


def test_a_resumed_log_reads_like_one_that_never_stopped(tmp_path):
  first = log.MetricLog(tmp_path, 0)
  for step in (1, 2, 3):
    first.write(step, {'loss': step / 2})
  first.close()
  with (tmp_path / 'metrics.jsonl').open('a') as file:
    file.write('{"step": 4, "lo')  # where a kill cut it off
  second = log.MetricLog(tmp_path, 2)
  second.write(3, {'loss': 1.5})
  second.close()
  rows = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
  assert rows == [{'step': 1, 'loss': 0.5}, {'step': 2, 'loss': 1.0}, {'step': 3, 'loss': 1.5}]
  assert list((tmp_path / 'tensorboard').iterdir())


def test_only_the_first_process_writes(tmp_path):
  silent = log.MetricLog(tmp_path, 0, active=False)
  silent.write(1, {'loss': 1.0})
  silent.close()
  assert not list(tmp_path.iterdir())


def test_pace_leaves_out_the_first_step_and_pauses(monkeypatch):
  clock = iter([10.0, 20.0])
  monkeypatch.setattr(log.time, 'monotonic', lambda: next(clock))
  pace = log.Pace(total=12, start=0)
  assert pace(2) == (0.0, 0.0)
  pace.pause(5.0)
  assert pace(7) == (1.0, 5.0)


def test_a_countdown_speaks_now_and_then(caplog, monkeypatch):
  now = [100.0]
  monkeypatch.setattr(log.time, 'monotonic', lambda: now[0])
  countdown = log.Countdown('texts', 1400)
  with caplog.at_level('INFO', 'dprjax'):
    now[0] = 104.0
    countdown(200)
    assert not caplog.messages  # too soon
    countdown.finish(300)
    now[0] = 110.0
    countdown(400)
    now[0] = 111.0
    countdown(500)
    now[0] = 120.0
    countdown(1100)  # the last: what comes next says so
  assert caplog.messages == ['700 of 1,400 texts  70 a second  10s left']
  assert countdown.seconds == 20.0
