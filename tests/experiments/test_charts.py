"""Figures of experiments."""

import charts


def test_a_system_has_one_colour():
  assert charts.system_colour('FT at [MASK]') == charts.system_colour('fine-tuned whole')
  assert charts.system_colour('scifact', 'a linear map') == charts.system_colour(
    'linear map + BM25'
  )
  assert charts.system_colour('frozen + BM25') != charts.system_colour('BM25')
