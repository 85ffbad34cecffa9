"""Topics of a corpus, found once by hLDA or LDA and then inferred for any text.

A topic model has word distributions of a background (for hLDA the root) and of the Ks largest
topics. EM with these distributions fixed gives the distribution of a text over topics (Topic-DPR
Eq. 1), for documents and queries alike.

A topics file and a prompt file of kind topic contain these arrays:

| array | shape | content |
|---|---|---|
| topics/meta | U | JSON: format, version, kind, options |
| topics/vocabulary | [V] U | known words, ascending |
| topics/distributions | [1 + Ks, V] float32 | word distributions of the background and each topic |
| topics/words | [Ks, W] int32 | the words of a topic, most probable first, then -1 |
| topics/sizes | [Ks] int64 | documents of each topic, largest first |
"""

import collections
import dataclasses
import functools
import hashlib
import heapq
import itertools
import json
import logging
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jaxtyping as jt
import msgspec
import numpy as np
import regex

from dprjax.base import arrays as npz
from dprjax.base import files, given, reading, version
from dprjax.base import words as scripts
from dprjax.base.counts import counted
from dprjax.base.errors import InputError
from dprjax.base.progress import Progress

FORMAT = 'dprjax.topics'
VERSION = 1
KINDS = ('hlda', 'lda')
ARRAYS = tuple(
  f'topics/{name}' for name in ('meta', 'vocabulary', 'distributions', 'words', 'sizes')
)

_WORD = re.compile(r'[^\W\d_]{3,}')
# A word of any script; in dense scripts, every pair of neighbouring letters.
_ANY_WORD = regex.compile(
  rf'(?P<dense>(?:{scripts.DENSE}\p{{M}}*+)++)|[\p{{L}}--{scripts.DENSE}][\p{{L}}\p{{M}}--{scripts.DENSE}]{{2,}}+',
  regex.V1,
)
_LONGEST_WORD = 40  # letters
# The English list of NLTK, words of three letters or more.
_STOP_WORDS = frozenset(
  """
  about above after again against ain all and any are aren because been before being below
  between both but can couldn did didn does doesn doing don down during each few for from
  further had hadn has hasn have haven having her here hers herself him himself his how into isn
  its itself just mightn more most mustn myself needn nor not now off once only other our ours
  ourselves out over own same shan she should shouldn some such than that the their theirs them
  themselves then there these they this those through too under until very was wasn were weren
  what when where which while who whom why will with won wouldn you your yours yourself
  yourselves
  """.split()  # noqa: SIM905
)
_SHOWN = 256  # words kept of a topic, for display and for prompts
_EM_STEPS = 50
_CHUNK = 2048  # texts that EM fits at a time
_SWEEPS_AT_ONCE = 10
_DEPTH = 3  # levels of hLDA, with the root

logger = logging.getLogger('dprjax')

MOST_DOCUMENTS = 3000  # used to find topics; more take longer


@dataclasses.dataclass(frozen=True)
class Topics:
  """A topic model; see the arrays of a file."""

  meta: dict[str, Any]
  names: list[list[str]]
  sizes: jt.Int64[np.ndarray, ' Ks']
  vocabulary: list[str]
  distributions: jt.Float32[np.ndarray, '1+Ks V']

  def __len__(self) -> int:
    return len(self.sizes)

  def distribution(self, texts: Sequence[str]) -> jt.Float32[np.ndarray, 'n Ks']:
    """Distribution over topics of each text (Eq. 1); without known words, that of the documents."""
    texts = given.texts(texts)
    shares = np.tile(self.sizes / self.sizes.sum(), (len(texts), 1))
    for start in range(0, len(texts), _CHUNK):
      rows, mixtures = self._fit_mixtures(texts[start : start + _CHUNK])
      weights = mixtures[:, 1:].sum(axis=1, keepdims=True)
      sound = weights[:, 0] > 0  # False if the background explains all words
      shares[start + rows[sound]] = mixtures[sound, 1:] / weights[sound]
    return shares.astype(np.float32)

  def assign(self, texts: Sequence[str]) -> jt.Int32[np.ndarray, ' n']:
    """The most probable topic of each text; the largest topic if no word is known."""
    return self.distribution(texts).argmax(axis=1).astype(np.int32)

  def count_known(self, texts: Sequence[str]) -> jt.Int64[np.ndarray, ' n']:
    places = self._places
    return np.array(
      [sum(word in places for word in words(text)) for text in given.texts(texts)], np.int64
    )

  def check_shares(self, texts: Sequence[str], where: str) -> None:
    """Raises InputError naming ``where`` if no text has a known word."""
    if not self.count_known(texts).any():
      raise InputError(
        f'{where}: none of {len(texts):,} texts has a word of the topics '
        f'({", ".join(self.names[0][:3])}, ...); give the topics of this corpus'
      )

  def arrays(self) -> dict[str, np.ndarray]:
    places = self._places
    longest = max(map(len, self.names))
    numbers = [[places[word] for word in name] for name in self.names]
    return {
      'topics/meta': np.array(json.dumps(self.meta, ensure_ascii=False)),
      'topics/vocabulary': np.array(self.vocabulary, np.str_),
      'topics/distributions': self.distributions,
      'topics/words': np.array([row + [-1] * (longest - len(row)) for row in numbers], np.int32),
      'topics/sizes': self.sizes,
    }

  @classmethod
  def from_arrays(cls, arrays: Mapping[str, np.ndarray], where: str = 'topics') -> 'Topics':
    """The topic model in these arrays; other arrays are ignored."""
    if name := _damaged(arrays):
      raise InputError(f'{where}: the array {name} is missing or damaged; make the topics again')
    meta, vocabulary, distributions, shown, sizes = (arrays[name] for name in ARRAYS)
    read = _read_meta(meta, where)
    names = [vocabulary[row[row >= 0]].tolist() for row in shown]
    return cls(read, names, sizes.astype(np.int64), vocabulary.tolist(), distributions)

  @functools.cached_property
  def _places(self) -> dict[str, int]:
    return {word: number for number, word in enumerate(self.vocabulary)}

  def _fit_mixtures(
    self, texts: Sequence[str]
  ) -> tuple[jt.Int64[np.ndarray, ' m'], jt.Float64[np.ndarray, 'm 1+Ks']]:
    """Rows of texts with known words, and their mixtures by EM."""
    places = self._places
    counted = [
      sorted(collections.Counter(places[w] for w in words(text) if w in places).items())
      for text in texts
    ]
    rows = np.flatnonzero([bool(row) for row in counted])
    if not len(rows):
      return rows, np.empty((0, len(self) + 1))
    lengths = np.array([len(counted[row]) for row in rows])
    flat = np.array([pair for row in rows for pair in counted[row]], np.int64)
    starts = np.cumsum(lengths) - lengths
    owners = np.repeat(np.arange(len(rows)), lengths)
    counts = flat[:, 1].astype(np.float64)
    likelihoods = self.distributions[:, flat[:, 0]].astype(np.float64)  # [1 + Ks, words]
    mixtures = np.full((len(self) + 1, len(rows)), 1 / (len(self) + 1))
    totals = np.add.reduceat(counts, starts)
    for _ in range(_EM_STEPS):
      shares = mixtures[:, owners] * likelihoods
      shares *= counts / np.maximum(shares.sum(axis=0), np.finfo(np.float64).tiny)
      mixtures = np.add.reduceat(shares, starts, axis=1) / totals
    return rows, mixtures.T


def words(text: str) -> list[str]:
  """Words of three letters or more, in lower case, without stop words.

  In scripts without spaces, and in Korean, every pair of neighbouring letters is a word.
  """
  text = scripts.normalise(text)
  tokens: list[str] = []
  if scripts.is_simple(text):
    tokens = _WORD.findall(text)
  else:
    for match in _ANY_WORD.finditer(text):
      tokens += scripts.pairs_of(match[0]) if match['dense'] else [match[0]]
  return [word for word in tokens if word not in _STOP_WORDS and len(word) <= _LONGEST_WORD]


def load_topics(path: files.PathLike) -> Topics:
  return Topics.from_arrays(npz.read_arrays(path, 'topics'), str(path))


def save_topics(path: files.PathLike, topics: Topics) -> None:
  npz.write_arrays(path, topics.arrays())


def _damaged(arrays: Mapping[str, np.ndarray]) -> str | None:
  if missing := [name for name in ARRAYS if name not in arrays]:
    return missing[0]
  _, vocabulary, distributions, shown, sizes = (arrays[name] for name in ARRAYS)
  words_, topics = vocabulary.size, sizes.size
  for name, array, kinds, shape in (
    ('vocabulary', vocabulary, 'U', (words_,)),
    ('sizes', sizes, 'iu', (topics,)),
    ('distributions', distributions, 'f', (1 + topics, words_)),
    ('words', shown, 'i', (topics, shown.size // max(topics, 1))),
  ):
    if array.dtype.kind not in kinds or array.shape != shape or not array.size:
      return f'topics/{name}'
  sums = distributions.sum(axis=1, dtype=np.float64)
  if not (distributions.min() >= 0 and abs(sums - 1).max() <= 1e-3):  # nor NaN
    return 'topics/distributions'
  return 'topics/words' if shown.min() < -1 or shown.max() >= words_ else None


class _Meta(msgspec.Struct):
  format: Literal['dprjax.topics']
  version: Literal[1]
  kind: Literal['hlda', 'lda']


def _read_meta(array: np.ndarray, where: str) -> dict[str, Any]:
  place = f'{where}, array topics/meta'
  try:
    text = array.item() if array.ndim == 0 and array.dtype.kind == 'U' else ''
  except ValueError:  # an invalid code point
    text = ''
  meta = reading.parse(text, place, dict[str, Any])
  reading.convert(meta, place, _Meta)
  return meta


class TopicSettings(NamedTuple):
  """Settings for finding topics; ``topics.Flags`` explains them."""

  kind: str = 'hlda'
  topics: int = 5
  sweeps: int = 200
  alpha: float = 0.1
  eta: float = 0.3
  gamma: float = 1.0
  min_documents: int = 5
  seed: int = 0


class Fitted(NamedTuple):
  """Topics, and how they were found.

  Attributes:
    sampled: the topic that the method gave each document; -1 if dropped or none.
    assigned: the topic of each document by its words.
    all_sizes: documents of every topic found, descending.
  """

  topics: Topics
  sampled: jt.Int32[np.ndarray, ' documents']
  assigned: jt.Int32[np.ndarray, ' documents']
  all_sizes: list[int]

  @property
  def agreement(self) -> float:
    """Fraction of the documents of kept topics where model and method agree."""
    kept = self.sampled >= 0
    return float(np.mean(self.sampled[kept] == self.assigned[kept])) if kept.any() else float('nan')


class _Found(NamedTuple):
  """Token counts of the background and topics, word ranks, and topics of documents (-1: none)."""

  background: jt.Float64[np.ndarray, ' V']
  counts: jt.Float64[np.ndarray, 'topics V']
  ranks: jt.Float64[np.ndarray, 'topics V']
  topic_of: jt.Int64[np.ndarray, ' documents']


def choose(texts: Iterable[str], most: int = MOST_DOCUMENTS) -> list[str]:
  texts = iter(texts)
  chosen = list(itertools.islice(texts, most + 1))
  if len(chosen) <= most:
    return chosen
  return heapq.nsmallest(
    most, itertools.chain(chosen, texts), key=lambda text: hashlib.sha256(text.encode()).digest()
  )


def fit(
  texts: Sequence[str],
  settings: TopicSettings,
  where: str = 'the documents',
) -> Fitted:
  """Finds the topics of documents."""
  tokens = [words(text) for text in given.texts(texts)]
  spread = collections.Counter(word for row in tokens for word in set(row))
  vocabulary = sorted(word for word, count in spread.items() if count >= settings.min_documents)
  places = {word: number for number, word in enumerate(vocabulary)}
  rows = [[places[word] for word in row if word in places] for row in tokens]
  used = np.flatnonzero([bool(row) for row in rows])
  if len(used) < settings.topics:
    raise InputError(
      f'{where}: {len(used):,} of {counted(len(texts), "documents")} have words that occur in '
      f'{settings.min_documents}, too few for {settings.topics} topics; give more documents'
    )
  find = _find_hlda if settings.kind == 'hlda' else _find_lda
  model = find([rows[i] for i in used], vocabulary, settings)
  sizes = np.bincount(model.topic_of[model.topic_of >= 0], minlength=len(model.counts))
  order = np.argsort(-sizes, kind='stable')
  alive = int(np.count_nonzero(sizes))
  if alive < settings.topics:
    raise InputError(
      f'{where}: {settings.kind} finds {counted(alive, "topics")} of {settings.topics}; ask for '
      'fewer' + (', or raise gamma' if settings.kind == 'hlda' else '')
    )
  best = order[: settings.topics]
  distributions = np.concatenate([model.background[None], model.counts[best]]) + settings.eta
  distributions /= distributions.sum(axis=1, keepdims=True)
  meta = {
    'format': FORMAT,
    'version': VERSION,
    **settings._asdict(),
    'documents': len(used),
    'dprjax_version': version.__version__,
  }
  topics = Topics(
    meta,
    [_shown(model.ranks[k], model.counts[k], vocabulary) for k in best],
    sizes[best].astype(np.int64),
    vocabulary,
    distributions.astype(np.float32),
  )
  number = np.full(len(sizes) + 1, -1)  # the last for documents without a topic
  number[best] = np.arange(len(best))
  sampled = np.full(len(texts), -1, np.int32)
  sampled[used] = number[model.topic_of]
  return Fitted(topics, sampled, topics.assign(texts), sizes[order][:alive].tolist())


def _shown(
  ranks: jt.Float64[np.ndarray, ' V'],
  counts: jt.Float64[np.ndarray, ' V'],
  vocabulary: Sequence[str],
) -> list[str]:
  """The words of a topic, most probable first, then those of its descendants."""
  order = np.lexsort((-counts, -ranks))[:_SHOWN]
  return [vocabulary[word] for word in order.tolist() if counts[word] > 0]


def _find_hlda(
  rows: Sequence[Sequence[int]], vocabulary: Sequence[str], settings: TopicSettings
) -> _Found:
  priors = {'alpha': settings.alpha, 'eta': settings.eta, 'gamma': settings.gamma}
  model = _tomotopy().HLDAModel(depth=_DEPTH, **priors, seed=settings.seed)
  topics, documents = _sample(model, rows, vocabulary, settings)
  branches = [k for k in range(model.k) if model.is_live_topic(k) and model.level(k) == 1]
  branch_of = np.full(model.k, -1)
  for k in range(model.k):
    if model.is_live_topic(k):
      at = k
      while model.level(at) > 1:
        at = model.parent_topic(at)
      if model.level(at) == 1:
        branch_of[k] = branches.index(at)
  trees = np.stack([topics[branch_of == branch].sum(axis=0) for branch in range(len(branches))])
  # The topics of a document are on one path; a document with words of only the root has none.
  topic_of = np.array([branch_of[document].max() for document in documents])
  return _Found(topics[0], trees, topics[branches], topic_of)


def _find_lda(
  rows: Sequence[Sequence[int]], vocabulary: Sequence[str], settings: TopicSettings
) -> _Found:
  model = _tomotopy().LDAModel(
    k=settings.topics, alpha=settings.alpha, eta=settings.eta, seed=settings.seed
  )
  topics, documents = _sample(model, rows, vocabulary, settings)
  topic_of = [np.bincount(document, minlength=settings.topics).argmax() for document in documents]
  return _Found(topics.sum(axis=0), topics, topics, np.array(topic_of))


def _tomotopy() -> Any:
  with warnings.catch_warnings():
    # Its import warns, and takes a warning raised as an error for a missing library.
    warnings.simplefilter('ignore')
    import tomotopy
  return tomotopy


def _sample(
  model: Any, rows: Sequence[Sequence[int]], vocabulary: Sequence[str], settings: TopicSettings
) -> tuple[jt.Float64[np.ndarray, 'topics V'], list[jt.Int64[np.ndarray, ' _']]]:
  """Trains a tomotopy model; returns token counts by topic, and the topics of each document."""
  for row in rows:
    model.add_doc([vocabulary[word] for word in row])
  progress = Progress('sweeps', settings.sweeps, settings.kind)
  for start in range(0, settings.sweeps, _SWEEPS_AT_ONCE):
    count = min(_SWEEPS_AT_ONCE, settings.sweeps - start)
    model.train(count, workers=1)
    progress.advance(count)
  counts = np.zeros((model.k, len(vocabulary)))
  places = {word: number for number, word in enumerate(vocabulary)}
  numbers = np.array([places[word] for word in model.vocabs])
  documents = []
  for document in model.docs:
    topics = np.asarray(document.topics, np.int64)
    np.add.at(counts, (topics, numbers[np.asarray(document.words)]), 1)
    documents.append(topics)
  return counts, documents
