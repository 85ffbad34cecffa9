import pytest

from dprjax.base import progress


@pytest.fixture
def clock(monkeypatch):
  """A list whose one number is the time in seconds."""
  now = [100.0]
  monkeypatch.setattr(progress.time, 'monotonic', lambda: now[0])
  return now


@pytest.fixture
def lines(caplog):
  with caplog.at_level('INFO', 'dprjax'):
    yield caplog


def test_a_job_in_parts_is_logged_every_few_seconds(clock, lines):
  meter = progress.Progress('texts', 1400, 'encoding')
  for seconds, count in ((104.0, 200), (110.0, None), (110.5, 400), (111.0, 500), (120.0, 1100)):
    clock[0] = seconds
    if count is None:
      meter.advance(300)
    else:
      meter(count)
  # Not at 104 s and 111 s, which are too early, nor at the end.
  assert lines.messages == ['encoding: 300 of 1,400 texts, 30/s, 37s left']
  assert (meter.seconds, meter.rate) == (20.0, 70.0)


@pytest.mark.parametrize(('terminal', 'least', 'most'), [(False, 10, 30), (True, 250, 600)])
def test_a_long_job_leaves_few_lines_in_a_log(clock, lines, monkeypatch, terminal, least, most):
  monkeypatch.setattr(progress.sys.stderr, 'isatty', lambda: terminal)
  meter = progress.Progress('texts', 1000)
  for count in range(600):
    clock[0] += 1
    meter(count)
  assert least <= len(lines.messages) <= most


def test_the_first_step_and_pauses_are_left_out(clock):
  meter = progress.Progress('steps', 12, skip_first=True)
  clock[0] += 30
  meter.update(2)
  assert meter.rate == 0
  meter.pause(5.0)
  clock[0] += 10
  meter.update(7)
  assert (meter.rate, meter.left) == (1.0, 5.0)
