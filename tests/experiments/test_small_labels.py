"""Scores of the comparison of few labels, which it computes for many weights at once."""

import numpy as np
import pytest

import gain_sets
import small_choices
import small_labels
import small_tables
from dprjax.base.ranking import ranked
from dprjax.retrieval import bm25_index, choosing, fusion, measures
from dprjax.retrieval.choosing import BM25, FROZEN, Candidate
from dprjax.text import texts
from dprjax.text.trec import run_from_dict

WORDS = ['wing', 'lift', 'drag', 'flow', 'heat', 'plate', 'shock', 'wave', 'jet', 'nozzle']
PASSAGES, QUERIES = 40, 6


@pytest.fixture
def some():
  """A set of random words and vectors."""
  rng = np.random.default_rng(0)

  def text():
    return ' '.join(rng.choice(WORDS, 4))

  entries = [texts.PassageRecord(f'd{n}', '', text()) for n in range(PASSAGES)]
  splits = []
  for split in ('train', 'test'):
    judged = {
      f'{split}{n}': {f'd{row}': int(grade) for row, grade in zip(rows, (2, 1, 0), strict=True)}
      for n, rows in enumerate(rng.integers(0, PASSAGES, (QUERIES, 3)))
      if len(set(rows)) == 3
    }
    splits.append(judged)
  queries = {id_: text() for split in splits for id_ in split}
  source = gain_sets.Source(entries, queries, *splits)
  return small_labels.Set(
    'toy', source, lambda side, own: rng.integers(-2, 3, (len(own), 3)).astype(np.float32)
  )


def test_scores_are_those_of_fuse_and_evaluate(some):
  rows = np.arange(len(some.queries))
  weights = fusion.candidates(2)
  grid, alone = some.grid(rows, some.frozen[rows]), some.measure(rows, some.frozen[rows])
  assert len(np.unique(some.frozen)) < 30  # many ties
  index = bm25_index.build(some.ids, some.passages)
  judged = {**some.source.train, **some.source.test}
  run = {}
  for row, id_ in enumerate(some.names):
    dense = ranked(some.ids, some.frozen[row].astype(np.float64))
    words = index.rankings([some.queries[row]], fusion.DEPTH)[0]
    how = fusion.Fusion(weights={fusion.BM25: 0.5, fusion.DENSE: 0.5}, method='zscore')
    table = how.table({fusion.BM25: words, fusion.DENSE: dense})
    np.testing.assert_allclose(grid[row], fusion.ndcg(*table, judged[id_], weights), atol=1e-6)
    run[id_] = dict(zip(dense.ids, dense.scores.tolist(), strict=True))
  found = measures.measure(run_from_dict(run), judged, ['nDCG@10', 'R@100'])
  expected = [[found['per_query'][name][id_] for id_ in some.names] for name in found['mean']]
  np.testing.assert_allclose(alone, expected, atol=1e-6)


def line(run, held, tested, rows='all', fused=None):
  views = {'held': held, 'nDCG@10': tested, 'R@100': tested}
  if fused is not None:
    views |= {
      'fused held': fused,
      'fused nDCG@10': fused,
      'fused weights': [0.4, 0.6],
      'fused R@100': fused,
    }
  return {'run': run, 'seed': 0, 'seconds': 1, 'commit': 'x', 'held': rows, 'views': views}


def test_the_chooser_of_a_source_knows_the_other_sources():
  rng, lines = np.random.default_rng(0), []
  for source, gain in (('scifact', 0.2), ('qnli', 0.1), ('sick', -0.1)):
    own = rng.uniform(0.2, 0.5, 50)
    lines += [
      line(f'{source}-50/frozen', own, own, fused=own + gain),
      line(f'{source}-50/bm25', own - 0.1, own - 0.1),
      line(f'{source}-50/linear', own + 0.01, own + 0.01, fused=own),
      line(f'{source}-50/nudge', own, own, fused=own),
      line(f'{source}-50/lora', own[:10] + 0.05, own - 0.05, rows=list(range(10))),
    ]
  settings = small_choices.read(lines)
  assert [one.name for one in settings] == ['scifact-50', 'qnli-50', 'sick-50']
  held = settings[0].held[Candidate('lora')]
  assert np.isnan(held[10:]).all() and not np.isnan(held[:10]).any()
  assert small_choices.prior(settings).spread > 0.02
  cheap = small_choices.choices(settings, ways={'frozen', 'bm25', 'linear'})
  chosen = [cheap[id(one)].candidate for one in settings]
  assert chosen == [Candidate('frozen', fused=True)] * 2 + [FROZEN]
  gains = [one.gain(name) for one, name in zip(settings, chosen, strict=True)]
  mean, low, high = small_tables.over_sources(settings, gains)
  assert mean == pytest.approx((0.2 + 0.1) / 3) and low < mean < high
  assert {FROZEN, BM25} <= settings[0].tested.keys()
  assert isinstance(cheap[id(settings[0])], choosing.Choice)
