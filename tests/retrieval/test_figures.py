"""The message of a comparison, in the title of its figure."""

import matplotlib.figure
import pytest

from dprjax.retrieval import figures


@pytest.mark.parametrize(
  ('second', 'title'),
  [
    ([0.5, 0.75, 1.0], 'prompt gains 0.250 nDCG@10'),
    ([0.0, 0.25, 0.5], 'prompt loses 0.250 nDCG@10'),
    ([0.0, 0.75, 0.75], 'prompt: no significant difference in nDCG@10'),
  ],
)
def test_the_title_says_what_the_last_system_gains(second, title, tmp_path, monkeypatch):
  drawn = []
  monkeypatch.setattr(
    matplotlib.figure.Figure, 'savefig', lambda self, *_, **__: drawn.append(self)
  )
  systems = {
    name: {
      'mean': {'nDCG@10': sum(values) / 3},
      'per_query': {'nDCG@10': dict(zip('abc', values, strict=True))},
    }
    for name, values in (('frozen', [0.25, 0.5, 0.75]), ('+ prompt', second))
  }
  figures.compared(systems, ['nDCG@10'], tmp_path / 'r.png')
  assert drawn[0].get_suptitle() == title


def test_systems_that_score_alike_can_be_drawn(tmp_path):
  alike = {'mean': {'nDCG@10': 0.0}, 'per_query': {'nDCG@10': dict.fromkeys('abc', 0.0)}}
  figures.compared({'frozen': alike, '+ prompt': alike}, ['nDCG@10'], tmp_path / 'r.png')
  assert (tmp_path / 'r.png').stat().st_size > 0
