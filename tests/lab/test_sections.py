"""Triplets of sections: the loss in plain numpy, draws from a dump, and the accuracy."""

import bz2

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dprjax.base import mesh as meshes
from dprjax.base import tree
from dprjax.models.encoder_config import EncoderConfig
from dprjax.training.method import Parts
from lab import sections
from lab.mediawiki import Article, Section
from tests import gradients, reference, starts
from tests.options import with_options
from tests.training.conftest import WORDS

MODEL = EncoderConfig('bert', 40, 8, 2, 2, 16, max_positions=12)
ROWS = 32
OWN = {name: option.value for name, option in sections.OPTIONS.items()}


def make_batch(seed=1):
  rng = np.random.default_rng(seed)
  batch = {'triplet_index': np.arange(ROWS, dtype=np.int32)}
  for view, longest in zip(sections.VIEWS, (5, 7, 6), strict=True):
    mask = np.arange(longest) < rng.integers(2, longest + 1, size=(ROWS, 1))
    tokens = np.where(mask, rng.integers(1, 40, size=(ROWS, longest)), 0).astype(np.int32)
    batch |= {f'{view}_tokens': tokens, f'{view}_mask': mask}
  # A positive that is its anchor: a distance of 0 has no slope of its own.
  for what in ('tokens', 'mask'):
    batch[f'positive_{what}'][0] = 0
    batch[f'positive_{what}'][0, :5] = batch[f'anchor_{what}'][0]
  return batch


def reference_loss(config, params, batch):
  params = tree.unflatten({name: np.asarray(leaf, np.float64) for name, leaf in params.items()})
  prefix = params['prompt']['prefix']
  a, p, n = (
    reference.pool(
      reference.encode(
        MODEL, params['backbone'], batch[f'{view}_tokens'], batch[f'{view}_mask'], prefix
      ),
      batch[f'{view}_mask'],
      config.pooling,
      config.normalize,
    )
    for view in sections.VIEWS
  )

  near, far = (np.sqrt(np.sum((a - other) ** 2, axis=1)) for other in (p, n))
  whole = near - far + config.sections.margin
  return np.mean(np.maximum(whole, 0)), np.mean(whole < config.sections.margin), np.mean(whole > 0)


@pytest.mark.slow
def test_loss_and_gradient_equal_numpy():
  config = with_options(
    method='lab.sections',
    sections=OWN | {'margin': 0.5},
    trainable=('prompt/.*',),
    prompt__length=3,
    prompt__dropout=0.0,
    backbone__dropout=0.0,
    batch_size=ROWS,
    normalize=True,
    grad_cache=2,
    pooling='mean',
  )
  mesh, batch = meshes.make_mesh({'data': 8}), make_batch()
  model = sections.build(config, MODEL, mesh)
  start = starts.init_params(MODEL, 0)
  params = {
    name: np.asarray(leaf) * (25 if name.endswith(('kernel', 'embedding', 'prefix')) else 1)
    for name, leaf in tree.flatten(model.init(Parts(start), jax.random.key(9))).items()
  }
  names = tree.trainable_names(config.trainable, list(params))
  value, metrics, gradient = gradients.value_and_gradient(
    model, params, config.trainable, mesh, batch
  )
  expected, accuracy, active = reference_loss(config, params, batch)
  assert 0.2 < active < 0.95  # the margin decides
  assert value == pytest.approx(expected, rel=1e-5)
  assert metrics['accuracy'] == pytest.approx(accuracy)
  # Only declared parameters have a gradient, and it is the slope of the numpy loss.
  assert set(gradient) == set(names)
  gradients.assert_slope(
    lambda params: reference_loss(config, params, batch)[0], params, gradient, 2e-5
  )


def sentence(article, section, number):
  """Five words that no other sentence has in this order."""
  topic, more = article % len(WORDS), article // len(WORDS)
  words = [WORDS[topic], WORDS[(topic + section + 1) % len(WORDS)], WORDS[more]]
  return ' '.join([*words, WORDS[section], WORDS[number]]).capitalize() + '.'


def article(number, parts=3, sentences=4):
  return Article(
    f'Article {number}',
    [
      Section('', 'The lead is about everything in here.'),
      *(
        Section(f'Part {s}', ' '.join(sentence(number, s, i) for i in range(sentences)))
        for s in range(parts)
      ),
    ],
  )


ARTICLES = [article(number) for number in range(40)]


def test_what_is_drawn():
  train, held_out = sections.draw_triplets(ARTICLES, 7, per_article=2, hold_out=0.25)
  assert len(train) + len(held_out) == 2 * len(ARTICLES) and 6 <= len(held_out) <= 40
  places = {sentence(a, s, i): (a, s) for a in range(40) for s in range(3) for i in range(4)}
  for triplet in (*train, *held_out):
    anchor, positive, negative = (
      {place for text, place in places.items() if text == one} for one in triplet
    )
    assert anchor & positive and triplet.anchor != triplet.positive
    [(article, section)] = anchor & positive
    assert any(a == article and s != section for a, s in negative)
  # Triplets of an article do not depend on the others, nor on which of them there are.
  again = sections.draw_triplets(ARTICLES[::-1], 7, per_article=2, hold_out=0.25)
  assert [sorted(part) for part in again] == [sorted(train), sorted(held_out)]
  anchors = {triplet.anchor for triplet in train}
  assert not anchors & {triplet.anchor for triplet in held_out}
  some, few = sections.draw_triplets(ARTICLES, 7, hold_out=0.25, most=50, most_held_out=10)
  assert (len(some), len(few)) == (50, 10)


@pytest.fixture
def dump(tmp_path):
  pages = ''.join(
    f'<page><title>{one.title}</title><ns>0</ns><revision><text>'
    + '\n'.join(f'== {part.heading} ==\n{part.text}' for part in one.sections[1:])
    + '</text></revision></page>'
    for one in ARTICLES
  )
  path = tmp_path / 'wiki.xml.bz2'
  path.write_bytes(bz2.compress(f'<mediawiki>{pages}</mediawiki>'.encode()))
  return path


@pytest.fixture
def start(dump, settings, devices, tokenizer, model, tmp_path):
  def run(workdir='run', **changes):
    options = {
      'method': 'lab.sections',
      'sections': OWN,
      'data__dir': str(dump),
      'data__format': 'mediawiki',
      'data__hold_out': 0.25,
      'batch_size': 8,
      'eval__measure': 'accuracy',
      'data__query_max_length': 8,
      'data__query_buckets': (8, 16),
    } | changes
    config = settings(**options)
    texts = sections.find_data(config.data, config, tmp_path / workdir, devices)
    return texts.open(tokenizer, model)

  return run


def test_what_the_loop_is_given(start, batches_of, words_of):
  data = start()
  assert data.unit == 'triplets' and 'of articles held out' in data.description
  expected, held_out = sections.draw_triplets(ARTICLES, 42, per_article=4, hold_out=0.25)
  assert data.description.startswith(
    f'{len(expected)} triplets of sentences to train on, {len(held_out)} of'
  )
  assert len(data.batches) == len(expected) // 8
  batch = next(batches_of(data))
  for number, row in enumerate(batch['triplet_index']):
    for view in sections.VIEWS:
      assert words_of(batch[f'{view}_tokens'][number]) == (
        getattr(expected[row], view).lower().split()
      )
      assert batch[f'{view}_mask'][number].sum() == 8
  assert data.ids(batch) == f'triplets {", ".join(map(str, batch["triplet_index"]))}'


def test_accuracy_of_the_held_out(start, bag):
  data = start()
  _, held_out = sections.draw_triplets(ARTICLES, 42, per_article=4, hold_out=0.25)

  def count(text):
    return np.array([text.lower().strip('.').split().count(word) for word in WORDS])

  a, p, n = ([count(getattr(one, view)) for one in held_out] for view in sections.VIEWS)
  near, far = (np.linalg.norm(np.float64(a) - np.float64(others), axis=1) for others in (p, n))
  evaluate = data.evaluation(bag)
  found = evaluate({'query/weight': jnp.float32(2)})
  assert found.means == {'accuracy': np.mean(near < far)}
  np.testing.assert_array_equal(found.values[''], near < far)
  # Equal vectors: a tie is a miss.
  assert evaluate({'query/weight': jnp.float32(0)}).means == {'accuracy': 0.0}
  assert start('none held out', data__hold_out=0.0).evaluation is None
