"""A vocabulary of whole words, the shape of a model, one device, and a method whose vectors can be
worked out by hand.
"""

import json

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from dprjax.base import mesh as meshes
from dprjax.models.encoder_config import EncoderConfig
from dprjax.text import batches, vocabularies
from dprjax.training.method import Model
from tests.options import with_options

WORDS = [
  'ash',
  'beech',
  'cedar',
  'elm',
  'fir',
  'hazel',
  'larch',
  'maple',
  'oak',
  'pine',
  'rowan',
  'spruce',
  'willow',
  'yew',
]


@pytest.fixture(scope='session')
def tokenizer(tmp_path_factory):
  """Every one of ``WORDS`` is one token; so is the full stop."""
  made = vocabularies.train_wordpiece(
    [f'{word} {other}.' for word in WORDS for other in WORDS], 200, tmp_path_factory.mktemp('words')
  )
  assert all(len(made.encode([word], 8)[0][0]) == 3 for word in WORDS)
  return made


@pytest.fixture(scope='session')
def model(tokenizer):
  return EncoderConfig('bert', tokenizer.vocab_size, 8, 1, 1, 8, max_positions=32)


@pytest.fixture(scope='session')
def devices():
  return meshes.make_mesh({'data': 1}, jax.devices()[:1])


@pytest.fixture(scope='session')
def bag(tokenizer):
  """Vectors that count words: an inner product is the number of words that two texts share.

  A parameter weighs those of each side.
  """
  ordinary = jnp.ones(tokenizer.vocab_size, jnp.float32).at[jnp.array(tokenizer.special_ids)].set(0)

  def embed(params, side, tokens, mask):
    counted = jax.nn.one_hot(tokens, tokenizer.vocab_size) * mask[:, :, None].astype(jnp.float32)
    return params[side]['weight'] * ordinary[None] * counted.sum(axis=1)

  return Model(None, None, embed, {})


@pytest.fixture
def settings():
  """``settings(a__b=value)``: the defaults with some of them set, frozen as the training loop hands
  them over.
  """
  return lambda **changes: ml_collections.FrozenConfigDict(with_options(**changes))


@pytest.fixture
def words_of(tokenizer):
  """The words of a row of tokens, without special ones."""
  return lambda tokens: tokenizer.backend.decode([int(token) for token in tokens]).split()


@pytest.fixture
def batches_of():
  """``batches_of(data)``: an open iterator over its batches."""
  opened = []

  def run(data):
    opened.append(batches.open_batches(data.batches))
    return opened[-1]

  yield run
  for iterator in opened:
    iterator.close()


def assert_goes_on(start, batches_of, before, after):
  """After ``before`` batches the state is saved; the ``after`` next ones can then be had again."""
  iterator = batches_of(start())
  for _ in range(before):
    next(iterator)
  state = json.loads(json.dumps(iterator.get_state()))
  expected = [next(iterator) for _ in range(after)]
  again = batches_of(start())
  again.set_state(state)
  for batch in expected:
    other = next(again)
    assert batch.keys() == other.keys()
    assert all(np.array_equal(batch[key], other[key]) for key in batch)
