"""Measures of backbones for research only, one function each, with its source.

``encode`` is any function that turns texts into vectors ``[n, H]``, such as ``Retriever.encode``.
"""

import collections
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from jaxtyping import Array, Bool, Float, Int

from dprjax.base.errors import InputError
from dprjax.papers.condenser.segments import split_sentences
from lab.mediawiki import Article, Section
from lab.statistics import unit
from lab.sts import Pair

Encode = Callable[[Sequence[str]], Float[np.ndarray, 'n H']]

_BLOCK = 1024  # rows of a block of cosines; bounds the memory
# Shorter sentences are headings and list items left over from the markup of a dump, longer ones are
# tables and lists run together.
_WORDS = range(5, 51)
# Sections that have a purpose but no theme.
_APPARATUS = frozenset(
  {
    'bibliography',
    'citations',
    'external links',
    'footnotes',
    'further reading',
    'notes',
    'notes and references',
    'references',
    'see also',
    'sources',
    'works cited',
  }
)


class Triplet(NamedTuple):
  """Three sentences of an article: two from one section, the third from another."""

  anchor: str
  positive: str
  negative: str


def cosine(x: Float[np.ndarray, 'n H'], y: Float[np.ndarray, 'n H']) -> Float[np.ndarray, ' n']:
  """The cosine of each row of ``x`` with that of ``y``; 0 if one of them is zero."""
  return np.sum(unit(x) * unit(y), axis=1)


def mean_cosine(
  x: Float[np.ndarray, 'n H'], y: Float[np.ndarray, 'm H'], pairs: Bool[np.ndarray, 'n m']
) -> float:
  """The mean cosine over some pairs: Sim(q, p-) of Topic-DPR Table 3; NaN where there are none."""
  x, y = unit(x), unit(y)
  total = sum(
    float(np.sum((x[i : i + _BLOCK] @ y.T)[pairs[i : i + _BLOCK]]))
    for i in range(0, len(x), _BLOCK)
  )
  count = int(np.count_nonzero(pairs))
  return total / count if count else float('nan')


def nearest(x: Float[np.ndarray, 'n H'], k: int) -> Int[np.ndarray, 'n k']:
  """The rows of the k vectors with the highest cosine to each, itself left out.

  Ties are in the order of rows; there are fewer than k where there are fewer vectors.
  """
  x = unit(x)
  found = []
  for start in range(0, len(x), _BLOCK):
    scores = x[start : start + _BLOCK] @ x.T
    own = np.arange(len(scores))
    scores[own, start + own] = -np.inf
    found.append(np.argsort(-scores, axis=1, kind='stable')[:, : min(k, len(x) - 1)])
  return np.concatenate(found)


def near_share(x: Float[np.ndarray, 'n H'], labels: Bool[np.ndarray, 'n C'], k: int = 10) -> float:
  """The share of the k nearest vectors of a vector, by cosine, with a common label.

  It is the mean over vectors with labels. It tells how well labels are separated, in a number for
  figures such as Topic-DPR Figure 4.

  Raises:
    ValueError: fewer than two vectors, or none with a label.
  """
  labelled = labels.any(axis=1)
  if len(x) < 2 or not labelled.any():
    raise ValueError(f'{len(x)} vectors, {np.count_nonzero(labelled)} of them with labels')
  rows = nearest(x, k)
  # One of the nearest at a time, which bounds the memory.
  common = [(labels & labels[column]).any(axis=1)[labelled].mean() for column in rows.T]
  return float(np.mean(common))


def import_manifold() -> Any:
  """sklearn.manifold. Raises InputError if it is not installed."""
  try:
    from sklearn import manifold
  except ImportError as error:
    raise InputError(
      f"t-SNE needs scikit-learn ({error}); install it: pip install 'dprjax[tsne]'"
    ) from error
  return manifold


def tsne(x: Float[np.ndarray, 'n H'], seed: int = 0) -> Float[np.ndarray, 'n 2']:
  """Vectors, scaled to unit length, in two dimensions (van der Maaten & Hinton 2008).

  Raises:
    InputError: scikit-learn is not installed.
  """
  manifold = import_manifold()
  # Its own default is 30, which must be less than the number of vectors.
  perplexity = min(30.0, max((len(x) - 1) / 3, 1.0))
  model = manifold.TSNE(perplexity=perplexity, init='random', random_state=seed)
  return model.fit_transform(unit(x).astype(np.float32))


def attention_entropy(weights: Float[Array, 'L B N S']) -> Float[Array, 'L B N']:
  """The entropy of first-token attention, in nats, by layer, text and head.

  Clark et al. 2019, section 3.3, and Condenser, section 5, whose Figure 2 shows the mean over texts
  and heads by layer. Even weights over S positions have log S, a single position has 0.

  Args:
    weights: of ``encoder.first_token_attention``; they sum to 1 over S.
  """
  return jnp.sum(jax.scipy.special.entr(weights), axis=-1)


def spearman(x: Float[np.ndarray, ' n'], y: Float[np.ndarray, ' n']) -> float:
  """Spearman rank correlation, with mean ranks for ties; NaN if ``x`` or ``y`` is constant."""
  if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
    return float('nan')
  return float(scipy.stats.spearmanr(x, y).statistic)


def sts(pairs: Sequence[Pair], encode: Encode) -> float:
  """Spearman correlation of cosines with human scores (Reimers & Gurevych 2019, section 4.1)."""
  vectors = encode([sentence for pair in pairs for sentence in (pair.first, pair.second)])
  return spearman(cosine(vectors[::2], vectors[1::2]), np.array([pair.score for pair in pairs]))


def section_triplets(articles: Iterable[Article], seed: int, most: int) -> list[Triplet]:
  """Triplets for the distinction of Wikipedia sections (Ein Dor et al. 2018).

  Used in SBERT section 4.4 and Condenser section 4.2. The anchor and the positive are sentences of
  one section, the negative is from another section of the same article. The articles take turns,
  one triplet each, until there are ``most``; no sentence is an anchor twice. Excluded are the text
  before the first heading (it is about everything), references and similar sections, sentences of
  fewer than 5 or more than 50 words, and those that occur more than once in the article.

  Args:
    articles: of ``mediawiki.read_articles``; all are read before the first triplet is drawn.
    seed: of the choice; the same articles and seed give the same triplets.
    most: the largest number of triplets.

  Returns:
    The triplets; none if no article has two usable sections.
  """
  rng = random.Random(seed)
  waiting = []
  for article in articles:
    sections = _themes(article)
    anchors = [
      (i, j) for i, section in enumerate(sections) if len(section) > 1 for j in range(len(section))
    ]
    if len(sections) > 1 and anchors:
      rng.shuffle(anchors)
      waiting.append((sections, anchors))
  rng.shuffle(waiting)
  triplets: list[Triplet] = []
  while waiting:
    for sections, anchors in waiting[: most - len(triplets)]:
      i, j = anchors.pop()
      other = rng.choice([k for k in range(len(sections)) if k != i])
      positive = rng.choice([sentence for k, sentence in enumerate(sections[i]) if k != j])
      triplets.append(Triplet(sections[i][j], positive, rng.choice(sections[other])))
    waiting = [item for item in waiting if item[1]] if len(triplets) < most else []
  return triplets


def themed(article: Article) -> list[Section]:
  """Sections of an article without the text before the first heading, references and the like."""
  return [
    section
    for section in article.sections
    if section.text.strip()
    and section.heading.strip()
    and section.heading.strip().lower() not in _APPARATUS
  ]


def _themes(article: Article) -> list[list[str]]:
  """The usable sentences of each section that has any."""
  sections = [split_sentences(section.text) for section in themed(article)]
  count = collections.Counter(sentence for section in sections for sentence in section)
  usable = [
    [sentence for sentence in section if count[sentence] == 1 and len(sentence.split()) in _WORDS]
    for section in sections
  ]
  return [section for section in usable if section]


def section_accuracy(triplets: Sequence[Triplet], encode: Encode) -> float:
  """The fraction of triplets whose anchor is nearer, by cosine, to the positive than the negative.

  By chance 0.5; a tie is a miss.
  """
  vectors = encode([sentence for triplet in triplets for sentence in triplet])
  anchors, positives, negatives = vectors[::3], vectors[1::3], vectors[2::3]
  return float(np.mean(cosine(anchors, positives) > cosine(anchors, negatives)))
