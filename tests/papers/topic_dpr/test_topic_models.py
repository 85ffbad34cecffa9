"""Topics: their words, the distribution of a text over them, the file, and how they are found."""

import collections
import json

import numpy as np
import pytest

from dprjax.base import arrays as npz
from dprjax.papers.topic_dpr import topic_models
from dprjax.papers.topic_dpr.topic_models import Topics, TopicSettings
from tests.refusals import refused

META = {'format': topic_models.FORMAT, 'version': 1, 'kind': 'lda'}


def model(distributions, names, sizes=(5, 3), vocabulary=('apple', 'banana', 'cherry', 'date')):
  return Topics(
    dict(META),
    [list(name) for name in names],
    np.array(sizes, np.int64),
    list(vocabulary),
    np.array(distributions, np.float32),
  )


@pytest.fixture(scope='module')
def small():
  return model(
    [[0.4, 0.3, 0.2, 0.1], [0.7, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.7]],
    [['apple', 'banana'], ['date']],
  )


def by_loops(model, text, steps=50):
  """Eq. 1 by EM, one word after the other, in Python numbers."""
  known = [model.vocabulary.index(w) for w in topic_models.words(text) if w in model.vocabulary]
  count = len(model.distributions)
  mixture = [1 / count] * count
  for _ in range(steps):
    shares = [0.0] * count
    for word in known:
      weights = [mixture[k] * float(model.distributions[k, word]) for k in range(count)]
      for k in range(count):
        shares[k] += weights[k] / sum(weights)
    mixture = [share / len(known) for share in shares]
  return [value / sum(mixture[1:]) for value in mixture[1:]]


@pytest.mark.parametrize(
  'text, expected',
  [
    ('The cats of a MOUSE', ['cats', 'mouse']),  # "the" and "of" stop, "a" is short
    ('spin-orbit x2y $\\mathcal{N}=4$', ['spin', 'orbit', 'mathcal']),
    ('u\u0308ber', ['über']),  # a mark of its own is joined to its letter
    ('a' * 41 + ' ' + 'b' * 40, ['b' * 40]),
    ('भारत की राजधानी', ['भारत', 'राजधानी']),
    ('北京是 iPhone手机2020', ['北京', '京是', 'iphone', '手机']),
  ],
)
def test_words(text, expected):
  assert topic_models.words(text) == expected


def test_distributions_are_those_of_a_plain_loop(small):
  rng = np.random.default_rng(0)
  vocabulary = sorted({f'{chr(97 + i % 26)}{chr(97 + i // 26)}word' for i in range(60)})
  random = model(rng.dirichlet(np.full(60, 0.3), 4), [['aaword']] * 3, (9, 4, 2), vocabulary)
  random.distributions[:] += 1e-6
  random.distributions[:] /= random.distributions.sum(axis=1, keepdims=True)
  texts = [' '.join(rng.choice(vocabulary, size)) + ' unknown' for size in (1, 2, 7, 40, 200)]
  for made, given in ((random, texts), (small, ['apple', 'date date cherry', 'banana Apple'])):
    found = made.distribution(given)
    assert found.dtype == np.float32 and found.shape == (len(given), len(made))
    np.testing.assert_allclose(found, [by_loops(made, t) for t in given], rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-6)
    assert made.assign(given).tolist() == found.argmax(axis=1).tolist()
    assert made.assign(given).dtype == np.int32


def test_a_text_without_known_words_has_the_largest_topic(small):
  texts = ['', 'zebra', 'date', 'the of']
  np.testing.assert_allclose(small.distribution(texts)[[0, 1, 3]], [[5 / 8, 3 / 8]] * 3)
  assert small.assign(texts).tolist() == [0, 0, 1, 0]
  assert small.count_known(['zebra apple Apple', '']).tolist() == [2, 0]
  assert small.distribution([]).shape == (0, 2) and small.assign([]).shape == (0,)


def test_a_text_is_what_it_is_in_any_company(small, monkeypatch):
  rng = np.random.default_rng(1)
  texts = [' '.join(rng.choice([*small.vocabulary, 'zebra'], n)) for n in rng.integers(0, 30, 50)]
  together = small.distribution(texts)
  np.testing.assert_array_equal(np.concatenate([small.distribution([t]) for t in texts]), together)
  monkeypatch.setattr(topic_models, '_CHUNK', 7)
  np.testing.assert_array_equal(small.distribution(texts), together)


def test_a_corpus_that_shares_no_word_is_refused(small):
  small.check_shares(['zebra', 'a date'], 'corpus.jsonl')
  with refused('corpus.jsonl'):
    small.check_shares(['zebra', ''], 'corpus.jsonl')


def meta(**changes):
  return np.array(json.dumps(META | changes))


DAMAGED = {
  'a newer version': ({'topics/meta': meta(version=2)}, 'topics/meta'),
  'sizes of halves': ({'topics/sizes': np.array([1.5, 1])}, 'topics/sizes'),
  'too much': ({'topics/distributions': np.ones((3, 4), np.float32)}, 'topics/distributions'),
  'names beyond': ({'topics/words': np.array([[0, 4], [1, 2]])}, 'topics/words'),
}


@pytest.mark.parametrize('changes, message', DAMAGED.values(), ids=DAMAGED)
def test_damaged_files_are_named(small, tmp_path, changes, message):
  arrays = {**small.arrays(), **changes}
  path = tmp_path / 'topics.npz'
  npz.write_arrays(path, {name: array for name, array in arrays.items() if array is not None})
  with refused('topics.npz', message):
    topic_models.load_topics(path)


THEMES = {
  'sea': 'fish whale coral tide boat harbour wave salt reef sailor',
  'sky': 'star planet orbit comet galaxy moon rocket telescope nebula dust',
  'farm': 'wheat tractor barn cow field harvest plough goat hay orchard',
}
COMMON = 'report result method time number'


def documents(count=90, seed=0):
  """Documents of three themes with words that all share, and the number of each one's theme."""
  rng = np.random.default_rng(seed)
  themes = rng.choice(3, count, p=[0.5, 0.3, 0.2])
  words = [theme.split() for theme in THEMES.values()]
  texts = [
    ' '.join([*rng.choice(words[theme], 14), *rng.choice(COMMON.split(), 6)]) for theme in themes
  ]
  return texts, themes


@pytest.mark.parametrize('kind', topic_models.KINDS)
def test_themes_are_found(kind):
  texts, themes = documents()
  settings = TopicSettings(kind, topics=3, sweeps=60, eta=0.1, seed=1)
  fitted = topic_models.fit(texts, settings)
  made = fitted.topics
  assert made.meta['kind'] == kind and made.meta['documents'] == len(texts)
  assert list(made.sizes) == sorted(made.sizes, reverse=True)
  assert fitted.agreement >= 0.95
  # Each theme is one topic, named by its own words, also of texts that were not seen.
  unseen, others = documents(40, seed=5)
  own = list(THEMES.values())
  for found, truth in ((fitted.assigned, themes), (made.assign(unseen), others)):
    pairs = collections.Counter(zip(found.tolist(), truth.tolist(), strict=True))
    main = {topic: max(range(3), key=lambda t, k=topic: pairs[k, t]) for topic in range(3)}
    assert sorted(main.values()) == [0, 1, 2]
    assert sum(pairs[k, main[k]] for k in main) >= 0.95 * len(truth)
  for topic, name in enumerate(made.names):
    assert len(set(name[:10]) & set(own[main[topic]].split())) >= 5
  again = topic_models.fit(texts, settings)
  for name, array in made.arrays().items():
    np.testing.assert_array_equal(array, again.topics.arrays()[name])


@pytest.mark.parametrize(
  'texts, settings, message',
  [
    (documents(60)[0], TopicSettings(topics=40, sweeps=5), '40'),
    (documents(4)[0], TopicSettings(), ('documents', '5', '4')),
    (['fish'] * 5, TopicSettings('lda', topics=6), ('5', '6')),
  ],
)
def test_too_little_is_said(texts, settings, message):
  with refused('papers.jsonl', message):
    topic_models.fit(texts, settings, where='papers.jsonl')


def test_documents_are_chosen_by_a_hash():
  texts = [f'text {i}' for i in range(50)]
  assert topic_models.choose(iter(texts), 50) == texts
  few = topic_models.choose(iter(texts), 20)
  assert len(few) == 20 and set(few) < set(texts)
  assert topic_models.choose(texts[::-1], 20) == few
