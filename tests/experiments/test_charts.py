"""Figures of experiments."""

import matplotlib.figure

import charts
from dprjax.retrieval import figures
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
  # As many groups as systems: a panel for each group, a row for each system.
  panels = {axes.get_title(): axes for axes in drawn[0].axes}
  assert list(panels) == ['a set', 'another']
  assert [text.get_text() for text in panels['a set'].get_yticklabels()] == ['one', 'two']
  points = {
    title: {
      int(line.get_ydata()[0]): line.get_xdata().tolist()
      for line in axes.lines
      if line.get_marker() == 'o'
    }
    for title, axes in panels.items()
  }
  # A group that lacks a system has no point of it.
  assert points == {'a set': {0: [0.25], 1: [-0.5]}, 'another': {1: [0.75]}}
  whiskers = [list(line.get_xdata()) for line in panels['a set'].lines]
  assert [0.125, 0.5] in whiskers and [-1.0, 0.25] in whiskers
  with refused('gains.txt'):
    charts.differences(GAINS, 'gain', 'foot', tmp_path / 'gains.txt')


def test_a_system_has_one_colour():
  assert charts.system_colour('FT at [MASK]') == charts.system_colour('fine-tuned whole')
  assert charts.system_colour('scifact', 'a linear map') == charts.system_colour(
    'linear map + BM25'
  )
  assert charts.system_colour('frozen + BM25') != charts.system_colour('BM25')
