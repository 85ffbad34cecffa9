"""What can be told of a backbone without training it: each measure a function, with its source.

Wherever text is needed, ``encode`` turns texts into vectors ``[n, H]``: ``Retriever.encode``, or
any other function that does.
"""

import collections
import random
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from jaxtyping import Array, Float

from dprjax.data.similarity import Pair
from dprjax.formats.documents import split_sentences
from dprjax.formats.mediawiki import Article, Section

Encode = Callable[[Sequence[str]], Float[np.ndarray, 'n H']]

_BLOCK = 1024  # bounds the memory of all distances: so many rows by so many
# Shorter ones are headings and list items that a dump's markup left over, longer ones tables and
# lists run together.
_WORDS = range(5, 51)
# Sections that share no theme, but a purpose.
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
  """Three sentences of one article: the first two of one section, the third of another."""

  anchor: str
  positive: str
  negative: str


def unit(x: Float[np.ndarray, 'n H']) -> Float[np.ndarray, 'n H']:
  """Vectors at length 1, float64; zero vectors stay zero."""
  x = np.asarray(x, np.float64)
  length = np.linalg.norm(x, axis=1, keepdims=True)
  return np.divide(x, length, out=np.zeros_like(x), where=length > 0)


def cosine(x: Float[np.ndarray, 'n H'], y: Float[np.ndarray, 'n H']) -> Float[np.ndarray, ' n']:
  """The cosine of each row of ``x`` with the same row of ``y``; 0 where one of them is a zero
  vector.
  """
  return np.sum(unit(x) * unit(y), axis=1)


def alignment(x: Float[np.ndarray, 'n H'], y: Float[np.ndarray, 'n H'], alpha: float = 2) -> float:
  """How near the two of a positive pair are: E ||x - y||^alpha; 0 is best (Wang & Isola 2020,
  section 4.1).

  Args:
    x: vectors of unit length.
    y: likewise, the other half of each pair.
    alpha: the power.
  """
  return float(np.mean(np.linalg.norm(np.asarray(x, np.float64) - y, axis=1) ** alpha))


def uniformity(x: Float[np.ndarray, 'n H'], t: float = 2) -> float:
  """How evenly vectors fill the sphere: log E exp(-t ||x - y||^2) over all distinct pairs; lower is
  better, 0 if all are the same.

  Wang & Isola 2020, section 4.1; the pairs are those of the code in their Figure 5
  (``torch.pdist``): each two rows once.

  Args:
    x: vectors of unit length, two of them or more.
    t: the kernel's width.

  Raises:
    ValueError: fewer than two vectors make no pair.
  """
  n = len(x)
  if n < 2:
    raise ValueError(f'uniformity is over pairs of vectors; there is {n}')
  blocks = [np.asarray(x[start : start + _BLOCK], np.float64) for start in range(0, n, _BLOCK)]
  total = 0.0
  for i, rows in enumerate(blocks):
    for j, others in enumerate(blocks[i:], start=i):
      square = (
        np.sum(rows**2, axis=1)[:, None]
        + np.sum(others**2, axis=1)[None, :]
        - 2 * (rows @ others.T)
      )
      kernel = np.exp(-t * square.clip(0))
      total += np.sum(np.triu(kernel, 1) if i == j else kernel)
  return float(np.log(total / (n * (n - 1) / 2)))


def attention_entropy(weights: Float[Array, 'L B N S']) -> Float[Array, 'L B N']:
  """The entropy, in nats, of what the first token attends to, by layer, text and head.

  Clark et al. 2019, section 3.3, and Condenser, section 5, whose Figure 2 shows its mean over texts
  and heads, a layer. Even weights over S positions have log S, a single position 0. The texts are
  left apart here, so that batches of any sizes can be averaged.

  Args:
    weights: ``encoder.first_token_attention``'s; they sum to 1 over S.
  """
  return jnp.sum(jax.scipy.special.entr(weights), axis=-1)


def spearman(x: Float[np.ndarray, ' n'], y: Float[np.ndarray, ' n']) -> float:
  """Spearman's rank correlation, ties at their mean rank; NaN where either is constant, as ranks
  then mean nothing.
  """
  if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
    return float('nan')
  return float(scipy.stats.spearmanr(x, y).statistic)


def sts(pairs: Sequence[Pair], encode: Encode) -> float:
  """Spearman's correlation of the vectors' cosine with the scores of people (Reimers & Gurevych
  2019, section 4.1).
  """
  vectors = encode([sentence for pair in pairs for sentence in (pair.first, pair.second)])
  return spearman(cosine(vectors[::2], vectors[1::2]), np.array([pair.score for pair in pairs]))


def section_triplets(articles: Iterable[Article], seed: int, most: int) -> list[Triplet]:
  """Triplets for the distinction of Wikipedia sections (Ein Dor et al. 2018; used in SBERT section
  4.4 and Condenser section 4.2).

  The anchor and the positive are sentences of one section, the negative one of another section of
  the same article. Each article gives one triplet in turn until there are ``most`` of them; no
  sentence is an anchor twice. Left out are the text before the first heading (it is about
  everything), reference sections and the like, sentences of fewer than 5 or more than 50 words, and
  any that come more than once in the article.

  Args:
    articles: those of ``mediawiki.read_articles``; all are read before the first triplet is drawn.
    seed: of the choice; the same articles and seed give the same triplets.
    most: how many triplets at most.

  Returns:
    The triplets; none where no article has two sections to tell apart.
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
    waiting = [one for one in waiting if one[1]] if len(triplets) < most else []
  return triplets


def themed(article: Article) -> list[Section]:
  """An article's sections with text on a theme: neither the text before the first heading nor
  references and the like.
  """
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
  """The share of triplets whose anchor has a larger cosine with the positive than with the
  negative; by chance 0.5, a tie is a miss.
  """
  vectors = encode([sentence for triplet in triplets for sentence in triplet])
  anchors, positives, negatives = vectors[::3], vectors[1::3], vectors[2::3]
  return float(np.mean(cosine(anchors, positives) > cosine(anchors, negatives)))
