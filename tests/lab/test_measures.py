import math

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from lab import measures as analysis
from lab.mediawiki import Article, Section


def cosine_of(a, b):
  return float(a @ b / math.sqrt((a @ a) * (b @ b)))


def test_mean_cosine_equals_the_pairs_one_by_one(monkeypatch):
  rng = np.random.default_rng(3)
  x, y = rng.normal(size=(11, 4)), rng.normal(size=(7, 4)).astype(np.float32)
  pairs = rng.random((11, 7)) < 0.4
  expected = np.mean([cosine_of(x[i], y[j]) for i in range(11) for j in range(7) if pairs[i, j]])
  for block in (1024, 4):
    monkeypatch.setattr(analysis, '_BLOCK', block)
    assert analysis.mean_cosine(x, y, pairs) == pytest.approx(expected)
  assert math.isnan(analysis.mean_cosine(x, y, pairs & False))


def test_shares_of_the_nearest_equal_a_loop(monkeypatch):
  rng = np.random.default_rng(4)
  x, labels = 3 * rng.normal(size=(40, 5)), rng.random((40, 6)) < 0.2
  shares = []
  for i in range(40):
    near = sorted((j for j in range(40) if j != i), key=lambda j: -cosine_of(x[i], x[j]))[:10]
    assert analysis.nearest(x, 10)[i].tolist() == near
    if labels[i].any():
      shares.append(np.mean([bool((labels[i] & labels[j]).any()) for j in near]))
  assert len(shares) < 40  # some have no label: they count as neighbours only
  for block in (1024, 7):
    monkeypatch.setattr(analysis, '_BLOCK', block)
    assert analysis.near_share(x, labels) == pytest.approx(np.mean(shares))


def test_attention_entropy_known_by_hand():
  even, one, half = [0.25] * 4, [0.0, 1.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0]
  weights = jnp.array([[[even, one], [half, even]]], jnp.float32)  # L = 1, B = 2, N = 2, S = 4
  np.testing.assert_allclose(
    analysis.attention_entropy(weights), [[[math.log(4), 0], [math.log(2), math.log(4)]]], atol=1e-6
  )


def test_spearman():
  x = np.array([1.0, 2.0, 3.0])
  assert analysis.spearman(x, np.array([30.0, 2.0, 1.0])) == pytest.approx(-1)
  rng = np.random.default_rng(0)
  x, y = rng.integers(0, 5, 200).astype(float), rng.integers(0, 9, 200).astype(float)
  assert analysis.spearman(x, y) == pytest.approx(
    np.corrcoef(scipy.stats.rankdata(x), scipy.stats.rankdata(y))[0, 1]
  )
  assert math.isnan(analysis.spearman(np.zeros(3), np.arange(3.0)))


VECTORS = {
  'east': [2.0, 0.0],
  'east too': [1.0, 0.1],
  'north': [0.0, 1.0],
  'north-east': [1.0, 1.0],
}


def encode(texts):
  return np.array([VECTORS[text] for text in texts], np.float32)


def test_section_accuracy_by_hand():
  right, wrong = (
    analysis.Triplet('east', 'east too', 'north'),
    analysis.Triplet('east', 'north', 'north-east'),
  )
  tie = analysis.Triplet('east', 'north', 'north')
  assert analysis.section_accuracy([right, wrong, right, tie], encode) == 0.5


def sentence(*words):
  return 'This sentence is about ' + ' '.join(map(str, words)) + '.'


def article(name, sections, sentences):
  return Article(
    name,
    [
      Section(
        f'Part {i}', '\n'.join(sentence(name, 'part', i, 'point', j) for j in range(sentences))
      )
      for i in range(sections)
    ],
  )


def place(text):
  """(article, part) of one of the sentences above."""
  words = text.split()
  return words[4], words[6]


def test_section_triplets():
  articles = [article('wool', 3, 5), article('iron', 2, 4), article('salt', 4, 2)]
  triplets = analysis.section_triplets(articles, 0, 1000)
  assert len(triplets) == 15 + 8 + 8  # every sentence is an anchor once
  assert len({triplet.anchor for triplet in triplets}) == len(triplets)
  for anchor, positive, negative in triplets:
    assert anchor != positive and place(anchor) == place(positive)
    assert place(anchor)[0] == place(negative)[0] and place(anchor)[1] != place(negative)[1]
  assert triplets == analysis.section_triplets(iter(articles), 0, 1000)
  assert triplets != analysis.section_triplets(articles, 1, 1000)
  few = analysis.section_triplets(articles, 0, 7)
  # The articles take turns.
  names = [place(triplet.anchor)[0] for triplet in few]
  assert few == triplets[:7] and sorted(map(names.count, ('wool', 'iron', 'salt'))) == [2, 2, 3]


def test_articles_without_triplets():
  def text(part):
    return '\n'.join(sentence(part, j) for j in range(3))

  def sections(*pairs):
    return [Article('a', [Section(heading, body) for heading, body in pairs])]

  found = sections(('One', text(1)), ('See also', text(2)), ('REFERENCES', text(3)))
  assert analysis.section_triplets(found, 0, 100) == []
  # One sentence is enough for a negative.
  triplets = analysis.section_triplets(sections(('One', text(1)), ('Two', sentence(2))), 0, 100)
  assert len(triplets) == 3 and {triplet.negative for triplet in triplets} == {sentence(2)}
