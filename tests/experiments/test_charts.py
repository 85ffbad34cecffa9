"""Figures of experiments."""

import matplotlib.figure
import numpy as np

import charts
from dprjax.analysis import figures
from tests.refusals import refused

GAINS = {
  'a set': {
    'one': figures.Bar(0.25, 0.125, 0.5, False),
    'two': figures.Bar(-0.5, -1.0, 0.25, False),
  },
  'another': {'two': figures.Bar(0.75, 0.5, 1.0, False)},
}


def test_differences_are_where_they_belong(tmp_path, monkeypatch):
  drawn = []
  save = matplotlib.figure.Figure.savefig
  monkeypatch.setattr(
    matplotlib.figure.Figure,
    'savefig',
    lambda self, *args, **kwargs: (drawn.append(self), save(self, *args, **kwargs)),
  )
  charts.differences(GAINS, 'gain', 'foot', tmp_path / 'gains.png')
  assert (tmp_path / 'gains.png').read_bytes().startswith(b'\x89PNG')
  [axes] = drawn[0].axes
  assert [label.get_text() for label in axes.get_yticklabels()] == ['a set', 'another']
  points, whiskers = {}, {}
  for line, _, (bars,) in axes.containers:
    rows = np.round(line.get_ydata()).astype(int).tolist()
    points[line.get_color()] = list(zip(rows, line.get_xdata().tolist(), strict=True))
    whiskers[line.get_color()] = [segment[:, 0].tolist() for segment in bars.get_segments()]
  one, two = points
  # A group that lacks a system has no point of it.
  assert points == {one: [(0, 0.25)], two: [(0, -0.5), (1, 0.75)]}
  assert whiskers == {one: [[0.125, 0.5]], two: [[-1.0, 0.25], [0.5, 1.0]]}
  with refused('gains.txt'):
    charts.differences(GAINS, 'gain', 'foot', tmp_path / 'gains.txt')
